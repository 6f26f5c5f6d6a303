"""Random traffic for a SimEngine, and the comparison of what came out with the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from minisgl.base.types import Admit, Finish, Limits, SamplingSpec
from minisgl.engine.loop import StepLoop
from minisgl.engine.port import Abort
from minisgl.testing.sim_engine import MakeCache, MakePolicy, SimEngine
from minisgl.testing.simulator import VOCAB, expected

BASES = np.random.default_rng(7).integers(0, VOCAB, (3, 512)).astype(np.int32)


@dataclass(frozen=True)
class Arrival:
    """A request: the first ``prefix`` tokens of a base text, and ``tail`` others. ``follows``: it continues the output of
    that earlier request instead, if that has any. ``wait``: turns since the arrival before. ``abort``: turns it may live."""

    wait: int
    base: int
    prefix: int
    tail: int
    max_new: int
    stops: int
    follows: int | None
    abort: int | None
    namespace: bytes
    priority: int
    owner: int


@dataclass(frozen=True)
class World:
    """What happens to an engine. ``flush_at``: turn before which the cache is cleared, -1: never."""

    limits: Limits
    flush_at: int
    arrivals: tuple[Arrival, ...]

    @property
    def room(self) -> int:
        """Tokens, prompt and output together, that a request may have."""
        return min(self.limits.max_len, self.limits.num_pages * self.limits.page_size)


def busy_world(seed: int) -> World:
    """Many requests at once in a pool that is too small for them, with long outputs and common prefixes."""
    rnd = Random(seed)
    page_size = rnd.choice([1, 2, 4, 4, 16])
    pages = max(8, rnd.choice([48, 96, 160, 320]) // page_size)
    slots = rnd.choice([3, 5, 8])
    room = min(200, pages * page_size)
    busy = tuple(
        Arrival(
            wait=rnd.choice([0, 0, 0, 1, 4]),
            base=rnd.randrange(2),
            prefix=rnd.choice([rnd.randrange(1, room // 2), page_size * rnd.randrange(1, 4), room // 3]),
            tail=rnd.randrange(3),
            max_new=rnd.choice([1, 4, 15, 40]),
            stops=rnd.choice([0, 0, 2, 10]),
            follows=rnd.choice([None, rnd.randrange(24)]),
            abort=rnd.choice([None, None, None, None, rnd.randrange(25)]),
            namespace=rnd.choice([b"", b"", b"", b"salt"]),
            priority=rnd.choice([0, 0, 1]),
            owner=rnd.randrange(2),
        )
        for _ in range(rnd.randrange(8, 24))
    )
    return World(
        limits=Limits(slots, 200, pages, page_size, slots + rnd.choice([1, 7, 40, 300]), rnd.choice([1, 1, 3])),
        flush_at=rnd.choice([-1, 20]),
        arrivals=busy,
    )


class Driver:
    """Plays a world's arrivals and aborts into an engine, turn by turn."""

    def __init__(self, world: World, cache: MakeCache, policy: MakePolicy, loop: StepLoop) -> None:
        self.world = world
        self.engine = SimEngine(world.limits, cache, policy, loop)
        self.admits: dict[int, Admit] = {}
        self.aborted: set[int] = set()
        self._aborts: list[tuple[int, int]] = []

    def play(self, turns: int = 20_000) -> None:
        todo = list(enumerate(self.world.arrivals))
        due = todo[0][1].wait if todo else 0
        for turn in range(turns):
            while todo and due <= turn:
                uid, a = todo.pop(0)
                self._arrive(uid, a, turn)
                due = turn + (todo[0][1].wait if todo else 0)
            self._abort(turn)
            if turn == self.world.flush_at:
                self.engine.scheduler.clear_cache()
            if not todo and self.engine.idle and not self.engine.inbox:
                return
            self.engine.turn()
        raise AssertionError(f"not done: {dict(self.engine.scheduler.counts())}")

    def _arrive(self, uid: int, a: Arrival, turn: int) -> None:
        ids = BASES[a.base, : a.prefix]
        if a.follows is not None and self.engine.tokens.get(a.follows):
            ids = np.concatenate([self.admits[a.follows].ids, np.array(self.engine.tokens[a.follows], np.int32)])
        ids = np.concatenate([ids, (BASES[a.base, 500 - uid * 7 :][: a.tail] + uid) % VOCAB]).astype(np.int32)
        sampling = SamplingSpec(
            max_new=a.max_new,
            stop_ids=tuple(range(a.stops)),
            seed=uid % 3,
            logprobs=1 if uid % 4 == 1 else None,
            prompt_logprobs=1 if uid % 5 == 4 else None,
        )
        buffer = ids.copy()
        self.admits[uid] = Admit(uid, ids, sampling, a.owner, a.priority, a.namespace, key=str(uid % 3))
        self.engine.inbox.append(Admit(uid, buffer, sampling, a.owner, a.priority, a.namespace, key=str(uid % 3)))
        if a.abort is not None:
            self._aborts.append((turn + a.abort, uid))

    def _abort(self, turn: int) -> None:
        for when, uid in self._aborts:
            if when == turn and uid not in self.engine.ended:
                self.aborted.add(uid)
                self.engine.inbox.append(Abort((uid, uid, 999)))

    def check_end(self) -> None:
        """Everything came back, and every request is accounted for."""
        s, lim = self.engine.scheduler, self.world.limits
        counts = s.counts()
        assert s.idle
        assert counts["held"] == counts["locked"] == 0
        assert counts["free"] + counts["evictable"] == lim.num_pages
        assert self.engine.ended.keys() | self.engine.refused.keys() == self.admits.keys()
        assert not self.engine.ended.keys() & self.engine.refused.keys()
        assert s.clear_cache() == counts["evictable"]
        for uid, a in self.admits.items():
            assert (uid in self.engine.refused) == (not 0 < len(a.ids) < self.world.room)

    def check_outputs(self) -> None:
        """Each request has exactly the oracle's tokens; an aborted one their beginning."""
        for uid, end in self.engine.ended.items():
            want, finish = expected(self.admits[uid], self.world.room)
            got = self.engine.tokens[uid]
            assert end.output_tokens == len(got)
            assert end.prompt_tokens == len(self.admits[uid].ids)
            assert end.cached_tokens < end.prompt_tokens
            assert end.cached_tokens % self.world.limits.page_size == 0
            if end.finish is Finish.ABORT:
                assert uid in self.aborted
                assert got == want[: len(got)]
            else:
                assert (got, end.finish) == (want, finish)
