"""Messages survive the trip unchanged, malformed ones are refused with a clear text, sockets never make a sender wait."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import stat
import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.base.errors import ConfigError
from minisgl.base.types import (
    PART_KINDS,
    Accepted,
    Admit,
    Candidate,
    Delta,
    Ended,
    EngineInfo,
    Finish,
    GenerateRequest,
    LocalModel,
    LogprobBlock,
    ParseSpec,
    Part,
    Refused,
    SamplingParams,
    SamplingSpec,
    Scores,
    TokenLogprob,
    Tokens,
    Usage,
)
from minisgl.wire import messages as m
from minisgl.wire.codec import WireError
from minisgl.wire.packing import decode, encode
from minisgl.wire.sockets import IPC_PATH_BYTES, Inbox, Outbox, RuntimeDir, address

INFO = EngineInfo(
    "m", ("a", "b"), 64, 100, (1, 2), 16, 8, 4, 32, "cpu", "float32", 1, {"temperature": 0.5}, {"cache": "x"}
)
MODEL = LocalModel(
    "dir:/x", "x", Path("/x"), {"a": [1, {"b": None}]}, weights=(Path("/x/w"),), tokenizer_dir=Path("/x")
)
ASKED = SamplingParams(
    logit_bias={5: -100, 7: 0.5}, bad_words=("x",), logits={"p": [1]}, logprobs=0, prompt_logprobs=3, min_tokens=2
)
SAMPLES: list[m.Message] = [
    m.Hello("engine", 7, "host", "abc", "{}", 2),
    m.Go(),
    m.Go(MODEL),
    m.Ready("engine", INFO),
    m.Ready("text-0"),
    m.Progress("engine", "weights", 1, 1 << 40),
    m.Beat(12, 0.5),
    m.FaultReport("engine", "plugin", "no 'x'\nnext", 78),
    m.Drain(1.5),
    m.Drained("api-0", 3),
    m.Lost("text-1"),
    m.Stop(2.0),
    m.Submit((1 << 48 | 5, 1 << 48 | 6), GenerateRequest(ids=(1, 2, 1 << 40), n=2)),
    m.Submit((1,), GenerateRequest(ids=())),
    m.Submit((1,), GenerateRequest(text="é\ud800", sampling=SamplingParams(stop=("a",), seed=1 << 62, top_k=-1))),
    m.Submit(
        (1,), GenerateRequest(messages=({"role": "user", "content": "x"},), template={"tools": [1]}, param="messages")
    ),
    m.Submit((1,), GenerateRequest(text="x", parse=ParseSpec(False, True, 1), return_prompt_ids=True, keep_last=-1)),
    m.Submit((1,), GenerateRequest(ids=(3,), sampling=ASKED)),
    m.Cancel((1, 2)),
    m.Tokenize(9, GenerateRequest(text="x")),
    m.Tokenized(9, (1, 2)),
    m.Detokenize(9, (1 << 50,)),
    m.Detokenized(9, "x\ud800"),
    m.Abort(()),
    m.Control(3, "stats"),
    m.Reply(3, b'{"a":1}'),
    Accepted(1, 3),
    Accepted(1, 3, True, (1, 2)),
    Refused(1, 400, "why", "code", "prompt"),
    Ended(1, Finish.LENGTH, 2, 3, 1),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda x: type(x).__name__)
def test_message_arrives_as_it_was_sent(message: m.Message) -> None:
    assert decode(encode(message)) == message


def test_admit_and_tokens_arrive_with_their_arrays() -> None:
    spec = replace(
        SamplingSpec(0.5, 3, 0.9, 0.1, None, 7, (1, 2)),
        bias_ids=(5,),
        biases=(-0.5,),
        bad_words=((1, 2), (3,)),
        extra={"p": {"q": 1}},
        logprobs=4,
        prompt_logprobs=0,
    )
    admit = Admit(5, np.array([1, 2, 3], np.int32), spec, 1, -2, b"\x00\xff", 99, "kim")
    got = decode(encode(admit))
    assert isinstance(got, Admit)
    assert got.ids.dtype == np.int32
    assert got.ids.tolist() == [1, 2, 3]
    assert (got.uid, got.sampling, got.owner, got.priority, got.namespace, got.arrived_ns, got.key) == (
        5,
        spec,
        1,
        -2,
        b"\x00\xff",
        99,
        "kim",
    )
    tokens = decode(encode(Tokens(1 << 40, np.array([1 << 60], np.int64), np.array([-1], np.int32))))
    assert isinstance(tokens, Tokens)
    assert (tokens.step, tokens.uids.tolist(), tokens.tokens.tolist()) == (1 << 40, [1 << 60], [-1])


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("n", [0, 3])
def test_scores_arrive_with_their_arrays(n: int, k: int) -> None:
    def ints(*shape: int) -> npt.NDArray[np.int32]:
        return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)

    floats = (np.full(n, -0.1, np.float32), np.full((n, k), -np.inf, np.float32))
    block = LogprobBlock(ints(n), ints(n), ints(n), floats[0], ints(n), ints(n, k), floats[1])
    got = decode(encode(Scores(np.array([1 << 60] * 3, np.int64), block)))
    assert isinstance(got, Scores)
    assert got.uids.tolist() == [1 << 60] * 3
    for field in fields(block):
        sent, came = getattr(block, field.name), getattr(got.block, field.name)
        assert (came.dtype, came.shape, came.tolist()) == (sent.dtype, (n, k if n else 0)[: sent.ndim], sent.tolist())


def test_log_probabilities_that_do_not_read_are_refused() -> None:
    """Cut anywhere, of more or fewer deltas than there are, or of tokens without a name."""
    c = Candidate(5, -0.5, "a", b"a")
    one = Delta(1, ids=(5,), logprobs=(TokenLogprob(c, 1, (c, c), 0),))
    *others, told = encode(m.Deltas((one,)))
    twice = encode(m.Deltas((one, one)))[-1]
    for bad in [told[:n] for n in range(1, len(told))] + [twice, told + b"\0"]:
        with pytest.raises(WireError, match="log probabilities"):
            decode([*others, bad])
    two = encode(m.Deltas((one, one)))
    with pytest.raises(WireError, match="log probabilities"):
        decode([*two[:-1], told])
    places = len(told) - 3 * 8 - 3 * 4
    with pytest.raises(WireError, match="beyond the 1 names"):
        decode([*others, told[:places] + b"\1" + told[places + 1 :]])
    assert decode([*others, told]) == m.Deltas((one,))


def test_every_message_type_is_covered_by_a_sample() -> None:
    seen = {type(s) for s in SAMPLES} | {Admit, Scores, Tokens, m.Deltas}
    assert seen == set(m.Message.__args__)  # type: ignore[attr-defined]


CANDIDATES = st.builds(
    Candidate,
    st.integers(0, 9),
    st.none() | st.sampled_from([-0.1, -float("inf")]),
    st.text(max_size=2),
    st.none() | st.binary(max_size=3),
)
TOLD = st.builds(
    TokenLogprob, CANDIDATES, st.integers(0, 9), st.lists(CANDIDATES, max_size=2).map(tuple), st.integers(0, 9)
)
DELTAS = st.builds(
    Delta,
    uid=st.integers(0, 2**63 - 1),
    index=st.integers(0, 200),
    text=st.text(),
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    finish=st.sampled_from([None, "stop", "length", "error"]),
    stop_reason=st.none() | st.integers(0, 9) | st.text(max_size=3),
    usage=st.none() | st.builds(Usage, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    error=st.text(max_size=3),
    parts=st.lists(st.builds(Part, st.sampled_from(PART_KINDS), st.text(max_size=5)), max_size=3).map(tuple),
    n_reasoning=st.integers(0, 4),
    logprobs=st.none() | st.lists(TOLD, max_size=2).map(tuple),
    prompt_logprobs=st.none() | st.lists(TOLD, max_size=2).map(tuple),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(DELTAS, max_size=6).map(tuple))
def test_a_batch_of_deltas_arrives_as_it_was_sent(items: tuple[Delta, ...]) -> None:
    assert decode(encode(m.Deltas(items))) == m.Deltas(items)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "version and a tag byte"),
        ([b"\x09\x01"], "message version 9, this process speaks version 1"),
        ([b"\x01\xee"], "unknown message tag 238"),
        ([encode(m.Beat(1, 0))[0][:2] + b"nonsense"], "Beat: not JSON"),
        ([encode(m.Beat(1, 0))[0][:2] + b'{"step":"1","age_s":0}'], r"Beat\.step: '1' is not int"),
        ([encode(m.Beat(1, 0))[0][:2] + b'{"step":1}'], r"fields \['age_s'\] are missing"),
        ([encode(m.Beat(1, 0))[0][:2] + b'{"step":1,"age_s":0,"x":1}'], r"unknown fields \['x'\]"),
        ([encode(m.Beat(1, 0))[0], b""], "Beat: 1 arrays, expected 0"),
        ([encode(m.Cancel((1,)))[0], b"123"], "not a whole number of int64"),
        ([encode(m.Tokenized(1, ()))[0], b"", b""], "0 uids, expected 1"),
        ([encode(Tokens(1, np.zeros(1, np.int64), np.zeros(1, np.int32)))[0], b"\0" * 8, b""], "1 uids and 0 tokens"),
        ([encode(m.Deltas(()))[0], b"\0" * 8, b"\0" * 4, b"", b"", b"", b""], "shape of 1 and 0 numbers"),
        ([encode(m.Deltas(()))[0], b"\0" * 8, b"\1" * 20, b"", b"", b"", b""], "do not add up"),
        (
            [
                encode(m.Deltas(()))[0],
                b"\0" * 8,
                np.array([0, 0, 0, 0, 1], "<i4").tobytes(),
                b"",
                b"",
                b"\7\0\0\0" * 2,
                b"",
            ],
            "part of kind 7",
        ),
    ],
)
def test_malformed_message_is_refused_with_its_reason(frames: list[bytes], text: str) -> None:
    with pytest.raises(WireError, match=text):
        decode(frames)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 25))
def test_random_frames_never_raise_anything_but_a_wire_error(frames: list[bytes], tag: int) -> None:
    with contextlib.suppress(WireError):
        decode([bytes((1, tag)) + (frames[0] if frames else b""), *frames[1:]])


def test_content_that_json_has_no_word_for_is_refused_where_it_is_sent() -> None:
    with pytest.raises(TypeError, match="object cannot be sent"):
        encode(m.Submit((1,), GenerateRequest(text="x", template={"a": object()})))
    with pytest.raises(OverflowError):
        encode(m.Detokenize(1, (1 << 70,)))


def test_no_module_of_the_wire_uses_pickle() -> None:
    for file in Path(m.__file__).parent.glob("*.py"):
        assert "import pickle" not in file.read_text()


# -------------------------------------------------------------------------------------------------------------- sockets


def test_runtime_dir_is_private_and_goes_away(tmp_path: Path) -> None:
    made = RuntimeDir(tmp_path)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_runtime_dir_of_a_killed_server_is_removed_and_a_live_one_is_not(tmp_path: Path) -> None:
    dead = tmp_path / "minisgl-dead"
    dead.mkdir()
    (dead / "lock").touch()
    live = RuntimeDir(tmp_path)
    second = RuntimeDir(tmp_path)
    assert not dead.exists()
    assert live.path.exists()
    second.remove()
    live.remove()


def test_runtime_dir_of_a_server_that_starts_at_the_same_moment_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the first has done when the second looks around, it keeps its folder."""
    others: list[RuntimeDir] = []

    def look_around(fd: int, how: int) -> None:
        monkeypatch.undo()
        others.append(RuntimeDir(tmp_path))
        fcntl.flock(fd, how)

    monkeypatch.setattr("minisgl.wire.sockets.fcntl.flock", look_around)
    first = RuntimeDir(tmp_path)
    assert first.path.exists()
    others[0].remove()
    first.remove()


