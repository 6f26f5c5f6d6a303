"""Chat templates: Jinja in a sandbox, with what the templates of Hugging Face checkpoints expect to find there."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from minisgl.api import RequestError

REASONING = ("reasoning_content", "reasoning", "thinking")  # names that templates read the same thing under
_LISTS = re.compile(
    r"""\bfor\s+\w+\s+in\s+\w+(\.content\b|\[\s*['"]content['"]\s*\]|\.get\(\s*['"]content['"])|\bcontent\s+is\s+(string|iterable)"""
)


class _Generation(Extension):  # type: ignore[misc]
    """``{% generation %}``, which marks assistant text for training, is only a scope here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):  # type: ignore[misc]
    """``namespace`` without names that Python gives a meaning."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_Namespace,
        dict=lambda *args, **kw: dict(*args, **kw),
    )
    return env


class ChatTemplate:
    """The chat template of a model, or several by name.

    Args: sources: template text by name; of several, "tool_use" is taken for requests with tools, else "default".
        variables: what every rendering sees, such as ``bos_token``.
    Raises: TemplateError for a template that does not compile.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        self._sources = dict(sources)
        self.text = "\n".join(self._sources.values())
        env = environment()
        self._compiled = {name: env.from_string(text) for name, text in sources.items()}
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt's text.

        ``add_generation_prompt`` None: unless the last message is to be continued. Raises: RequestError, with the message
        of a template that refuses the conversation.
        """
        name = self._choose(tools)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true", param="add_generation_prompt"
            )
        chat = [_normalize(m, self._sources[name]) for m in _plain(messages, "messages")]
        mark = _mark_end(chat) if continue_final_message else ""
        try:
            text = self._compiled[name].render(
                messages=chat,
                tools=_plain(tools, "tools"),
                documents=_plain(documents, "documents"),
                add_generation_prompt=not continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt,
                **{**self._variables, **_plain(variables, "chat_template_kwargs")},
            )
        except RequestError:
            raise
        except Exception as e:  # a template is a program of its own: whatever it does not expect is the request's fault
            raise RequestError(f"the chat template refused the messages: {_first_line(e)}", param="messages") from e
        return _cut(text, mark) if mark else text

    def _choose(self, tools: object) -> str:
        if tools and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        raise RequestError(
            f"this model has chat templates {sorted(self._sources)} and none is the default; set model.chat_template",
            code="unsupported_value",
            param="messages",
        )


def _first_line(e: Exception) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0][:500]


def _plain(value: Any, param: str) -> Any:
    """A copy made of JSON types only: a template sees no object whose methods the sandbox does not know."""

    def mapping(x: Any) -> dict[str, Any]:
        if isinstance(x, Mapping):
            return dict(x)
        raise TypeError(f"{type(x).__name__} is not a JSON type")

    try:
        return json.loads(json.dumps(value, default=mapping))
    except (TypeError, ValueError, RecursionError) as e:
        raise RequestError(f"{param}: {_first_line(e)}", code="invalid_type", param=param) from e


def _normalize(message: Any, template: str) -> dict[str, Any]:
    """One message as templates expect it: no null fields, reasoning under every name, arguments of calls as objects, text
    parts joined unless the template takes parts itself, "developer" as "system" unless the template knows it."""
    if not isinstance(message, dict):
        raise RequestError(
            f"a message must be an object, not {type(message).__name__}", code="invalid_type", param="messages"
        )
    m = {k: v for k, v in message.items() if v is not None}
    reasoning = next((m[k] for k in REASONING if k in m), None)
    if reasoning is not None:
        m = {**dict.fromkeys(REASONING, reasoning), **m}
    if m.get("role") == "developer" and "developer" not in template:
        m["role"] = "system"
    content = m.get("content")
    if isinstance(content, list) and not _LISTS.search(template):
        m["content"] = _joined(content)
    if isinstance(m.get("tool_calls"), list):
        m["tool_calls"] = [_call(c) for c in m["tool_calls"]]
    return m


def _joined(parts: list[Any]) -> str:
    texts = []
    for j, part in enumerate(parts):
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise RequestError(
                f"content part {j} has no text; this model reads text only", code="unsupported_value", param="messages"
            )
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any) -> Any:
    """A tool call whose ``arguments`` are an object if they are JSON of one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Put a mark at the end of the last message, where the rendered text is to be cut."""
    mark = f"[end-{secrets.token_hex(8)}] "  # the space shows whether the template trims
    last = chat[-1] if chat else {}
    content = last.get("content")
    parts = (
        [p for p in content if isinstance(p, dict) and isinstance(p.get("text"), str)]
        if isinstance(content, list)
        else []
    )
    if isinstance(content, str):
        last["content"] = content + mark
    elif parts:
        parts[-1]["text"] += mark
    else:
        raise RequestError("continue_final_message: the last message has no text to continue", param="messages")
    return mark


def _cut(text: str, mark: str) -> str:
    """Rendered text up to the mark; without trailing spaces if the template trims its messages."""
    at = text.rfind(mark.rstrip())
    if at < 0:
        raise RequestError(
            "continue_final_message: this chat template does not show the last message as it is", param="messages"
        )
    return text[:at] if text.startswith(mark, at) else text[:at].rstrip()


def compile_template(sources: Mapping[str, str], variables: Mapping[str, Any]) -> ChatTemplate | None:
    """None without sources. Raises: ValueError naming the line of a syntax error."""
    try:
        return ChatTemplate(sources, variables) if sources else None
    except jinja2.TemplateSyntaxError as e:
        raise ValueError(f"line {e.lineno}: {e.message}") from e
