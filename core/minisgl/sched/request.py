"""One request as the scheduler keeps it; policies see it as a ReqView."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.base.types import I32, Admit, Finish, ReqState, SamplingSpec
from minisgl.sched.cache import EmptyLease, Lease
from minisgl.sched.rows import Rows


@dataclass(eq=False, slots=True)
class Req:
    """``ids``: known tokens, [prompt_len] int32, after a preemption [prompt_len + emitted]; read-only. ``slot``: its row,
    None while it waits. ``lease``: pins the row's cached pages. ``cached_tokens``: prompt tokens from the cache at first
    admission, None before. ``planned``: all of ``ids`` has been planned. ``share_key``, ``awaits``, ``checked``: of
    PromptSharing. ``matched``: (cache version, pages) of the last match. ``scored``: prompt tokens whose log probability is
    planned, of those that are wanted."""

    uid: int
    ids: I32
    sampling: SamplingSpec
    owner: int
    priority: int
    namespace: bytes
    key: str
    arrived: int
    max_new: int
    rows: Rows
    prompt_len: int
    state: ReqState = ReqState.WAITING
    finish: Finish | None = None
    slot: int | None = None
    lease: Lease = field(default_factory=EmptyLease)
    cached_tokens: int | None = None
    planned: bool = False
    share_key: tuple[bytes, bytes] | None = None
    awaits: Req | None = None
    checked: int = -1
    matched: tuple[int, int] | None = None
    scored: int = 0

    @classmethod
    def of(cls, a: Admit, ids: I32, max_new: int, arrived: int, rows: Rows) -> Req:
        return cls(
            uid=a.uid,
            ids=ids,
            sampling=a.sampling,
            owner=a.owner,
            priority=a.priority,
            namespace=a.namespace,
            key=a.key,
            arrived=arrived,
            max_new=max_new,
            rows=rows,
            prompt_len=len(ids),
        )

    @property
    def row(self) -> int:
        """Its slot; only while it has one."""
        assert self.slot is not None, f"request {self.uid} in state {self.state.name} has no slot"
        return self.slot

    @property
    def scores(self) -> bool:
        """Log probabilities of its prompt are still to be computed: it cannot begin with cached pages."""
        return self.sampling.prompt_logprobs is not None and self.scored < self.prompt_len - 1

    @property
    def emitted(self) -> int:
        """Output tokens sampled and committed."""
        return len(self.ids) - self.prompt_len if self.slot is None else int(self.rows.emitted[self.slot])

    @property
    def left(self) -> int:
        """Output tokens still to come."""
        return self.max_new - self.emitted

    @property
    def kv_len(self) -> int:
        """Tokens whose KV is planned."""
        return 0 if self.slot is None else int(self.rows.kv[self.slot])
