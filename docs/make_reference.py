"""Writes the tables of reference.md that follow from the code: ``python docs/make_reference.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from minisgl.config.names import ALIASES
from minisgl.config.schema import CORE_SECTIONS
from minisgl.plugin.kinds import KINDS
from minisgl.plugin.registry import Registry
from minisgl_cli.options import default_text

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


def filled(text: str) -> str:
    """``text`` with the generated parts between their marks made anew."""
    for mark, table in (("settings", settings_table()), ("plugins", plugins_table())):
        pattern = re.compile(f"(<!-- {mark} -->\n).*?(<!-- end {mark} -->)", re.DOTALL)
        assert pattern.search(text), f"{PAGE.name} has no mark {mark!r}"
        text = pattern.sub(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
