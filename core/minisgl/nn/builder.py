"""The builder: makes a model's layers for its facts, dtype and device, so that models name no kernel and no rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from minisgl.base.errors import ConfigError
from minisgl.base.facts import ModelFacts, MoEFacts
from minisgl.base.parallel import check_tp
from minisgl.nn.experts import PackedExperts
from minisgl.nn.layers import Attention, Embedding, Experts, Head, Linear, Norm, QKVLinear, SiluMul
from minisgl.nn.packed import pack, packs
from minisgl.nn.parallel import RowLinear, SplitExperts, SplitQKVLinear, VocabEmbedding, VocabHead
from minisgl.nn.rope import cos_sin_table
from minisgl.runtime.comm import Comm
from minisgl.runtime.quant import Apply, QuantMethod

L = TypeVar("L", bound=Linear)


class Builder:
    """``comm``: the ranks that share the model. ``max_len``: positions the engine serves, for the rotary table. ``quant``: what
    linear layers are quantized with.

    Sizes given to the methods are those of the whole model. Raises: ConfigError if the ranks cannot share it (M14).
    """

    def __init__(
        self,
        facts: ModelFacts,
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        quant: QuantMethod | None = None,
    ) -> None:
        check_tp(facts, comm.size)
        self.comm, self._alone = comm, comm.size == 1
        self.facts, self.dtype, self.device, self.max_len, self.quant = facts, dtype, device, max_len, quant

    @cached_property
    def cos_sin(self) -> Tensor:
        """The rotary table, one for all layers."""
        return cos_sin_table(self.facts.rope, self.facts.head_dim, self.max_len, self.device)

    def embed(self) -> Embedding:
        f = self.facts
        if self._alone:
            return Embedding(f.vocab, f.hidden, self.dtype)
        return VocabEmbedding(f.vocab, f.hidden, self.dtype, self.comm)

    def head(self, embed: Embedding) -> Head:
        """The language model head; shares the weight of ``embed`` if the model is tied."""
        f, tied = self.facts, embed if self.facts.tied else None
        if self._alone:
            return self._quantized(Head(f.hidden, f.vocab, self.dtype, tied), head=True)
        return self._quantized(VocabHead(f.hidden, f.vocab, self.dtype, tied, self.comm), head=True)

    def norm(self, size: int | None = None) -> Norm:
        return Norm(size or self.facts.hidden, self.facts.norm_eps, self.dtype)

    def qkv(self, bias: bool = False) -> QKVLinear:
        """q_proj, k_proj and v_proj."""
        f = self.facts
        if self._alone:
            return self._quantized(QKVLinear(f.hidden, f.heads, f.kv_heads, f.head_dim, self.dtype, bias=bias))
        return self._quantized(SplitQKVLinear(f, self.dtype, self.comm, bias=bias))

    def attention(self, layer: int, rope: bool = True) -> Attention:
        return Attention(layer, self.cos_sin if rope else None)

    def gate_up(self, bias: bool = False) -> Linear:
        """gate_proj and up_proj."""
        f = self.facts
        parts = (("gate_proj", f.intermediate), ("up_proj", f.intermediate))
        return self._quantized(Linear(f.hidden, 2 * f.intermediate, self.dtype, bias=bias, shard=0, parts=parts))

    def activation(self) -> SiluMul:
        """``act(gate) * up`` on the product of ``gate_up``."""
        self._check_act()
        return SiluMul()

    def router(self) -> Linear:
        """Hidden states to one logit for each expert; whole on every rank, and never quantized: small errors would pick other experts."""
        return Linear(self.facts.hidden, self._moe.experts, self.dtype, bias=False, shard=None)

    def experts(self) -> Experts:
        """The gated MLPs that ``router`` chooses from."""
        self._check_act()
        f, product = self.facts, self._expert_pack()
        if product is not None:
            return PackedExperts(f.hidden, self._moe, self.dtype, self.comm, product)
        if self._alone:
            return Experts(f.hidden, self._moe, self.dtype)
        return SplitExperts(f.hidden, self._moe, self.dtype, self.comm)

    def _expert_pack(self) -> Callable[[Tensor], Apply | None] | None:
        """What makes the products of experts; None: the op ``moe`` has them."""
        if self.quant is not None and self.quant.experts:
            return partial(self.quant.linear, head=False)
        return pack if packs(self.device, self.dtype) else None

    @property
    def _moe(self) -> MoEFacts:
        if self.facts.moe is None:
            raise ConfigError(
                f"{self.facts.arch} asks for experts, but its facts have none; its facts() must set ``moe``"
            )
        return self.facts.moe

    def _check_act(self) -> None:
        if self.facts.act not in ("silu", "swish"):
            raise ConfigError(f"config: hidden_act={self.facts.act!r} is not supported; supported: 'silu'")

    def col(self, inputs: int, outputs: int, bias: bool = False) -> Linear:
        """A linear layer whose outputs are split over ranks."""
        self._check_split(outputs, "outputs")
        return self._quantized(Linear(inputs, outputs, self.dtype, bias=bias, shard=0))

    def row(self, inputs: int, outputs: int, bias: bool = False) -> Linear:
        """A linear layer whose inputs are split over ranks."""
        self._check_split(inputs, "inputs")
        if self._alone:
            return self._quantized(Linear(inputs, outputs, self.dtype, bias=bias, shard=1))
        return self._quantized(RowLinear(inputs, outputs, self.dtype, self.comm, bias=bias))

    def _check_split(self, size: int, what: str) -> None:
        if size % self.comm.size:
            raise ConfigError(
                f"parallel.tp = {self.comm.size} does not fit this model: {size} {what} of a layer cannot be split by "
                f"{self.comm.size}; use a size that divides {size}"
            )

    def _quantized(self, layer: L, head: bool = False) -> L:
        """``layer``, which is quantized when it is loaded, if anything is."""
        if self.quant is not None:
            layer.pack = partial(self.quant.linear, head=head)
        return layer
