"""``min_tokens``: no stop token before so many others."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from minisgl.api import RowInit
from minisgl.api.device import BANNED, LogitsContext, LogitsProcessor, SampleRows

from .lists import SlotLists


class MinTokensProcessor(LogitsProcessor):
    order: ClassVar[int] = 30

    def __init__(self, ctx: LogitsContext) -> None:
        self._vocab = ctx.vocab
        self._stops = SlotLists(ctx, fill=None)  # filled up with a stop token again

    def set_row(self, row: RowInit) -> int:
        stops = [i for i in row.sampling.stop_ids if i < self._vocab]
        if not stops or row.emitted >= row.sampling.min_new:
            return 0
        self._stops.set(row.slot, stops)
        return row.sampling.min_new

    def prepare(self) -> None:
        self._stops.prepare()

    def apply(self, logits: Tensor, rows: SampleRows) -> None:
        logits.scatter_(1, self._stops.of(rows.slot).long(), BANNED)
