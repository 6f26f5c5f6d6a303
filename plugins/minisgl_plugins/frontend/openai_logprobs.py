"""Log probabilities as the three places of the API have them.

All are the model's own: of the logits before penalties, bans, grammars, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.api import Candidate, TokenLogprob

LEAST = -9999.0  # stands for minus infinity, which JSON has no word for


class LogprobWriter:
    """``as_ids``: tokens are written as ``token_id:<id>`` instead of their text."""

    def __init__(self, as_ids: bool) -> None:
        self._as_ids = as_ids

    # ------------------------------------------------------------------------------------------------------------- chat

    def chat(self, told: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": [self._entry(t) for t in told], "refusal": None}

    def _entry(self, t: TokenLogprob) -> dict[str, Any]:
        return {**self._candidate(t.token), "top_logprobs": [self._candidate(c) for c in t.top]}

    def _candidate(self, c: Candidate) -> dict[str, Any]:
        data = None if c.data is None else list(c.data)
        number = LEAST if c.logprob is None else _finite(c.logprob)
        return {"token": f"token_id:{c.id}" if self._as_ids else c.text, "logprob": number, "bytes": data}

    # ------------------------------------------------------------------------------------------------------ completions

    def completion(
        self, told: Sequence[TokenLogprob], start: int = 0, prompt: Sequence[TokenLogprob] = ()
    ) -> dict[str, Any]:
        """Of an echoed ``prompt`` and output tokens, whose text begins after ``start`` characters."""
        every = (*prompt, *told)
        return {
            "tokens": [self._key(t.token) for t in every],
            "token_logprobs": [None if t.token.logprob is None else _finite(t.token.logprob) for t in every],
            "top_logprobs": [None if t.token.logprob is None else self._tops(t) for t in every],
            "text_offset": [*(t.offset for t in prompt), *(start + t.offset for t in told)],
        }

    def _tops(self, t: TokenLogprob) -> dict[str, float]:
        """The token itself is always among them; of two that are written alike the likelier counts."""
        found: dict[str, float] = {}
        for c in (*t.top, t.token):
            key, number = self._key(c), LEAST if c.logprob is None else _finite(c.logprob)
            found[key] = max(number, found.get(key, number))
        return found

    def _key(self, c: Candidate) -> str:
        """The token's text; its bytes where they are no text alone, so that no two tokens are one."""
        if self._as_ids:
            return f"token_id:{c.id}"
        if c.data is not None and "\ufffd" in c.text:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in c.data)
        return c.text

    # ----------------------------------------------------------------------------------------------------------- prompt

    def prompt(self, told: Sequence[TokenLogprob], most: int) -> list[dict[str, Any] | None]:
        """By token id; null for the first token."""
        return [None if t.token.logprob is None else self._ranked(t, most) for t in told]

    def _ranked(self, t: TokenLogprob, most: int) -> dict[str, Any]:
        ranked = [*((i, c) for i, c in enumerate(t.top[:most], 1)), (t.rank, t.token)]
        return {
            str(c.id): {
                "logprob": LEAST if c.logprob is None else _finite(c.logprob),
                "rank": rank,
                "decoded_token": self._candidate(c)["token"],
            }
            for rank, c in ranked
        }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
