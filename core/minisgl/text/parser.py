"""Output parsers: what a model writes, taken apart into answer, reasoning and tool calls. Torch-free.

A parser is a state machine over the text as it comes. The same machine serves answers that stream and those that do not, and its
parts, joined by kind, do not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from minisgl.base.component import Component
from minisgl.base.errors import RequestError
from minisgl.base.types import Part

Stage = Literal["reasoning", "calls"]
Terminal = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class ParserContext:
    """``tools``: the functions that may be called, as the request has them (``name``, ``parameters``, ...). ``prompt``: the
    text that the output continues. ``continued``: the end of it that is the model's own, when the last message is continued;
    else "". ``cuts``: texts that end reasoning though its end tag did not come. ``sure``: a grammar sees to it that what begins as
    a call becomes one."""

    settings: Any
    tools: Sequence[Mapping[str, Any]] = ()
    prompt: str = ""
    continued: str = ""
    cuts: Sequence[str] = ()
    sure: bool = False


class OutputParser(Component):
    """One output's worth of state.

    ``stage``: "reasoning" parsers come first, and their content goes through the "calls" parser. ``openers``: texts that begin
    what it looks for. ``tags``: texts to show to it also where they are special tokens. ``thinking``: the text so far ends
    within reasoning.
    """

    stage: ClassVar[Stage]
    openers: ClassVar[tuple[str, ...]] = ()
    tags: ClassVar[tuple[str, ...]] = ()
    thinking: bool = False

    @abstractmethod
    def __init__(self, ctx: ParserContext) -> None: ...

    @classmethod
    def fits(cls, template: str) -> int:
        """How surely models with this chat template write what it parses; 0: they do not. ``auto`` takes the surest."""
        return 0

    def reasoning_tags(self) -> tuple[str, str] | None:
        """Before its first piece: the tags between which the output may think before it answers; the first is "" if the prompt
        has begun it. None if it may not."""
        return None

    def call_rules(self, tools: Sequence[Mapping[str, Any]], many: bool, free: bool, terminal: Terminal) -> str:
        """Rules for an output that is calls of these tools, in the Lark dialect of llguidance; the first is ``calls``.

        Args: many: several calls may follow one another. free: text may come instead and between, and only what begins as
            a call has to be one. terminal: writes a text as a terminal of the rules, special tokens in it too.
        Raises: RequestError if this format cannot be held to rules.
        """
        raise RequestError(
            "this server cannot hold tool calls of this model to a grammar; use tool_choice 'auto' without 'strict'",
            code="unsupported_value",
            param="tool_choice",
        )

    @abstractmethod
    def push(self, delta: str, ids: Sequence[int]) -> list[Part]:
        """What is certain now. ``ids``: the tokens that came with the text; text held back may be of earlier ones.

        Never raises for anything a model may write: text that does not parse is content.
        """

    @abstractmethod
    def finish(self, why: str) -> list[Part]:
        """The rest. ``why``: "stop", "length", "abort" or "error". Text is never dropped."""
