"""CUDA graphs of decode steps: captured once for some sizes, replayed for every step of at most so many rows.

A step is two graphs. The first fills its inputs from the device rows and runs the layers; the second runs the head and the
sampler and notes the tokens. Where the sampler cannot serve the rows from a graph, or more than the sampler acts on them, or a grammar
does, the second is run call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.base.types import I32, NO_PAGES
from minisgl.runtime.attention import AttentionBackend
from minisgl.runtime.batch import BatchView, ForwardBatch, OpTable
from minisgl.runtime.model import Model
from minisgl.runtime.pick import Mask, Picker
from minisgl.runtime.record import Captures, Graph, Recorder
from minisgl.runtime.rows import DeviceRows, Rows
from minisgl.runtime.sampling import SampleRows


def graph_sizes(most: int) -> list[int]:
    """Row counts worth a graph, up to ``most``: small ones exactly, then steps of 8, from 256 on of 32."""
    sizes = [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 32)) if n < most]
    return [*sizes, most] if most else []


def decode_rows(
    n: Tensor, order: Tensor, kv_len: Tensor, next_token: Tensor, page_table: Tensor, page_size: int,
    slot: Tensor, kv: Tensor, pos: Tensor, loc: Tensor, tokens: Tensor,
) -> None:  # fmt: skip
    """The inputs of a decode step from the state of the rows; the reference of the op of this name.

    Args: n: [1] int64, the rows that decode. The other arguments are those of ``DeviceRows`` and ``BatchView``. The last five,
    all [rows] int64, are filled; rows from ``n`` on are padding: slot max_slots, position 0, token 0.
    """
    rows, padding = len(slot), len(kv_len) - 1
    live = torch.arange(rows, device=slot.device) < n
    slot.copy_(torch.where(live, order[:rows], padding))
    pos.copy_(torch.where(live, kv_len.index_select(0, slot), 0))
    kv.copy_(pos + 1)
    tokens.copy_(torch.where(live, next_token.index_select(0, slot), 0))
    page = page_table.view(-1).index_select(0, slot * page_table.shape[1] + pos // page_size)
    loc.copy_(page * page_size + pos % page_size)


@dataclass(frozen=True, slots=True)
class Captured:
    """The graphs of one size. ``hidden``: a list of one tensor [rows, hidden], and ``tokens`` [rows] int32: what they give."""

    view: BatchView
    batch: ForwardBatch
    hidden: list[Tensor]
    tokens: Tensor
    layers: Graph
    sample: Graph | None


class GraphRunner:
    """Decode steps of at most as many rows as the largest of ``sizes``. ``replays`` counts them."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        ops: OpTable,
        picker: Picker,
        rows: Rows,
        state: DeviceRows,
        kv: list[Tensor],
        dtype: torch.dtype,
        recorder: Recorder,
        sizes: Sequence[int],
    ) -> None:
        self._model, self._attention, self._ops, self._picker = model, attention, ops, picker
        self._rows, self._state, self._kv, self._dtype, self._recorder = rows, state, kv, dtype, recorder
        self._captured = Captures[Captured](sizes)
        self.replays = 0
        self._fill = ops.get("decode_rows", decode_rows)
        device = state.kv_len.device
        most = self._captured.most
        self._slot, self._kv_len, self._pos, self._loc, self._tokens = (
            torch.zeros(most, dtype=torch.int64, device=device) for _ in range(5)
        )
        self._every = torch.arange(most, device=device)
        self._picked = torch.zeros(most, dtype=torch.int32, device=device)
        self._h_ones, self._h_starts = np.ones(most, np.int32), np.arange(most + 1, dtype=np.int32)

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None]) -> None:
        """Record all sizes."""
        self._attention.graph_begin(self._captured.sizes)
        self._picker.prepare()
        self._captured.make("CUDA graphs", self._capture, progress)

    def _capture(self, rows: int) -> Captured:
        view = self._view(rows)
        meta = self._attention.graph_plan(view)
        batch = ForwardBatch(
            view, meta, self._tokens[:rows], self._every[:rows], self._kv, self._attention, self._ops, self._dtype
        )
        hidden: list[Tensor] = []

        def layers() -> None:
            state = self._state
            view.pos = self._pos[:rows]  # another object: an op may keep what it derives from a step's positions
            self._fill(
                state.n_decode, state.order, state.kv_len, state.next_token, state.table, self._rows.page_size,
                view.slot, view.kv, view.pos, view.loc, batch.tokens,
            )  # fmt: skip
            self._attention.graph_prologue(meta, view)
            hidden[:] = [self._model(batch)]
            state.kv_len.index_copy_(0, view.slot, view.kv)

        def sample() -> None:
            out = self._state.n_out.index_select(0, view.slot)
            nobody = SampleRows(NO_PAGES, NO_PAGES, view.slot, out)
            tokens = self._picker.sampler.sample(self._model.logits(hidden[0], batch), nobody)
            self._state.sampled(view.slot, out, tokens)
            self._picked[:rows].copy_(tokens)

        self._state.n_decode.zero_()  # padding rows only, while it warms up and records
        layers()  # kernels compile and libraries take their workspaces outside the graph
        first = self._recorder.record(layers)
        second = None
        if self._picker.sampler.capturable:
            sample()
            second = self._recorder.record(sample)
        self._state.n_decode.fill_(self._state.h_n_decode)
        return Captured(view, batch, hidden, self._picked[:rows], first, second)

    def _view(self, rows: int) -> BatchView:
        """A step of padding rows, with the graph's own device tensors."""
        ones = self._h_ones[:rows]
        return BatchView(
            step=-1,
            n_decode=rows,
            n_rows=rows,
            n_tokens=rows,
            max_q=1,
            max_kv=self._rows.columns * self._rows.page_size,
            h_slot=np.full(rows, self._rows.max_slots, np.int32),
            h_q=ones,
            h_kv=ones,
            h_q_start=self._h_starts[: rows + 1],
            slot=self._slot[:rows],
            kv=self._kv_len[:rows],
            pos=self._pos[:rows],
            loc=self._loc[:rows],
            page_table=self._state.table,
            rows_padded=rows,
        )

    def fits(self, rows: int) -> bool:
        return self._captured.fits(rows)

    def replay(self, step: int, h_slot: I32, h_kv: I32, h_out: I32, mask: Mask | None = None) -> Tensor:
        """Run the step of these decode rows, whose changes the device rows have. ``mask``: see ``Picker.pick``. Returns: [n]
        int32 tokens, overwritten by the next replay."""
        n = len(h_slot)
        c = self._captured.of(n)
        self._refresh(c, step, h_slot, h_kv)
        c.layers.replay()
        self._picker.prepare()
        if c.sample is not None and mask is None and self._picker.plain(h_slot, h_out):
            c.sample.replay()
        else:
            self._sample(c, h_slot, h_out, mask)
        self.replays += 1
        return c.tokens[:n]

    def _refresh(self, c: Captured, step: int, h_slot: I32, h_kv: I32) -> None:
        v, n = c.view, len(h_slot)
        v.step, v.n_decode, v.n_rows, v.n_tokens = step, n, n, n
        v.h_slot, v.h_kv, v.h_q, v.h_q_start = h_slot, h_kv, self._h_ones[:n], self._h_starts[: n + 1]
        v.max_kv = int(h_kv.max())
        self._attention.graph_refresh(c.batch.meta, v)

    def _sample(self, c: Captured, h_slot: I32, h_out: I32, mask: Mask | None) -> None:
        n = len(h_slot)
        slot = c.view.slot[:n]
        out = self._state.n_out.index_select(0, slot)
        logits = self._model.logits(c.hidden[0][:n], c.batch)
        tokens = self._picker.pick(logits, SampleRows(h_slot, h_out, slot, out), mask)
        self._state.sampled(slot, out, tokens)
        c.tokens[:n].copy_(tokens)

    def close(self) -> None:
        """Let the graphs go before what they read."""
        self._captured.clear()
