"""The worker: runs step plans on one device, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minisgl.base.types import I32, NO_PAGES, ExecInfo, StepPlan, StepResult
from minisgl.runtime.attention import AttentionBackend
from minisgl.runtime.batch import BatchView, ForwardBatch, OpTable
from minisgl.runtime.comm import Comm, NoComm
from minisgl.runtime.model import Model
from minisgl.runtime.rows import Rows
from minisgl.runtime.sampling import Sampler, SampleRows


@dataclass(slots=True)
class Worker:
    """A model with its kernels, its KV pool and its rows. ``run`` is called from one thread.

    ``comm``: the ranks that share the model. All run the same plans; rank 0 samples, and the others take its tokens.
    """

    info: ExecInfo
    model: Model
    attention: AttentionBackend
    ops: OpTable
    sampler: Sampler
    rows: Rows
    kv: list[Tensor]
    device: torch.device
    dtype: torch.dtype
    comm: Comm = field(default_factory=NoComm)
    step: int = 0

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. Plans come gap-free and in order."""
        assert plan.step == self.step, f"plan {plan.step} came, {self.step} is next"
        self.step += 1
        self.rows.apply(plan)
        for row in plan.init:
            self.sampler.set_row(row.slot, row.uid, row.sampling)
        view, tokens, sample = self._batch(plan)
        b = ForwardBatch(
            view, self.attention.plan(view), tokens, self._tensor(sample), self.kv, self.attention, self.ops, self.dtype
        )
        hidden = self.model(b)
        if not len(sample):
            return StepResult(plan.step, NO_PAGES, np.empty(0, np.bool_))
        if len(sample) < view.n_tokens:
            hidden = hidden.index_select(0, b.sample_at)
        logits = self.model.logits(hidden, b)
        slot = view.h_slot[_sampled_rows(plan)]
        if self.comm.rank == 0:
            picked = self.sampler.sample(logits, SampleRows(slot, self.rows.n_out[slot]))
        else:
            picked = torch.empty(len(slot), dtype=torch.int64, device=self.device)
        if self.comm.size > 1:
            picked = self.comm.broadcast(picked)
        out: I32 = picked.cpu().numpy().astype(np.int32)
        return StepResult(plan.step, out, self.rows.emit(slot, out))

    def close(self) -> None:
        """Free the backend and the KV pool."""
        self.attention.close()
        self.kv.clear()

    def _tensor(self, a: I32) -> Tensor:
        """As int64 on the device."""
        return torch.from_numpy(a.astype(np.int64)).to(self.device)

    def _batch(self, plan: StepPlan) -> tuple[BatchView, Tensor, I32]:
        """The rows of the step. Returns: the view, its tokens [n_tokens] int64, and which tokens to sample after.

        Decode rows cost vector operations only; prefill spans a few Python operations each.
        """
        rows, n = self.rows, plan.n_decode
        h_slot, h_q = rows.order[:n].copy(), np.ones(n, np.int32)
        pos, tokens, of_token, sample = (
            rows.kv_len[h_slot],
            rows.next_token[h_slot],
            h_slot,
            np.arange(n, dtype=np.int32),
        )
        if plan.spans:
            slots = np.array([s.slot for s in plan.spans], np.int32)
            lengths = np.array([s.n_new for s in plan.spans], np.int32)
            starts = rows.kv_len[slots]
            at = list(zip(slots.tolist(), starts.tolist(), lengths.tolist()))
            pos = np.concatenate((pos, *(np.arange(a, a + q, dtype=np.int32) for _, a, q in at)))
            tokens = np.concatenate((tokens, *(rows.known(s, a, q) for s, a, q in at)))
            of_token = np.concatenate((h_slot, np.repeat(slots, lengths)))
            last = n + np.cumsum(lengths, dtype=np.int32) - 1
            sample = np.concatenate((sample, last[[s.sample for s in plan.spans]]))
            h_slot, h_q = np.concatenate((h_slot, slots)), np.concatenate((h_q, lengths))
        rows.kv_len[h_slot] += h_q
        h_kv = rows.kv_len[h_slot]
        q_start = np.zeros(len(h_q) + 1, np.int32)
        np.cumsum(h_q, out=q_start[1:])
        view = BatchView(
            step=plan.step,
            n_decode=n,
            n_rows=len(h_slot),
            n_tokens=len(pos),
            max_q=int(h_q.max()),
            max_kv=int(h_kv.max()),
            h_slot=h_slot,
            h_q=h_q,
            h_kv=h_kv,
            h_q_start=q_start,
            slot=self._tensor(h_slot),
            kv=self._tensor(h_kv),
            pos=self._tensor(pos),
            loc=self._tensor(rows.locate(of_token, pos)),
            page_table=rows.table,
        )
        return view, self._tensor(tokens), sample


def _sampled_rows(plan: StepPlan) -> I32:
    """Indices of the rows that get a token: the decode rows, then the spans that end their prompt."""
    ending = [plan.n_decode + i for i, s in enumerate(plan.spans) if s.sample]
    return np.concatenate((np.arange(plan.n_decode), ending)).astype(np.int32)
