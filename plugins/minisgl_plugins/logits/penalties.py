"""Presence, frequency and repetition penalties, from what the device itself has sampled.

Repetition (CTRL, arXiv:1909.05858, as transformers has it): the logit of a token that the prompt or the output has is divided
by the penalty where it is positive and multiplied where it is not. Presence and frequency (OpenAI): from the logit of a token
that the output has ``count`` times, ``presence + count * frequency`` is taken away.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from minisgl.api import RowInit
from minisgl.api.device import FOREVER, LogitsContext, LogitsProcessor, SampleRows

from .lists import SlotLists, bits
from .seats import Seats

ROWS = 32  # that are computed at once: each takes several times its logits


class PenaltiesProcessor(LogitsProcessor):
    """Of a row with penalties it keeps 4 bytes for each token of the vocabulary, and 1 more where repetition counts."""

    order: ClassVar[int] = 20

    def __init__(self, ctx: LogitsContext) -> None:
        self._penalties = SlotLists(ctx, width=3)
        self._output, self._prompt = Seats(ctx, torch.int32), Seats(ctx, torch.bool)

    def set_row(self, row: RowInit) -> int:
        s = row.sampling
        if s.repetition_penalty == 1 and s.presence_penalty == 0 and s.frequency_penalty == 0:
            self._output.leave(row.slot)
            self._prompt.leave(row.slot)
            return 0
        self._penalties.set(row.slot, bits((s.repetition_penalty, s.presence_penalty, s.frequency_penalty)))
        self._output.take(row.slot, row.written)
        self._prompt.take(row.slot, row.prompt)
        return FOREVER

    def prepare(self) -> None:
        self._penalties.prepare()
        self._output.prepare()
        self._prompt.prepare()

    def apply(self, logits: Tensor, rows: SampleRows) -> None:
        for x, slot in zip(torch.split(logits, ROWS), torch.split(rows.slot, ROWS), strict=True):
            repetition, presence, frequency = torch.split(self._penalties.floats(slot), 1, 1)
            count = self._output.of(slot)
            used = count > 0
            repeated = torch.where(x > 0, x / repetition, x * repetition)
            x.copy_(torch.where(used | self._prompt.of(slot), repeated, x))
            x.sub_(presence * used + frequency * count)

    def sampled(self, tokens: Tensor, rows: SampleRows) -> None:
        self._output.add(rows.slot, tokens)
