"""The layers that the builder makes. Each says which checkpoint tensors fill its parameters (``ParamSpec``).

A layer's tensors are named after its place in the model tree, so a tree that mirrors the checkpoint needs no name map. A
merged layer stands for several checkpoint layers of one parent: ``self_attn.qkv_proj`` is filled from ``self_attn.q_proj``,
``self_attn.k_proj`` and ``self_attn.v_proj``, and costs one matrix product instead of three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.base.facts import MoEFacts
from minisgl.nn.packed import pack
from minisgl.runtime.batch import ForwardBatch
from minisgl.runtime.quant import Apply


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """How one parameter is filled.

    ``name``: of the parameter in the model tree. ``parts``: (checkpoint tensor, its whole shape), laid one after the other
    along dimension 0. ``shard``: the dimension that tensor parallelism splits; None: every rank holds all of it. ``copies``:
    for each part, how many neighbouring ranks have the same slice; () if each has its own. ``pad``: what cannot be split
    evenly is, with zeros at the end of the last slices.
    ``stacked``: a checkpoint tensor of one dimension more that some checkpoints have in place of all the parts.
    """

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    shard: int | None = None
    stacked: tuple[str, tuple[int, ...]] | None = None
    copies: tuple[int, ...] = ()
    pad: bool = False


class Layer(nn.Module):
    """A leaf of the model tree that owns parameters. They are made without memory; the loader puts the tensors in.

    ``needs``: layers whose parameters this one is finished with beside its own; ``needed_by``: the other way round."""

    needs: tuple[Layer, ...] = ()
    needed_by: tuple[Layer, ...] = ()

    def _parameter(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Args: shape: of the whole parameter; a rank of several gets its share when it is loaded."""
        empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def specs(self, path: str) -> list[ParamSpec]:
        """What fills this layer's parameters, for a layer at ``path`` in the tree."""
        return [
            ParamSpec(f"{path}.{n}", ((f"{path}.{n}", tuple(p.shape)),))
            for n, p in self.named_parameters(recurse=False)
        ]

    def unused(self, path: str) -> list[str]:
        """Checkpoint tensors that this layer knows and does not need."""
        return []

    def finish(self) -> None:
        """Called once when the parameters are loaded, and those of the layers that it ``needs``."""


class Linear(Layer):
    """``x @ weight.T + bias``. ``parts``: (name, output features) of the checkpoint layers merged in it; () for a layer
    that is one in the checkpoint too. ``shard``: 0 splits the outputs over ranks, 1 the inputs, None nothing.

    When loaded, the weight may be packed for the device or quantized (``pack``, set by the builder); the layer then has no
    ``weight`` any more.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        *,
        bias: bool,
        shard: int | None,
        parts: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.parts, self.shard = inputs, outputs, tuple(parts), shard
        self.weight: Tensor
        self.bias: Tensor | None
        self.pack: Callable[[Tensor], Apply | None] = pack
        self._apply_packed: Apply | None = None
        self._parameter("weight", (outputs, inputs), dtype)
        if bias:
            self._parameter("bias", (outputs,), dtype)
        else:
            self.register_parameter("bias", None)

    def specs(self, path: str) -> list[ParamSpec]:
        parent = path.rpartition(".")[0]
        parts = [(f"{parent}.{name}" if parent else name, rows) for name, rows in self.parts]
        parts = parts or [(path, self.outputs)]
        found = [ParamSpec(f"{path}.weight", tuple((f"{p}.weight", (n, self.inputs)) for p, n in parts), self.shard)]
        if self.bias is not None:  # the bias of a layer split by inputs is whole on every rank, and added once (N7)
            shard = 0 if self.shard == 0 else None
            found.append(ParamSpec(f"{path}.bias", tuple((f"{p}.bias", (n,)) for p, n in parts), shard))
        return found

    def finish(self) -> None:
        self._apply_packed = self.pack(self.weight.detach())
        if self._apply_packed is not None:
            del self.weight

    def forward(self, x: Tensor) -> Tensor:  # [n, inputs] -> [n, outputs]
        if self._apply_packed is not None:
            return self._apply_packed(x, self.bias)
        return F.linear(x, self.weight, self.bias)


class QKVLinear(Linear):
    """The three projections of attention in one product."""

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, bias: bool
    ) -> None:
        split = (heads, kv_heads, kv_heads)
        sizes = [n * head_dim for n in split]
        parts = list(zip(("q_proj", "k_proj", "v_proj"), sizes))
        super().__init__(hidden, sum(sizes), dtype, bias=bias, shard=0, parts=parts)
        self.split, self.head_dim = list(split), head_dim

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Returns: q [n, heads, head_dim], k and v [n, kv_heads, head_dim]; views of one tensor."""
        q, k, v = torch.split(super().forward(x).view(x.shape[0], -1, self.head_dim), self.split, dim=1)
        return q, k, v


class Embedding(Layer):
    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: Tensor
        self.prepare: Callable[[Tensor], None] | None = None  # changes the weight when it is loaded
        self._parameter("weight", (vocab, hidden), dtype)

    def finish(self) -> None:
        if self.prepare is not None:
            self.prepare(self.weight.detach())

    def forward(self, tokens: Tensor) -> Tensor:  # [n] int64 -> [n, hidden]
        return F.embedding(tokens, self.weight)


