"""Quantization methods: linear layers that keep fewer bits of each weight."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from minisgl.base.component import Component

Apply = Callable[[Tensor, Tensor | None], Tensor]  # (x [n, inputs], bias [outputs] or None) -> [n, outputs], new
Turn = Callable[[Tensor], Tensor]  # x [n, size] -> x @ basis, for an orthogonal [size, size]; new


@dataclass(frozen=True, slots=True)
class QuantContext:
    """``dtype``: of the model's activations and of the weights that are quantized."""

    settings: Any
    device: torch.device
    dtype: torch.dtype


class QuantMethod(Component):
    """Makes the linear layers of a model: projections of attention and MLP, and the head.

    The embedding, norms and routers keep all bits. Models do not know of it: the builder gives each linear layer the
    method, and the layer calls ``linear`` when its weight is loaded. ``experts``: the two products of each expert of a mixture
    are made by ``linear`` as well, and called one expert after the other; else experts stay as they are.
    """

    experts: ClassVar[bool] = False

    @classmethod
    def supports(cls, device: str, dtype: str) -> str | None:
        """None if it can work on this type of device ("cpu", "cuda") with activations of this dtype ("float32"), else the
        reason and what to do. Called before weights are read."""
        return None

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's ``quantization_config`` asks for this method. Asked with ``quant = "auto"``."""
        return False

    def __init__(self, ctx: QuantContext) -> None:
        self.settings = ctx.settings

    @abstractmethod
    def linear(self, weight: Tensor, head: bool) -> Apply:
        """The product with ``weight``, quantized.

        Args: weight: [outputs, inputs], this rank's shard, of the context's device and dtype. It is read during this call
        and not kept: the caller frees it. head: whether it is the language model head, which some methods keep finer.
        Returns: a function of x [n, inputs] and a bias [outputs] or None; it leaves x as it is. Called by one thread.
        """

    def basis(self, size: int) -> Turn | None:
        """A basis in which vectors of ``size`` elements are easier to round, or None. Decoders then keep their hidden states and
        values in one (``nn.basis``), and layers that read those are made by ``turned``."""
        return None

    def turned(self, weight: Tensor, turn: Turn, head: bool) -> Apply:
        """As ``linear``, for inputs that come in a basis: each row of ``weight`` has to be turned into it."""
        raise NotImplementedError(f"{type(self).__name__} has no basis")