def test_too_long_runtime_dir_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * IPC_PATH_BYTES)
    long.mkdir()
    with pytest.raises(ConfigError, match="107 bytes"):
        RuntimeDir(long)


def test_longest_accepted_folder_can_really_be_bound(tmp_path: Path) -> None:
    room = IPC_PATH_BYTES - len("/supervisor") - len("/minisgl-12345678") - len(os.fsencode(tmp_path)) - 1
    parent = tmp_path / ("x" * room)
    parent.mkdir()
    made, context = RuntimeDir(parent), zmq.Context()
    for role in ("supervisor", "engine", "api-0", "text-63"):
        Inbox(context, address(made.path, role)).close()
    context.term()
    made.remove()


def test_message_sent_before_the_inbox_exists_is_kept_and_order_holds(tmp_path: Path) -> None:
    context = zmq.Context()
    out = Outbox(context, address(tmp_path, "a"))
    for i in range(2000):
        out.send(m.Beat(i, 0.0))
    inbox, got = Inbox(context, address(tmp_path, "a")), []
    while len(got) < 2000:
        batch = inbox.receive(5000)
        assert batch
        got += [b.step for b in batch if isinstance(b, m.Beat)]
    assert got == list(range(2000))
    assert inbox.receive(0) == []
    out.close()
    with pytest.raises(WireError, match="closed"):
        out.send(m.Beat(0, 0.0))
    inbox.close()
    context.term()


