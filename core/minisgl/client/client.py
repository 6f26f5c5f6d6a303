"""The way from frontends to the engine: one per api process, used from its event loop only.

uid = api index << 48 | counter, and counter % number of text workers is the text worker of the request
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from minisgl.base.bounds import MAX_N
from minisgl.base.errors import RequestError
from minisgl.base.types import Accepted, Delta, EngineInfo, GenerateRequest, Refused, Usage
from minisgl.client.envelope import unavailable
from minisgl.client.job import Gone, Item, Job, RequestMeters
from minisgl.observe.meter import Meter
from minisgl.text.validate import integer
from minisgl.wire.messages import (
    API_SHIFT,
    Abort,
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


class EngineClient:
    """``state``: "loading", "ready", "draining" or "dead". ``info``: None until ready.

    Args: index: of this api process. text: the ways to the text workers. queue_limit: most requests that may wait beyond
        those that run (``limits.queue``). check: asked for every request before it is sent; raises RequestError to refuse it.
        meter: where requests are counted. first_token_s: longest wait for a request's first output (None: any).
    """

    def __init__(
        self,
        text: Sequence[Send],
        engine: Send,
        queue_limit: int,
        index: int = 0,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[GenerateRequest, EngineInfo], object] = lambda request, info: None,
        meter: Meter | None = None,
        first_token_s: float | None = None,
    ) -> None:
        self._check = check
        self.meter = Meter() if meter is None else meter
        self._meters = RequestMeters(self.meter)
        self._first_token_s = first_token_s
        self.info: EngineInfo | None = None
        self.state = LOADING
        self._text, self._engine, self._queue_limit, self._clock = text, engine, queue_limit, clock
        self._base = index << API_SHIFT
        self._counters = [itertools.count(w, len(text)) for w in range(len(text))]
        self._turn = itertools.cycle(range(len(text)))
        self._jobs: dict[int, Job] = {}  # by uid of a running output
        self._answers: dict[int, asyncio.Future[Any]] = {}
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
                item = await (job.items.get() if job.delivered else self._first(job))
                for out in self._received(job, item):
                    yield out
        finally:
            self._leave(job)

    async def _first(self, job: Job) -> Item:
        """The next item of a job that has no output yet. Raises: RequestError 504 when that takes too long."""
        if self._first_token_s is None:
            return await job.items.get()
        left = job.submitted_s + self._first_token_s - self._clock()
        try:
            async with asyncio.timeout(max(0.0, left)):
                return await job.items.get()
        except TimeoutError:
            raise RequestError(
                f"The request had no output after {self._first_token_s:g} s (server.request_timeout_s).",
                status=504,
                code="request_timeout",
            ) from None

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
        """The engine is gone: every open request ends with an error."""
        if self.state == DEAD:
            return
        self.state = DEAD
        self._end(set(self._jobs.values()), Gone(text))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._dead(text))

    def lose_worker(self, worker: int) -> None:
        """A text worker is gone, and its requests with it; another one takes its place. The engine is told to end them."""
        text = f"the process text-{worker} died"
        lost = {job for job in self._jobs.values() if job.worker == worker}
        uids = tuple(uid for job in lost for uid in job.running)
        self._end(lost, Gone(text))
        if uids:
            self._engine(Abort(uids))
            self._text[worker](Cancel(uids))  # the new one may find them in its inbox
        for uid, answer in self._answers.items():
            if self._worker_of(uid) == worker and not answer.done():
                answer.set_exception(self._dead(text))

    def _end(self, jobs: set[Job], why: Gone) -> None:
        for job in jobs:
            job.items.put_nowait(why)
            self._meters.finished("error", len(job.running))
            for uid in job.running:
                self._jobs.pop(uid, None)

    def _worker_of(self, uid: int) -> int:
        return (uid & ((1 << API_SHIFT) - 1)) % len(self._text)

    def take(self, message: Message) -> None:
        """A message from a text worker or the engine; those for requests that were left are dropped."""
        if isinstance(message, Deltas):
            self._take_deltas(message.items)
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

    def _take_deltas(self, deltas: Sequence[Delta]) -> None:
        now, jobs, arrived = self._clock(), self._jobs, self._meters.arrived
        for delta in deltas:
            job = jobs.get(delta.uid)
            if job is None:
                continue
            arrived(job, delta, now)
            job.items.put_nowait(delta)
            if delta.finish is not None:
                del jobs[delta.uid], job.running[delta.uid]

    def _take_item(self, uid: int, item: Item, ended: bool) -> None:
        job = self._jobs.get(uid)
        if job is None:
            return
        job.items.put_nowait(item)
        if ended:
            del self._jobs[uid], job.running[uid]

    # ---------------------------------------------------------------------------------------------------------- requests

    def _submit(self, r: GenerateRequest) -> Job:
        integer(r.n, "n", 1, MAX_N)  # before uids are made of it
        self._check_open(r.n)
        worker = next(self._turn)
        uids = tuple(self._new_uid(worker) for _ in range(r.n))
        job = Job(worker, uids, {uid: i for i, uid in enumerate(uids)}, self._clock())
        self._send(self._text[worker], Submit(uids, r), r.param)
        self._jobs.update(dict.fromkeys(uids, job))
        return job

    def _received(self, job: Job, item: Item) -> list[Accepted | Delta]:
        """What of an item the caller gets. Raises: RequestError."""
        if isinstance(item, Accepted):
            first, job.accepted, job.prompt_tokens = not job.accepted, True, item.prompt_tokens
            return [item] if first else []
        if isinstance(item, Delta):
            job.delivered = True
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
            raise self._dead(item.text)
        return [self._error_delta(job, uid, index, item.text) for uid, index in unfinished.items()]

    def _error_delta(self, job: Job, uid: int, index: int, text: str) -> Delta:
        out = job.outputs.get(index)
        usage = Usage(job.prompt_tokens, 0 if out is None else out.tokens)
        return Delta(uid, index, finish="error", usage=usage, error=text)

    def _leave(self, job: Job) -> None:
        """The caller is done with the request, or gone: abort what still runs."""
        left = [uid for uid in job.running if self._jobs.pop(uid, None) is not None]
        if left:
            self._meters.finished("abort", len(left))
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

    def _dead(self, text: str) -> RequestError:
        """500 for a request that was open when something failed."""
        if self.state != DEAD:
            return RequestError(f"The server failed on this request: {text}.", status=500, code="internal_error")
        return RequestError(f"The engine failed while it served this request: {text}", status=500, code="engine_dead")

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
