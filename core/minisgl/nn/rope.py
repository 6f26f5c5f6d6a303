"""Rotary position embedding: the table of cosines and sines, in float32 as transformers computes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minisgl.base.errors import ModelError
from minisgl.base.facts import RopeFacts


def cos_sin_table(rope: RopeFacts, head_dim: int, max_len: int, device: torch.device) -> Tensor:
    """Returns: [max_len, head_dim] float32, for each position head_dim / 2 cosines, then as many sines."""
    freq, scale = frequencies(rope, head_dim)
    angle = torch.arange(max_len, dtype=torch.float32)[:, None] * freq  # [max_len, head_dim / 2]
    return torch.cat((angle.cos() * scale, angle.sin() * scale), dim=1).to(device)


def frequencies(rope: RopeFacts, head_dim: int) -> tuple[Tensor, float]:
    """Returns: [head_dim / 2] float32 radians per position, and the factor on cosines and sines."""
    if head_dim % 2:
        raise ModelError(f"config: head_dim={head_dim} is odd; rotary embedding needs pairs")
    freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind in ("default", "dynamic"):  # dynamic: equal up to max_position_embeddings, where the context ends
        return freq, 1.0
    if rope.kind == "linear":
        return freq / rope.params["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(freq, rope.params), 1.0
    if rope.kind == "yarn":
        return _yarn(rope.theta, head_dim, rope.params)
    raise ModelError(
        f"config: rope type {rope.kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn"
    )


def _llama3(freq: Tensor, p: Mapping[str, Any]) -> Tensor:
    """Slow waves are stretched by ``factor``, fast ones stay, those between are blended (Llama 3.1's reference code)."""
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    length = p["original_max_position_embeddings"]
    wave = 2 * math.pi / freq  # tokens per turn
    stretched = torch.where(wave > length / low, freq / factor, freq)
    smooth = (length / wave - low) / (high - low)
    between = (wave >= length / high) & (wave <= length / low)
    return torch.where(between, (1 - smooth) * stretched / factor + smooth * stretched, stretched)


def _yarn(theta: float, head_dim: int, p: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, extrapolate fast ones, and sharpen attention."""
    factor, length = p["factor"], p["original_max_position_embeddings"]

    def dimension(turns: float) -> float:  # the dimension that makes so many turns within the original length
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    pos = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    freq = 1.0 / (factor * pos) * (1 - keep) + 1.0 / pos * keep  # rounded as transformers does
    return freq, _yarn_scale(factor, p)


def _yarn_scale(factor: float, p: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in p:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return mscale(1.0)
