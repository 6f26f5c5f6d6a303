"""How long a step takes: from sizes and rates of a device, or as fitted to measured steps (calibrate.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from minisgl_cli.simulate.shapes import Shape


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes. ``tokens``: through the layers. ``kv``: KV tokens that its rows have afterwards, together, which
    attention reads. ``pairs``: of a new token and a token it attends to; ``prompt_pairs``: those of prompts. ``sampled``: rows
    of the LM head. ``decode``: rows that decode, a token each."""

    tokens: int
    kv: int
    pairs: int
    sampled: int
    decode: int = 0
    prompt_pairs: int = 0


@dataclass(frozen=True, slots=True)
class Hardware:
    """``bandwidth``: bytes/s read. ``flops``: of matrix products, 1/s. ``memory``: bytes for weights and KV cache together.
    ``layer_s``: seconds each layer takes however small the step (kernel starts). ``host_s``: seconds in which the host makes
    a step ready; step loops that overlap hide it. ``value_bytes``: of a weight and of a KV number. ``batch_tokens``,
    ``max_running``: limits of the engine on such a device, where the settings have none."""

    name: str
    bandwidth: float
    flops: float
    memory: int
    layer_s: float
    host_s: float
    value_bytes: int
    batch_tokens: int
    max_running: int


HARDWARE: dict[str, Hardware] = {
    h.name: h
    for h in (
        # H200, bf16: 4.3 TB/s is between reading once (4.5) and attention over pages (3.5-3.8); products of 8192 run at
        # 790 TFLOP/s; a step of one row takes about 50 us a layer more than its bytes.
        Hardware("h200", 4.3e12, 790e12, 141 * 10**9, 50e-6, 250e-6, 2, 8192, 256),
        # Two AVX512 cores, float32: 538 MB of weights are read at 30 GB/s; 128 rows run at 240 GFLOP/s.
        Hardware("laptop-cpu", 30e9, 240e9, 8 * 2**30, 170e-6, 500e-6, 4, 256, 32),
    )
}


class Cost(Protocol):
    """``host_s``: seconds of the host for each step, before the device can begin it."""

    @property
    def host_s(self) -> float: ...
    def seconds(self, w: Work) -> float:
        """Of the device, for one step."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """Each part of a step takes as long as its bytes or its products, whichever is more; parts add up.

    seconds = layers * layer_s + linear + attention + head, where
    linear = max(weights read / bandwidth, 2 * weights used * tokens / flops),
    attention = max(kv * bytes of a KV token / bandwidth, 4 * layers * heads * head_dim * pairs / flops),
    head = max(head bytes / bandwidth, 2 * head weights * sampled / flops), if a row samples.
    """

    shape: Shape
    hardware: Hardware

    @property
    def host_s(self) -> float:
        return self.hardware.host_s

    def seconds(self, w: Work) -> float:
        s, h = self.shape, self.hardware
        read = s.dense_values + self._experts_read(w.tokens) * s.expert_values
        used = s.dense_values + s.top_k * s.expert_values
        linear = self._longer(read, 2 * used * w.tokens)
        attention = self._longer(w.kv * s.kv_values, 4 * s.layers * s.heads * s.head_dim * w.pairs)
        head = self._longer(s.head_values, 2 * s.head_values * w.sampled) if w.sampled else 0.0
        return s.layers * h.layer_s + linear + attention + head

    def _longer(self, values: float, flops: float) -> float:
        return max(values * self.hardware.value_bytes / self.hardware.bandwidth, flops / self.hardware.flops)

    def _experts_read(self, tokens: int) -> float:
        """Experts of a layer that at least one of the tokens uses, on average, if all are equally likely."""
        s = self.shape
        return s.experts * (1 - (1 - s.top_k / s.experts) ** tokens) if s.experts else 0.0


@dataclass(frozen=True, slots=True)
class Fitted:
    """seconds = step_s + token_s * prompt tokens + decode_s * decoded rows + kv_s * kv + pair_s * pairs, of the prompts' tokens
    alone, with the host's time in ``step_s``: a measured step has both. ``decode_s`` None: as ``token_s``."""

    step_s: float
    token_s: float
    kv_s: float
    host_s: float = 0.0
    decode_s: float | None = None
    pair_s: float = 0.0

    def seconds(self, w: Work) -> float:
        decode_s = self.token_s if self.decode_s is None else self.decode_s
        rows = self.token_s * (w.tokens - w.decode) + decode_s * w.decode
        return self.step_s + rows + self.kv_s * w.kv + self.pair_s * w.prompt_pairs
