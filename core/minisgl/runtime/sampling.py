"""The sampler: picks the next token of each row from its logits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from minisgl.base.component import Component
from minisgl.base.types import I32, SamplingSpec


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """``vocab``: tokens that may be sampled; logits may be wider (W4). ``seed``: of requests that bring none. ``depth``: steps
    in flight at once."""

    settings: Any
    device: torch.device
    max_slots: int
    vocab: int
    seed: int = 0
    depth: int = 1


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Whose logits they are. ``slot``, ``out``: [n] int64 on the device, the rows' slots and the number of output tokens each
    has had before this one; the random number of a row depends on its seed and this alone. ``h_slot``, ``h_out``: [n] int32,
    the same on the host; in a graph, which serves other rows at each replay, they are empty."""

    h_slot: I32
    h_out: I32
    slot: Tensor
    out: Tensor


class Sampler(Component):
    """``capturable``: ``sample`` can be recorded in a CUDA graph for steps whose rows are all ``plain``: then it works on
    device state alone, allocates nothing outside torch, and never waits for the device."""

    capturable: ClassVar[bool] = False

    @classmethod
    def supports(cls, device: torch.device) -> str | None:
        """None if it can run there, else the reason. Cheap, without initializing a device."""
        return None

    @abstractmethod
    def __init__(self, ctx: SamplerContext) -> None: ...

    @abstractmethod
    def set_row(self, slot: int, uid: int, spec: SamplingSpec) -> None:
        """A request took ``slot``: overwrite all state of the slot's former row. Without a seed, one is drawn from ``uid``
        and the sampler's own random state. O(1), on the host."""

    def prepare(self) -> None:
        """Once before each step's ``sample``, outside any graph: brings to the device what ``set_row`` has changed. Slot
        ``max_slots`` is the padding row, which samples greedily."""

    def plain(self, h_slot: I32) -> bool:
        """Whether the graph serves these rows. Asked only if ``capturable``."""
        return False

    @abstractmethod
    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Args: logits: [n, vocab or wider] in the model's dtype; may be overwritten. Returns: [n] int64 token ids.

        Greedy rows get the argmax whatever their neighbours do.
        """
