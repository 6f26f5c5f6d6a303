"""``python -m minisgl_cli.describe KIND.NAME [settings]``: import one plugin and print what it is, as JSON. A process of its
own, so that a plugin that hangs, exits or prints cannot harm the command that asks."""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
from argparse import ArgumentParser
from contextlib import redirect_stdout
from typing import Any

from minisgl.base.errors import ConfigError, MiniSGLError
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.kinds import KINDS
from minisgl.plugin.registry import Registry
from minisgl_cli.main import see_current_folder
from minisgl_cli.options import default_text, parse


def describe(registry: Registry, hooks: Hooks, what: str) -> dict[str, Any]:
    """Raises: PluginError if ``what``, KIND.NAME, is unknown or broken."""
    kind, dot, name = what.partition(".")
    if not dot or kind not in KINDS:
        raise ConfigError(f"config: {what!r} is no plugin; write KIND.NAME, where KIND is one of {', '.join(KINDS)}")
    started = time.perf_counter()
    if kind == "hooks":
        ref = registry.ref(kind, name)
        enabled = next((p for p in hooks.plugins if p.ref.name == name), None) or Hooks(registry, [name]).plugins[0]
        found, fields, added = enabled.object, {}, [".".join(pick) for pick in enabled.added]
    else:
        found = registry.load(kind, name)
        ref = registry.ref(kind, name)
        fields, added = found.Settings.model_fields, []
    seconds = time.perf_counter() - started
    doc = inspect.getdoc(found) if kind == "hooks" or found.__doc__ else ""
    return {
        "kind": kind,
        "name": name,
        "doc": (doc or "").strip().split("\n\n")[0].replace("\n", " "),
        "package": ref.package,
        "dist": ref.dist,
        "version": ref.version,
        "class": ref.target,
        "file": _file(found),
        "door": ref.door,
        "api": f"v{ref.api}",
        "stability": getattr(found, "stability", "stable"),
        "select": _select(kind, name),
        "hooks": hooks.implemented(found) if kind == "hooks" else [],
        "added": added,
        "options": [_option(kind, name, key, f) for key, f in fields.items()],
        "seconds": seconds,
    }


def _file(found: Any) -> str:
    try:
        return inspect.getsourcefile(found if inspect.ismodule(found) or inspect.isclass(found) else type(found)) or ""
    except TypeError:
        return ""


def _select(kind: str, name: str) -> str:
    if kind == "hooks":
        return f'[plugins] enable = ["{name}"]   --plugin {name}'
    return f'[{kind}] use = "{name}"   --{kind} {name}' if KINDS[kind].by_config else ""


def _option(kind: str, name: str, key: str, f: Any) -> dict[str, str]:
    shown = f.annotation.__name__ if isinstance(f.annotation, type) else str(f.annotation).replace("typing.", "")
    env = "__".join(re.sub(r"\W", "_", part) for part in (kind, name, key))
    settings = KINDS[kind].by_config  # else the options are those of a command line alone
    return {
        "toml": f"[{kind}.{name}] {key}" if settings else f"{kind}.{name}.{key}",
        "env": f"MINISGL_{env.upper()}" if settings else "",
        "cli": f"--{kind}.{name}.{key}".replace("_", "-"),
        "type": shown,
        "default": default_text(f),
        "doc": f.description or "",
    }


def main(argv: list[str]) -> int:
    def arguments(p: ArgumentParser) -> None:
        p.add_argument("what", metavar="KIND.NAME")

    see_current_folder()
    try:
        with redirect_stdout(sys.stderr):  # what a plugin prints is not part of the answer
            _, registry, hooks, args = parse(argv, verb="plugins info", extra=arguments)
            described = describe(registry, hooks, args.what)
    except MiniSGLError as exc:
        text = str(exc)
        print(text if text.startswith("config:") else f"error: {text}", file=sys.stderr)
        return exc.exit_code
    print(json.dumps(described))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
