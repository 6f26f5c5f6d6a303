"""``logit_bias``: a number that is added to the logits of some tokens."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from minisgl.api import RowInit
from minisgl.api.device import FOREVER, LogitsContext, LogitsProcessor, SampleRows

from .lists import SlotLists, bits


class BiasProcessor(LogitsProcessor):
    order: ClassVar[int] = 10

    def __init__(self, ctx: LogitsContext) -> None:
        self._vocab = ctx.vocab
        self._ids, self._biases = SlotLists(ctx), SlotLists(ctx)  # filled up: 0 is added to token 0

    def set_row(self, row: RowInit) -> int:
        pairs = [
            (i, b) for i, b in zip(row.sampling.bias_ids, row.sampling.biases, strict=True) if i < self._vocab and b
        ]
        if not pairs:
            return 0
        self._ids.set(row.slot, [i for i, _ in pairs])
        self._biases.set(row.slot, bits([b for _, b in pairs]))
        return FOREVER

    def prepare(self) -> None:
        self._ids.prepare()
        self._biases.prepare()

    def apply(self, logits: Tensor, rows: SampleRows) -> None:
        logits.scatter_add_(1, self._ids.of(rows.slot).long(), self._biases.floats(rows.slot))
