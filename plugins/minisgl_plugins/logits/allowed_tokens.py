"""``allowed_token_ids``: no other token comes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from minisgl.api import RowInit
from minisgl.api.device import BANNED, FOREVER, LogitsContext, LogitsProcessor, SampleRows

from .seats import Seats


class AllowedTokensProcessor(LogitsProcessor):
    order: ClassVar[int] = 30

    def __init__(self, ctx: LogitsContext) -> None:
        self._seats = Seats(ctx, torch.bool)

    def set_row(self, row: RowInit) -> int:
        allowed = row.sampling.allowed_ids
        if not allowed:
            self._seats.leave(row.slot)
            return 0
        self._seats.take(row.slot, allowed)
        return FOREVER

    def prepare(self) -> None:
        self._seats.prepare()

    def apply(self, logits: Tensor, rows: SampleRows) -> None:
        logits.masked_fill_(~self._seats.of(rows.slot), BANNED)
