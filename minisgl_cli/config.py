"""``minisgl config show`` and ``config check``."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from minisgl_cli.options import parse

if TYPE_CHECKING:
    from minisgl.config.load import Loaded


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("show", "check"), help="show every setting, or only check them (exit code 78)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON: path -> value, origin, hides")
    parser.add_argument("--diff", action="store_true", help="only what is not a default")


def run(argv: list[str]) -> int:
    loaded, _, _, args = parse(argv, verb="config", extra=arguments)
    if args.action == "check":
        print("The settings are valid.")
        return 0
    rows = [row for row in describe(loaded) if not args.diff or row["origin"] != "default"]
    print(json.dumps(rows, indent=2, default=str) if args.json else _table(rows))
    return 0


def describe(loaded: Loaded) -> Iterator[dict[str, Any]]:
    """Each setting with its origin; secrets are hidden. Options are listed for plugins that are selected or configured."""
    from minisgl.config.names import KIND_SECTIONS
    from minisgl.config.schema import CORE_SECTIONS

    s = loaded.settings
    for section, model in CORE_SECTIONS.items():
        for name, f in model.model_fields.items():
            yield _row(loaded, (section, f.alias or name), getattr(getattr(s, section), name))
    for kind in KIND_SECTIONS:
        used = s.use(kind)
        yield _row(loaded, (kind, "use"), used if len(used) != 1 else used[0])
        given = s.kinds[kind].options if kind in s.kinds else {}
        for name in [*used, *(n for n in given if n not in used)]:
            for key, value in _options(loaded, kind, name).items():
                yield _row(loaded, (kind, name, key), value)


def _options(loaded: Loaded, kind: str, name: str) -> dict[str, Any]:
    """With defaults, if the plugin can be imported without torch; else as they were given."""
    from minisgl.base.errors import PluginError
    from minisgl.plugin.kinds import KINDS

    given = dict(loaded.settings.options(kind, name))
    if name == "auto" or KINDS[kind].torch:
        return given
    try:
        checked = loaded.registry.settings(kind, name, given)
    except PluginError:
        return given
    return {key: getattr(checked, key) for key in type(checked).model_fields}


def _row(loaded: Loaded, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    from minisgl.plugin.shape import is_secret

    exact = loaded.origins.get(path)
    below = [o for p, o in loaded.origins.items() if p[: len(path)] == path]  # a mapping: its keys have the origins
    origin = exact or (below[0] if below else None)
    secret = hasattr(value, "get_secret_value")
    if secret or (is_secret(path[-1]) and isinstance(value, str)):
        set_ = value.get_secret_value() if secret else value
        value = "***" if set_ else ""
    return {
        "path": ".".join(path),
        "value": dict(value) if isinstance(value, dict) else value,
        "origin": origin.where if origin else "default",
        "hides": list(origin.hides) if origin else [],
    }


def _table(rows: list[dict[str, Any]]) -> str:
    shown = [(r["path"], repr(r["value"]), r["origin"], r["hides"]) for r in rows]
    wide = max((len(path) for path, *_ in shown), default=0)
    wider = min(max((len(value) for _, value, *_ in shown), default=0), 32)
    lines = []
    for path, value, origin, hides in shown:
        hidden = f"  (hides {', '.join(hides)})" if hides else ""
        lines.append(f"  {path:<{wide}} = {value:<{wider}}  {origin}{hidden}")
    return "\n".join(lines)
