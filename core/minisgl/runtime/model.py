"""The model interface and its context."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from minisgl.base.component import Component
from minisgl.base.facts import ModelFacts
from minisgl.runtime.batch import ForwardBatch

if TYPE_CHECKING:
    from minisgl.nn.builder import Builder


@dataclass(frozen=True, slots=True)
class TpInfo:
    """Tensor parallel rank and world size."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class ModelContext:
    """``nn`` makes the layers; models never name a kernel or a rank themselves."""

    facts: ModelFacts
    tp: TpInfo
    dtype: torch.dtype
    device: torch.device
    nn: Builder
    settings: Any = None


class Model(Component, nn.Module):
    """A decoder-only transformer.

    ``rename``: (checkpoint prefix, parameter prefix) pairs. ``ignore``: regular expressions of checkpoint tensors that may
    stay unused; every other unused tensor is an error, and so is every parameter that no tensor fills.
    """

    rename: ClassVar[Sequence[tuple[str, str]]] = ()
    ignore: ClassVar[Sequence[str]] = (r".*rotary_emb\.inv_freq",)

    @classmethod
    def facts(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelFacts:
        return ModelFacts.from_hf(config, generation)

    def __init__(self, ctx: ModelContext) -> None:
        nn.Module.__init__(self)

    @abstractmethod
    def forward(self, b: ForwardBatch) -> Tensor:
        """Returns: hidden states [n_tokens, hidden]. No control flow on values of tensors."""

    @abstractmethod
    def logits(self, h: Tensor, b: ForwardBatch) -> Tensor:
        """Args: h: [n_sample, hidden]. Returns: [n_sample, vocab] in float32, cut at the true vocabulary."""
