"""``minisgl plugins list | info | check``. Listing reads metadata alone; what imports a plugin does so in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minisgl.base.errors import EXIT_CONFIG, BrokenPlugin, ConfigError, UnknownPlugin

if TYPE_CHECKING:
    from minisgl.plugin.registry import Ref, Registry

USAGE = """usage: minisgl plugins ACTION ...

  list [--kind KIND] [--json] [--load]   every plugin that is installed, without importing any
  info KIND.NAME [--json]                one plugin: what it is, its options, where it comes from
  check [KIND.NAME | PACKAGE]            import plugins, each in a process of its own, and say what is wrong

list --load, info and check also take settings, --config and --plugin, and then show what hook plugins add."""
IMPORT_TIMEOUT_S = 120.0


def run(argv: list[str]) -> int:
    actions = {"list": list_plugins, "info": info, "check": check}
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] not in actions:
        raise ConfigError(f"config: minisgl plugins has no action {argv[0]!r}; actions: {', '.join(actions)}")
    return actions[argv[0]](argv[1:])


# ------------------------------------------------------------------------------------------------------- list
def list_plugins(argv: list[str]) -> int:
    def arguments(p: ArgumentParser) -> None:
        p.add_argument("--kind", metavar="KIND", help="only this kind")
        p.add_argument("--json", action="store_true", help="as JSON")
        p.add_argument(
            "--load", action="store_true", help="read the configuration and run the hooks that register plugins"
        )

    args, registry, selected = _listing(argv, arguments)
    from minisgl.plugin.kinds import KINDS
    from minisgl.plugin.registry import did_you_mean

    if args.kind is not None and args.kind not in KINDS:
        raise UnknownPlugin(
            f"no plugin kind is named {args.kind!r}.{did_you_mean(args.kind, KINDS)} Kinds: {', '.join(KINDS)}"
        )
    rows = [_row(registry, r, selected) for r in registry.refs(args.kind)]
    if args.json:
        print(json.dumps({"plugins": rows, "problems": registry.problems}, indent=2))
        return 0
    widths = [max((len(row[key]) for row in rows), default=0) for key in ("kind", "name", "package")]
    for row in rows:
        cells = [f"{row[key]:<{w}}" for key, w in zip(("kind", "name", "package"), widths, strict=True)]
        print("  ".join([*cells, row["status"]]).rstrip())
    for problem in registry.problems:
        print(f"note: {problem}", file=sys.stderr)
    return 0


def _listing(argv: list[str], arguments: Any) -> tuple[Namespace, Registry, set[tuple[str, str]]]:
    """Without --load no settings are read, so that neither pydantic nor a plugin is imported."""
    if "--load" in argv or "-h" in argv or "--help" in argv:
        from minisgl_cli.options import parse

        loaded, registry, hooks, args = parse(argv, verb="plugins list", extra=arguments)
        from minisgl.config.names import KIND_SECTIONS

        chosen = {(kind, name) for kind in KIND_SECTIONS for name in loaded.settings.use(kind)}
        return args, registry, chosen | set(hooks.picks())
    from minisgl_cli.main import scan

    parser = ArgumentParser(prog="minisgl plugins list", allow_abbrev=False)
    arguments(parser)
    return parser.parse_args(argv), scan(), set()


def _row(registry: Registry, ref: Ref, selected: set[tuple[str, str]]) -> dict[str, Any]:
    rivals = registry.rivals(ref)
    if ref.unusable:
        status = f"unusable: {ref.unusable}"
    elif rivals:
        status = f"conflict: also in {', '.join(r.package for r in rivals)}"
    else:
        status = "selected" if (ref.kind, ref.name) in selected else "available"
    row = {key: getattr(ref, key) for key in ("kind", "name", "package", "target", "door")}
    return {**row, "status": status}


# ------------------------------------------------------------------------------------------------------- info
def info(argv: list[str]) -> int:
    """Describe one plugin. Returns: 0, or the exit code of the process that imported it."""
    as_json, rest = "--json" in argv, [a for a in argv if a != "--json"]
    if not rest or rest[0].startswith("-"):
        raise ConfigError("config: minisgl plugins info needs a plugin first, as in: minisgl plugins info cache.radix")
    done = _describe(rest)
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        return done.returncode
    print(done.stdout if as_json else _card(json.loads(done.stdout)))
    return 0


def _describe(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "minisgl_cli.describe", *argv]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise BrokenPlugin(f"{argv[0]} was not imported within {IMPORT_TIMEOUT_S:.0f} s") from exc
    if done.returncode != 0 and not done.stderr:
        done.stderr = f"error: {argv[0]} ended the process that imported it, with exit code {done.returncode}\n"
    return done


def _card(d: dict[str, Any]) -> str:
    lines = [f"{d['kind']} {d['name']!r}", f"  {d['doc']}" if d["doc"] else "", ""]
    for key in ("package", "class", "file", "door", "api", "stability"):
        lines.append(f"  {key:<10} {d[key]}")
    if d["hooks"]:
        lines.append(f"  {'hooks':<10} {', '.join(d['hooks'])}")
    if d["added"]:
        lines.append(f"  {'adds':<10} {', '.join(d['added'])}")
    if d["select"]:
        lines.append(f"  {'select':<10} {d['select']}")
    lines += ["", "  options:" if d["options"] else "  no options"]
    for o in d["options"]:
        shown = f" (default {o['default']})" if o["default"] else ""
        lines += [f"    {o['toml']}: {o['type']}{shown}", *([f"        {o['doc']}"] if o["doc"] else [])]
        lines.append(f"        {o['cli']}   {o['env']}".rstrip())
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- check
def check(argv: list[str]) -> int:
    """Import plugins one by one. Returns: 0, or 78 if any of them cannot be used or the scan found something odd."""
    from minisgl.plugin.kinds import KINDS
    from minisgl.plugin.registry import normalize
    from minisgl_cli.options import parse

    def arguments(p: ArgumentParser) -> None:
        p.add_argument("what", nargs="?", metavar="KIND.NAME | PACKAGE", help="only these; default: all")

    _, registry, _, args = parse(argv, verb="plugins check", extra=arguments)
    settings = [a for a in argv if a != args.what]
    refs = [
        r
        for r in registry.refs()
        if args.what in (None, f"{r.kind}.{r.name}") or normalize(r.dist) == normalize(args.what or "")
    ]
    if not refs:
        raise UnknownPlugin(f"no plugin and no package with plugins is named {args.what!r}; see minisgl plugins list")
    bad = 0
    for r in refs:
        used = KINDS[r.kind].base is not None or r.kind == "hooks"
        if r.unusable or not used:
            print(
                f"{r.kind}.{r.name} ({r.package}): UNUSABLE: {r.unusable or 'this version of minisgl has no use for it'}"
            )
            bad += 1
            continue
        done = _describe([f"{r.kind}.{r.name}", *settings])
        failed = done.returncode != 0
        bad += failed
        outcome = (
            f"FAILED\n{_indent(done.stderr)}"
            if failed
            else f"ok, imported in {json.loads(done.stdout)['seconds']:.2f} s"
        )
        print(f"{r.kind}.{r.name} ({r.package}): {outcome}", flush=True)
    if args.what is None:
        for problem in registry.problems:
            print(f"note: {problem}")
            bad += 1
    return EXIT_CONFIG if bad else 0


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())
