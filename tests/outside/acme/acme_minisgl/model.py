"""A Llama with the multipliers of Granite (embedding, residual, logits), made of minisgl's own layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from minisgl.api import ModelError, ModelFacts
from minisgl.api.device import ForwardBatch, Model, ModelContext


class AcmeAttentionBlock(nn.Module):
    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        f = ctx.facts
        self.qkv_proj = ctx.nn.qkv(bias=f.attention_bias)
        self.attention = ctx.nn.attention(layer)
        self.o_proj = ctx.nn.row(f.heads * f.head_dim, f.hidden, bias=f.attention_bias)

    def forward(self, x: Tensor, b: ForwardBatch) -> Tensor:
        q, k, v = self.qkv_proj(x)
        return self.o_proj(self.attention(q, k, v, b))


class AcmeMLP(nn.Module):
    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        self.gate_up_proj = ctx.nn.gate_up()
        self.activation = ctx.nn.activation()
        self.down_proj = ctx.nn.row(ctx.facts.intermediate, ctx.facts.hidden)

    def forward(self, x: Tensor, b: ForwardBatch) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x), b))


class AcmeLayer(nn.Module):
    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        self.scale = float(ctx.facts.extra.get("residual_multiplier", 1.0))
        self.input_layernorm = ctx.nn.norm()
        self.self_attn = AcmeAttentionBlock(ctx, layer)
        self.post_attention_layernorm = ctx.nn.norm()
        self.mlp = AcmeMLP(ctx)

    def forward(self, x: Tensor, residual: Tensor | None, b: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Each norm adds ``x`` to ``residual`` first, so blocks return their output already scaled."""
        x, residual = self.input_layernorm(x, residual, b)
        x, residual = self.post_attention_layernorm(self.self_attn(x, b) * self.scale, residual, b)
        return self.mlp(x, b) * self.scale, residual


class AcmeTrunk(nn.Module):
    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        self.scale = float(ctx.facts.extra.get("embedding_multiplier", 1.0))
        self.embed_tokens = ctx.nn.embed()
        self.layers = nn.ModuleList(AcmeLayer(ctx, i) for i in range(ctx.facts.layers))
        self.norm = ctx.nn.norm()

    def forward(self, b: ForwardBatch) -> Tensor:
        x, residual = self.embed_tokens(b.tokens) * self.scale, None
        for layer in self.layers:
            x, residual = layer(x, residual, b)
        return self.norm(x, residual, b)[0]


class AcmeForCausalLM(Model):
    """Its checkpoints are those of transformers' GraniteForCausalLM with the usual attention scale."""

    @classmethod
    def facts(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelFacts:
        facts = ModelFacts.from_hf(config, generation)
        scale, usual = config.get("attention_multiplier"), facts.head_dim**-0.5
        if scale is not None and abs(scale - usual) > 1e-6:
            raise ModelError(
                f"attention_multiplier = {scale!r} is not supported by AcmeForCausalLM; expected {usual:.6f}"
            )
        return facts

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx)
        self.model = AcmeTrunk(ctx)
        self.lm_head = ctx.nn.head(self.model.embed_tokens)
        self.logits_scaling = float(ctx.facts.extra.get("logits_scaling", 1.0))

    def forward(self, b: ForwardBatch) -> Tensor:
        return self.model(b)

    def logits(self, h: Tensor, b: ForwardBatch) -> Tensor:
        return self.lm_head(h) / self.logits_scaling
