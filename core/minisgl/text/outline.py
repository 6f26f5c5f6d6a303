"""From what a request asks of its output's form to the grammar that the engine holds it to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minisgl.base.errors import RequestError
from minisgl.base.grammar import Grammar, Outline
from minisgl.base.types import GenerateRequest, GrammarSpec, ParseSpec
from minisgl.text.parse import Parsers
from minisgl.text.parser import Terminal

Functions = Sequence[tuple[int, Mapping[str, Any]]]  # with their places in the request's tools


class Outlines:
    """``grammar``: None if this server holds no output to a grammar. ``special``: id of a text that is a special token."""

    def __init__(self, parsers: Parsers, grammar: Grammar | None, special: Callable[[str], int | None]) -> None:
        self._parsers, self._grammar, self._special = parsers, grammar, special

    @staticmethod
    def wanted(request: GenerateRequest) -> str | None:
        """The field that asks for a grammar; None if none does."""
        parse = request.parse
        if request.grammar is not None:
            return request.grammar.param
        if parse is None or not parse.calls:
            return None
        return "tool_choice" if parse.required else "tools" if parse.strict else None

    def check(self, request: GenerateRequest) -> None:
        """What may take long, and can be done in another thread: are the schemas and expressions what can be enforced?

        Raises: RequestError.
        """
        param = self.wanted(request)
        if param is None:
            return
        if self._grammar is None:
            raise RequestError(
                f"'{param}' asks for an output of a given form, which this server does not enforce; leave it out.",
                code="unsupported_parameter",
                param=param,
            )
        if request.grammar is not None:
            self._grammar.check(request.grammar)
        if request.parse is not None and request.parse.calls:
            for i, function in self._held(request, request.parse):
                self._grammar.check(_parameters(i, function, request.parse))
            # Each alone is within the limits; so has to be their sum.
            self._grammar.matcher(self._grammar.compile(Outline(request.grammar, self._calls(request))))

    def compile(self, request: GenerateRequest, text: str, continued: str) -> bytes:
        """b"" for a request that asks for no form. ``text``: of the prompt. Raises: RequestError."""
        if self.wanted(request) is None:
            return b""
        self.check(request)
        assert self._grammar is not None, "checked"
        return self._grammar.compile(
            Outline(request.grammar, self._calls(request), self._think(request.parse, text, continued))
        )

    def _held(self, request: GenerateRequest, parse: ParseSpec) -> Functions:
        """The functions whose arguments are held to their schemas."""
        every = list(enumerate(tool_functions(request.template.get("tools"))))
        if parse.required:
            return [(i, f) for i, f in every if not parse.names or f.get("name") in parse.names]
        return every if request.grammar is not None or parse.strict else []

    def _calls(self, request: GenerateRequest) -> str:
        parse = request.parse
        if parse is None or not parse.calls:
            return ""
        functions = [f for _, f in self._held(request, parse)]
        free = not parse.required and request.grammar is None
        parser = self._parsers.calls(parse)
        return parser.call_rules(functions, parse.max_calls != 1, free, self._terminal(parser.tags)) + "\n"

    def _think(self, parse: ParseSpec | None, text: str, continued: str) -> tuple[str, str] | None:
        """A model may think whether or not its reasoning is to be parsed."""
        if parse is None:
            return None
        tags = self._parsers.reasoning_tags(text, continued)
        if tags is None:
            return None
        terminal = self._terminal(tags)
        return (terminal(tags[0]) if tags[0] else "", terminal(tags[1]))

    def _terminal(self, tags: Sequence[str]) -> Terminal:
        """Texts as terminals, in which those of the ``tags`` that are special tokens are such."""
        special = [(tag, i) for tag in tags if tag and (i := self._special(tag)) is not None]

        def terminal(text: str) -> str:
            pieces: list[str] = [text]
            for tag, i in special:
                pieces = [p for piece in pieces for p in _split(piece, tag, f"<[{i}]>")]
            return " ".join(p if p.startswith("<[") else json.dumps(p, ensure_ascii=False) for p in pieces)

        return terminal


def _split(text: str, tag: str, token: str) -> list[str]:
    if text.startswith("<["):
        return [text]
    out: list[str] = []
    for i, piece in enumerate(text.split(tag)):
        out += [token] if i else []
        out += [piece] if piece else []
    return out


def _parameters(i: int, function: Mapping[str, Any], parse: ParseSpec) -> GrammarSpec:
    schema = function.get("parameters") or {"type": "object"}
    strict = function.get("name") in parse.strict
    return GrammarSpec("json_schema", json.dumps(schema), strict, f"tools[{i}].function.parameters")


def tool_functions(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """The functions of a request's ``tools``."""
    return tuple(
        t["function"] for t in tools or () if isinstance(t, Mapping) and isinstance(t.get("function"), Mapping)
    )
