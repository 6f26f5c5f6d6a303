"""Qwen 3 with experts: Qwen 3's attention, and in most layers a mixture of experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from minisgl.api import ModelFacts, MoEFacts
from minisgl.api.device import ModelContext
from minisgl.nn import DecoderLayer, DecoderLM, GatedMLP, SelfAttention, SparseMLP


class Qwen3MoeForCausalLM(DecoderLM):
    """A window that is on (``use_sliding_window``) is one of all layers."""

    @classmethod
    def facts(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelFacts:
        own = {
            "use_sliding_window": config.get("use_sliding_window") or False,
            "layer_types": None,
            "max_window_layers": 0,
        }
        return replace(ModelFacts.from_hf({**config, **own}, generation, windows=True), moe=MoEFacts.from_hf(config))

    def layer(self, ctx: ModelContext, i: int) -> nn.Module:
        f = ctx.facts
        attention = SelfAttention(ctx, i, qkv_bias=f.attention_bias, out_bias=f.attention_bias, head_norm=True)
        sparse = f.moe is not None and i in f.moe.layers
        return DecoderLayer(ctx, attention, SparseMLP(ctx) if sparse else GatedMLP(ctx))
