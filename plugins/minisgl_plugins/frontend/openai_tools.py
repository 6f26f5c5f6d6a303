"""``tools`` and what goes with them, as chat completions take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from minisgl.api import Fields, ParseSpec, RequestError, as_array, as_object, as_string, invalid_type, one_of

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
    items = f.array("tools", min_len=0 if empty else 1)
    if not items:
        _choice_without_tools(f)
        return ToolUse()
    read = [_tool(item, f"tools[{i}]") for i, item in enumerate(items)]
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


def _tool(value: Any, path: str) -> tuple[dict[str, Any], bool]:
    """The tool without nulls and ``strict``, which are not for the model; and ``strict``."""
    tool = Fields(as_object(value, path), path)
    kind = as_string(tool.require("type"), tool.at("type"))
    if kind == "custom":
        raise RequestError(
            f"'{tool.at('type')}' is 'custom'; this server calls tools of type 'function' only.",
            code="unsupported_value",
            param=tool.at("type"),
        )
    one_of(kind, tool.at("type"), ("function",))
    function = Fields(as_object(tool.require("function"), tool.at("function")), tool.at("function"))
    _name(function)
    function.string("description")
    parameters = function.raw("parameters")
    if parameters is not None:
        _parameters(parameters, function.at("parameters"))
    strict = function.boolean("strict") or False
    shown = {k: v for k, v in function.body.items() if v is not None and k != "strict"}
    return {**{k: v for k, v in tool.body.items() if v is not None}, "function": shown}, strict


def _name(function: Fields) -> str:
    path = function.at("name")
    name = as_string(function.require("name"), path, 1, MAX_NAME)
    if not name.isprintable():
        raise RequestError(f"'{path}' has control characters.", code="invalid_value", param=path)
    return name


def _parameters(value: Any, path: str) -> None:
    """The schema of an object, as far as that is plain to see."""
    kind = value.get("type", "object") if isinstance(value, dict) else None
    properties = value.get("properties", {}) if isinstance(value, dict) else None
    if kind != "object" or not isinstance(properties, dict):
        raise RequestError(
            f"'{path}' must be the JSON schema of an object: {{'type': 'object', 'properties': {{...}}}}.",
            code="invalid_function_parameters",
            param=path,
        )


def _choice_without_tools(f: Fields) -> None:
    choice = f.raw("tool_choice")
    if choice in (None, "none", "auto"):
        return
    if not isinstance(choice, (str, dict)):
        raise invalid_type("tool_choice", choice, "a string or an object")
    raise _bad_choice("must be 'none' or 'auto' when there are no 'tools'")


def _choice(f: Fields, names: list[str]) -> tuple[Mode, list[str], bool]:
    """(mode, names that may be called, whether the others are hidden)"""
    choice = f.raw("tool_choice")
    if choice is None:
        return "auto", names, False
    if isinstance(choice, str):
        if choice in ("none", "auto", "required"):
            return choice, names, False  # type: ignore[return-value]  # one of its literals
        raise _bad_choice("must be 'none', 'auto', 'required' or an object")
    if not isinstance(choice, dict):
        raise invalid_type("tool_choice", choice, "a string or an object")
    c = Fields(choice, "tool_choice")
    kind = one_of(as_string(c.require("type"), c.at("type")), c.at("type"), ("function", "allowed_tools"))
    if kind == "function":
        return "named", [_known(c, names)], False
    allowed = Fields(as_object(c.require("allowed_tools"), c.at("allowed_tools")), c.at("allowed_tools"))
    mode = one_of(as_string(allowed.require("mode"), allowed.at("mode")), allowed.at("mode"), ("auto", "required"))
    items = as_array(allowed.require("tools"), allowed.at("tools"), min_len=1)
    wanted = [
        _known(Fields(as_object(item, path), path), names)
        for i, item in enumerate(items)
        for path in (f"{allowed.at('tools')}[{i}]",)
    ]
    return mode, wanted, True  # type: ignore[return-value]  # one of its literals


def _known(c: Fields, names: list[str]) -> str:
    function = Fields(as_object(c.require("function"), c.at("function")), c.at("function"))
    name = as_string(function.require("name"), function.at("name"))
    if name not in names:
        raise _bad_choice(f"names {name[:100]!r}, which is not in 'tools'")
    return name


def _bad_choice(why: str) -> RequestError:
    return RequestError(f"'tool_choice' {why}.", code="invalid_value", param="tool_choice")
