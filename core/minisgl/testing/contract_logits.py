"""The contract of logits processors. ``specs`` are what requests ask of the plugin; for one with parameters of its own::

class TestMine(contract("logits", Mine)):
    specs = (SamplingSpec(extra={"Mine": {"strength": 2}}),)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.base.types import NO_PAGES, RowInit, SamplingSpec
from minisgl.runtime.logits import LogitsContext, LogitsProcessor
from minisgl.runtime.sampling import SampleRows
from minisgl.testing.contracts import ComponentContract
from minisgl.testing.plans import ints

VOCAB, SLOTS, STEPS = 40, 6, 10
PROMPT = (3, 7, 7, 11, 2)


class Rows:
    """A processor and the rows it has. Tokens are made up: they depend on the slot's request and its count alone."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor
        self._until: dict[int, int] = {}
        self._said: dict[int, list[int]] = {}
        self._seed: dict[int, int] = {}

    def start(self, slot: int, spec: SamplingSpec, seed: int, written: Sequence[int] = ()) -> int:
        """``seed``: which request it is; its prompt and its tokens follow from it. Returns: what ``set_row`` does."""
        prompt = [(t + seed) % VOCAB for t in PROMPT]
        ids = ints([*prompt, *written])
        known = ints(prompt) if spec.needs_prompt else NO_PAGES
        row = RowInit(slot, seed, 0, ids, NO_PAGES, spec, len(written), 999, ints(written), known)
        self._said[slot], self._seed[slot] = list(written), seed
        self._until[slot] = self._processor.set_row(row)
        return self._until[slot]

    def step(self, slots: Sequence[int]) -> dict[int, Tensor]:
        """The logits of each slot after the processor; then each gets a token. Where it does not act they are left alone."""
        logits = {slot: self.logits(slot) for slot in slots}
        acting = [slot for slot in slots if len(self._said[slot]) < self._until[slot]]
        self._processor.prepare()
        if acting:
            h_slot, h_out = ints(acting), ints([len(self._said[s]) for s in acting])
            rows = SampleRows(h_slot, h_out, torch.from_numpy(h_slot).long(), torch.from_numpy(h_out).long())
            x = torch.stack([logits[slot] for slot in acting])
            self._processor.apply(x, rows)
            self._processor.sampled(torch.tensor([self.token(slot) for slot in acting]), rows)
            logits |= dict(zip(acting, x, strict=True))
        for slot in slots:
            self._said[slot].append(self.token(slot))
        return logits

    def token(self, slot: int) -> int:
        """The next of the slot's row: of few, so that they come again."""
        return (self._seed[slot] + len(self._said[slot]) ** 2) % 4 + 1

    def logits(self, slot: int) -> Tensor:
        seed = 1000 * self._seed[slot] + len(self._said[slot])
        return torch.from_numpy(np.random.RandomState(seed).standard_normal(VOCAB).astype(np.float32))


def tokens_of(seed: int, n: int) -> list[int]:
    return [(seed + i**2) % 4 + 1 for i in range(n)]


class LogitsContract(ComponentContract):
    specs: ClassVar[tuple[SamplingSpec, ...]] = ()

    def asked(self) -> tuple[SamplingSpec, ...]:
        return self.specs or (SamplingSpec(extra={self.plugin: True}),)

    @property
    def plugin(self) -> str:
        return self.name or self.cls.__name__

    def rows(self) -> Rows:
        ctx = LogitsContext(self.settings(), self.plugin, torch.device("cpu"), SLOTS, VOCAB, 2)
        made: Any = self.cls(ctx)  # type: ignore[call-arg]
        return Rows(made)

    def alone(self, spec: SamplingSpec, seed: int, written: int = 0) -> list[Tensor]:
        """The logits of each step of a row that has a processor for itself."""
        rows = self.rows()
        rows.start(0, spec, seed, tokens_of(seed, written))
        return [rows.step([0])[0] for _ in range(STEPS - written)]

    def test_it_changes_logits_of_rows_that_ask_and_leaves_others_alone(self) -> None:
        """P3: the effect, not that it was accepted."""
        rows = self.rows()
        assert rows.start(1, SamplingSpec(), 5) == 0, "a row that asks for nothing is not changed"
        for seed, spec in enumerate(self.asked()):
            assert rows.start(0, spec, seed) > 0, f"nothing is done for {spec}"
            pairs = [(rows.logits(0), rows.step([0])[0]) for _ in range(STEPS)]
            assert not all(torch.equal(*pair) for pair in pairs), f"no logit changes for {spec}"

    def test_rows_do_not_depend_on_their_neighbours(self) -> None:
        """In any company and order, also when others come and go."""
        specs = [*self.asked(), SamplingSpec()]
        rows, rng = self.rows(), np.random.RandomState(0)
        every = [(slot, specs[slot % len(specs)]) for slot in range(SLOTS)]
        got: dict[int, list[Tensor]] = {slot: [] for slot, _ in every}
        for slot, spec in every:
            rows.start(slot, spec, slot)
        while any(len(x) < STEPS for x in got.values()):
            some = [s for s in rng.permutation(SLOTS).tolist() if len(got[s]) < STEPS][: rng.randint(1, SLOTS + 1)]
            for slot, x in rows.step(some).items():
                got[slot].append(x)
        for slot, spec in every:
            self.same(got[slot], self.alone(spec, slot))

    def test_a_recycled_slot_has_nothing_of_the_row_before(self) -> None:
        rows = self.rows()
        for seed, spec in enumerate([*self.asked(), *reversed(self.asked())]):
            rows.start(3, spec, seed)
            self.same([rows.step([3])[3] for _ in range(STEPS)], self.alone(spec, seed))

    @pytest.mark.parametrize("written", [1, 4, 9])
    def test_a_row_that_was_preempted_goes_on_as_if_it_had_not_been(self, written: int) -> None:
        for seed, spec in enumerate(self.asked()):
            self.same(self.alone(spec, seed, written), self.alone(spec, seed)[written:])

    @staticmethod
    def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        for at, (x, y) in enumerate(zip(got, want, strict=True)):
            assert torch.allclose(x, y, rtol=1e-5, atol=1e-5), f"step {at}: {x.tolist()}, expected {y.tolist()}"
