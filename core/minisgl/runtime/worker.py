"""The worker: runs step plans on one device, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minisgl.base.types import I32, ExecInfo, StepPlan, StepResult
from minisgl.runtime.attention import AttentionBackend
from minisgl.runtime.batch import BatchView, ForwardBatch, OpTable
from minisgl.runtime.comm import Comm, NoComm
from minisgl.runtime.forms import Forms
from minisgl.runtime.graph import GraphRunner
from minisgl.runtime.model import Model
from minisgl.runtime.pick import Picker
from minisgl.runtime.piecewise import PiecewiseRunner
from minisgl.runtime.rows import DeviceRows, Layout, Rows, stopped
from minisgl.runtime.sampling import Sampler, SampleRows
from minisgl.runtime.scores import SCORE_ROWS, Ask, Packed, joined, unpack
from minisgl.runtime.staging import Ring, Uploads


@dataclass(frozen=True, slots=True)
class Pending:
    """A step that was launched. ``tokens``: [n] int32 on the host, complete after ``done``, which is None on a CPU, where it
    already is. ``stop_ids``: the rows' stop sets. ``scored``: log probabilities, whose ``data`` are on the host likewise."""

    step: int
    tokens: Tensor
    stop_ids: I32
    done: torch.cuda.Event | None = None
    scored: tuple[Packed, ...] = ()

    def wait(self) -> I32:
        """The tokens; waits for the device. To be called before so many other steps are launched as the worker has ``depth``."""
        if self.done is not None:
            self.done.synchronize()
        tokens: I32 = self.tokens.numpy().copy()
        return tokens

    def result(self) -> StepResult:
        """As ``wait``."""
        tokens = self.wait()
        blocks = [unpack(s.row, s.position, s.data.numpy().copy()) for s in self.scored]
        return StepResult(self.step, tokens, stopped(tokens, self.stop_ids), joined(blocks) if blocks else None)


