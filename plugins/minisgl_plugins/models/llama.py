"""Llama 2 and 3, and models of the same architecture (SmolLM2, TinyLlama, Mistral's early checkpoints under this name)."""

from __future__ import annotations

from torch import Tensor, nn

from minisgl.api.device import ForwardBatch, Model, ModelContext


class LlamaAttention(nn.Module):
    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        f = ctx.facts
        self.qkv_proj = ctx.nn.qkv(bias=f.attention_bias)
        self.attention = ctx.nn.attention(layer)
        self.o_proj = ctx.nn.row(f.heads * f.head_dim, f.hidden, bias=f.attention_bias)

    def forward(self, x: Tensor, b: ForwardBatch) -> Tensor:
        q, k, v = self.qkv_proj(x)
        out: Tensor = self.o_proj(self.attention(q, k, v, b))
        return out


class LlamaMLP(nn.Module):
    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        f = ctx.facts
        self.gate_up_proj = ctx.nn.gate_up(bias=f.mlp_bias)
        self.activation = ctx.nn.activation()
        self.down_proj = ctx.nn.row(f.intermediate, f.hidden, bias=f.mlp_bias)

    def forward(self, x: Tensor, b: ForwardBatch) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_up_proj(x), b))
        return out


class LlamaDecoderLayer(nn.Module):
    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        self.input_layernorm = ctx.nn.norm()
        self.self_attn = LlamaAttention(ctx, layer)
        self.post_attention_layernorm = ctx.nn.norm()
        self.mlp = LlamaMLP(ctx)

    def forward(self, x: Tensor, residual: Tensor | None, b: ForwardBatch) -> tuple[Tensor, Tensor]:
        """``x`` is the last block's output, not yet added to ``residual``: each norm does both in one op."""
        x, residual = self.input_layernorm(x, residual, b)
        x = self.self_attn(x, b)
        x, residual = self.post_attention_layernorm(x, residual, b)
        return self.mlp(x, b), residual


class LlamaModel(nn.Module):
    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        self.embed_tokens = ctx.nn.embed()
        self.layers = nn.ModuleList(LlamaDecoderLayer(ctx, i) for i in range(ctx.facts.layers))
        self.norm = ctx.nn.norm()

    def forward(self, b: ForwardBatch) -> Tensor:
        x, residual = self.embed_tokens(b.tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual, b)
        out: Tensor = self.norm(x, residual, b)[0]
        return out


class LlamaForCausalLM(Model):
    """The module tree mirrors the checkpoint, so tensors need no renaming."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx)
        self.model = LlamaModel(ctx)
        self.lm_head = ctx.nn.head(self.model.embed_tokens)

    def forward(self, b: ForwardBatch) -> Tensor:
        out: Tensor = self.model(b)
        return out

    def logits(self, h: Tensor, b: ForwardBatch) -> Tensor:
        out: Tensor = self.lm_head(h)
        return out
