"""Tool calls as Llama 4 and small Llama 3.2 models write them: ``[f(a=1, b="x"), g()]``, a list of Python calls."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from minisgl.api import Part, Terminal

from .calls import CallParser, CallReader
from .rules import alternatives, listed, schema
from .schemas import parameter_schemas, required_names

TAGS = ("<|python_start|>", "<|python_tag|>")
NAME = re.compile(r"[A-Za-z_][\w.-]*")
CLOSES = {")": "(", "]": "[", "}": "{"}
MAX_CHARS = 1 << 18  # of one call: the parser of Python is not made for more


class PythonicParser(CallParser):
    """A list counts only at the start of the answer, or after a tag, and only while its calls are of the request's tools. The
    arguments are literals given by name; they go out as JSON when the call is complete."""

    openers = TAGS
    tags = (*TAGS, "<|python_end|>")
    after = ("]", "<|python_end|>")

    @classmethod
    def fits(cls, template: str) -> int:
        return 2 if "[func_name1(" in template else 0

    def opening(self, text: str) -> tuple[int, str] | None:
        start = len(text) - len(text.lstrip())
        if not self._said:
            first = text[start : start + 1]
            if first == "[" or (first == "," and self._called):
                return start, first
        return super().opening(text)

    def reader(self, opener: str) -> CallReader:
        return PythonCall(opener, self._names)

    def call_rules(self, tools: Sequence[Mapping[str, Any]], many: bool, free: bool, terminal: Terminal) -> str:
        rules = []
        for i, tool in enumerate(tools):
            wanted = required_names(tool)
            items: dict[bool, list[str]] = {True: [], False: []}
            for k, (name, own) in enumerate(parameter_schemas(tool).items()):
                rules.append((f"h_{i}_{k}", f"{terminal(name + '=')} {schema(own)}"))
                items[name in wanted].append(f"h_{i}_{k}")
            inner = listed(items[True], items[False], terminal(", "))
            rules.append((f"call_{i}", f"{terminal(tool['name'] + '(')} {inner} {terminal(')')}"))
        more = f"({terminal(', ')} call)*" if many else ""
        text = " | /([^\\[ \\n](.|\\n)*)?/" if free else ""
        return f"calls: {terminal('[')} call {more} {terminal(']')}{text}\n" + alternatives(rules)


class PythonCall(CallReader):
    def __init__(self, opener: str, names: Collection[str]) -> None:
        super().__init__()
        self._skip = len(opener)
        self._bracket = opener in TAGS  # an opening bracket must follow
        self._names = names
        self._name: list[str] = []
        self._arguments: list[str] = []
        self._open: list[str] = []  # brackets, from the call's own on
        self._quote = ""
        self._escaped = False

    def push(self, text: str, out: list[Part]) -> str:
        at = 0
        while at < len(text) and self.status == "more":
            at += self._take(text[at], out)
        self.read(text[:at])
        return text[at:]

    def _take(self, c: str, out: list[Part]) -> int:
        """Returns: characters used, 0 or 1; one that makes it bad is not used."""
        self._look_at(c, out)
        return 0 if self.status == "bad" else 1

    def _look_at(self, c: str, out: list[Part]) -> None:
        if self._skip:
            self._skip -= 1
        elif self._open:
            self._in_arguments(c, out)
        elif c.isspace() and not self._name:
            pass
        elif self._bracket:
            self._bracket = False
            self.status = "more" if c == "[" else "bad"
        elif c == "(":
            if "".join(self._name) in self._names:
                self._open.append(c)
            else:
                self.status = "bad"
        else:
            self._name.append(c)
            if not NAME.fullmatch("".join(self._name)):
                self.status = "bad"

    def _in_arguments(self, c: str, out: list[Part]) -> None:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == self._quote:
                self._quote = ""
        elif c in "'\"":
            self._quote = c
        elif c in "([{":
            self._open.append(c)
        elif c in CLOSES and self._open.pop() != CLOSES[c]:
            self.status = "bad"
            return
        if not self._open:
            self._complete(out)
        elif len(self._arguments) >= MAX_CHARS:
            self.status = "bad"
        else:
            self._arguments.append(c)

    def _complete(self, out: list[Part]) -> None:
        found = keyword_arguments("".join(self._arguments))
        if found is None:
            self.status = "bad"
            return
        self.opened, self.status = True, "done"
        out += [Part("call", "".join(self._name)), Part("arguments", found)]


def keyword_arguments(source: str) -> str | None:
    """``a=1, b="x"`` as JSON of an object; None if that is not what it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            call = ast.parse(f"f({source})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {k.arg: _literal(k.value) for k in call.keywords}
        if None in values:
            return None
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _literal(node: ast.expr) -> Any:
    """The value of a literal that JSON can say. Raises: ValueError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    words = {"true": True, "false": False, "null": None}  # models mix up their languages
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    raise ValueError(f"{type(node).__name__} is no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is no string")