@dataclass(slots=True)
class Worker:
    """A model with its kernels, its KV pool and its rows. ``launch`` is called from one thread.

    ``depth``: the most steps launched at once. ``graphs``: of decode steps; ``piecewise``: of steps whose attention is launched
    by itself; None: such steps are launched kernel by kernel.
    ``comm``: the ranks that share the model. All run the same plans; rank 0 samples, and the others take its tokens.
    """

    info: ExecInfo
    model: Model
    attention: AttentionBackend
    ops: OpTable
    picker: Picker
    rows: Rows
    state: DeviceRows
    kv: list[Tensor]
    device: torch.device
    dtype: torch.dtype
    comm: Comm = field(default_factory=NoComm)
    depth: int = 1
    graphs: GraphRunner | None = None
    piecewise: PiecewiseRunner | None = None
    forms: Forms | None = None  # None: rows are held to no grammar
    step: int = 0
    decode_steps: int = 0  # of decode rows only: those that a graph can serve
    _uploads: Uploads = field(init=False)
    _results: Ring = field(init=False)
    _scores: Ring = field(init=False)

    def __post_init__(self) -> None:
        self._uploads = Uploads(self.device, self.depth)
        self._results = Ring(self.device, self.depth + 1)
        self._scores = Ring(self.device, self.depth + 1)

    @property
    def sampler(self) -> Sampler:
        return self.picker.sampler

    @sampler.setter
    def sampler(self, sampler: Sampler) -> None:
        self.picker.sampler = sampler

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, and wait for it."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Enqueue one step; on a CPU, compute it. Plans come gap-free and in order."""
        assert plan.step == self.step, f"plan {plan.step} came, {self.step} is next"
        self.step += 1
        cells, pages = self.rows.apply(plan)
        for row in plan.init:
            self.picker.set_row(row)
        if self.forms is not None:
            self.forms.change(plan.retire, plan.init)
        self.decode_steps += not plan.spans
        if self.graphs is not None and not plan.spans and self.graphs.fits(plan.n_decode):
            pending = self._replay(plan, self.graphs, cells, pages)
        else:
            pending = self._compute(plan, cells, pages)
        if self.forms is not None:
            self.forms.sampled(pending.wait)
        return pending

    @property
    def stats(self) -> dict[str, int]:
        """``decode_steps``, and how many of them were ``graph_replays``; ``piecewise_replays``: of steps of any kind."""
        replays, pieces = (runner.replays if runner else 0 for runner in (self.graphs, self.piecewise))
        return {"decode_steps": self.decode_steps, "graph_replays": replays, "piecewise_replays": pieces}

    def close(self) -> None:
        """Free the graphs, the backend and the KV pool."""
        for runner in (self.graphs, self.piecewise):
            if runner is not None:
                runner.close()
        self.graphs = self.piecewise = None
        self.attention.close()
        self.kv.clear()

    def _replay(self, plan: StepPlan, graphs: GraphRunner, cells: I32, pages: I32) -> Pending:
        if len(cells) or len(plan.order_pos):
            self.state.change(*self._uploads.send(cells, pages, plan.order_pos, plan.order_slot))
        self.state.resize(plan.n_decode)
        slot, kv = self.rows.decoding(plan.n_decode)
        out, stop_ids = self.rows.emit(slot)
        mask = self.forms.mask if self.forms is not None and self.forms.any(slot) else None
        tokens = graphs.replay(plan.step, slot, kv, out, mask)
        if mask is None and self.forms is not None:
            self.forms.settle()
        return self._read(plan.step, tokens, stop_ids)

    def _compute(self, plan: StepPlan, cells: I32, pages: I32) -> Pending:
        ask = self.rows.asks(plan) if any(s.score for s in plan.spans) else None
        at = self.rows.layout(plan)
        out, stop_ids = self.rows.emit(at.sampled)
        *changes, slot, kv, pos, loc, known, sample, sampled, before = self._uploads.send(
            cells, pages, plan.order_pos, plan.order_slot,
            at.slot, at.kv, at.pos, at.loc, at.known, at.sample, at.sampled, out,
        )  # fmt: skip
        self.state.change(*changes)
        self.state.resize(plan.n_decode)
        tokens = (
            torch.cat((self.state.next_token.index_select(0, slot[: plan.n_decode]), known)) if plan.n_decode else known
        )
        view = self._view(plan, at, slot, kv, pos, loc)
        meta = self.attention.plan(view)
        b = ForwardBatch(view, meta, tokens, sample, self.kv, self.attention, self.ops, self.dtype)
        piecewise = self.piecewise if self.piecewise is not None and self.piecewise.fits(view.n_tokens) else None
        hidden = self.model(b) if piecewise is None else piecewise.run(b)
        self.state.kv_len.index_copy_(0, slot, kv)
        if ask is not None:
            self._score(hidden, b, ask)
        if not len(at.sample):
            if self.forms is not None:
                self.forms.settle()
            return self._read(plan.step, known[:0], stop_ids)
        if len(at.sample) < view.n_tokens:
            hidden = hidden.index_select(0, sample)
        picked = self._sample(self.model.logits(hidden, b), SampleRows(at.sampled, out, sampled, before))
        self.state.sampled(sampled, before, picked)
        return self._read(plan.step, picked, stop_ids)

    def _score(self, hidden: Tensor, b: ForwardBatch, ask: Ask) -> None:
        """Log probabilities of prompt tokens, a few rows of logits at a time. All ranks have to compute those."""
        where, tokens = self._uploads.send(ask.at, ask.token)
        parts = [
            self.picker.scorer.prompt(self.model.logits(hidden.index_select(0, w), b), t, ask.row)
            for w, t in zip(torch.split(where, SCORE_ROWS), torch.split(tokens, SCORE_ROWS), strict=True)
        ]
        self.picker.scored.append(Packed(ask.row, ask.position, torch.cat(parts)))

    def _sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        if self.comm.rank == 0:
            self.picker.prepare()
            picked = self.picker.pick(logits, rows, self.forms.mask if self.forms is not None else None)
        else:
            picked = torch.empty(len(rows.slot), dtype=torch.int64, device=self.device)
        return self.comm.broadcast(picked) if self.comm.size > 1 else picked

    def _view(self, plan: StepPlan, at: Layout, slot: Tensor, kv: Tensor, pos: Tensor, loc: Tensor) -> BatchView:
        return BatchView(
            step=plan.step,
            n_decode=plan.n_decode,
            n_rows=len(at.slot),
            n_tokens=len(at.pos),
            max_q=int(at.q.max()),
            max_kv=int(at.kv.max()),
            h_slot=at.slot,
            h_q=at.q,
            h_kv=at.kv,
            h_q_start=at.q_start,
            slot=slot,
            kv=kv,
            pos=pos,
            loc=loc,
            page_table=self.state.table,
            rows_padded=len(at.slot),
        )

    def _read(self, step: int, tokens: Tensor, stop_ids: I32) -> Pending:
        """Start the copy of ``tokens`` [n], and of what was scored beside them, to the host."""
        scored = self._read_scores() if self.picker.scored else ()
        if self.device.type == "cpu":
            return Pending(step, tokens.to(torch.int32, copy=True), stop_ids, scored=scored)
        host = self._results.take(len(tokens))
        host.copy_(tokens.int(), non_blocking=True)
        return Pending(step, host, stop_ids, self._results.mark(), scored)

    def _read_scores(self) -> tuple[Packed, ...]:
        scored, self.picker.scored = self.picker.scored, []
        if self.device.type == "cpu":
            return tuple(scored)
        sizes = [s.data.numel() for s in scored]
        host = self._scores.take(sum(sizes))
        host.copy_(torch.cat([s.data.flatten() for s in scored]), non_blocking=True)
        self._scores.mark()
        return tuple(
            Packed(s.row, s.position, part.view(s.data.shape))
            for s, part in zip(scored, torch.split(host, sizes), strict=True)
        )
