"""A device without a model that checks what it is told, and the tokens it must give: an oracle without the engine.

The KV entry of a token is a hash of all tokens up to it, so an entry is right only if its whole prefix is. Every step reads
all that its rows would attend to and compares it with their history. The next token follows from that hash, the seed and the
number of tokens emitted: a lost, repeated, stale or foreign KV entry changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from minisgl.base.types import I32, Admit, Finish, Limits, LogprobBlock, RowInit, SamplingSpec, StepPlan, StepResult
from minisgl.sched.rows import cdiv

U64 = npt.NDArray[np.uint64]
MASK = (1 << 64) - 1
VOCAB = 97


def mix(h: int, x: int) -> int:
    """A 64-bit hash step."""
    h = ((h ^ (x + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & MASK
    return h ^ (h >> 29)


def next_token(h: int, sampling: SamplingSpec, emitted: int, vocab: int = VOCAB) -> int:
    """The token after a history with hash ``h``, of which ``emitted`` are output."""
    return mix(mix(h, sampling.seed or 0), emitted) % vocab


def expected(a: Admit, room: int, vocab: int = VOCAB) -> tuple[list[int], Finish]:
    """What request ``a`` must produce, and how it ends, on a server that takes ``room`` tokens per request."""
    h = 0
    for token in a.ids.tolist():
        h = mix(h, token)
    out: list[int] = []
    while len(out) < min(a.sampling.max_new, room - len(a.ids)):
        out.append(next_token(h, a.sampling, len(out), vocab))
        if out[-1] in a.sampling.stop_ids:
            return out, Finish.STOP
        h = mix(h, out[-1])
    return out, Finish.LENGTH


def score(h: int, token: int) -> float:
    """The log probability of ``token`` after a history with hash ``h``; a number that float32 has exactly."""
    return -(mix(h, token) % 1024) / 64


class SimRow:
    """``tokens``: history; ``hashes[i]``: hash of the first i + 1 of them; ``kv``: of how many the KV is written."""

    def __init__(self, init: RowInit, cached: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.hashes: list[int] = []
        self.kv = init.kv_len
        self.sampling = init.sampling
        self.emitted = init.emitted
        self.prompt = init.kv_len + len(init.ids) - init.emitted
        for token in [*cached, *init.ids.tolist()]:
            self.push(token)

    def push(self, token: int) -> None:
        self.hashes.append(mix(self.hashes[-1] if self.hashes else 0, token))
        self.tokens.append(token)


class Simulator:
    """Runs plans at once; the caller decides when it looks at a result."""

    def __init__(self, limits: Limits, vocab: int = VOCAB) -> None:
        self.limits, self.vocab = limits, vocab
        pages_per_row = cdiv(limits.max_len, limits.page_size) + 1
        self._table = np.full((limits.max_slots, pages_per_row), -1, np.int64)
        self._kv: U64 = np.zeros((limits.num_pages, limits.page_size), np.uint64)  # hashes
        self._kv_tokens: I32 = np.full((limits.num_pages, limits.page_size), -1, np.int32)
        self._rows: dict[int, SimRow] = {}
        self._order: I32 = np.full(limits.max_slots, -1, np.int32)
        self.step = 0
        self.tokens_computed = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Apply and compute ``plan``. Raises: AssertionError if a row reads KV that is not its own history."""
        assert plan.step == self.step, f"plan of step {plan.step}, expected {self.step}"
        self.step += 1
        self._apply(plan)
        tokens: list[int] = []
        stops: list[bool] = []
        scored = [at for s in plan.spans if s.score for at in self._scores(s.slot, s.n_new)]
        decode = [(slot, 1, True) for slot in self._order[: plan.n_decode].tolist()]
        rows = decode + [(span.slot, span.n_new, span.sample) for span in plan.spans]
        for slot, n_new, _ in rows:
            self._write(slot, n_new)
        for slot, n_new, sample in rows:
            self._read(slot)
            self.tokens_computed += n_new
            if sample:
                tokens.append(self._sample(slot))
                stops.append(tokens[-1] in self._rows[slot].sampling.stop_ids)
                if self._rows[slot].sampling.logprobs is not None:
                    scored.append((slot, len(self._rows[slot].tokens) - 1))
        told = self._block(scored) if scored else None
        return StepResult(plan.step, np.array(tokens, np.int32), np.array(stops, np.bool_), told)

    def _scores(self, slot: int, n_new: int) -> list[tuple[int, int]]:
        """Slot and position of the prompt tokens that the row's next ``n_new`` tokens predict."""
        row = self._rows[slot]
        return [(slot, at) for at in range(row.kv + 1, min(row.kv + n_new + 1, row.prompt))]

    def _block(self, scored: Sequence[tuple[int, int]]) -> LogprobBlock:
        slot, at = (np.array(x, np.int32) for x in zip(*scored))
        rows = [(self._rows[s], i) for s, i in scored]
        token = np.array([r.tokens[i] for r, i in rows], np.int32)
        logprob = np.array([score(r.hashes[i - 1], r.tokens[i]) for r, i in rows], np.float32)
        return LogprobBlock(slot, at, token, logprob, np.ones_like(at), token[:, None], logprob[:, None])

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.retire.tolist():
            del self._rows[slot]
            self._table[slot] = -1
        for init in plan.init:
            self._table[init.slot, : len(init.pages)] = init.pages
            at = np.arange(init.kv_len)
            cached = self._kv_tokens[self._entries(init.slot, at)]
            self._rows[init.slot] = SimRow(init, cached.tolist())
        self._table[plan.grow_slot, plan.grow_at] = plan.grow_page
        self._order[plan.order_pos] = plan.order_slot

    def _entries(self, slot: int, at: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Page and offset of each position of a row."""
        pages = self._table[slot, at // self.limits.page_size]
        assert (pages >= 0).all(), f"slot {slot} has no page for positions {at[pages < 0].tolist()}"
        return pages, at % self.limits.page_size

    def _write(self, slot: int, n_new: int) -> None:
        row = self._rows[slot]
        assert row.kv + n_new <= len(row.tokens), f"slot {slot}: {row.kv} + {n_new} of {len(row.tokens)} known tokens"
        where = self._entries(slot, np.arange(row.kv, row.kv + n_new))
        self._kv[where] = row.hashes[row.kv : row.kv + n_new]
        self._kv_tokens[where] = row.tokens[row.kv : row.kv + n_new]
        row.kv += n_new

    def _read(self, slot: int) -> None:
        row = self._rows[slot]
        got = self._kv[self._entries(slot, np.arange(row.kv))]
        want = np.array(row.hashes[: row.kv], np.uint64)
        wrong = np.flatnonzero(got != want)
        assert not len(wrong), f"step {self.step - 1}, slot {slot}: KV at positions {wrong.tolist()} is not its history"

    def _sample(self, slot: int) -> int:
        row = self._rows[slot]
        assert row.kv == len(row.tokens), f"slot {slot} samples after {row.kv} of {len(row.tokens)} tokens"
        token = next_token(row.hashes[-1], row.sampling, row.emitted, self.vocab)
        row.emitted += 1
        row.push(token)
        return token
