"""An independent check of step plans against their contract: it knows the plans alone, nothing of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.base.types import Limits, RowInit, Span, StepPlan
from minisgl.sched.rows import cdiv


@dataclass(slots=True)
class Row:
    """A row as the device has it. ``known``: tokens to prefill in all; ``end``: most KV tokens it may ever have."""

    pages: list[int]
    kv: int
    known: int
    emitted: int
    max_new: int
    scored: bool = False  # log probabilities of its prompt are wanted


class PlanValidator:
    """Checks each plan in turn; an AssertionError says which rule is broken.

    If ``committed`` is called for every finished step, it also checks that nothing a step in flight touches is used for
    something else: neither its rows' slots nor their pages.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rows: dict[int, Row] = {}
        self._order: dict[int, int] = {}
        self._step = 0
        self._fences = False
        self._fresh: list[tuple[int, int]] = []  # slot and page given out by the plan under check
        self._flying: dict[int, tuple[set[int], set[int]]] = {}  # step -> its slots, their pages

    def committed(self, step: int) -> None:
        """The result of ``step`` was committed. Call with -1 before the first plan to have fences checked."""
        self._fences = True
        self._flying.pop(step, None)

    def check(self, plan: StepPlan) -> None:
        """Apply ``plan`` to the rows and check it. Raises: AssertionError."""
        assert plan.step == self._step, f"I1: plan of step {plan.step}, expected {self._step}"
        assert plan.n_decode or plan.spans, f"step {plan.step} computes nothing"
        assert plan.num_tokens <= self._limits.batch_tokens, f"{plan.num_tokens} tokens > {self._limits.batch_tokens}"
        self._step += 1
        self._fresh = []
        for slot in plan.retire.tolist():
            self._retire(slot)
        for init in plan.init:
            self._init(init)
        for slot, at, page in zip(plan.grow_slot.tolist(), plan.grow_at.tolist(), plan.grow_page.tolist()):
            self._grow(slot, at, page)
        for pos, slot in zip(plan.order_pos.tolist(), plan.order_slot.tolist()):
            self._order[pos] = slot
        self._check_fresh()
        self._run(plan)

    # -------------------------------------------------------------------------------------------------------- deltas

    def _retire(self, slot: int) -> None:
        assert slot in self._rows, f"slot {slot} retired, live are {sorted(self._rows)}"
        for step, (slots, _) in self._flying.items():
            assert slot not in slots, f"I2: slot {slot} retired, step {step} with it is not committed"
        del self._rows[slot]

    def _init(self, r: RowInit) -> None:
        ps = self._limits.page_size
        assert 0 <= r.slot < self._limits.max_slots, f"I11: slot {r.slot} of {self._limits.max_slots}"
        assert r.slot not in self._rows, f"I2: slot {r.slot} is in use"
        assert len(r.ids) >= 1, f"I7: slot {r.slot} has nothing to compute"
        assert r.kv_len % ps == 0, f"slot {r.slot}: {r.kv_len} cached tokens are not whole pages of {ps}"
        n_cached = r.kv_len // ps
        pages = r.pages.tolist()
        assert len(pages) >= n_cached, f"slot {r.slot}: {len(pages)} pages, {n_cached} cached"
        assert len(r.written) == r.emitted, f"slot {r.slot}: {len(r.written)} tokens written, {r.emitted} emitted"
        assert 0 <= r.emitted < r.max_new, f"I6: slot {r.slot} emitted {r.emitted} of {r.max_new}"
        self._rows[r.slot] = Row(pages[:n_cached], r.kv_len, r.kv_len + len(r.ids), r.emitted, r.max_new)
        self._rows[r.slot].scored = r.sampling.prompt_logprobs is not None
        assert all(0 <= p < self._limits.num_pages for p in pages), f"I11: pages {pages} of {self._limits.num_pages}"
        assert len(set(pages)) == len(pages), f"slot {r.slot}: a page twice in {pages}"
        for page in pages[n_cached:]:
            self._append(r.slot, page)

    def _grow(self, slot: int, at: int, page: int) -> None:
        ps = self._limits.page_size
        assert slot in self._rows, f"I4: page {page} written to dead slot {slot}"
        assert 0 <= page < self._limits.num_pages, f"I11: page {page} of {self._limits.num_pages}"
        row = self._rows[slot]
        assert at <= len(row.pages), f"I4: slot {slot} has {len(row.pages)} pages, next written is {at}"
        if at == len(row.pages):
            self._append(slot, page)
            return
        assert (at + 1) * ps <= row.kv, f"I5: slot {slot} repointed at page {at}, {row.kv} tokens are computed"
        row.pages[at] = page

    def _append(self, slot: int, page: int) -> None:
        self._rows[slot].pages.append(page)
        self._fresh.append((slot, page))

    def _check_fresh(self) -> None:
        """Pages given to a row to be written: no other row has them, and no step in flight touches them."""
        for slot, page in self._fresh:
            users = [other for other, row in self._rows.items() if page in row.pages]
            assert users == [slot], f"I5: page {page} is given to slot {slot}, slots {users} have it"
            for step, (_, pages) in self._flying.items():
                assert page not in pages, f"page {page} is given to slot {slot}, step {step} in flight touches it"

    # ---------------------------------------------------------------------------------------------------------- rows

    def _run(self, plan: StepPlan) -> None:
        decode = [self._order.get(i, -1) for i in range(plan.n_decode)]
        slots = decode + [span.slot for span in plan.spans]
        assert len(set(slots)) == len(slots), f"I3: a row twice in {slots}"
        missing = [s for s in slots if s not in self._rows]
        assert not missing, f"slots {missing} take part, live are {sorted(self._rows)}"
        for slot in decode:
            row = self._rows[slot]
            assert row.kv >= row.known, f"slot {slot} decodes with {row.known - row.kv} prompt tokens not computed"
            self._advance(slot, 1, True)
        for span in plan.spans:
            self._span(span)
        pages = {p for s in slots for p in self._rows[s].pages}
        if self._fences:
            self._flying[plan.step] = set(slots), pages

    def _span(self, span: Span) -> None:
        row = self._rows[span.slot]
        assert span.n_new >= 1, f"I3: slot {span.slot} computes {span.n_new} tokens"
        assert row.kv + span.n_new <= row.known, f"slot {span.slot}: {row.kv} + {span.n_new} > {row.known} known tokens"
        last = row.kv + span.n_new == row.known
        assert span.sample == last, f"I8: slot {span.slot} samples: {span.sample}, ends its prompt: {last}"
        assert row.scored or not span.score, f"slot {span.slot} scores its prompt, which nobody asked for"
        self._advance(span.slot, span.n_new, span.sample)

    def _advance(self, slot: int, n_new: int, sample: bool) -> None:
        """The row writes ``n_new`` tokens, into pages that no other live row has."""
        ps, row = self._limits.page_size, self._rows[slot]
        first = row.kv // ps
        row.kv += n_new
        row.emitted += sample
        assert row.emitted <= row.max_new, f"I6: slot {slot} emits {row.emitted} tokens, {row.max_new} were asked for"
        assert row.kv <= len(row.pages) * ps, f"I6: slot {slot} has {row.kv} tokens in {len(row.pages)} pages of {ps}"
        assert row.kv <= self._limits.max_len, f"I6: slot {slot} has {row.kv} tokens, at most {self._limits.max_len}"
        written = set(row.pages[first : cdiv(row.kv, ps)])
        for other_slot, other in self._rows.items():
            shared = written.intersection(other.pages) if other_slot != slot else set()
            assert not shared, f"I5: slot {slot} writes pages {shared} that slot {other_slot} has too"
