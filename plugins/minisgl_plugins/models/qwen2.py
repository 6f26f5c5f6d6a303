"""Qwen 2 and 2.5: Llama's layers with biases on the projections of q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from minisgl.api import ModelFacts
from minisgl.api.device import ModelContext
from minisgl.nn import DecoderLayer, DecoderLM, GatedMLP, SelfAttention

DEFAULTS = {"use_sliding_window": False, "max_window_layers": 28}  # of a config that has no such keys


class Qwen2ForCausalLM(DecoderLM):
    """With ``use_sliding_window`` the layers from ``max_window_layers`` on have a window."""

    @classmethod
    def facts(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelFacts:
        return ModelFacts.from_hf({**DEFAULTS, **config}, generation, windows=True)

    def layer(self, ctx: ModelContext, i: int) -> nn.Module:
        return DecoderLayer(ctx, SelfAttention(ctx, i, qkv_bias=True), GatedMLP(ctx))
