"""The text worker process: tokenizes for the engine, and turns its tokens into text for the api processes."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from minisgl.base.errors import RequestError
from minisgl.base.types import Delta, Ended, EngineOutput, Refused, TextOutput, Tokens
from minisgl.text.create import make_processor, make_tokenizer
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


class TextWorker:
    """``to_api``: by api index. Tokens of running requests go before new prompts, whose tokenization takes longest: one
    prompt at a time, and what the engine has said meanwhile in between. ``pass_began_ns``: monotonic; 0 while it waits."""

    def __init__(self, processor: TextProcessor, to_api: Mapping[int, Send], to_engine: Send) -> None:
        self._text = processor
        self._to_api, self._to_engine = to_api, to_engine
        self._jobs: deque[Job] = deque()
        self.pass_began_ns = 0

    @property
    def waiting(self) -> int:
        """Prompts that are not tokenized yet."""
        return len(self._jobs)

    def take(self, messages: Sequence[Message]) -> None:
        """Queue prompts, handle all else."""
        outputs: list[EngineOutput] = []
        for m in messages:
            if isinstance(m, Tokens | Ended | Refused):
                outputs.append(m)
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

    def _cancel(self, uids: Sequence[int]) -> None:
        gone = set(uids)
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
        serve(process, worker)
    finally:
        pulse.stop()


def serve(process: Process, worker: TextWorker) -> None:
    """Until Stop."""
    messages = process.early
    while not any(isinstance(m, Stop) for m in messages):
        worker.pass_began_ns = time.monotonic_ns()
        worker.take(messages)
        worker.work()
        worker.pass_began_ns = 0
        messages = process.inbox.receive(0 if worker.waiting else IDLE_MS)
