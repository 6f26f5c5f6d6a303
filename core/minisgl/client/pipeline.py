"""The Python API: an engine in this process, without sockets.

``LLM`` generates from prompts; ``Pipeline`` is underneath it and can be driven step by step.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from minisgl.base.bounds import MAX_N
from minisgl.base.errors import ConfigError, Fault, RequestError
from minisgl.base.types import (
    Accepted,
    Admit,
    Delta,
    EngineInfo,
    EngineOutput,
    GenerateRequest,
    LocalModel,
    Refused,
    SamplingParams,
    TextOutput,
)
from minisgl.client.components import choose, scan
from minisgl.client.outputs import Collected, RequestOutput
from minisgl.client.progress import progress_bars
from minisgl.client.prompts import Prompt, as_prompts, longest_first, prompt_request, refusal
from minisgl.config.load import load_settings
from minisgl.config.schema import Settings
from minisgl.engine.build import build_engine
from minisgl.engine.executor import Executor
from minisgl.engine.port import Abort, LocalPort
from minisgl.observe import Observer
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.registry import Registry
from minisgl.text.create import make_processor, make_tokenizer
from minisgl.text.resolve import resolve_model
from minisgl.text.tokenizer import Tokenizer
from minisgl.text.validate import integer

Message = Mapping[str, Any]


class Pipeline:
    """Model, engine and text processing joined in this process and driven by the caller's thread, one at a time.

    ``submit`` queues a request, ``step`` makes one pass of the engine and returns what came out. ``components``: a plugin
    for a kind by name or as a class: ``Pipeline(settings, scheduler=MyPolicy)``.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        plugins: Sequence[str | object] = (),
        registry: Registry | None = None,
        hooks: Hooks | None = None,
        observers: Sequence[Observer] = (),
        show_progress: bool = True,
        **components: str | type,
    ) -> None:
        if settings is None:
            loaded = load_settings(plugins=plugins)
            settings, registry, hooks = loaded.settings, loaded.registry, loaded.hooks
        self.registry = registry or scan(settings)
        self.hooks = hooks or Hooks(self.registry, [*settings.plugins.enable, *plugins])
        self.settings = choose(settings, self.registry, components)
        executor = cast(type[Executor], self.registry.load("executor", self.settings.use("executor")[0]))
        self.port = LocalPort()
        with progress_bars(show_progress) as progress:
            self.model: LocalModel = resolve_model(
                self.settings, self.registry, self.hooks, progress, weights=executor.needs_weights
            )
            # Before the engine: a tokenizer that cannot be used is known before weights are read, and leaves no engine behind.
            self.tokenizer = make_tokenizer(self.settings, self.registry, self.model)
            self.engine = build_engine(self.settings, self.registry, self.model, self.port, progress, observers)
        self.info: EngineInfo = self.engine.info
        self.text = make_processor(self.settings, self.registry, self.model, self.tokenizer, self.info)
        self._next_uid = 0
        self._end = weakref.finalize(self, self.engine.close)  # one that is dropped gives its memory back too

    @classmethod
    def from_config(cls, path: str | Path, *, plugins: Sequence[str | object] = (), **kw: Any) -> Self:
        """Settings from a TOML file (and the environment). ``kw``: as of the class, without registry and hooks."""
        loaded = load_settings(files=[Path(path)], plugins=plugins)
        return cls(loaded.settings, registry=loaded.registry, hooks=loaded.hooks, **kw)

    # ---------------------------------------------------------------------------------------------------- with text

    def submit(self, request: GenerateRequest) -> list[int]:
        """Queue a request; returns the uids of its ``n`` outputs. Raises: RequestError; Fault after ``close``."""
        uids, admits = self._admits(request)
        self.port.inputs.extend(admits)
        return uids

    def submit_all(self, requests: Sequence[GenerateRequest]) -> list[list[int]]:
        """Queue a batch, all or none; returns the uids of each request. Raises: as ``submit``, for the first that is wrong.
        One that ignores EOS is queued longest first (see ``longest_first``) unless the scheduler's option ``order`` is set."""
        taken: list[tuple[list[int], list[Admit]]] = []
        try:
            for request in requests:
                taken.append(self._admits(request))
        except RequestError:
            self.cancel([uid for uids, _ in taken for uid in uids])
            raise
        admits = [a for _, more in taken for a in more]
        ordered = "order" in self.settings.options("scheduler", self.settings.use("scheduler")[0])
        self.port.inputs.extend(admits if ordered else longest_first(requests, admits))
        return [uids for uids, _ in taken]

    def _admits(self, request: GenerateRequest) -> tuple[list[int], list[Admit]]:
        self._need_open()
        integer(request.n, "n", 1, MAX_N)  # before uids are made of it
        self.hooks.call("check_request", request=request, info=self.info)
        uids = list(range(self._next_uid, self._next_uid + request.n))
        self._next_uid += request.n
        outputs, admits = self.text.submit(uids, request)
        for out in outputs:
            if isinstance(out, Refused):
                raise refusal(out)
        return uids, admits

    def step(self) -> list[TextOutput]:
        """One pass of the engine; what is new of every request. Deltas carry ``uid``."""
        outputs, aborts = self.text.engine_outputs(self.poll_after_turn())
        if aborts:
            self.port.inputs.append(Abort(tuple(aborts)))
        return outputs

    def cancel(self, uids: Sequence[int]) -> None:
        """End requests; nothing more comes out of them."""
        if aborts := self.text.cancel(uids):
            self.port.inputs.append(Abort(tuple(aborts)))

    # ------------------------------------------------------------------------------------------------- tokens only

    def admit(self, a: Admit) -> None:
        """Queue token ids, past the text side; the output comes out of ``poll_after_turn``."""
        self._need_open()
        self.port.inputs.append(a)

    def poll_after_turn(self) -> list[EngineOutput]:
        """One pass of the engine; its raw outputs."""
        self._need_open()
        self.engine.turn()
        outputs = list(self.port.outputs)
        self.port.outputs.clear()
        return outputs

    @property
    def idle(self) -> bool:
        """Nothing is queued, running or in flight."""
        return self.engine.idle and not self.port.inputs

    def _need_open(self) -> None:
        if not self._end.alive:
            raise Fault("this LLM or Pipeline is closed; make another one")

    def close(self) -> None:
        """Stop the device; what still runs is lost. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class LLM:
    """Offline batches: ``LLM().generate(["Hello"], SamplingParams(temperature=0))``.

    Args: model: folder, GGUF file, hub id or reference; None: the default model. options: settings as on the command line
    with underscores: kinds by name (``cache="naive"``), short names (``page_size=16``), or sections
    (``limits={"max_running": 4}``). plugins: hook plugins, as objects or ``module:attr``.

    Several threads may use one LLM: their requests run together, and whoever waits for an output makes the next pass.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        plugins: Sequence[str | object] = (),
        observers: Sequence[Observer] = (),
        show_progress: bool = True,
        **options: Any,
    ) -> None:
        classes: dict[str, Any] = {kind: value for kind, value in options.items() if isinstance(value, type)}
        overrides = {key: value for key, value in options.items() if key not in classes}
        if model is not None:
            overrides["model"] = {**overrides.get("model", {}), "path": str(model)}
        loaded = load_settings(overrides=overrides, plugins=plugins)
        self._use(
            Pipeline(
                loaded.settings,
                registry=loaded.registry,
                hooks=loaded.hooks,
                observers=observers,
                show_progress=show_progress,
                **classes,
            )
        )

    @classmethod
    def on(cls, pipeline: Pipeline) -> Self:
        """An LLM on a pipeline that exists; closing it closes the pipeline."""
        llm = cls.__new__(cls)
        llm._use(pipeline)
        return llm

    def _use(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._boxes: dict[int, deque[TextOutput]] = {}  # by uid: what came out of a request and is not looked at yet
        self._given_up: deque[list[int]] = deque()  # uids of requests that nobody reads any more
        self._lock, self._next = threading.Lock(), threading.Lock()

    @property
    def info(self) -> EngineInfo:
        return self.pipeline.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.pipeline.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids), all in one batch.

        Returns: outputs in the order of the prompts; with ``n`` > 1, the ``n`` outputs of a prompt follow one another.
        Raises: RequestError for the first prompt that cannot be served, before anything runs.
        """
        many = as_prompts(prompts)
        params = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise ConfigError(f"{len(params)} sampling params for {len(many)} prompts; give one, or one for each")
        return self._run([replace(prompt_request(p), sampling=s, n=n) for p, s in zip(many, params, strict=True)])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several. ``template``: variables for the chat template."""
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self._run(
            [
                GenerateRequest(
                    messages=tuple(cast(Sequence[Message], chat)),
                    sampling=sampling or SamplingParams(),
                    n=n,
                    template=template,
                    param="messages",
                )
                for chat in chats
            ]
        )

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling: SamplingParams | None = None, **template: Any
    ) -> Iterator[Delta]:
        """Deltas of one output as they come. The request begins with the first that is asked for; closing the iterator ends
        it. Several streams may be read in turn. Raises: RequestError, from the iterator."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            request = GenerateRequest(
                messages=tuple(cast(Sequence[Message], prompt)), template=template, param="messages"
            )
        else:
            request = prompt_request(cast(Prompt, prompt))
        yield from self._deltas(*self._open([replace(request, sampling=sampling or SamplingParams())]))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """For one thread at a time; who waits comes before who has just been here."""
        with self._next:
            self._lock.acquire()
        try:
            self._cancel_given_up()
            yield
        finally:
            self._lock.release()

    def _cancel_given_up(self) -> None:
        while self._given_up:
            self.pipeline.cancel(self._given_up.popleft())

    def _open(self, requests: Sequence[GenerateRequest]) -> tuple[list[int], deque[TextOutput]]:
        """Submit all or none; returns the uids of the outputs, and the box they come into. Raises: RequestError."""
        box: deque[TextOutput] = deque()
        with self._alone():
            uids = [uid for mine in self.pipeline.submit_all(requests) for uid in mine]
            self._boxes.update(dict.fromkeys(uids, box))
        return uids, box

    def _deltas(self, uids: list[int], box: deque[TextOutput]) -> Iterator[Delta]:
        """What comes out of these requests until each has ended. Raises: RequestError for the first that fails."""
        open_uids = set(uids)
        try:
            while open_uids:
                while not box:
                    self._step(box)
                out = box.popleft()
                if isinstance(out, Refused):
                    open_uids.discard(out.uid)
                    raise refusal(out)
                if isinstance(out, Delta):
                    if out.finish is not None:
                        open_uids.discard(out.uid)
                    if out.finish == "error":
                        raise RequestError(out.error, status=500, code="internal_error")
                    yield out
        finally:
            self._leave(uids, sorted(open_uids))

    def _leave(self, uids: list[int], open_uids: list[int]) -> None:
        """Never waits: the garbage collector may call it at any point, also in the middle of a pass."""
        for uid in uids:
            self._boxes.pop(uid, None)
        self._given_up.append(open_uids)
        if self._lock.acquire(blocking=False):
            try:
                self._cancel_given_up()
            finally:
                self._lock.release()

    def _step(self, box: deque[TextOutput]) -> None:
        """One pass unless ``box`` has something by now; each output goes to whoever reads it.

        Raises: Fault if nothing can come out any more.
        """
        with self._alone():
            if box:
                return
            if self.pipeline.idle:
                raise Fault(
                    "a request ended unseen: its outputs went to another caller of Pipeline.step(), or it was cancelled"
                )
            for out in self.pipeline.step():
                if (mine := self._boxes.get(out.uid)) is not None:
                    mine.append(out)

    def _run(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
        uids, box = self._open(requests)
        partial = {uid: Collected() for uid in uids}
        done: dict[int, RequestOutput] = {}
        for delta in self._deltas(uids, box):
            if (output := partial[delta.uid].add(delta)) is not None:
                done[delta.uid] = output
        return [done[uid] for uid in uids]

    def close(self) -> None:
        self.pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


__all__ = ["LLM", "Accepted", "Delta", "Pipeline", "RequestOutput", "SamplingParams", "scan"]
