"""The way from frontends to the engine: one per api process, used from its event loop only.

uid = api index << 48 | counter, and counter % number of text workers is the text worker of the request
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.base.bounds import MAX_N
from minisgl.base.errors import RequestError
from minisgl.base.types import Accepted, Delta, EngineInfo, GenerateRequest, Refused, Usage
from minisgl.client.envelope import unavailable
from minisgl.text.validate import integer
from minisgl.wire.messages import (
    API_SHIFT,
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

Send = Callable[[Message], None]
BEAT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
LOADING, READY, DRAINING, DEAD = "loading", "ready", "draining", "dead"


@dataclass(frozen=True, slots=True)
class _EngineGone:
    text: str


_Item = Accepted | Delta | Refused | _EngineGone


@dataclass(slots=True, eq=False)
class _Job:
    """An open request. ``uids``: of its outputs, by index; ``running``: those that have not ended, uid -> index;
    ``delivered``: a Delta was handed out."""

    worker: int
    uids: tuple[int, ...]
    running: dict[int, int]
    items: asyncio.Queue[_Item] = field(default_factory=asyncio.Queue)
    accepted: bool = False
    delivered: bool = False
    prompt_tokens: int = 0
    output_tokens: dict[int, int] = field(default_factory=dict)  # by index


class EngineClient:
    """``state``: "loading", "ready", "draining" or "dead". ``info``: None until ready.

    Args: index: of this api process. text: the ways to the text workers. queue_limit: most requests that may wait beyond
        those that run (``limits.queue``). check: asked for every request before it is sent; raises RequestError to refuse it.
    """

    def __init__(
        self,
        text: Sequence[Send],
        engine: Send,
        queue_limit: int,
        index: int = 0,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[GenerateRequest, EngineInfo], object] = lambda request, info: None,
    ) -> None:
        self._check = check
        self.info: EngineInfo | None = None
        self.state = LOADING
        self._text, self._engine, self._queue_limit, self._clock = text, engine, queue_limit, clock
        self._base = index << API_SHIFT
        self._counters = [itertools.count(w, len(text)) for w in range(len(text))]
        self._turn = itertools.cycle(range(len(text)))
        self._jobs: dict[int, _Job] = {}  # by uid of a running output
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._failure = ""
        self._beat: Beat | None = None
        self._beat_at = 0.0

    @property
    def num_open(self) -> int:
        """Outputs that wait or run."""
        return len(self._jobs)

    # ---------------------------------------------------------------------------------------------------- for frontends

    def generate(self, r: GenerateRequest) -> AsyncGenerator[Accepted | Delta, None]:
        """Accepted once, then the news of the ``n`` outputs until each has finished; closing the generator aborts the rest.

        The ``check_request`` hooks are asked at once; the request is sent when the first item is asked for.
        Raises: RequestError, at once or before the first Delta. After it a failure is a Delta with finish "error".
        """
        if self.info is not None:
            self._check(r, self.info)
        return self._generate(r)

    async def _generate(self, r: GenerateRequest) -> AsyncGenerator[Accepted | Delta, None]:
        job = self._submit(r)
        try:
            while job.running or not job.items.empty():
                for out in self._received(job, await job.items.get()):
                    yield out
        finally:
            self._leave(job)

    async def tokenize(self, r: GenerateRequest) -> list[int]:
        """Ids of the prompt. Raises: RequestError."""
        worker = next(self._turn)
        uid = self._new_uid(worker)
        answer: Tokenized = await self._ask(uid, self._text[worker], Tokenize(uid, r))
        return list(answer.ids)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Raises: RequestError."""
        worker = next(self._turn)
        uid = self._new_uid(worker)
        answer: Detokenized = await self._ask(uid, self._text[worker], Detokenize(uid, tuple(ids)))
        return answer.text

    async def control(self, op: str) -> Any:
        """Run ``op`` ("stats", "flush_cache", ...) in the engine. Raises: RequestError."""
        uid = self._new_uid(0)
        answer: Reply = await self._ask(uid, self._engine, Control(uid, op))
        value = json.loads(answer.payload)
        if isinstance(value, dict) and "error" in value:
            if value.get("known"):
                raise RequestError(str(value["error"]), status=500, code="internal_error")
            raise RequestError(str(value["error"]), code="unsupported_value", param="op")
        return value

    def healthy(self) -> str | None:
        """None if requests can be served, else why not: "model_loading", "engine_dead" or "server_draining"."""
        if self.state == LOADING:
            return "model_loading"
        silent = self.info is not None and self._clock() - self._beat_at > BEAT_TIMEOUT_S
        if self.state == DEAD or silent:
            return "engine_dead"
        return "server_draining" if self.state == DRAINING else None

    @property
    def beat(self) -> Beat | None:
        """The engine's last sign of life."""
        return self._beat

    # -------------------------------------------------------------------------------------------------- from the process

    def ready(self, info: EngineInfo) -> None:
        """All processes can work."""
        self.info = info
        self._beat_at = self._clock()
        if self.state == LOADING:
            self.state = READY

    def drain(self) -> None:
        """Refuse new requests from now on."""
        if self.state != DEAD:
            self.state = DRAINING

    def fail(self, text: str) -> None:
        """The engine or a text worker is gone: every open request ends with an error."""
        if self.state == DEAD:
            return
        self.state, self._failure = DEAD, text
        for job in {id(j): j for j in self._jobs.values()}.values():
            job.items.put_nowait(_EngineGone(text))
        self._jobs.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._dead())

    def take(self, message: Message) -> None:
        """A message from a text worker or the engine; those for requests that were left are dropped."""
        if isinstance(message, Deltas):
            for delta in message.items:
                self._take_item(delta.uid, delta, ended=delta.finish is not None)
        elif isinstance(message, Beat):
            self._beat, self._beat_at = message, self._clock()
        elif isinstance(message, Accepted):
            self._take_item(message.uid, message, ended=False)
        elif isinstance(message, Tokenized | Detokenized | Reply | Refused):
            answer = self._answers.get(message.uid)
            if answer is not None and not answer.done():
                answer.set_result(message)
            elif isinstance(message, Refused):
                self._take_item(message.uid, message, ended=True)

    def _take_item(self, uid: int, item: _Item, ended: bool) -> None:
        job = self._jobs.get(uid)
        if job is None:
            return
        job.items.put_nowait(item)
        if ended:
            del self._jobs[uid], job.running[uid]

    # ---------------------------------------------------------------------------------------------------------- requests

    def _submit(self, r: GenerateRequest) -> _Job:
        integer(r.n, "n", 1, MAX_N)  # before uids are made of it
        self._check_open(r.n)
        worker = next(self._turn)
        uids = tuple(self._new_uid(worker) for _ in range(r.n))
        job = _Job(worker, uids, {uid: i for i, uid in enumerate(uids)})
        self._send(self._text[worker], Submit(uids, r), r.param)
        self._jobs.update(dict.fromkeys(uids, job))
        return job

    def _received(self, job: _Job, item: _Item) -> list[Accepted | Delta]:
        """What of an item the caller gets. Raises: RequestError."""
        if isinstance(item, Accepted):
            first, job.accepted, job.prompt_tokens = not job.accepted, True, item.prompt_tokens
            return [item] if first else []
        if isinstance(item, Delta):
            job.delivered = True
            job.output_tokens[item.index] = job.output_tokens.get(item.index, 0) + len(item.ids)
            return [item]
        if isinstance(item, Refused) and job.delivered:  # one of several outputs, when another runs already
            return [self._error_delta(job, item.uid, job.uids.index(item.uid), item.message)]
        if isinstance(item, Refused):
            raise RequestError(
                item.message,
                status=item.status,
                code=item.code,
                param=item.param,
                retry_after=1 if item.status in (429, 503) else None,
            )
        unfinished, job.running = job.running, {}
        if not job.delivered:
            raise self._dead()
        return [self._error_delta(job, uid, index, item.text) for uid, index in unfinished.items()]

    def _error_delta(self, job: _Job, uid: int, index: int, text: str) -> Delta:
        usage = Usage(job.prompt_tokens, job.output_tokens.get(index, 0))
        return Delta(uid, index, finish="error", usage=usage, error=text)

    def _leave(self, job: _Job) -> None:
        """The caller is done with the request, or gone: abort what still runs."""
        left = [uid for uid in job.running if self._jobs.pop(uid, None) is not None]
        if left:
            self._text[job.worker](Cancel(tuple(left)))

    def _check_open(self, n: int) -> None:
        """Raises: RequestError 503 if no new request can be taken."""
        why = self.healthy()
        if why is not None:
            raise unavailable(why)
        assert self.info is not None, f"state {self.state!r} without info"
        most = self.info.max_running + self._queue_limit
        if self.num_open + n > most:
            raise _overloaded(
                f"{self.num_open} requests run or wait, and {n} more would be over the limit of {most} "
                "(limits.max_running + limits.queue)"
            )

    def _new_uid(self, worker: int) -> int:
        return self._base | next(self._counters[worker])

    def _send(self, way: Send, message: Message, param: str | None) -> None:
        try:
            way(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise RequestError(f"the request cannot be passed on: {exc}", param=param) from exc

    def _dead(self) -> RequestError:
        return RequestError(
            f"The engine failed while it served this request: {self._failure}", status=500, code="engine_dead"
        )

    async def _ask(self, uid: int, way: Send, message: Message) -> Any:
        """Send and wait for the answer of this uid. Raises: RequestError."""
        why = self.healthy()
        if why is not None and why != "server_draining":
            raise unavailable(why)
        if len(self._answers) >= self._queue_limit:
            raise _overloaded(f"{len(self._answers)} questions wait for an answer, which is the limit (limits.queue)")
        answer = self._answers[uid] = asyncio.get_running_loop().create_future()
        try:
            self._send(way, message, None)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                got = await answer
        except TimeoutError:
            raise RequestError(
                f"{type(message).__name__.lower()}: no answer within {ANSWER_TIMEOUT_S:g} s",
                status=503,
                code="request_timeout",
                retry_after=5,
            ) from None
        finally:
            del self._answers[uid]
        if isinstance(got, Refused):
            raise RequestError(got.message, status=got.status, code=got.code, param=got.param)
        return got


def _overloaded(why: str) -> RequestError:
    return RequestError(f"{why}; try again later", status=503, code="server_overloaded", retry_after=1)
