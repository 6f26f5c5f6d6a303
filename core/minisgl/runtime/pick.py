"""From logits to tokens: logits processors in their order, a mask of grammars, then the sampler; and log probabilities beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.base.errors import RequestError
from minisgl.base.types import I32, NO_PAGES, Bools, RowInit
from minisgl.runtime.logits import FOREVER, LogitsProcessor
from minisgl.runtime.sampling import Sampler, SampleRows
from minisgl.runtime.scores import Packed, Scorer
from minisgl.runtime.staging import Uploads

Mask = Callable[[Tensor, I32], Tensor]  # logits [n, vocab or wider] and their slots, to logits


class Picker:
    """``vocab``: tokens that may be sampled. ``width``: logits of the model. ``scored``: log probabilities of the step that was
    picked last, until somebody takes them. Steps whose rows nothing acts on cost one look at the host's arrays."""

    def __init__(
        self,
        sampler: Sampler,
        processors: Mapping[str, LogitsProcessor],
        device: torch.device,
        max_slots: int,
        vocab: int,
        width: int,
        depth: int = 1,
    ) -> None:
        self.sampler, self._vocab, self._width, self._device = sampler, vocab, width, device
        self.scorer = Scorer(max_slots, vocab, width)
        self.scored: list[Packed] = []
        self._by_name = processors
        self._processors = sorted(processors.values(), key=lambda p: p.order)
        self._until = np.zeros((len(processors), max_slots + 1), np.int32)  # output tokens that a processor acts on
        self._busy = np.zeros(max_slots + 1, np.int32)  # output tokens that anything acts on
        self._uploads = Uploads(device, depth)

    def set_row(self, row: RowInit) -> None:
        """A row takes its slot."""
        slot = row.slot
        self.sampler.set_row(slot, row.uid, row.sampling)
        self.scorer.set_row(row)
        self._until[:, slot] = [p.set_row(row) for p in self._processors]
        told = FOREVER if self.scorer.output[slot] >= 0 else 0
        self._busy[slot] = max(told, self._until[:, slot].max(initial=0))

    def check(self, extra: Mapping[str, Any]) -> None:
        """What a request gives to processors by name. Raises: RequestError. May be called from another thread."""
        for name, params in extra.items():
            try:
                self._by_name[name].check(params)
            except ValueError as e:
                raise RequestError(f"logits.{name}: {e}", param=f"logits.{name}") from e

    def prepare(self) -> None:
        """Once before each step's ``pick``, outside any graph."""
        self.sampler.prepare()
        for processor in self._processors:
            processor.prepare()

    @torch.inference_mode()
    def warm(self) -> None:
        """Let the sampler compile what it needs for float32, in which processed logits come: now, and not while requests wait."""
        padding = torch.full((1,), self._busy.shape[0] - 1, device=self._device)
        nobody = SampleRows(NO_PAGES, NO_PAGES, padding, torch.zeros_like(padding))
        self.prepare()
        self.sampler.sample(torch.zeros((1, self._width), device=self._device), nobody)

    def plain(self, h_slot: I32, h_out: I32) -> bool:
        """Whether a graph with the sampler alone serves these rows."""
        return self.sampler.plain(h_slot) and not self._acts(h_slot, h_out)

    def _acts(self, h_slot: I32, h_out: I32) -> bool:
        return bool((h_out < self._busy[h_slot]).any())

    def pick(self, logits: Tensor, rows: SampleRows, mask: Mask | None = None) -> Tensor:
        """As ``Sampler.sample``. ``mask``: forbids what the rows' grammars do, after all processors."""
        if not self._acts(rows.h_slot, rows.h_out):
            return self.sampler.sample(logits if mask is None else mask(logits, rows.h_slot), rows)
        acting: Bools = rows.h_out < self._until[:, rows.h_slot]  # [processors, n]
        told: Bools = self.scorer.output[rows.h_slot] >= 0
        *at, tell = self._uploads.send(*(np.flatnonzero(a).astype(np.int32) for a in (*acting, told)))
        before = self.scorer.before(logits.index_select(0, tell), rows.h_slot[told]) if told.any() else None
        parts = [
            (processor, where, _some(rows, where, acts))
            for processor, where, acts in zip(self._processors, at, acting, strict=True)
            if acts.any()
        ]
        logits = self._process(logits, parts)
        if mask is not None:
            logits = mask(logits, rows.h_slot)
        tokens = self.sampler.sample(logits, rows)
        for processor, where, mine in parts:
            processor.sampled(tokens.index_select(0, where), mine)
        if before is not None:
            picked = tokens.index_select(0, tell)
            self.scored.append(self.scorer.sampled(before, picked, rows.h_slot[told], rows.h_out[told]))
        return tokens

    def _process(self, logits: Tensor, parts: Sequence[tuple[LogitsProcessor, Tensor, SampleRows]]) -> Tensor:
        """The logits in float32, changed by each processor where it acts."""
        if not parts:
            return logits
        logits = logits.float()
        for processor, where, mine in parts:
            if len(where) == len(logits):
                processor.apply(logits[:, : self._vocab], mine)
                continue
            own = logits.index_select(0, where)
            processor.apply(own[:, : self._vocab], mine)
            logits.index_copy_(0, where, own)
        return logits


def _some(rows: SampleRows, where: Tensor, acts: Bools) -> SampleRows:
    if acts.all():
        return rows
    return SampleRows(
        rows.h_slot[acts], rows.h_out[acts], rows.slot.index_select(0, where), rows.out.index_select(0, where)
    )
