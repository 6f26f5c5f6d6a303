"""A number for each token of the vocabulary, for the few slots that need that many, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.api.device import LogitsContext, Uploads

I32 = npt.NDArray[np.int32]
FIRST = 4  # seats


class Seats:
    """[seats, vocab] of ``dtype``. A slot has a seat while it needs one; there are as many as slots have had one at once."""

    def __init__(self, ctx: LogitsContext, dtype: torch.dtype) -> None:
        self._vocab, self._device = ctx.vocab, ctx.device
        self._counts = torch.zeros((0, ctx.vocab), dtype=dtype, device=ctx.device)
        self._seat = torch.zeros(ctx.max_slots + 1, dtype=torch.int64, device=ctx.device)
        self._h_seat: dict[int, int] = {}
        self._free: list[int] = []
        self._fresh: dict[int, I32] = {}  # slot -> tokens that its new row begins with
        self._uploads = Uploads(ctx.device, ctx.depth)

    def take(self, slot: int, tokens: Sequence[int] | I32) -> None:
        """A new row in ``slot`` begins with a 1 for each of ``tokens``, each time it is among them (a boolean: with True)."""
        if slot not in self._h_seat:
            self._h_seat[slot] = self._free.pop() if self._free else self._grown()
        ids = np.asarray(tokens, np.int32)
        self._fresh[slot] = ids[ids < self._vocab]  # a prompt may have ids that only pad the embedding

    def leave(self, slot: int) -> None:
        """The row in ``slot`` needs none."""
        if (seat := self._h_seat.pop(slot, None)) is not None:
            self._free.append(seat)
            self._fresh.pop(slot, None)

    def _grown(self) -> int:
        """One more seat: twice as many as before, of which the rest is free."""
        n = len(self._counts)
        more = max(n, FIRST)
        self._counts = torch.cat((self._counts, self._counts.new_zeros((more, self._vocab))))
        self._free = list(range(n + more - 1, n, -1))
        return n

    def prepare(self) -> None:
        """Bring to the device what has changed."""
        if not self._fresh:
            return
        slots = np.fromiter(self._fresh, np.int32, len(self._fresh))
        seats = np.array([self._h_seat[slot] for slot in slots.tolist()], np.int32)
        places = [seat * self._vocab + ids for seat, ids in zip(seats.tolist(), self._fresh.values(), strict=True)]
        self._fresh.clear()
        where, seat, at = self._uploads.send(slots, seats, np.concatenate(places).astype(np.int32))
        self._seat.index_copy_(0, where, seat)
        self._counts.index_fill_(0, seat, 0)
        self._add(at)

    def _add(self, at: Tensor) -> None:
        flat = self._counts.view(-1)
        if self._counts.dtype == torch.bool:
            flat.index_fill_(0, at, True)
        else:
            flat.index_add_(0, at, torch.ones_like(at, dtype=self._counts.dtype))

    def of(self, slot: Tensor) -> Tensor:
        """[n, vocab] of the slots [n], each of which has a seat."""
        return self._counts.index_select(0, self._seat.index_select(0, slot))

    def add(self, slot: Tensor, tokens: Tensor) -> None:
        """One more of ``tokens[i]`` for ``slot[i]``."""
        self._add(self._seat.index_select(0, slot) * self._vocab + tokens)
