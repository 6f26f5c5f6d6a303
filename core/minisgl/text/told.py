"""Log probabilities on their way out: from ids to tokens as a client reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.base.types import Candidate, LogprobBlock, TokenLogprob
from minisgl.text.tokenizer import Tokenizer


class TokenNames:
    """What ids are by themselves. ``tokenizer`` None: their numbers."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def candidate(self, token: int, logprob: float | None) -> Candidate:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._name(token)
        return Candidate(token, logprob, *known)

    def told(self, token: int, score: Score | None, most: int, offset: int) -> TokenLogprob:
        """``score`` None: not known."""
        if score is None:
            return TokenLogprob(self.candidate(token, None), 0, (), offset)
        top = tuple([self.candidate(i, logprob) for i, logprob in score.top[:most]])
        return TokenLogprob(self.candidate(token, score.logprob), score.rank, top, offset)

    def _name(self, token: int) -> tuple[str, bytes | None]:
        if self.tokenizer is None:
            return f"token_id:{token}", None
        data, special = self.tokenizer.piece(token)
        return data.decode("utf-8", "replace"), None if special else data


@dataclass(frozen=True, slots=True)
class Score:
    """Of one token: its log probability, rank and the likeliest, (id, log probability), falling."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def scores_of(block: LogprobBlock) -> list[tuple[int, int, Score]]:
    """(row, position, score) of each token."""
    tops = zip(block.top_ids.tolist(), block.top_logprobs.tolist(), strict=True)
    columns = zip(block.row.tolist(), block.position.tolist(), block.logprob.tolist(), block.rank.tolist(), tops)
    return [(row, at, Score(own, rank, tuple(zip(*top)))) for row, at, own, rank, top in columns]


class PromptScores:
    """Those of one prompt, which all outputs of its request tell; the engine computes them for the first. ``most``: alternatives that
    are wanted. ``ids``, ``offsets``: its tokens and the characters of its text before each."""

    def __init__(self, names: TokenNames, most: int, ids: Sequence[int], offsets: Sequence[int]) -> None:
        self._names, self._most, self._ids, self._offsets = names, most, ids, offsets
        self._scores: dict[int, Score] = {}
        self._told: tuple[TokenLogprob, ...] | None = None

    @classmethod
    def of(cls, names: TokenNames, most: int | None, ids: Sequence[int], text: str) -> PromptScores | None:
        """None if nothing is wanted. ``text``: of the prompt, "" for one that came as ids."""
        return None if most is None else cls(names, most, ids, prompt_offsets(names.tokenizer, ids, text))

    def add(self, position: int, score: Score) -> None:
        """It may come again, after a preemption."""
        self._scores[position] = score

    @property
    def complete(self) -> bool:
        return len(self._scores) >= len(self._ids) - 1  # nothing predicts the first

    def told(self) -> tuple[TokenLogprob, ...]:
        if self._told is None:
            tokens = enumerate(zip(self._ids, self._offsets, strict=True))
            self._told = tuple(
                self._names.told(token, self._scores.get(at), self._most, offset) for at, (token, offset) in tokens
            )
        return self._told


class Told:
    """What one output tells beside its text. ``output``: alternatives that are wanted of its tokens, None: nothing is.
    ``prompt``: of its prompt, None: nothing is told of it. ``prompt_tokens``: of the prompt."""

    def __init__(self, names: TokenNames, output: int | None, prompt: PromptScores | None, prompt_tokens: int) -> None:
        self._names, self._output, self._prompt, self._prompt_tokens = names, output, prompt, prompt_tokens
        self._scores: dict[int, Score] = {}  # of output tokens that are to come, by position, the prompt's first
        self._chars = 0
        self._new: list[TokenLogprob] = []
        self._prompt_due = prompt is not None

    def add(self, position: int, score: Score) -> None:
        if position >= self._prompt_tokens:
            self._scores[position] = score
        elif self._prompt is not None:
            self._prompt.add(position, score)

    def take(self, position: int, token: int, text: str) -> None:
        """An output token came, which completes ``text``."""
        if self._output is not None:
            self._new.append(self._names.told(token, self._scores.pop(position, None), self._output, self._chars))
        self._chars += len(text)

    def flush(self) -> tuple[TokenLogprob, ...] | None:
        """Of the output tokens that came since the last call."""
        if self._output is None:
            return None
        new, self._new = tuple(self._new), []
        return new

    @property
    def waiting(self) -> bool:
        """The prompt goes out with the first delta, and is not complete: another output of it is being scored."""
        return self._prompt_due and self._prompt is not None and not self._prompt.complete

    def prompt(self) -> tuple[TokenLogprob, ...] | None:
        """Of the prompt, the first time only."""
        if not self._prompt_due or self._prompt is None:
            return None
        self._prompt_due = False
        return self._prompt.told()


def prompt_offsets(tokenizer: Tokenizer | None, ids: Sequence[int], text: str) -> list[int]:
    """Characters before each token of a prompt, in its text; ``text``: "" for a prompt that came as ids. A BOS that was put
    before a text has none."""
    if tokenizer is None:
        return [0] * len(ids)
    decoder, chars, out = tokenizer.decoder(False), 0, []
    for at, token in enumerate(ids):
        out.append(chars)
        added = at == 0 and bool(text) and token == tokenizer.bos and not text.startswith(decoded(tokenizer, token))
        chars += 0 if added else len(decoder.push((token,)))
    return out


def decoded(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.piece(token)[0].decode("utf-8", "replace")
