"""From settings to the limits of a simulated engine."""

from __future__ import annotations

from minisgl.base.errors import CapacityError
from minisgl.base.types import Limits
from minisgl.config.memory import parse_memory
from minisgl.config.schema import KindSection, Settings
from minisgl_cli.simulate.cost import Hardware
from minisgl_cli.simulate.shapes import Shape

AUTO_MEMORY = "0.9"


def sim_limits(settings: Settings, shape: Shape, hardware: Hardware) -> Limits:
    """Raises: CapacityError if the weights leave no room for KV pages."""
    limits, kv = settings.limits, settings.kv
    num_pages = kv.num_pages or _pages(settings, shape, hardware)
    return Limits(
        max_slots=limits.max_running or hardware.max_running,
        max_len=min(limits.max_len or shape.max_len, num_pages * kv.page_size),
        num_pages=num_pages,
        page_size=kv.page_size,
        batch_tokens=limits.batch_tokens or hardware.batch_tokens,
        grow_pages=kv.grow_pages,
    )


def _pages(settings: Settings, shape: Shape, hardware: Hardware) -> int:
    weights = shape.values * hardware.value_bytes
    memory = AUTO_MEMORY if settings.kv.memory == "auto" else settings.kv.memory
    free = max(0, hardware.memory - weights)
    pages = min(parse_memory(memory, free), free) // (shape.kv_values * hardware.value_bytes * settings.kv.page_size)
    if pages < 1:
        raise CapacityError(
            f"{shape.name} has {weights / 1e9:.1f} GB of weights and {hardware.name} {hardware.memory / 1e9:.0f} GB of memory: "
            "no KV page fits; take a smaller --shape, or set --kv.num-pages"
        )
    return pages


def with_policies(settings: Settings, scheduler: str, cache: str, seed: int) -> Settings:
    """``settings`` with these plugins, and a seed if it has none: a simulation can be repeated."""
    kinds = dict(settings.kinds)
    for kind, name in (("scheduler", scheduler), ("cache", cache)):
        section = kinds.get(kind, KindSection())
        kinds[kind] = section.model_copy(update={"use": name})
    engine = settings.engine
    seeded = engine if engine.seed is not None else engine.model_copy(update={"seed": seed})
    return settings.model_copy(update={"kinds": kinds, "engine": seeded})