def test_event_loop_gets_every_message_also_after_bursts_from_another_thread(tmp_path: Path) -> None:
    context = zmq.Context()

    async def run() -> list[int]:
        inbox = Inbox(context, address(tmp_path, "a"))
        got: list[int] = []
        errors: list[Exception] = []
        done = asyncio.Event()

        def handle(message: m.Message) -> None:
            assert isinstance(message, m.Beat)
            got.append(message.step)
            if message.step % 1500 == 1499:
                done.set()

        def burst(first: int) -> None:
            out = Outbox(context, address(tmp_path, "a"))
            for i in range(first, first + 1500):
                out.send(m.Beat(i, 0.0))
            out.close()

        inbox.watch(asyncio.get_running_loop(), handle, errors.append)
        for first in (0, 1500, 3000):
            thread = threading.Thread(target=burst, args=(first,))
            thread.start()
            await asyncio.wait_for(done.wait(), 20)
            done.clear()
            thread.join()
        inbox.close()
        assert errors == []
        return got

    assert asyncio.run(run()) == list(range(4500))
    context.term()


def test_message_that_an_event_loop_cannot_handle_is_reported_not_lost(tmp_path: Path) -> None:
    context = zmq.Context()

    async def run() -> Exception:
        inbox, out = Inbox(context, address(tmp_path, "a")), Outbox(context, address(tmp_path, "a"))
        failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        inbox.watch(asyncio.get_running_loop(), lambda message: {}[message], failure.set_result)
        out.send(m.Beat(1, 0.0))
        try:
            return await asyncio.wait_for(failure, 10)
        finally:
            inbox.close()
            out.close()

    assert isinstance(asyncio.run(run()), KeyError)
    context.term()


def test_sender_does_not_wait_for_a_receiver_that_never_reads(tmp_path: Path) -> None:
    context = zmq.Context()
    inbox, out = Inbox(context, address(tmp_path, "a")), Outbox(context, address(tmp_path, "a"))
    payload = b"x" * 10_000
    for _ in range(5000):  # 50 MB, more than any socket buffer; zmq.Again would be raised if there were a limit
        out.send(m.Reply(1, payload))
    inbox.close()
    out.close()
    context.destroy(linger=0)


def test_wire_json_is_json() -> None:
    frame = encode(m.FaultReport("engine", "fault", "x", 70))[0]
    assert json.loads(frame[2:]) == {"role": "engine", "kind": "fault", "text": "x", "exit_code": 70}
