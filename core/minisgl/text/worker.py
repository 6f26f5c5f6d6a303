"""The text worker process: tokenizes for the engine, and turns its tokens into text for the api processes."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from minisgl.base.errors import RequestError
from minisgl.base.types import Delta, Ended, EngineOutput, Refused, Scores, TextOutput, Tokens
from minisgl.text.create import make_processor, make_tokenizer
from minisgl.text.outline import Outlines
from minisgl.text.processor import TextProcessor
from minisgl.wire.messages import (
    API_SHIFT,
    Abort,
    Cancel,
    Deltas,
    Detokenize,
    Detokenized,
    Message,
    Ready,
    Stop,
    Submit,
    Tokenize,
    Tokenized,
)
from minisgl.wire.process import Process
from minisgl.wire.pulse import Pulse

log = logging.getLogger("minisgl.text")
Send = Callable[[Message], None]
Job = Submit | Tokenize | Detokenize
IDLE_MS = 500
CHECK_S = 2.0  # longest that the check of a schema or expression may take
CHECK_POLL_MS = 2  # while one is checked
CHECKERS = 2


@dataclass(frozen=True, slots=True)
class _Checked:
    """A request whose output is to have a form, while a thread checks the form."""

    job: Submit
    param: str
    done: Future[None]
    due: float  # monotonic seconds


class TextWorker:
    """``to_api``: by api index. Tokens of running requests go before new prompts, whose tokenization takes longest: one
    prompt at a time, and what the engine has said meanwhile in between. Schemas and expressions are checked by threads of
    their own. ``pass_began_ns``: monotonic; 0 while it waits."""

    def __init__(
        self,
        processor: TextProcessor,
        to_api: Mapping[int, Send],
        to_engine: Send,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._checks: list[_Checked] = []
        self._checkers = ThreadPoolExecutor(CHECKERS, "minisgl-grammar")
        self._text = processor
        self._to_api, self._to_engine = to_api, to_engine
        self._jobs: deque[Job] = deque()
        self.pass_began_ns = 0

    @property
    def waiting(self) -> int:
        """Prompts that are not tokenized yet."""
        return len(self._jobs)

    @property
    def idle_ms(self) -> int:
        """How long to wait for messages when there is nothing to do."""
        return 0 if self._jobs else CHECK_POLL_MS if self._checks else IDLE_MS

    def close(self) -> None:
        self._checkers.shutdown(wait=False, cancel_futures=True)

    def take(self, messages: Sequence[Message]) -> None:
        """Queue prompts, handle all else."""
        outputs: list[EngineOutput] = []
        for m in messages:
            if isinstance(m, Tokens | Scores | Ended | Refused):
                outputs.append(m)
            elif isinstance(m, Submit) and (param := Outlines.wanted(m.request)) is not None:
                done = self._checkers.submit(self._text.outlines.check, m.request)
                self._checks.append(_Checked(m, param, done, self._clock() + CHECK_S))
            elif isinstance(m, Submit | Tokenize | Detokenize):
                self._jobs.append(m)
            elif isinstance(m, Cancel):
                self._cancel(m.uids)
        if outputs:
            told, aborts = self._text.engine_outputs(outputs)
            self._tell(told)
            self._abort(aborts)

    def work(self) -> None:
        """Handle one queued prompt."""
        if self._checks:
            self._see_checks()
        if not self._jobs:
            return
        job = self._jobs.popleft()
        if isinstance(job, Submit):
            told, admits = self._text.submit(job.uids, job.request)
            for admit in admits:
                self._to_engine(admit)
            self._tell(told)
        else:
            self._answer(job)

    def _see_checks(self) -> None:
        """Requests whose check is done join the others: it left its result, good or bad, with the grammars."""
        now, open_ = self._clock(), []
        for c in self._checks:
            if c.done.done():
                self._jobs.append(c.job)
            elif now < c.due:
                open_.append(c)
            else:
                c.done.cancel()
                why = f"'{c.param}' takes longer than {CHECK_S:g} s to check; make it simpler"
                code = "invalid_json_schema" if "schema" in c.param or "json" in c.param else "invalid_grammar"
                self._tell([Refused(c.job.uids[0], 400, why, code, c.param)])
        self._checks = open_

    def _cancel(self, uids: Sequence[int]) -> None:
        gone = set(uids)
        self._checks = [c for c in self._checks if not gone.issuperset(c.job.uids)]
        for job in [j for j in self._jobs if isinstance(j, Submit) and gone.issuperset(j.uids)]:
            self._jobs.remove(job)
        self._abort(self._text.cancel(uids))

    def _abort(self, uids: Sequence[int]) -> None:
        if uids:
            self._to_engine(Abort(tuple(uids)))

    def _answer(self, job: Tokenize | Detokenize) -> None:
        reply = self._to_api[job.uid >> API_SHIFT]
        try:
            if isinstance(job, Tokenize):
                reply(Tokenized(job.uid, tuple(self._text.tokenize(job.request))))
            else:
                reply(Detokenized(job.uid, self._text.detokenize(job.ids)))
        except RequestError as e:
            reply(Refused(job.uid, e.status, e.message, e.code, e.param))
        except Exception:
            log.exception("a request to tokenize could not be processed")
            reply(Refused(job.uid, 500, "the request could not be processed", "internal_error"))

    def _tell(self, outputs: Iterable[TextOutput]) -> None:
        """Neighbouring deltas for one api process travel as one message."""
        for (api, is_delta), run in groupby(outputs, key=lambda o: (o.uid >> API_SHIFT, isinstance(o, Delta))):
            if is_delta:
                self._to_api[api](Deltas(tuple(o for o in run if isinstance(o, Delta))))
            else:
                for o in run:
                    if not isinstance(o, Delta):
                        self._to_api[api](o)


def run(process: Process) -> None:
    """Load the tokenizer while the engine loads the model, then serve until Stop."""
    go = process.wait_go()
    assert go.model is not None, "the supervisor sends text workers the model"
    tokenizer = make_tokenizer(process.settings, process.registry, go.model)
    info = process.wait_for(Ready).info
    processor = make_processor(process.settings, process.registry, go.model, tokenizer, info, process.spec.index)
    worker = TextWorker(processor, dict(enumerate(process.to_apis())), process.to("engine"))
    pulse = Pulse(process.spec)
    pulse.watch(lambda: (-1, worker.pass_began_ns))
    pulse.start()
    process.tell(Ready(process.role))
    try:
        gc.freeze()  # what is loaded stays: collections look at requests only
        serve(process, worker)
    finally:
        worker.close()
        pulse.stop()


def serve(process: Process, worker: TextWorker) -> None:
    """Until Stop."""
    messages = process.early
    while not any(isinstance(m, Stop) for m in messages):
        worker.pass_began_ns = time.monotonic_ns()
        worker.take(messages)
        worker.work()
        worker.pass_began_ns = 0
        messages = process.inbox.receive(worker.idle_ms)
