"""Log probabilities of sampled and of prompt tokens, from the logits as the model gives them. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.base.types import F32, I32, LogprobBlock, RowInit

SCORE_ROWS = 128  # logits that are looked at at once: the whole vocabulary of each, in float32


@dataclass(frozen=True, slots=True)
class Ask:
    """Prompt tokens of a step that are to be scored. ``at``: the step's token whose logits say how likely it was; ``row`` (slot),
    ``position`` and ``token``: of the token itself. All [n] int32."""

    at: I32
    row: I32
    position: I32
    token: I32


@dataclass(frozen=True, slots=True)
class Packed:
    """``data`` [n, 3 + 2k] int32 on the device: token, rank, log probability, k ids, their k log probabilities; floats by their bits."""

    row: I32
    position: I32
    data: Tensor


class Scorer:
    """Knows which rows want log probabilities, and how many alternatives. ``vocab``: tokens that may be sampled; ``width``: logits
    of the model, which the distribution is over; those beyond are padding."""

    def __init__(self, max_slots: int, vocab: int, width: int) -> None:
        self._vocab, self._width = vocab, width
        self.output = np.full(max_slots + 1, -1, np.int32)  # alternatives, -1: none wanted
        self._prompt = np.full(max_slots + 1, -1, np.int32)
        self._length = np.zeros(max_slots + 1, np.int32)  # of the prompt

    def set_row(self, row: RowInit) -> None:
        spec, slot = row.sampling, row.slot
        self.output[slot] = -1 if spec.logprobs is None else spec.logprobs
        self._prompt[slot] = -1 if spec.prompt_logprobs is None else spec.prompt_logprobs
        self._length[slot] = row.kv_len + len(row.ids) - row.emitted

    def sampled(self, before: Before, tokens: Tensor, h_slot: I32, h_out: I32) -> Packed:
        """Of tokens that were sampled for rows of ``h_slot`` [m], each after ``h_out`` others. ``before``: their logits."""
        return Packed(h_slot, self._length[h_slot] + h_out, before.of(tokens))

    def before(self, logits: Tensor, h_slot: I32) -> Before:
        """Keep what is needed of ``logits`` [m, width or wider], a copy of those of the rows ``h_slot``."""
        return self._look(logits, int(self.output[h_slot].max()))

    def prompt(self, logits: Tensor, tokens: Tensor, slots: I32) -> Tensor:
        """Packed data of prompt ``tokens`` [m] int64 that follow on ``logits`` [m, width or wider]. ``slots``: of the step's asks."""
        return self._look(logits, int(self._prompt[slots].max())).of(tokens)

    def _look(self, logits: Tensor, most: int) -> Before:
        x = logits.float()
        return Before(
            x[:, : self._vocab], torch.logsumexp(x[:, : self._width], -1, keepdim=True), min(most, self._vocab)
        )


@dataclass(frozen=True, slots=True)
class Before:
    """``logits`` [m, vocab] float32, before anything has changed them, and the log of their sum over the model's vocabulary."""

    logits: Tensor
    total: Tensor
    most: int

    def of(self, tokens: Tensor) -> Tensor:
        """[m, 3 + 2k] int32: see Packed. A token's number is the same, bit by bit, where it is among the alternatives too."""
        own = self.logits.gather(1, tokens[:, None])
        rank = (self.logits > own).sum(-1, keepdim=True) + 1
        parts = [tokens[:, None].int(), rank.int(), (own - self.total).view(torch.int32)]
        if self.most:
            top, ids = self.logits.topk(self.most, -1)
            parts += [ids.int(), (top - self.total).view(torch.int32)]
        return torch.cat(parts, 1)


def unpack(row: I32, position: I32, data: I32) -> LogprobBlock:
    """``data`` [n, 3 + 2k] on the host."""
    k = (data.shape[1] - 3) // 2
    floats: F32 = np.ascontiguousarray(data).view(np.float32)
    return LogprobBlock(row, position, data[:, 0], floats[:, 2], data[:, 1], data[:, 3 : 3 + k], floats[:, 3 + k :])


def joined(blocks: Sequence[LogprobBlock]) -> LogprobBlock:
    """As one; where a block has fewer alternatives, the places of the others have id -1."""
    if len(blocks) == 1:
        return blocks[0]
    k = max(b.top_ids.shape[1] for b in blocks)

    def one(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(b, name) for b in blocks])

    def wide(name: str, fill: float) -> npt.NDArray[Any]:
        arrays = [getattr(b, name) for b in blocks]
        return np.concatenate([np.pad(a, ((0, 0), (0, k - a.shape[1])), constant_values=fill) for a in arrays])

    return LogprobBlock(
        row=one("row"),
        position=one("position"),
        token=one("token"),
        logprob=one("logprob"),
        rank=one("rank"),
        top_ids=wide("top_ids", -1),
        top_logprobs=wide("top_logprobs", -np.inf),
    )
