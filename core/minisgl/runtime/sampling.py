"""The sampler: picks the next token of each row from its logits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minisgl.base.component import Component
from minisgl.base.types import I32, SamplingSpec


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """``vocab``: tokens that may be sampled; logits may be wider (W4). ``seed``: of requests that bring none."""

    settings: Any
    device: torch.device
    max_slots: int
    vocab: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SampleRows:
    """``h_slot``: [n] int32 slots of the rows. ``h_out``: [n] int32, output tokens each row has had before this one; the
    random number of a row depends on its seed and this alone."""

    h_slot: I32
    h_out: I32


class Sampler(Component):
    @abstractmethod
    def __init__(self, ctx: SamplerContext) -> None: ...

    @abstractmethod
    def set_row(self, slot: int, uid: int, spec: SamplingSpec) -> None:
        """A request took ``slot``: overwrite all state of the slot's former row. Without a seed, one is drawn from ``uid``
        and the sampler's own random state."""

    @abstractmethod
    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Args: logits: [n, vocab] float32, may be overwritten. Returns: [n] int64 token ids.

        Greedy rows get the argmax whatever their neighbours do.
        """
