"""The waiting requests of a policy in an order of its own."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from minisgl.api import ReqState, ReqView

Place = tuple[int, ...]


def by_arrival(r: ReqView) -> Place:
    """Higher priority first, then who came first."""
    return -r.priority, r.arrived


class WaitingQueue:
    """Sorted by ``place``, which must differ for any two requests and is asked once for each time one begins to wait.
    While one iterates, requests that came up may be granted."""

    def __init__(self, place: Callable[[ReqView], Place] = by_arrival) -> None:
        self._place = place
        self._order: list[Place] = []
        self._at: dict[Place, ReqView] = {}
        self._places: dict[int, Place] = {}  # by uid

    def __iter__(self) -> Iterator[ReqView]:
        return map(self._at.__getitem__, self._order.copy())

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> ReqView:
        return self._at[self._order[i]]

    def add(self, r: ReqView) -> None:
        place = self._places[r.uid] = self._place(r)
        self._at[place] = r
        insort(self._order, place)

    def changed(self, r: ReqView, old: ReqState) -> None:
        """Keep step with a change of state."""
        if old is ReqState.WAITING:
            place = self._places.pop(r.uid)
            del self._at[place], self._order[bisect_left(self._order, place)]
        elif r.state is ReqState.WAITING:
            self.add(r)
