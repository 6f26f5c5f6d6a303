"""Sampling in one pass over the logits, on the device alone, so that it can be captured in a CUDA graph.

A token is the argmax of log(p) plus a Gumbel number for each token, which is a function of (seed of the row, number of its
output tokens, token): no softmax, no sum, and a row's tokens depend on its own logits and seed alone. Filters become a
threshold on the row's logits, found without sorting, by a kernel that only steps with such rows run.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.api import SamplingSpec
from minisgl.api.device import Sampler, SamplerContext, SampleRows, Uploads
from minisgl_plugins.sampler.torch import mix

# int32 words of a slot's state; floats by their bits. Kernels read them by the constants of ``fused_kernels``.
FIELDS = ("greedy", "inv_temperature", "seed_low", "seed_high", "top_k", "top_p", "min_p_floor")
QUARTER = (
    1024  # tokens; four times as many are a tile. Part of what a seed means: it decides which random bits a token gets
)
BLOCK = 8192  # tokens that the search for a threshold reads at once
FEW = 4096  # logits above a first bound that are searched by themselves
SHIFT = {torch.bfloat16: 16, torch.float16: 13}  # bits that float32 has more
I32 = npt.NDArray[np.int32]


class FusedSampler(Sampler):
    capturable = True

    @classmethod
    def supports(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"device is {device.type!r}; its kernels run on 'cuda'"
        if find_spec("triton") is None:
            return "needs package 'triton', which torch for CUDA brings: pip install triton"
        return None

    def __init__(self, ctx: SamplerContext) -> None:
        rows = ctx.max_slots + 1
        self.vocab, self.device, self.seed = ctx.vocab, ctx.device, ctx.seed
        self._uploads = Uploads(ctx.device, ctx.depth)
        self._filtered = np.zeros(rows, np.bool_)
        self._host = np.zeros((rows, len(FIELDS)), np.int32)
        self._host[:] = _pack(greedy=True)
        self._state = torch.from_numpy(self._host.copy()).to(ctx.device)  # [rows, fields] int32
        self._changed: set[int] = set()

    def set_row(self, slot: int, uid: int, spec: SamplingSpec) -> None:
        greedy = spec.greedy or spec.top_p <= 0
        self._filtered[slot] = not greedy and (0 < spec.top_k < self.vocab or spec.top_p < 1 or spec.min_p > 0)
        self._host[slot] = _pack(
            greedy=greedy,
            temperature=max(spec.temperature, 1e-5),
            seed=self._own_seed(uid) if spec.seed is None else spec.seed,
            top_k=spec.top_k if 0 < spec.top_k < self.vocab else 0,
            top_p=min(spec.top_p, 1.0),
            min_p=spec.min_p,
        )
        self._changed.add(slot)

    def _own_seed(self, uid: int) -> int:
        own = mix(np.array([self.seed & (2**64 - 1), uid & (2**64 - 1)], np.uint64))
        return int(own[0] ^ own[1])

    def prepare(self) -> None:
        if not self._changed:
            return
        slots = np.fromiter(self._changed, np.int32, len(self._changed))
        self._changed.clear()
        where, words = self._uploads.send(slots, self._host[slots].reshape(-1))
        self._state.index_copy_(0, where, words.view(-1, len(FIELDS)).to(torch.int32))

    def plain(self, h_slot: npt.NDArray[np.int32]) -> bool:
        return not self._filtered[h_slot].any()

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        from minisgl_plugins.sampler import fused_kernels

        n, tiles = logits.shape[0], -(-self.vocab // (4 * QUARTER))
        assert logits.stride(1) == 1, f"strides {logits.stride()}: the logits of a row lie apart"
        scores = torch.empty((n, tiles), dtype=torch.float32, device=self.device)
        tokens = torch.empty((n, tiles), dtype=torch.int32, device=self.device)
        picked = torch.empty(n, dtype=torch.int64, device=self.device)
        filtered = len(rows.h_slot) > 0 and bool(self._filtered[rows.h_slot].any())
        floor = self._thresholds(logits, rows) if filtered else tokens
        fused_kernels.best_of_tiles[n, tiles](
            logits, self._state, rows.slot, rows.out, floor, scores, tokens, logits.stride(0), logits.shape[1], self.vocab, tiles,
            QUARTER=QUARTER, THRESHOLD=filtered, FAST=logits.is_cuda, num_warps=4,
        )  # fmt: skip
        fused_kernels.best_of_rows[n,](scores, tokens, picked, tiles, BLOCK=_power(tiles), num_warps=1)
        return picked

    def _thresholds(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """[n] int32, the ordered logit from which on a row's tokens are kept. A row without filters is done at once."""
        from minisgl_plugins.sampler import fused_kernels

        n = logits.shape[0]
        floor = torch.empty(n, dtype=torch.int32, device=self.device)
        few = torch.empty((n, FEW), dtype=torch.float32, device=self.device)
        fused_kernels.thresholds[n,](
            logits, self._state, rows.slot, few, floor, logits.stride(0),
            COLUMNS=logits.shape[1], VOCAB=self.vocab, SHIFT=SHIFT.get(logits.dtype, 0), BLOCK=BLOCK, FEW=FEW, num_warps=16,
        )  # fmt: skip
        return floor


def _pack(
    greedy: bool, temperature: float = 1.0, seed: int = 0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> I32:
    """A slot's words, in the order of ``FIELDS``. Filters of greedy rows are left out: they never change the argmax."""
    floor = math.log2(min_p) if min_p > 0 and not greedy else -math.inf
    floats = np.array([math.log2(math.e) / temperature, 1.0 if greedy else top_p, floor], np.float32).view(np.int32)
    seeds = np.array([seed & (2**64 - 1)], np.uint64).view(np.int32)  # low word first
    words = [int(greedy), floats[0], seeds[0], seeds[1], 0 if greedy else top_k, floats[1], floats[2]]
    return np.array(words, np.int32)


def _power(size: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(size - 1, 0).bit_length()
