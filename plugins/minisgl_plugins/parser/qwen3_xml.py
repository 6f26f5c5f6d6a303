"""Tool calls as Qwen3-Coder and Qwen3.5 write them: ``<tool_call><function=f><parameter=a>1</parameter></function></tool_call>``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.api import Part, Terminal

from .calls import CallParser, CallReader
from .rules import ANYTHING, alternatives, schema, with_text
from .schemas import parameter_schemas, required_names, schema_types, types_of

CALL, FUNCTION, PARAMETER = "<tool_call>", "<function=", "<parameter="
END_PARAMETER, END_FUNCTION = "</parameter>", "</function>"
MAX_NAME = 128


class Qwen3XmlParser(CallParser):
    """Values are raw text; the schema of the tool says what they are. ``<tool_call>`` may be missing, as models leave it out."""

    openers = (CALL, FUNCTION)
    tags = (CALL, "</tool_call>")
    after = ("</tool_call>",)

    @classmethod
    def fits(cls, template: str) -> int:
        return 3 if FUNCTION in template and PARAMETER in template else 0

    def reader(self, opener: str) -> CallReader:
        schemas = {str(t.get("name")): parameter_schemas(t) for t in self._tools}
        return XmlCall(opener == CALL, schemas)

    def call_rules(self, tools: Sequence[Mapping[str, Any]], many: bool, free: bool, terminal: Terminal) -> str:
        rules = []
        for i, tool in enumerate(tools):
            wanted = required_names(tool)
            body = [terminal(f"\n<function={tool['name']}>\n")]
            for k, (name, own) in enumerate(parameter_schemas(tool).items()):
                rules += _parameter_rules(f"h_{i}_{k}", name, own, terminal)
                body.append(f"h_{i}_{k}" if name in wanted else f"h_{i}_{k}?")
            rules.append((f"call_{i}", " ".join([*body, terminal("</function>\n</tool_call>")])))
        lead = terminal(CALL)
        if free:
            return with_text(lead, lead.startswith("<[")) + alternatives(rules)
        more = f"({terminal(chr(10) + CALL)} call)*" if many else ""
        return f"calls: {lead} call {more}\n" + alternatives(rules)


class XmlCall(CallReader):
    """``wrapped``: ``<tool_call>`` comes first. Arguments go out as JSON, one parameter at a time."""

    def __init__(self, wrapped: bool, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas
        self._text = ""
        self._state = "call" if wrapped else "function"
        self._types: Mapping[str, Any] = {}
        self._key = ""
        self._keys: set[str] = set()
        self._count = 0

    def push(self, text: str, out: list[Part]) -> str:
        self._text += text
        while self.status == "more" and self._step(out):
            pass
        if self.status == "more":
            return ""
        rest, self._text = self._text, ""
        return rest

    @property
    def raw(self) -> str:
        return super().raw + self._text

    def _use(self, n: int) -> str:
        used, self._text = self._text[:n], self._text[n:]
        self.read(used)
        return used

    def _step(self, out: list[Part]) -> bool:
        """One transition. Returns: whether another may follow."""
        if self._state == "value":
            return self._value(out)
        if self._state in ("function name", "parameter name"):
            return self._named(out)
        return self._tag(out)

    def _tag(self, out: list[Part]) -> bool:
        """Whitespace, then a tag that may come here."""
        accepted = {"call": (CALL,), "function": (FUNCTION,)}.get(self._state, (PARAMETER, END_FUNCTION))
        self._use(len(self._text) - len(self._text.lstrip()))
        for tag in accepted:
            if self._text.startswith(tag):
                self._use(len(tag))
                self._enter(tag, out)
                return True
            if tag.startswith(self._text):
                return False
        self.status = "bad"
        return False

    def _enter(self, tag: str, out: list[Part]) -> None:
        if tag == END_FUNCTION:
            out.append(Part("arguments", "}" if self._count else "{}"))
            self.status = "done"
        else:
            self._state = {CALL: "function", FUNCTION: "function name", PARAMETER: "parameter name"}[tag]

    def _named(self, out: list[Part]) -> bool:
        """The rest of ``<function=`` or ``<parameter=``."""
        end = self._text.find(">")
        name = self._text[: end if end >= 0 else None]
        if len(name) > MAX_NAME or "<" in name or "\n" in name or end == 0:
            self.status = "bad"
            return False
        if end < 0:
            return False
        self._use(end + 1)
        if self._state == "function name":
            self._types = self._schemas.get(name, {})
            self._state, self.opened = "parameters", True
            out.append(Part("call", name))
        elif name in self._keys:
            self.status = "bad"
        else:
            self._keys.add(name)
            self._state, self._key = "value", name
        return True

    def _value(self, out: list[Part]) -> bool:
        end = self._text.find(END_PARAMETER)
        if end < 0:
            return False
        text = self._use(end + len(END_PARAMETER))[:end].removeprefix("\n").removesuffix("\n")
        value = typed(text, self._types.get(self._key))
        item = f"{json.dumps(self._key, ensure_ascii=False)}: {value}"
        out.append(Part("arguments", (", " if self._count else "{") + item))
        self._count += 1
        self._state = "parameters"
        return True


def _parameter_rules(rule: str, name: str, own: Mapping[str, Any], terminal: Terminal) -> list[tuple[str, str]]:
    """``<parameter=name>``, its value and the end tag. A string is any text up to the tag."""
    head, end = terminal(f"{PARAMETER}{name}>\n"), terminal(f"\n{END_PARAMETER}\n")
    values = own.get("enum")
    if isinstance(values, list) and values and all(isinstance(v, str) for v in values):
        return [(rule, f"{head} ({' | '.join(map(terminal, values))}) {end}")]
    if schema_types(own) == {"string"}:
        return [(f"{rule}_text[lazy]", f"{ANYTHING} {end}"), (rule, f"{head} {rule}_text")]
    return [(rule, f"{head} {schema(own)} {end}")]


def typed(text: str, schema: Any) -> str:
    """``text`` as JSON of the type that ``schema`` has; a string if it is none of another type."""
    types = schema_types(schema)
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    words = {"True": "true", "False": "false", "None": "null"}  # as Python writes them
    plain = words.get(text.strip(), text.strip())
    try:
        value = json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types and not types & types_of(value):
        return json.dumps(text, ensure_ascii=False)
    return plain


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
