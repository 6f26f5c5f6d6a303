"""Grammars: what an output may be, checked when a request comes, and enforced token by token. Torch-free.

The text side compiles a request's ``Outline`` to ``bytes`` that travel with the request; the engine makes a ``Matcher`` of them
for each output. Rules beside JSON schemas are written in the Lark dialect of llguidance.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.base.component import Component
from minisgl.base.types import GrammarSpec

log = logging.getLogger(__name__)
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """``tokenizer_dir``: folder with tokenizer.json. ``vocab``: ids that the model may sample. ``eos``: ids that end a text."""

    settings: Any
    tokenizer_dir: Path
    vocab: int
    eos: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """A whole output: maybe reasoning, then an answer or tool calls.

    ``answer``: what the answer is held to. ``calls``: rules of which ``calls`` is the first, "" if there are none; beside an
    answer they are the alternative to it. ``think``: the terminals that begin and end reasoning, which comes before all that
    and is free; the first is "" if the prompt has begun it; None if there is none. Terminals are written as in the rules.
    """

    answer: GrammarSpec | None = None
    calls: str = ""
    think: tuple[str, str] | None = None


class Matcher(ABC):
    """One output as far as it has come."""

    @abstractmethod
    def fill(self, mask: U32) -> None:
        """Write the tokens that may come next: bit ``i % 32`` of ``mask[i // 32]`` for token i, [ceil(vocab / 32)] uint32.
        EOS is among them only where the output may end; after the end nothing else is."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Go on by one token. Returns: False if the grammar does not allow it; nothing can follow then."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """The output is complete and nothing but EOS may follow."""


class Grammar(Component):
    """Compiles and matches. All methods may be called from several threads at once."""

    @abstractmethod
    def __init__(self, ctx: GrammarContext) -> None: ...

    def load(self) -> None:
        """Make what takes long and every grammar needs, before the first one comes. It is made when it is needed otherwise."""

    @abstractmethod
    def check(self, spec: GrammarSpec) -> None:
        """Raises: RequestError 400 with ``spec.param`` if it cannot be enforced: with ``strict``, all of it must be."""

    @abstractmethod
    def compile(self, outline: Outline) -> bytes:
        """What ``matcher`` takes, in this or another process. Raises: RequestError 400."""

    @abstractmethod
    def matcher(self, compiled: bytes) -> Matcher:
        """For one more output. May take long the first time; other threads go on meanwhile.

        Raises: RequestError if it needs more than the limits allow.
        """


def load_beside(grammar: Grammar) -> None:
    """Load it in a thread of its own, while the start goes on."""

    def load() -> None:
        try:
            grammar.load()
        except Exception as exc:  # requests that need it will say so
            log.warning("what grammars need could not be made: %s", exc)

    Thread(target=load, name="minisgl-grammar-load", daemon=True).start()
