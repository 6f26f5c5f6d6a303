"""The tokenizer interface: text to ids, chat messages to ids, ids to text as they come. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.base.component import Component
from minisgl.base.types import I32


@dataclass(frozen=True, slots=True)
class TokenizerContext:
    """``path``: folder with tokenizer.json (and tokenizer_config.json, chat template, ...). ``chat_template``: replaces the
    model's own."""

    settings: Any
    path: Path
    chat_template: str | None = None


class Decoder:
    """Ids to text, one output's worth of state."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; never part of a character."""
        raise NotImplementedError

    def finish(self) -> str:
        """The rest; an incomplete character becomes U+FFFD."""
        raise NotImplementedError


class Tokenizer(Component):
    """All methods may be called from several threads at once.

    ``vocab``: number of ids it knows (largest id + 1). ``eos``: ids that end a text. ``bos``: id or None. ``max_chars``: the
    most characters of text that one id can stand for; None if there is no bound. ``template``: the source of its chat
    template, all of them if there are several, "" without one.
    """

    vocab: int
    eos: frozenset[int]
    bos: int | None
    max_chars: int | None = None
    template: str = ""

    @abstractmethod
    def __init__(self, ctx: TokenizerContext) -> None: ...

    @abstractmethod
    def encode(self, text: str, special: bool) -> I32:
        """Ids of ``text``; ``special``: add BOS and the like, once."""

    @abstractmethod
    def render(self, messages: Sequence[Mapping[str, Any]], **kw: Any) -> str:
        """The chat template's text. ``kw``: tools, add_generation_prompt, continue_final_message, template variables.

        Raises: RequestError(400, invalid_value, messages) with the template's own message.
        """

    @abstractmethod
    def decoder(self, skip_special: bool) -> Decoder: ...

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...

    def token_to_id(self, token: str) -> int | None:
        return None

    def piece(self, token: int) -> tuple[bytes, bool]:
        """The bytes that an id stands for by itself, and whether it is special: left out of a text where such are skipped."""
        shown = self.decode((token,), False)
        return shown.encode(), bool(shown) and not self.decode((token,), True)
