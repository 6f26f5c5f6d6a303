"""From settings to a running engine: choose the components by name, start the executor, join the parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from minisgl.base.bounds import NEUTRAL, SAMPLING_RANGES
from minisgl.base.errors import ModelError, UnknownPlugin
from minisgl.base.facts import ModelFacts
from minisgl.base.progress import no_progress
from minisgl.base.types import EngineInfo, ExecInfo, Limits, LocalModel
from minisgl.config.schema import Settings
from minisgl.engine.engine import Engine
from minisgl.engine.executor import ExecContext, Executor
from minisgl.engine.loop import LoopContext, StepLoop
from minisgl.engine.port import EnginePort
from minisgl.engine.threads import bound_spinning
from minisgl.observe import Observer, ObserverContext
from minisgl.plugin.kinds import group
from minisgl.plugin.registry import Registry
from minisgl.sched.cache import CacheContext, CachePolicy
from minisgl.sched.policy import SchedContext, SchedulerPolicy
from minisgl.sched.scheduler import Scheduler


def build_engine(
    settings: Settings,
    registry: Registry,
    model: LocalModel,
    port: EnginePort,
    progress: Callable[[str, int, int], None] = no_progress,
    observers: Sequence[Observer] = (),
    queue_limit: int | None = None,
) -> Engine:
    """Load the configured components and the model; the engine is ready when this returns.

    ``observers``: in addition to the configured ones. ``queue_limit``: see Engine.
    Raises: PluginError, ConfigError, ModelError, CapacityError, Fault.
    """
    bound_spinning()  # before the model's and the device's plugins import torch
    make = partial(component, settings, registry)
    loop: StepLoop = make("loop", LoopContext)
    executor_class: type[Executor] = registry.load("executor", settings.use("executor")[0])
    facts = model_facts(registry, model) if executor_class.needs_weights else plain_facts(model)
    executor: Executor = make(
        "executor", lambda s: ExecContext(s, settings, registry, model, facts, loop.depth, progress)
    )
    # What needs no weights is loaded and checked before they are read, so that what is broken is known at once.
    for kind in ("cache", "scheduler"):
        registry.load(kind, settings.use(kind)[0])
    named = [make("observer", lambda s: ObserverContext(s, "engine"), name) for name in settings.use("observer")]
    defaults = sampling_defaults(model) if settings.model.generation_defaults else {}
    try:
        device = executor.start()
        limits = engine_limits(settings, device)
        return Engine(
            scheduler=make_scheduler(limits, settings, make),
            executor=executor,
            loop=loop,
            port=port,
            info=engine_info(settings, model, facts, device, defaults),
            queue_limit=queue_limit,
            queue_tokens=settings.limits.queue_tokens,
            stall_s=settings.engine.stall_limit(device.device),
            observers=[*named, *observers],
            check_plan=plan_checker(settings, limits),
            audit=settings.engine.validate_ == "audit",
        )
    except BaseException:
        executor.stop(5.0)
        raise


def component(
    settings: Settings, registry: Registry, kind: str, make_ctx: Callable[[Any], Any], name: str | None = None
) -> Any:
    """The configured component of ``kind``, or the one with this name, with the options configured for it."""
    name = name or settings.use(kind)[0]
    return registry.create(kind, name, settings.options(kind, name), make_ctx)


def engine_limits(settings: Settings, device: ExecInfo) -> Limits:
    return Limits(
        max_slots=device.max_slots,
        max_len=device.max_len,
        num_pages=device.num_pages,
        page_size=device.page_size,
        batch_tokens=device.batch_tokens,
        grow_pages=settings.kv.grow_pages,
    )


def make_scheduler(limits: Limits, settings: Settings, make: Callable[..., Any]) -> Scheduler:
    """The scheduler with the configured cache and policy; both read its step as their clock. ``make``: as ``component``."""
    owner: list[Scheduler] = []

    def clock() -> int:
        return owner[0].step if owner else 0

    rng = Random(settings.engine.seed)
    cache: CachePolicy = make("cache", lambda s: CacheContext(limits.page_size, limits.num_pages, s, clock))
    policy: SchedulerPolicy = make("scheduler", lambda s: SchedContext(s, limits, rng, clock))
    owner.append(Scheduler(limits, cache, policy))
    return owner[0]


def plan_checker(settings: Settings, limits: Limits) -> Callable[[Any], None] | None:
    if settings.engine.validate_ == "off":
        return None
    from minisgl.sched.validator import PlanValidator

    return PlanValidator(limits).check


def architecture(registry: Registry, model: LocalModel) -> str:
    """The first of the checkpoint's architectures that a plugin has.

    Raises: ModelError if the config names none; UnknownPlugin if no plugin has any of them.
    """
    given = model.config.get("architectures") or ()
    architectures = (given,) if isinstance(given, str) else tuple(given)
    known = registry.names("model")
    for name in architectures:
        if name in known:
            return str(name)
    if not architectures:
        raise ModelError(
            f"{model.path / 'config.json'} names no architecture (key 'architectures'); a model plugin is chosen by it. "
            f"Registered: {', '.join(known)}"
        )
    try:
        registry.ref("model", str(architectures[0]))
    except UnknownPlugin as exc:
        raise UnknownPlugin(
            f"{exc}\nAn architecture comes with a package that has its name as an entry point in the group "
            f"{group('model')!r}: pip install one, or write one (docs/add_a_model.md)"
        ) from None
    raise AssertionError(f"{architectures[0]!r} is registered but not among {known!r}")


def model_facts(registry: Registry, model: LocalModel) -> ModelFacts:
    """Facts as the model's own plugin reads them; ``arch`` is the plugin's name, whichever the config names first."""
    name = architecture(registry, model)
    facts: ModelFacts = registry.load("model", name).facts(model.config, model.generation)
    return replace(facts, arch=name)


def plain_facts(model: LocalModel) -> ModelFacts:
    """Facts without loading a model plugin, for executors that run no model."""
    return ModelFacts.from_hf(model.config, model.generation)


def engine_info(
    settings: Settings, model: LocalModel, facts: ModelFacts, device: ExecInfo, defaults: Mapping[str, Any]
) -> EngineInfo:
    picks = {kind: settings.use(kind)[0] for kind in ("executor", "loop", "scheduler", "cache")}
    return EngineInfo(
        model=model.name,
        served_names=settings.model.served_names or (model.name,),
        max_len=device.max_len,
        vocab=device.vocab,
        eos=tuple(sorted(facts.eos)),
        page_size=device.page_size,
        num_pages=device.num_pages,
        max_running=device.max_slots,
        batch_tokens=device.batch_tokens,
        device=device.device,
        dtype=device.dtype,
        created=int(time.time()),
        defaults=defaults,
        picks={**picks, **device.picks},
        grammars=device.grammars,
        logits=device.logits,
    )


def sampling_defaults(model: LocalModel) -> Mapping[str, Any]:
    """The generation config's sampling values, under those that the model source gives.

    Raises: ModelError for a value that a request could not have either.
    """
    merged = {**model.generation, **model.defaults}
    given = {key: merged[key] for key in NEUTRAL if merged.get(key) is not None}
    for key, value in given.items():
        low, high = SAMPLING_RANGES[key]
        whole = isinstance(low, int)
        fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not (fits and low <= value <= high):
            raise ModelError(
                f"{model.path / 'generation_config.json'}: {key} = {value!r} is not {'an integer' if whole else 'a number'} "
                f"from {low} to {high}; correct it, or start with --model.generation-defaults false"
            )
    return given
