"""Logits processors: they change the logits of some rows before a token is picked from them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from minisgl.base.component import Component
from minisgl.base.types import RowInit
from minisgl.runtime.sampling import SampleRows

FOREVER = 2**31 - 1
# The logit of a token that must not come. A number: where a grammar forbids all the others (-inf), such a token still can.
BANNED = -1e30


@dataclass(frozen=True, slots=True)
class LogitsContext:
    """``name``: under which requests give parameters. ``vocab``: tokens that may be sampled. ``depth``: steps in flight."""

    settings: Any
    name: str
    device: torch.device
    max_slots: int
    vocab: int
    depth: int = 1


class LogitsProcessor(Component):
    """Called by the thread that launches steps, which must never wait for the device.

    ``order``: lower comes first. Of core's own, the bias has 10, penalties 20 and bans 30; a grammar's mask comes after all.
    """

    order: ClassVar[int] = 50

    @abstractmethod
    def __init__(self, ctx: LogitsContext) -> None: ...

    def check(self, params: Any) -> None:
        """Look at what a request gives under this processor's name, any JSON value. May be called from another thread.

        Raises: ValueError saying what is wrong; the request is then refused with it.
        """

    @abstractmethod
    def set_row(self, row: RowInit) -> int:
        """A row begins, or comes back after it was preempted: overwrite all state of its slot's former row. On the host.
        The parameters are in ``row.sampling.extra``; ``row.written`` is the output so far, and ``row.prompt`` the prompt if
        there are parameters.

        Returns: of how many of its output tokens, counted from the request's first, it changes the logits: 0 for a row that
        it leaves alone, FOREVER for all. It is called for these tokens only, and steps of rows that no processor changes
        run from CUDA graphs.
        """

    def prepare(self) -> None:
        """Once before each step's ``apply``: bring to the device what ``set_row`` has changed."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: SampleRows) -> None:
        """Change ``logits`` [n, vocab] float32, of the n rows that this processor changes and no others, in place. Their last
        tokens were given to ``sampled``: also while the host does not know them yet, so steps may overlap."""

    def sampled(self, tokens: Tensor, rows: SampleRows) -> None:
        """The rows of the last ``apply`` got these tokens, [n] int64 on the device."""
