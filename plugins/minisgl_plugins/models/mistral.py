"""Mistral: Llama's layers without biases, with attention to a sliding window in the first versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from minisgl.api import ModelFacts
from minisgl.api.device import ModelContext
from minisgl.nn import DecoderLayer, DecoderLM, GatedMLP, SelfAttention


class MistralForCausalLM(DecoderLM):
    """A window that is set is one of all layers."""

    @classmethod
    def facts(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelFacts:
        window = config.get("sliding_window", 4096)  # as in transformers; checkpoints without a window have null
        own = {"sliding_window": window, "use_sliding_window": True, "layer_types": None, "max_window_layers": 0}
        return ModelFacts.from_hf({**config, **own}, generation, windows=True)

    def layer(self, ctx: ModelContext, i: int) -> nn.Module:
        return DecoderLayer(ctx, SelfAttention(ctx, i), GatedMLP(ctx))
