"""Llama 2 and 3, and models of the same architecture (SmolLM2, TinyLlama, Mistral's early checkpoints under this name)."""

from __future__ import annotations

from torch import nn

from minisgl.api.device import ModelContext
from minisgl.nn import DecoderLayer, DecoderLM, GatedMLP, SelfAttention


class LlamaForCausalLM(DecoderLM):
    def layer(self, ctx: ModelContext, i: int) -> nn.Module:
        f = ctx.facts
        attention = SelfAttention(ctx, i, qkv_bias=f.attention_bias, out_bias=f.attention_bias)
        return DecoderLayer(ctx, attention, GatedMLP(ctx, bias=f.mlp_bias))