class Head(Linear):
    """Hidden states to logits. With ``embed`` it shares the embedding's weight and has none of its own; a copy of it in
    the checkpoint is skipped (W1)."""

    def __init__(self, hidden: int, vocab: int, dtype: torch.dtype, embed: Embedding | None) -> None:
        super().__init__(hidden, vocab, dtype, bias=False, shard=0)
        self._embed = (embed,)  # in a tuple: the module tree must not have the embedding twice
        if embed is not None:
            del self.weight

    @property
    def tied(self) -> bool:
        return self._embed[0] is not None

    def specs(self, path: str) -> list[ParamSpec]:
        return super().specs(path) if self._embed[0] is None else []

    def unused(self, path: str) -> list[str]:
        return [] if self._embed[0] is None else [f"{path}.weight"]

    def finish(self) -> None:
        embed = self._embed[0]
        if embed is None:
            super().finish()
            return
        self._apply_packed = self.pack(embed.weight.detach())  # packed it is a second copy: the embedding looks up rows
        if self._apply_packed is None:
            self.weight = embed.weight


class Norm(Layer):
    """RMS norm. With a residual: first adds ``x`` to it, then norms the sum."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight: Tensor
        self._parameter("weight", (size,), dtype)

    def forward(self, x: Tensor, residual: Tensor | None, b: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Returns: (normed, residual), both [n, size]; may overwrite its arguments."""
        if residual is None:
            return b.ops["rms_norm"](x, self.weight, self.eps), x
        normed, residual = b.ops["add_rms_norm"](x, residual, self.weight, self.eps)
        return normed, residual


class Attention(nn.Module):
    """Head norms, rotary embedding, then attention over the paged KV cache of one layer. ``cos_sin``: see ``nn.rope``; None:
    a layer without rotary embedding (NoPE)."""

    def __init__(self, layer: int, cos_sin: Tensor | None) -> None:
        super().__init__()
        self.layer, self.cos_sin = layer, cos_sin

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        b: ForwardBatch,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Tensor:
        """Args: q, k, v: as ``QKVLinear`` gives them. q_norm, k_norm: both or none, of the heads before their rotation.
        Returns: [n, heads * head_dim]."""
        pool, store = b.kv[self.layer], not b.attention.writes_kv
        fused = b.ops.get("qk_norm_rope_store") if store and self.cos_sin is not None else None
        if fused is not None:
            weights = (
                (None, None, 0.0) if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
            )
            q = fused(q, k, v, *weights, b.view.pos, self.cos_sin, pool, b.view.loc)
        else:
            if q_norm is not None and k_norm is not None:
                q, k = q_norm(q, None, b)[0], k_norm(k, None, b)[0]
            if self.cos_sin is not None:
                q, k = b.ops["rope"](q, k, b.view.pos, self.cos_sin)
            if store:
                b.ops["store_kv"](k, v, pool, b.view.loc)
        out: Tensor = b.attention.forward(q, k, v, pool, self.layer, b.meta, b.view)
        return out.reshape(out.shape[0], -1)


class Experts(Layer):
    """The MLPs of a mixture of experts, stacked. Checkpoints have ``experts.0.gate_proj.weight`` and so on, or
    ``experts.gate_up_proj`` and ``experts.down_proj`` of all experts, as transformers 5 has them in memory."""

    def __init__(self, hidden: int, moe: MoEFacts, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden, self.moe = hidden, moe
        self.gate_up: Tensor
        self.down: Tensor
        self._parameter("gate_up", (moe.experts * 2 * moe.intermediate, hidden), dtype)
        self._parameter("down", (moe.experts * hidden, moe.intermediate), dtype)

    def specs(self, path: str) -> list[ParamSpec]:
        n, m, hidden = self.moe.experts, self.moe.intermediate, self.hidden
        up = [(f"{path}.{e}.{p}_proj.weight", (m, hidden)) for e in range(n) for p in ("gate", "up")]
        down = [(f"{path}.{e}.down_proj.weight", (hidden, m)) for e in range(n)]
        return [
            ParamSpec(f"{path}.gate_up", tuple(up), 0, (f"{path}.gate_up_proj", (n, 2 * m, hidden))),
            ParamSpec(f"{path}.down", tuple(down), 1, (f"{path}.down_proj", (n, hidden, m))),
        ]

    def finish(self) -> None:
        """A dimension for the experts: [experts, 2 * m, hidden] and [experts, hidden, m]."""
        n = self.moe.experts
        self.gate_up = nn.Parameter(self.gate_up.view(n, -1, self.hidden), requires_grad=False)
        self.down = nn.Parameter(self.down.view(n, self.hidden, -1), requires_grad=False)

    def forward(self, x: Tensor, logits: Tensor, b: ForwardBatch) -> Tensor:
        """Args: x: [n, hidden]. logits: [n, experts] of the router. Returns: [n, hidden]."""
        out: Tensor = b.ops["moe"](x, logits, self.gate_up, self.down, self.moe.top_k, self.moe.renormalize)
        return out


class SiluMul(nn.Module):
    """``silu(gate) * up`` of a merged gate_up product."""

    def forward(self, x: Tensor, b: ForwardBatch) -> Tensor:  # [n, 2 * m] -> [n, m]
        out: Tensor = b.ops["silu_mul"](x)
        return out


def layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """All layers with their paths in the tree."""
    return ((path, m) for path, m in model.named_modules() if isinstance(m, Layer))
