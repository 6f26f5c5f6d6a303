"""EngineClient: what frontends get out of it, and what it sends, with the other processes played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from minisgl.base.errors import RequestError
from minisgl.base.types import Accepted, Delta, EngineInfo, GenerateRequest, Refused, Usage
from minisgl.client.client import ANSWER_TIMEOUT_S, EngineClient
from minisgl.wire.messages import (
    Beat,
    Cancel,
    Control,
    Deltas,
    Detokenize,
    Detokenized,
    Message,
    Reply,
    Submit,
    Tokenize,
    Tokenized,
)

INFO = EngineInfo("m", ("m",), 64, 100, (1,), 16, 8, 2, 32, "cpu", "float32", 1)
REQUEST = GenerateRequest(text="x")


class World:
    """The other processes: what was sent to them, and a clock that the test turns."""

    def __init__(self, workers: int = 1, queue: int = 4, index: int = 0, ready: bool = True) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.now = 100.0
        self.client = EngineClient(
            [self._way(f"text-{i}") for i in range(workers)], self._way("engine"), queue, index, lambda: self.now
        )
        if ready:
            self.client.ready(INFO)

    def _way(self, to: str) -> Callable[[Message], None]:
        return lambda message: self.sent.append((to, message))

    def submits(self) -> list[Submit]:
        return [m for _, m in self.sent if isinstance(m, Submit)]

    def cancelled(self) -> list[int]:
        return [uid for _, m in self.sent if isinstance(m, Cancel) for uid in m.uids]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(limited())


async def first(client: EngineClient, request: GenerateRequest = REQUEST) -> tuple[Any, asyncio.Task[Any]]:
    """The iterator, and a task that waits for its first item; the request has been sent when this returns."""
    stream = client.generate(request)
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    return stream, task


def test_a_stream_is_accepted_then_deltas_until_every_output_has_finished() -> None:
    async def test() -> None:
        w = World()
        stream, task = await first(w.client, GenerateRequest(text="x", n=2))
        a, b = w.submits()[0].uids
        w.client.take(Accepted(a, 3))
        w.client.take(Deltas((Delta(a, 0, "h", (7,)), Delta(b, 1, "i", (8,)))))
        w.client.take(Deltas((Delta(b, 1, "", (), "stop", usage=Usage(3, 1)),)))
        w.client.take(Deltas((Delta(a, 0, "j", (9,), "length", usage=Usage(3, 2)),)))
        got = [await task] + [item async for item in stream]
        assert [type(i).__name__ for i in got] == ["Accepted", "Delta", "Delta", "Delta", "Delta"]
        assert [(d.index, d.text, d.finish) for d in got[1:]] == [
            (0, "h", None),
            (1, "i", None),
            (1, "", "stop"),
            (0, "j", "length"),
        ]
        assert w.client.num_open == 0
        assert w.cancelled() == []

    run(test)


def test_uids_are_unique_carry_the_api_index_and_name_their_text_worker() -> None:
    async def test() -> None:
        w = World(workers=3, queue=1000, index=5)
        tasks = [(await first(w.client, GenerateRequest(text="x", n=1 + i % 4)))[1] for i in range(40)]
        seen: set[int] = set()
        for to, m in w.sent:
            assert isinstance(m, Submit)
            for uid in m.uids:
                assert uid >> 48 == 5
                assert to == f"text-{(uid & (1 << 48) - 1) % 3}"
                assert uid not in seen
                seen.add(uid)
        assert {to for to, _ in w.sent} == {"text-0", "text-1", "text-2"}
        for task in tasks:
            task.cancel()

    run(test)


def test_m1_closing_the_iterator_aborts_what_still_runs() -> None:
    """M1"""

    async def test() -> None:
        w = World()
        stream, task = await first(w.client, GenerateRequest(text="x", n=2))
        a, b = w.submits()[0].uids
        w.client.take(Accepted(a, 3))
        w.client.take(Deltas((Delta(a, 0, "h", (7,), "stop", usage=Usage(3, 1)),)))
        await task
        await anext(stream)
        await stream.aclose()
        assert w.cancelled() == [b]
        assert w.client.num_open == 0
        w.client.take(Deltas((Delta(b, 1, "late", (7,)),)))  # on its way when the caller left
        assert w.client.num_open == 0

    run(test)


def test_m1_a_caller_cancelled_before_the_first_output_aborts_too() -> None:
    """M1"""

    async def test() -> None:
        w = World()
        _, task = await first(w.client)
        task.cancel()
        await asyncio.wait([task])
        assert w.cancelled() == list(w.submits()[0].uids)

    run(test)


def test_refused_request_raises_what_it_was_refused_for_and_aborts_its_other_outputs() -> None:
    async def test() -> None:
        w = World()
        stream, task = await first(w.client, GenerateRequest(text="x", n=2))
        a, b = w.submits()[0].uids
        w.client.take(Refused(a, 400, "too long", "context_length_exceeded", "prompt"))
        with pytest.raises(RequestError, match="too long") as e:
            await task
        assert (e.value.status, e.value.code, e.value.param) == (400, "context_length_exceeded", "prompt")
        assert w.cancelled() == [b]
        assert w.client.num_open == 0
        await stream.aclose()

    run(test)


def test_a_refusal_of_a_full_engine_comes_with_a_time_to_try_again() -> None:
    async def test() -> None:
        w = World()
        _, task = await first(w.client)
        uid = w.submits()[0].uids[0]
        w.client.take(Accepted(uid, 3))
        await task
        stream, task = await first(w.client)
        w.client.take(Refused(w.submits()[1].uids[0], 503, "full", "server_overloaded"))
        with pytest.raises(RequestError) as e:
            await task
        assert (e.value.status, e.value.retry_after) == (503, 1)
        await stream.aclose()

    run(test)


def test_engine_death_before_the_first_output_is_500_and_after_it_an_error_delta_of_each_output() -> None:
    """A17: nothing hangs, and an error never looks like a finished answer."""

    async def test() -> None:
        w = World()
        early, early_task = await first(w.client)
        w.client.take(Accepted(w.submits()[0].uids[0], 3))
        await early_task
        late, late_task = await first(w.client, GenerateRequest(text="x", n=2))
        a, _b = w.submits()[1].uids
        w.client.take(Accepted(a, 3))
        await late_task
        w.client.take(Deltas((Delta(a, 0, "h", (7, 8)),)))
        w.client.fail("engine was killed by SIGKILL")
        with pytest.raises(RequestError, match="SIGKILL") as e:
            await anext(early)
        assert (e.value.status, e.value.code) == (500, "engine_dead")
        rest = [d async for d in late]
        assert [(d.index, d.finish, d.error, d.usage) for d in rest[1:]] == [
            (0, "error", "engine was killed by SIGKILL", Usage(3, 2)),
            (1, "error", "engine was killed by SIGKILL", Usage(3, 0)),
        ]
        assert w.client.num_open == 0
        assert w.cancelled() == []
        with pytest.raises(RequestError) as e:
            await anext(w.client.generate(REQUEST))
        assert (e.value.status, e.value.code) == (503, "engine_dead")

    run(test)


def test_outputs_that_ended_before_the_death_keep_their_end() -> None:
    async def test() -> None:
        w = World()
        stream, task = await first(w.client)
        uid = w.submits()[0].uids[0]
        w.client.take(Accepted(uid, 1))
        w.client.take(Deltas((Delta(uid, 0, "h", (7,), "stop", usage=Usage(1, 1)),)))
        w.client.fail("gone")
        assert [await task] + [d.finish async for d in stream] == [Accepted(uid, 1), "stop"]

    run(test)


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        (lambda c: None, "model_loading"),
        (lambda c: (c.ready(INFO), c.drain()), "server_draining"),
        (lambda c: c.drain(), "server_draining"),
        (lambda c: (c.ready(INFO), c.fail("x")), "engine_dead"),
    ],
)
def test_a_server_that_cannot_serve_answers_503_with_its_reason(prepare: Callable[[Any], Any], code: str) -> None:
    async def test() -> None:
        w = World(ready=False)
        prepare(w.client)
        if w.client.info is not None:
            w.client.take(Beat(1, 0.0))
        with pytest.raises(RequestError) as e:
            await anext(w.client.generate(REQUEST))
        assert (e.value.status, e.value.code) == (503, code)
        assert e.value.retry_after is not None
        assert w.sent == []

    run(test)


def test_an_output_that_is_refused_while_another_runs_ends_alone_with_an_error() -> None:
    """After the first Delta there is no exception any more: the other outputs go on."""

    async def test() -> None:
        w = World()
        stream, task = await first(w.client, GenerateRequest(text="x", n=2))
        a, b = w.submits()[0].uids
        w.client.take(Accepted(a, 3))
        w.client.take(Deltas((Delta(a, 0, "h", (7,)),)))
        w.client.take(Refused(b, 503, "full", "server_overloaded"))
        w.client.take(Deltas((Delta(a, 0, "i", (8,), "length", usage=Usage(3, 2)),)))
        _, *deltas = [await task] + [item async for item in stream]
        assert [(d.index, d.text, d.finish, d.error) for d in deltas] == [
            (0, "h", None, ""),
            (1, "", "error", "full"),
            (0, "i", "length", ""),
        ]
        assert w.client.num_open == 0

    run(test)


def test_more_questions_than_may_wait_are_answered_503() -> None:
    """/tokenize and the like: the text worker's queue does not grow without a limit."""

    async def test() -> None:
        w = World(queue=2)
        asked = [asyncio.ensure_future(w.client.tokenize(REQUEST)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match=r"limits\.queue") as e:
            await w.client.detokenize([1])
        assert (e.value.status, e.value.code, e.value.retry_after) == (503, "server_overloaded", 1)
        w.client.take(Tokenized(w.sent[0][1].uid, (5,)))  # type: ignore[union-attr]
        assert await asked[0] == [5]
        again = asyncio.ensure_future(w.client.detokenize([1]))
        await asyncio.sleep(0)
        assert isinstance(w.sent[-1][1], Detokenize)
        for task in (asked[1], again):
            task.cancel()

    run(test)


@pytest.mark.parametrize("n", [0, -1, 129, True])
def test_number_of_outputs_is_checked_before_anything_is_sent(n: int) -> None:
    async def test() -> None:
        w = World(queue=1000)
        with pytest.raises(RequestError) as e:
            await anext(w.client.generate(GenerateRequest(text="x", n=n)))
        assert (e.value.status, e.value.param) == (400, "n")
        assert w.sent == []

    run(test)


def test_more_requests_than_run_and_wait_are_answered_503_until_one_ends() -> None:
    """A17: the status is known before anything is sent."""

    async def test() -> None:
        w = World(queue=1)  # 2 run, 1 waits
        opened = [await first(w.client) for _ in range(3)]
        with pytest.raises(RequestError, match=r"limit of 3") as e:
            await anext(w.client.generate(REQUEST))
        assert (e.value.status, e.value.code, e.value.retry_after) == (503, "server_overloaded", 1)
        opened[0][1].cancel()
        await asyncio.wait([opened[0][1]])
        _, task = await first(w.client)
        assert len(w.submits()) == 4
        for t in (task, *(t for _, t in opened)):
            t.cancel()

    run(test)


def test_health_follows_the_engines_beat() -> None:
    w = World(ready=False)
    assert w.client.healthy() == "model_loading"
    w.client.ready(INFO)
    assert w.client.healthy() is None
    w.now += 5.1
    assert w.client.healthy() == "engine_dead"
    w.client.take(Beat(3, 0.0))
    assert w.client.healthy() is None
    w.client.drain()
    assert w.client.healthy() == "server_draining"
    w.client.fail("x")
    assert w.client.healthy() == "engine_dead"


def test_tokenize_detokenize_and_control_get_the_answer_of_their_own_question() -> None:
    async def test() -> None:
        w = World(workers=2)
        asked = [
            asyncio.ensure_future(c)
            for c in (w.client.tokenize(REQUEST), w.client.detokenize([1]), w.client.control("stats"))
        ]
        await asyncio.sleep(0)
        (_, t), (_, d), (where, c) = w.sent
        assert isinstance(t, Tokenize)
        assert isinstance(d, Detokenize)
        assert isinstance(c, Control)
        assert where == "engine"
        assert len({t.uid, d.uid, c.uid}) == 3
        w.client.take(Reply(c.uid, b'{"running":0}'))
        w.client.take(Detokenized(d.uid, "a"))
        w.client.take(Tokenized(t.uid, (4, 5)))
        assert await asyncio.gather(*asked) == [[4, 5], "a", {"running": 0}]

    run(test)


def test_questions_that_are_refused_unanswered_or_outlived_raise_request_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        w = World()
        task = asyncio.ensure_future(w.client.detokenize([1 << 40]))
        await asyncio.sleep(0)
        w.client.take(Refused(w.sent[-1][1].uid, 400, "no such token", "invalid_value", "tokens"))  # type: ignore[union-attr]
        with pytest.raises(RequestError, match="no such token"):
            await task
        task = asyncio.ensure_future(w.client.control("nonsense"))
        await asyncio.sleep(0)
        w.client.take(Reply(w.sent[-1][1].uid, b'{"error":"unknown operation"}'))  # type: ignore[union-attr]
        with pytest.raises(RequestError, match="unknown operation"):
            await task
        task = asyncio.ensure_future(w.client.control("audit"))
        await asyncio.sleep(0)
        w.client.take(Reply(w.sent[-1][1].uid, b'{"error":"audit: no","known":true}'))  # type: ignore[union-attr]
        with pytest.raises(RequestError, match="audit: no") as failed:
            await task
        assert (failed.value.status, failed.value.code) == (500, "internal_error")
        monkeypatch.setattr("minisgl.client.client.ANSWER_TIMEOUT_S", 0.01)
        with pytest.raises(RequestError, match=r"control: no answer within 0\.01 s"):
            await w.client.control("stats")
        monkeypatch.setattr("minisgl.client.client.ANSWER_TIMEOUT_S", ANSWER_TIMEOUT_S)
        task = asyncio.ensure_future(w.client.tokenize(REQUEST))
        await asyncio.sleep(0)
        w.client.fail("gone")
        with pytest.raises(RequestError, match="gone") as e:
            await task
        assert e.value.status == 500

    run(test)


def test_a_request_that_the_wire_cannot_carry_is_the_requests_error() -> None:
    async def test() -> None:
        w = World()
        w.client._text = [lambda message: (_ for _ in ()).throw(TypeError("set cannot be sent"))]
        with pytest.raises(RequestError, match="cannot be sent") as e:
            await anext(w.client.generate(REQUEST))
        assert e.value.status == 400
        assert w.client.num_open == 0

    run(test)
