"""``tools`` and what goes with them, as chat completions take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from minisgl.api import Fields, ParseSpec, RequestError, Value

MAX_NAME = 128
Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``tools``: as the chat template gets them, only those that may be called. ``mode``: whether they may or must be called;
    "named": exactly one call of the only tool in ``callable``. ``strict[i]``: the arguments of tool i must validate."""

    tools: tuple[dict[str, Any], ...] = ()
    callable: tuple[dict[str, Any], ...] = ()
    strict: tuple[bool, ...] = ()
    mode: Mode = "none"
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")

    def parse(self, reasoning: bool) -> ParseSpec:
        calls = self.mode != "none"
        one = calls and (self.mode == "named" or not self.parallel)
        names = [tool["function"]["name"] for tool in self.callable]
        return ParseSpec(
            reasoning,
            calls,
            1 if one else None,
            required=self.forced,
            names=tuple(names) if self.forced else (),
            strict=tuple(n for n, s in zip(names, self.strict, strict=True) if s) if calls else (),
        )


def read_tools(f: Fields, empty: bool = False) -> ToolUse:
    """``empty``: an empty array is the same as none. Raises: RequestError."""
    parallel = f.boolean("parallel_tool_calls") is not False
    f.refuse("functions", [])
    f.refuse("function_call", "none", "auto")
    read = [_tool(item.object()) for item in f.items("tools", min_len=0 if empty else 1)]
    if not read:
        _choice_without_tools(f)
        return ToolUse()
    tools, strict = tuple(tool for tool, _ in read), tuple(s for _, s in read)
    names = [tool["function"]["name"] for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            path = f"tools[{i}].function.name"
            raise RequestError(f"'{path}' is {name!r}, as that of another tool.", code="invalid_value", param=path)
    mode, wanted, only = _choice(f, names)
    chosen = [i for i, name in enumerate(names) if name in wanted]
    allowed = tuple(tools[i] for i in chosen)
    return ToolUse(allowed if only else tools, allowed, tuple(strict[i] for i in chosen), mode, parallel)


def _tool(tool: Fields) -> tuple[dict[str, Any], bool]:
    """The tool without nulls and ``strict``, which are not for the model; and ``strict``."""
    kind = tool.need("type")
    if kind.raw == "custom":
        raise kind.refused("is 'custom'; this server calls tools of type 'function' only", "unsupported_value")
    kind.one_of(("function",))
    function = tool.need("function").object()
    _name(function.need("name"))
    function.string("description")
    parameters = function.value("parameters")
    if parameters is not None:
        _parameters(parameters)
    strict = function.boolean("strict") or False
    shown = {k: v for k, v in function.body.items() if v is not None and k != "strict"}
    return {**{k: v for k, v in tool.body.items() if v is not None}, "function": shown}, strict


def _name(name: Value) -> None:
    if not name.string(1, MAX_NAME).isprintable():
        raise name.refused("has control characters")


def _parameters(schema: Value) -> None:
    """The schema of an object, as far as that is plain to see."""
    kind = schema.raw.get("type", "object") if isinstance(schema.raw, dict) else None
    properties = schema.raw.get("properties", {}) if isinstance(schema.raw, dict) else None
    if kind != "object" or not isinstance(properties, dict):
        raise schema.refused(
            "must be the JSON schema of an object: {'type': 'object', 'properties': {...}}",
            "invalid_function_parameters",
        )
    schema.object()


def _choice_without_tools(f: Fields) -> None:
    choice = f.value("tool_choice")
    if choice is None or choice.raw in ("none", "auto"):
        return
    if not isinstance(choice.raw, (str, dict)):
        raise choice.wrong_type("a string or an object")
    raise choice.refused("must be 'none' or 'auto' when there are no 'tools'")


def _choice(f: Fields, names: list[str]) -> tuple[Mode, list[str], bool]:
    """(mode, names that may be called, whether the others are hidden)"""
    choice = f.value("tool_choice")
    if choice is None:
        return "auto", names, False
    if isinstance(choice.raw, str):
        return choice.one_of(("none", "auto", "required")), names, False  # type: ignore[return-value]  # one of its literals
    if not isinstance(choice.raw, dict):
        raise choice.wrong_type("a string or an object")
    c = choice.object()
    if c.need("type").one_of(("function", "allowed_tools")) == "function":
        return "named", [_known(c, choice, names)], False
    allowed = c.need("allowed_tools").object()
    mode = allowed.need("mode").one_of(("auto", "required"))
    wanted = [_known(item.object(), choice, names) for item in allowed.need("tools").items(min_len=1)]
    return mode, wanted, True  # type: ignore[return-value]  # one of its literals


def _known(tool: Fields, choice: Value, names: list[str]) -> str:
    name = tool.need("function").object().need("name").string()
    if name not in names:
        raise choice.refused(f"names {name[:100]!r}, which is not in 'tools'")
    return name
