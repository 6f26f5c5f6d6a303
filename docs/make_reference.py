"""Writes the tables of reference.md that follow from the code: ``python docs/make_reference.py``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from minisgl.base import bounds
from minisgl.config.names import ALIASES
from minisgl.config.schema import CORE_SECTIONS
from minisgl.plugin.kinds import KINDS
from minisgl.plugin.registry import Registry
from minisgl_cli.options import default_text
from minisgl_plugins.frontend import anthropic_about, openai_about, responses_about
from minisgl_plugins.frontend.openai_fields import OpenAISettings

PAGE = Path(__file__).with_name("reference.md")


def row(*cells: str) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def option(path: tuple[str, ...], field: Any) -> str:
    short = {v: k for k, v in ALIASES.items()}.get(path)
    flag = f"--{(short or '.'.join(path)).replace('_', '-')}"
    return row(f"`{'.'.join(path)}`", f"`{flag}`", f"`{default_text(field) or 'none'}`", field.description or "")


def settings_table() -> str:
    lines = [row("setting", "flag", "default", "meaning"), "|---|---|---|---|"]
    for section, model in CORE_SECTIONS.items():
        for name, field in model.model_fields.items():
            lines.append(option((section, field.alias or name), field))
    return "\n".join(lines)


def plugins_table() -> str:
    """The bundled plugins of each kind and their options."""
    registry = Registry.scan(bundled_only=True)
    lines = [row("kind", "plugins", "default", "loaded in"), "|---|---|---|---|"]
    options = [row("setting", "flag", "default", "meaning"), "|---|---|---|---|"]
    for kind in KINDS.values():
        if kind.base is None:
            continue
        names = ", ".join(f"`{n}`" for n in registry.names(kind.name)) or "none bundled"
        default = kind.default if isinstance(kind.default, str) else ", ".join(kind.default)
        chosen = f"`{default or 'none'}`" if kind.by_config else "by the model, reference or command"
        lines.append(row(f"`{kind.name}`", names, chosen, ", ".join(kind.roles)))
        for name in registry.names(kind.name):
            for key, field in registry.load(kind.name, name).Settings.model_fields.items():
                options.append(option((kind.name, name, key), field))
    return "\n".join([*lines, "", "Options of the bundled plugins:", "", *options])


def kind(schema: dict[str, Any]) -> str:
    """A field's type and limits in words."""
    if "anyOf" in schema:
        return " or ".join(kind(form) for form in schema["anyOf"] if form.get("type") != "null")
    if "enum" in schema:
        given = [value for value in schema["enum"] if value is not None]
        if "type" in schema:
            return ", ".join(f"`{value}`" for value in given)
        return "refused" + ("" if not given else ", but for " + ", ".join(f"`{json.dumps(value)}`" for value in given))
    types = schema.get("type", "any")
    name = types if isinstance(types, str) else types[0]
    name += f" of {kind(schema['items'])}" if schema.get("items", {}).get("type") in ("string", "integer") else ""
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is not None and high >= bounds.INT31_MAX - 1:
        high = None
    if low is not None and high is not None:
        return f"{name}, {low:g} to {high:g}"
    return name if low is None else f"{name}, at least {low:g}"


def fields_table() -> str:
    """The top-level fields of each route's body, from what its reader asks for."""
    settings = OpenAISettings()
    routes = {
        "chat": openai_about.chat(settings),
        "completions": openai_about.completions(settings),
        "responses": responses_about.responses(settings),
        "messages": anthropic_about.messages(settings),
        "count_tokens": anthropic_about.COUNT_TOKENS,
        "tokenize": openai_about.TOKENIZE,
        "detokenize": openai_about.DETOKENIZE,
    }
    found: dict[tuple[str, str], list[str]] = {}
    for route, about in routes.items():
        assert about.body is not None
        schema = about.body.schema()
        for name, of_field in schema["properties"].items():
            needed = " (required)" if name in schema.get("required", ()) else ""
            found.setdefault((name, kind(of_field)), []).append(route + needed)
    lines = [row("field", "value", "routes"), "|---|---|---|"]
    return "\n".join([*lines, *(row(f"`{name}`", text, ", ".join(found[name, text])) for name, text in sorted(found))])


def filled(text: str) -> str:
    """``text`` with the generated parts between their marks made anew."""
    tables = {"settings": settings_table(), "plugins": plugins_table(), "fields": fields_table()}
    for mark, table in tables.items():
        pattern = re.compile(f"(<!-- {mark} -->\n).*?(<!-- end {mark} -->)", re.DOTALL)
        assert pattern.search(text), f"{PAGE.name} has no mark {mark!r}"
        text = pattern.sub(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
