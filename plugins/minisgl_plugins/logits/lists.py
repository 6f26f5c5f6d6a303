"""A list of numbers for each slot, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.api.device import LogitsContext, Uploads


class SlotLists:
    """[slots, K] int32, where K grows with the longest list that was ever set. Shorter lists are filled up with ``fill``, or with
    their own first number where it is None."""

    def __init__(self, ctx: LogitsContext, fill: int | None = 0, width: int = 1) -> None:
        self._device, self._fill = ctx.device, fill
        self._host = np.full((ctx.max_slots + 1, width), fill or 0, np.int32)
        self._table = torch.from_numpy(self._host.copy()).to(ctx.device)
        self._changed: set[int] = set()
        self._uploads = Uploads(ctx.device, ctx.depth)

    def set(self, slot: int, values: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """The list of ``slot``, of one number at least, is another one."""
        n = len(values)
        if n > self.width:
            self._widen(max(n, 2 * self.width))
        self._host[slot, :n] = values
        self._host[slot, n:] = values[0] if self._fill is None else self._fill
        self._changed.add(slot)

    def _widen(self, width: int) -> None:
        more = width - self.width
        filling = torch.full_like(self._table[:, :1], self._fill) if self._fill is not None else self._table[:, :1]
        self._table = torch.cat((self._table, filling.expand(-1, more)), 1)
        first = self._host[:, :1] if self._fill is None else np.full_like(self._host[:, :1], self._fill)
        self._host = np.concatenate((self._host, np.repeat(first, more, axis=1)), axis=1)

    @property
    def width(self) -> int:
        return self._host.shape[1]

    def prepare(self) -> Tensor | None:
        """Bring to the device what has changed. Returns: the slots [n] int64, None if there are none."""
        if not self._changed:
            return None
        slots = np.fromiter(self._changed, np.int32, len(self._changed))
        self._changed.clear()
        where, words = self._uploads.send(slots, self._host[slots].reshape(-1))
        self._table.index_copy_(0, where, words.int().view(len(slots), -1))
        return where

    def of(self, slot: Tensor) -> Tensor:
        """[n, K] int32 of the slots [n]."""
        return self._table.index_select(0, slot)

    def floats(self, slot: Tensor) -> Tensor:
        """[n, K] float32, of lists that were set as the bits of floats."""
        return self.of(slot).view(torch.float32)


def bits(values: Sequence[float]) -> npt.NDArray[np.int32]:
    """Floats as they are set in a list."""
    return np.array(values, np.float32).view(np.int32)
