"""Rows whose output is held to a grammar: the mask of each next token, made when the token before it is known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from minisgl.base.errors import RequestError
from minisgl.base.grammar import U32, Matcher
from minisgl.base.types import I32, RowInit

log = logging.getLogger(__name__)
MAX_PREPARED = 4096  # matchers of requests that were not scheduled yet; those of aborted ones leave by this


class _Form:
    """One row's matcher; None when it has failed: its limits were passed, so nothing but a stop may follow."""

    __slots__ = ("matcher", "stops")

    def __init__(self, matcher: Matcher | None, stops: tuple[int, ...]) -> None:
        self.matcher, self.stops = matcher, stops

    def accept(self, token: int) -> None:
        if self.matcher is not None and not self.matcher.done and not self.matcher.accept(token):
            self.matcher = None

    def fill(self, mask: U32) -> None:
        if self.matcher is not None:
            self.matcher.fill(mask)
        if not mask.any():
            for token in self.stops:
                mask[token // 32] |= np.uint32(1 << token % 32)


class Forms:
    """The forms of a worker's rows, by slot.

    A step's tokens reach the matchers before the next step of theirs is masked, not before it is planned or its layers are
    enqueued: so steps overlap as they do without grammars, and what waits for the device is the mask alone.

    Args: vocab: tokens that may be sampled. make: a matcher of what the grammar plugin compiled.
    """

    def __init__(self, vocab: int, device: torch.device, make: Callable[[bytes], Matcher]) -> None:
        self._vocab, self._device, self._make = vocab, device, make
        self._words = -(-vocab // 32)
        self._forms: dict[int, _Form] = {}
        self._prepared: dict[int, Matcher | None] = {}  # by uid
        self._lock = Lock()  # of what is prepared
        self._due: list[tuple[int, _Form]] = []  # (place in the last step's tokens, form)
        self._tokens: Callable[[], I32] | None = None  # of the last step that sampled for a form

    def prepare(self, uid: int, compiled: bytes) -> None:
        """Make the matcher of a request that comes. For any thread: it may take long, and no step has to wait for it."""
        matcher = self._matcher(compiled)
        with self._lock:
            self._prepared[uid] = matcher
            if len(self._prepared) > MAX_PREPARED:
                del self._prepared[next(iter(self._prepared))]

    def change(self, retire: I32, init: tuple[RowInit, ...]) -> None:
        """Rows leave and come. A row that comes back has written something already."""
        if self._forms:
            for slot in retire.tolist():
                self._forms.pop(slot, None)
        for row in init:
            self._forms.pop(row.slot, None)
            if row.sampling.grammar:
                form = self._forms[row.slot] = _Form(self._first(row), row.sampling.stop_ids)
                for token in row.written.tolist():
                    form.accept(token)

    def _first(self, row: RowInit) -> Matcher | None:
        """The matcher that was prepared; a new one for a row that comes back, whose grammar is compiled already."""
        with self._lock:
            if row.uid in self._prepared:
                return self._prepared.pop(row.uid)
        return self._matcher(row.sampling.grammar)

    def _matcher(self, compiled: bytes) -> Matcher | None:
        try:
            return self._make(compiled)
        except RequestError as exc:  # the text side has checked its parts: only their sum can be over a limit
            log.warning("a grammar cannot be enforced: %s", exc)
            return None

    def any(self, slots: I32) -> bool:
        """Whether one of these rows has a form."""
        return bool(self._forms) and any(slot in self._forms for slot in slots.tolist())

    def mask(self, logits: Tensor, slots: I32) -> Tensor:
        """Forbid what the forms of these rows do not allow.

        Args: logits: [n, vocab or wider]; changed in place. slots: [n], whose they are.
        """
        at = [(i, form) for i, slot in enumerate(slots.tolist()) if (form := self._forms.get(slot)) is not None]
        self.settle()
        if not at:
            return logits
        words = np.zeros((len(at), self._words), np.uint32)
        for (_, form), row in zip(at, words, strict=True):
            form.fill(row)
        allowed = self._expand(words, logits.shape[1])
        if len(at) == len(slots):
            logits.masked_fill_(~allowed, float("-inf"))
        else:
            where = torch.tensor([i for i, _ in at], device=self._device)
            logits[where] = logits[where].masked_fill_(~allowed, float("-inf"))
        self._due = at
        return logits

    def sampled(self, tokens: Callable[[], I32]) -> None:
        """The step that was masked last gives these tokens, [n] in the order of its slots, once the device is done with it."""
        if self._due:
            self._tokens = tokens

    def settle(self) -> None:
        """Bring the tokens of the last step to the matchers. Waits for the device."""
        if self._tokens is not None:
            tokens, self._tokens = self._tokens(), None
            for i, form in self._due:
                form.accept(int(tokens[i]))
        self._due = []

    def _expand(self, words: U32, width: int) -> Tensor:
        """[k, width] bool of [k, words] bits; tokens beyond the vocabulary are not allowed (W4)."""
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab, bitorder="little")
        allowed = np.zeros((len(words), width), np.bool_)
        allowed[:, : bits.shape[1]] = bits
        return torch.from_numpy(allowed).to(self._device, non_blocking=True)
