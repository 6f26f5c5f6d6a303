"""``bad_words``: sequences of tokens that the output must not have. The last token of one is banned where the others are before it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from minisgl.api import RowInit
from minisgl.api.device import BANNED, FOREVER, LogitsContext, LogitsProcessor, SampleRows

from .lists import SlotLists

TOKENS = 16  # of the longest word that is looked for; of a longer one its last so many
ANY, NONE, FILL = -1, -2, -3  # in the place of a token: fits all; there is none yet; fits nothing


class BadWordsProcessor(LogitsProcessor):
    """``tail``: the last tokens of each row's output, the latest last, ``NONE`` where it has none yet."""

    order: ClassVar[int] = 30

    def __init__(self, ctx: LogitsContext) -> None:
        self._vocab = ctx.vocab
        self._before = SlotLists(ctx, FILL, TOKENS - 1)  # of each word the tokens before the last, all in one list
        self._last = SlotLists(ctx)
        self._begun = SlotLists(ctx, NONE, TOKENS - 1)
        self._tail = self._begun.of(torch.arange(ctx.max_slots + 1, device=ctx.device))

    def set_row(self, row: RowInit) -> int:
        words = [w[-TOKENS:] for w in row.sampling.bad_words if w and max(w) < self._vocab]
        if not words:
            return 0
        self._before.set(row.slot, [i for w in words for i in (*[ANY] * (TOKENS - len(w)), *w[:-1])])
        self._last.set(row.slot, [w[-1] for w in words])
        written = row.written[-(TOKENS - 1) :].tolist()
        self._begun.set(row.slot, [*[NONE] * (TOKENS - 1 - len(written)), *written])
        return FOREVER

    def prepare(self) -> None:
        for lists in (self._before, self._last):
            lists.prepare()
        if (fresh := self._begun.prepare()) is not None:
            self._tail.index_copy_(0, fresh, self._begun.of(fresh))

    def apply(self, logits: Tensor, rows: SampleRows) -> None:
        tail = self._tail.index_select(0, rows.slot)[:, None]  # [n, 1, TOKENS - 1]
        last = self._last.of(rows.slot).long()  # [n, words]
        before = self._before.of(rows.slot).view(len(last), -1, TOKENS - 1)
        words = min(before.shape[1], last.shape[1])  # the lists grow apart; what is beyond the shorter is filling
        fits = ((before == tail) | (before == ANY)).all(-1)[:, :words]
        logits.scatter_add_(1, last[:, :words], torch.where(fits, BANNED, 0.0).to(logits.dtype))

    def sampled(self, tokens: Tensor, rows: SampleRows) -> None:
        tail = self._tail.index_select(0, rows.slot)
        self._tail.index_copy_(0, rows.slot, torch.cat((tail[:, 1:], tokens[:, None].int()), 1))
