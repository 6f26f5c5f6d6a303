"""Hand-made step plans: drives a worker or an executor without a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from minisgl.base.types import I32, NO_PAGES, RowInit, SamplingSpec, Span, StepPlan, StepResult

GREEDY = SamplingSpec(temperature=0.0, max_new=1 << 20)


def ints(values: Sequence[int]) -> I32:
    return np.array(values, np.int32)


class PlanDriver:
    """Rows get all their pages when they start, unless ``pages`` says otherwise. ``run`` executes a plan at once."""

    def __init__(self, run: Callable[[StepPlan], StepResult], page_size: int) -> None:
        self.run, self.page_size = run, page_size
        self.next_step = 0
        self.out: dict[int, list[int]] = {}  # slot -> tokens sampled
        self.stopped: dict[int, bool] = {}  # slot -> whether its last token is in its stop set
        self.given: dict[int, int] = {}  # slot -> known tokens planned
        self.ids: dict[int, I32] = {}
        self._init: list[RowInit] = []
        self._retire: list[int] = []
        self._grow: list[tuple[int, int, int]] = []
        self._order: list[int] = []
        self._free_page = 0

    def start(
        self,
        slot: int,
        ids: Sequence[int],
        sampling: SamplingSpec = GREEDY,
        *,
        room: int = 64,
        pages: Sequence[int] | None = None,
        kv_len: int = 0,
        emitted: int = 0,
        uid: int | None = None,
    ) -> None:
        """A row begins in the next step. ``ids``: its tokens, of which the KV of ``kv_len`` is in ``pages``; without
        ``pages`` it gets fresh ones for ``room`` tokens beyond ``ids``."""
        if pages is None:
            n = -(-(len(ids) + room) // self.page_size)
            pages = range(self._free_page, self._free_page + n)
            self._free_page += n
        uid = slot if uid is None else uid
        rest = ints(ids[kv_len:])
        said = len(ids) - emitted
        self._init.append(
            RowInit(
                slot,
                uid,
                kv_len,
                rest,
                ints(list(pages)),
                sampling,
                emitted,
                sampling.max_new,
                ints(ids[said:]),
                ints(ids[:said]),
            )
        )
        self.out[slot], self.ids[slot], self.given[slot] = [], rest, 0

    def retire(self, *slots: int) -> None:
        self._retire += slots

    def grow(self, slot: int, at: int, page: int) -> None:
        self._grow.append((slot, at, page))

    def step(self, decode: Sequence[int] = (), prefill: Mapping[int, int] | None = None) -> StepResult:
        """One step: rows ``decode`` in this order, then ``prefill`` slot -> tokens; its result is noted in ``out``."""
        spans = []
        for slot, n in (prefill or {}).items():
            self.given[slot] += n
            spans.append(Span(slot, n, self.given[slot] == len(self.ids[slot])))
        moved = [i for i, s in enumerate(decode) if i >= len(self._order) or self._order[i] != s]
        grow = np.array(self._grow, np.int32).reshape(-1, 3)
        plan = StepPlan(
            step=self.next_step,
            retire=ints(self._retire) if self._retire else NO_PAGES,
            init=tuple(self._init),
            grow_slot=grow[:, 0],
            grow_at=grow[:, 1],
            grow_page=grow[:, 2],
            order_pos=ints(moved),
            order_slot=ints([decode[i] for i in moved]),
            n_decode=len(decode),
            spans=tuple(spans),
        )
        self.next_step += 1
        self._init, self._retire, self._grow = [], [], []
        self._order[: len(decode)] = decode
        result = self.run(plan)
        sampled = [*decode, *(s.slot for s in spans if s.sample)]
        assert len(sampled) == len(result.tokens) == len(result.stop), (sampled, result)
        for slot, token, stop in zip(sampled, result.tokens.tolist(), result.stop.tolist()):
            self.out[slot].append(token)
            self.stopped[slot] = stop
        return result

    def generate(self, slots: Sequence[int], steps: int) -> None:
        """Prefill these rows whole in one step, then decode them together."""
        self.step(prefill={s: len(self.ids[s]) for s in slots})
        for _ in range(steps - 1):
            self.step(decode=slots)
