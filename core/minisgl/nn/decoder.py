"""The blocks that most decoder-only transformers are made of. Their parameters are named as in Hugging Face checkpoints, so a
model built from them needs no map of names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from minisgl.runtime.batch import ForwardBatch
from minisgl.runtime.model import Model, ModelContext


class SelfAttention(nn.Module):
    """Projections, attention, output projection. ``head_norm``: each head of q and k is normed before its rotation.
    ``rope``: False for a layer without rotary embedding."""

    def __init__(
        self,
        ctx: ModelContext,
        layer: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm: bool = False,
        rope: bool = True,
    ) -> None:
        super().__init__()
        f = ctx.facts
        self.qkv_proj = ctx.nn.qkv(bias=qkv_bias)
        self.q_norm = ctx.nn.norm(f.head_dim) if head_norm else None
        self.k_norm = ctx.nn.norm(f.head_dim) if head_norm else None
        self.attention = ctx.nn.attention(layer, rope)
        self.o_proj = ctx.nn.row(f.heads * f.head_dim, f.hidden, bias=out_bias)

    def forward(self, x: Tensor, b: ForwardBatch) -> Tensor:  # [n, hidden] -> [n, hidden]
        q, k, v = self.qkv_proj(x)
        out: Tensor = self.o_proj(self.attention(q, k, v, b, self.q_norm, self.k_norm))
        return out


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, ctx: ModelContext, *, bias: bool = False) -> None:
        super().__init__()
        f = ctx.facts
        self.gate_up_proj = ctx.nn.gate_up(bias=bias)
        self.activation = ctx.nn.activation()
        self.down_proj = ctx.nn.row(f.intermediate, f.hidden, bias=bias)

    def forward(self, x: Tensor, b: ForwardBatch) -> Tensor:  # [n, hidden] -> [n, hidden]
        out: Tensor = self.down_proj(self.activation(self.gate_up_proj(x), b))
        return out


class SparseMLP(nn.Module):
    """A mixture of gated MLPs, of which the router picks a few for each token."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        self.gate = ctx.nn.router()
        self.experts = ctx.nn.experts()

    def forward(self, x: Tensor, b: ForwardBatch) -> Tensor:  # [n, hidden] -> [n, hidden]
        out: Tensor = self.experts(x, self.gate(x), b)
        return out


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP, each pair beside a residual."""

    def __init__(self, ctx: ModelContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = ctx.nn.norm()
        self.self_attn = attention
        self.post_attention_layernorm = ctx.nn.norm()
        self.mlp = mlp

    def forward(self, x: Tensor, residual: Tensor | None, b: ForwardBatch) -> tuple[Tensor, Tensor]:
        """``x`` is the last block's output, not yet added to ``residual``: each norm does both in one op."""
        x, residual = self.input_layernorm(x, residual, b)
        x = self.self_attn(x, b)
        x, residual = self.post_attention_layernorm(x, residual, b)
        return self.mlp(x, b), residual


class Decoder(nn.Module):
    """Embedding, layers, norm. ``layer``: makes the layer of a number."""

    def __init__(self, ctx: ModelContext, layer: Callable[[ModelContext, int], nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = ctx.nn.embed()
        self.layers = nn.ModuleList(layer(ctx, i) for i in range(ctx.facts.layers))
        self.norm = ctx.nn.norm()

    def forward(self, b: ForwardBatch) -> Tensor:
        x, residual = self.embed_tokens(b.tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual, b)
        out: Tensor = self.norm(x, residual, b)[0]
        return out


class DecoderLM(Model):
    """A ``Decoder`` with a head for the next token. An architecture says what a layer of it is."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx)
        self.model = Decoder(ctx, self.layer)
        self.lm_head = ctx.nn.head(self.model.embed_tokens)

    @abstractmethod
    def layer(self, ctx: ModelContext, i: int) -> nn.Module:
        """Returns: layer ``i``, called as a ``DecoderLayer`` is. Called while the model is built."""

    def forward(self, b: ForwardBatch) -> Tensor:
        out: Tensor = self.model(b)
        return out

    def logits(self, h: Tensor, b: ForwardBatch) -> Tensor:
        out: Tensor = self.lm_head(h)
        return out
