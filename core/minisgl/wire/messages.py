"""The messages between processes, as types; ``minisgl.wire.packing`` makes frames of them.

api  -- Submit, Cancel, Tokenize, Detokenize --> text -- Admit, Abort --> engine
api <-- Accepted, Refused, Deltas, replies ----- text <-- Scores, Tokens, Ended, Refused -- engine
api  -- Control --> engine -- Reply, Beat --> api
child -- Hello, Ready, Progress, Beat, Drained, FaultReport --> supervisor -- Go, Ready, FaultReport, Lost, Drain, Stop --> child
api  -- Control "metrics" --> other api -- Reply --> api
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minisgl.base.types import (
    Accepted,
    Admit,
    Delta,
    Ended,
    EngineInfo,
    GenerateRequest,
    LocalModel,
    Refused,
    Scores,
    Tokens,
)

API_SHIFT = 48  # uid = api index << 48 | counter


# ------------------------------------------------------------------------------------------------ child <-> supervisor


@dataclass(frozen=True, slots=True)
class Hello:
    """A child has started; ``lock`` is its own view of the selected plugins, as JSON."""

    role: str
    pid: int
    host: str
    fingerprint: str
    lock: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Go:
    """The child's plugins are those of its parent; ``model`` for the roles that need one. ``lock``: PluginLock as JSON of what
    the model selects, which the parent did not know at HELLO; the child compares it with its own view. "" if nothing."""

    model: LocalModel | None = None
    lock: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """``role`` can work. The engine's has ``info``; the supervisor passes it on to the text workers, then to the api."""

    role: str
    info: EngineInfo | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long start is, in bytes. ``total`` 0: not known."""

    role: str
    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Beat:
    """The engine lives. ``age_s``: how long the pass that runs now has taken, 0 when idle."""

    step: int
    age_s: float


@dataclass(frozen=True, slots=True)
class FaultReport:
    """``role`` failed and is about to exit with ``exit_code``. ``text``: what to tell the user, complete."""

    role: str
    kind: Literal["config", "plugin", "fault", "stall"]
    text: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A text worker has died and is being started again; what it was doing is lost."""

    role: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new requests; finish those that run within ``grace_s``, then answer Drained."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """``open``: requests that still ran when the time was up and were cut off."""

    role: str
    open: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the main loop and exit within ``grace_s``."""

    grace_s: float


# --------------------------------------------------------------------------------------------------------- api <-> text


@dataclass(frozen=True, slots=True)
class Submit:
    """A request; ``uids[i]`` is its i-th output."""

    uids: tuple[int, ...]
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    uids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deltas:
    """News of many requests of one api process, in order."""

    items: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Answered by Tokenized or Refused of this uid; ``uid`` is used for nothing else."""

    uid: int
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Tokenized:
    uid: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Detokenize:
    uid: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Detokenized:
    uid: int
    text: str


# ------------------------------------------------------------------------------------------------ text or api -> engine


@dataclass(frozen=True, slots=True)
class Abort:
    uids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Control:
    """Run ``op`` between steps; answered by Reply of this uid to the api process that the uid belongs to."""

    uid: int
    op: str


@dataclass(frozen=True, slots=True)
class Reply:
    """``payload``: JSON."""

    uid: int
    payload: bytes


Message = (
    Hello | Go | Ready | Progress | Beat | FaultReport | Lost | Drain | Drained | Stop | Submit | Cancel | Deltas | Tokenize
    | Tokenized | Detokenize | Detokenized | Admit | Abort | Scores | Tokens | Ended | Refused | Accepted | Control | Reply
)  # fmt: skip
