"""Sampling in plain torch: greedy, temperature, min-p, top-k and top-p, one uniform number per token.

A token is the inverse of the cumulative distribution over the kept tokens, in the order of the vocabulary, at a uniform
number that is a hash of (seed of the row, number of its output tokens). So a row's tokens depend on its own logits and seed
alone: not on its neighbours, nor on when it was preempted or how its prompt was cut.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.api import SamplingSpec
from minisgl.api.device import Sampler, SamplerContext, SampleRows

U64 = npt.NDArray[np.uint64]

# How many of the likeliest tokens are sorted first; rows that keep more go on to the next size, at last the whole vocabulary.
CANDIDATES = (64, 1024)


def mix(x: U64) -> U64:
    """The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64 bits that scatters them."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: U64 = x ^ (x >> np.uint64(31))
    return out


def uniform(seed: U64, count: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1), a function of each (seed, count)."""
    bits = mix(mix(seed) ^ count.astype(np.uint64))
    out: npt.NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return out


class TorchSampler(Sampler):
    def __init__(self, ctx: SamplerContext) -> None:
        rows = ctx.max_slots + 1
        self.vocab, self.device, self.seed = ctx.vocab, ctx.device, ctx.seed
        self.greedy = np.ones(rows, np.bool_)
        self.filtered = np.zeros(rows, np.bool_)
        self.temperature = np.ones(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seeds = np.zeros(rows, np.uint64)

    def set_row(self, slot: int, uid: int, spec: SamplingSpec) -> None:
        self.greedy[slot] = spec.greedy or spec.top_p <= 0
        self.filtered[slot] = 0 < spec.top_k < self.vocab or spec.top_p < 1 or spec.min_p > 0
        self.temperature[slot] = max(spec.temperature, 1e-5)
        self.top_k[slot] = min(spec.top_k, self.vocab) if spec.top_k > 0 else self.vocab
        self.top_p[slot] = spec.top_p
        self.min_p[slot] = spec.min_p
        if spec.seed is None:
            own = mix(np.array([self.seed & (2**64 - 1), uid & (2**64 - 1)], np.uint64))
            self.seeds[slot] = own[0] ^ own[1]
        else:
            self.seeds[slot] = spec.seed & (2**64 - 1)

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        logits = logits[:, : self.vocab].float()
        slot = rows.h_slot
        greedy = self.greedy[slot]
        if greedy.all():
            return argmax(logits)
        out = argmax(logits) if greedy.any() else torch.empty(len(slot), dtype=torch.int64, device=self.device)
        u = uniform(self.seeds[slot], rows.h_out)
        filtered = self.filtered[slot]
        for chosen, draw in ((~greedy & ~filtered, self._plain), (~greedy & filtered, self._filtered)):
            at = np.flatnonzero(chosen)
            if len(at):
                where = self._tensor(at)
                picked = logits if len(at) == len(slot) else logits.index_select(0, where)
                scaled = picked / self._tensor(self.temperature[slot[at]])[:, None]
                out[where] = draw(scaled, slot[at], self._tensor(u[at]))
        return out

    def _tensor(self, a: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(a).to(self.device)

    def _plain(self, x: Tensor, slot: npt.NDArray[np.int32], u: Tensor) -> Tensor:
        """x: [n, vocab] logits divided by the temperature; u: [n]. Every token may be drawn."""
        return inverse_cdf(torch.softmax(x, -1), u)

    def _filtered(self, x: Tensor, slot: npt.NDArray[np.int32], u: Tensor) -> Tensor:
        """As ``_plain``, for rows with top-k, top-p or min-p: sorts as few tokens as each row's own filters allow."""
        out = torch.empty(len(slot), dtype=torch.int64, device=self.device)
        total = torch.logsumexp(x, -1) if (self.top_p[slot] < 1).any() else torch.zeros(len(slot), device=self.device)
        left = np.arange(len(slot))
        for size in (*(c for c in CANDIDATES if c < self.vocab), self.vocab):
            at = self._tensor(left)
            values, ids = x.index_select(0, at).topk(size, -1)  # [m, size] falling
            keep, sure = self._keep(values, total[at], slot[left])
            enough = sure.cpu().numpy() if size < self.vocab else np.ones(len(left), np.bool_)
            if enough.any():
                done = self._tensor(np.flatnonzero(enough))
                out[at[done]] = _draw(values[done], ids[done], keep[done], u[at[done]])
            left = left[~enough]
            if not len(left):
                break
        return out

    def _keep(self, values: Tensor, total: Tensor, slot: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Which of the likeliest tokens the filters keep, in the order min-p, top-k, top-p; tokens that tie with the last
        kept one are kept too, so that the order of ties does not matter.

        Args: values: [n, size] falling. total: [n] log of the sum over the vocabulary, used by rows with top-p.
        Returns: [n, size] bool, a prefix of each row; and [n] bool, whether no token beyond ``values`` would be kept.
        """
        best = values[:, :1]
        with np.errstate(divide="ignore"):
            floor = best + self._tensor(np.log(self.min_p[slot]))[:, None]  # -inf without min-p
        k = self.top_k[slot]
        kth = values.gather(1, self._tensor(np.minimum(k, values.shape[1]).astype(np.int64) - 1)[:, None])
        kth.masked_fill_(self._tensor(k > values.shape[1])[:, None], float("-inf"))
        keep = values >= torch.maximum(floor, kth)

        weight = (values - best).exp() * keep
        only_top_p = self._tensor((k == self.vocab) & (self.min_p[slot] == 0))
        mass = torch.where(only_top_p, (total - best[:, 0]).exp(), weight.sum(-1))
        seen = only_top_p | ~keep[:, -1]  # else the mass of what min-p and top-k keep is not known yet
        top_p = self.top_p[slot]
        limit = mass * self._tensor(np.where(top_p < 1, top_p, np.inf))
        before = weight.cumsum(-1) - weight
        last = ((before < limit[:, None]) & keep).sum(-1, keepdim=True).clamp(min=1) - 1
        keep &= values >= values.gather(1, last)
        return keep, seen & ~keep[:, -1]


def argmax(logits: Tensor) -> Tensor:
    """[n] int64, the first of equals. On a CPU numpy's is ten times as fast as torch's."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def inverse_cdf(weight: Tensor, u: Tensor) -> Tensor:
    """The index where the running sum of ``weight`` [n, m] >= 0 passes ``u`` [n] of its total: never one of weight 0. With
    weights that are no numbers it is still an index of the row."""
    running = weight.cumsum(-1, dtype=torch.float64)
    total = running[:, -1:].contiguous()
    index = torch.searchsorted(running, u[:, None] * total, right=True)
    last = torch.searchsorted(running, total)  # the last of positive weight
    return torch.minimum(index, last).clamp_(max=weight.shape[1] - 1).squeeze(1)


def _draw(values: Tensor, ids: Tensor, keep: Tensor, u: Tensor) -> Tensor:
    """Draw among the kept candidates in the order of the vocabulary."""
    order = ids.argsort(-1)
    weight = ((values - values[:, :1]).exp() * keep).gather(1, order)
    return ids.gather(1, order).gather(1, inverse_cdf(weight, u)[:, None]).squeeze(1)
