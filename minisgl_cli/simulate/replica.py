"""One simulated engine: the real engine, scheduler, loop and plugins around a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from minisgl.base.types import I32, Admit, EngineInfo, EngineOutput, Limits, SamplingSpec
from minisgl.client.router import ReplicaLoad
from minisgl.config.schema import Settings
from minisgl.engine.build import component, make_scheduler, plan_checker
from minisgl.engine.engine import Engine
from minisgl.engine.loop import LoopContext
from minisgl.engine.port import EngineInput
from minisgl.plugin.registry import Registry
from minisgl_cli.simulate.cost import Cost
from minisgl_cli.simulate.device import Clock, SimExecutor
from minisgl_cli.simulate.workload import Request

Take = Callable[[Sequence[EngineOutput], float], None]


class Replica:
    """An engine with a clock of its own. ``take``: gets what it sends, with the time on that clock."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        limits: Limits,
        cost: Cost,
        requests: Sequence[Request],
        take: Take,
    ) -> None:
        self.clock = Clock()
        self.tokens: dict[int, int] = {}  # open requests, with their prompt's length
        self._inbox: list[EngineInput] = []
        self._take = take
        make = partial(component, settings, registry)
        executor = SimExecutor(limits, cost, self.clock, requests)
        info = executor.start()
        self.engine = Engine(
            scheduler=make_scheduler(limits, settings, make),
            executor=executor,
            loop=make("loop", LoopContext),
            port=self,
            info=_engine_info(limits, info.vocab),
            queue_limit=settings.limits.queue,
            stall_s=float("inf"),
            check_plan=plan_checker(settings, limits),
            audit=settings.engine.validate_ == "audit",
        )
        self.executor = executor

    @property
    def idle(self) -> bool:
        return not self._inbox and self.engine.idle

    @property
    def load(self) -> ReplicaLoad:
        return ReplicaLoad(len(self.tokens), sum(self.tokens.values()))

    def deliver(self, uid: int, prompt: I32, output_len: int, at_s: float) -> None:
        """A request comes at ``at_s``; an engine that has nothing to do begins it then."""
        if self.idle:
            self.clock.now = max(self.clock.now, at_s)
        self.tokens[uid] = len(prompt)
        self._inbox.append(Admit(uid, prompt, SamplingSpec(temperature=0.0, max_new=output_len)))

    def turn(self) -> None:
        self.engine.turn()

    # ---------------------------------------------------------------------------------------------- the engine's port

    def receive(self, timeout_ms: int) -> Sequence[EngineInput]:
        taken, self._inbox = self._inbox, []
        return taken

    def send(self, owner: int, outputs: Sequence[EngineOutput]) -> None:
        for out in outputs:
            uid = getattr(out, "uid", None)  # an end or a refusal
            if uid is not None:
                del self.tokens[uid]
        self._take(outputs, self.clock.now)


def _engine_info(limits: Limits, vocab: int) -> EngineInfo:
    return EngineInfo(
        model="simulated",
        served_names=("simulated",),
        max_len=limits.max_len,
        vocab=vocab,
        eos=(),
        page_size=limits.page_size,
        num_pages=limits.num_pages,
        max_running=limits.max_slots,
        batch_tokens=limits.batch_tokens,
        device="simulated",
        dtype="none",
        created=0,
    )
