"""What the verbs share: from a command line to settings, and the help that lists them."""

from __future__ import annotations

import difflib
import logging
import sys
from argparse import ArgumentParser, HelpFormatter, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from minisgl.base.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from minisgl.config.load import Loaded
    from minisgl.plugin.hooks import Hooks
    from minisgl.plugin.registry import Registry

WIDTH, COLUMN = 110, 34


def parse(
    argv: Sequence[str], *, verb: str, extra: Callable[[ArgumentParser], None] | None = None
) -> tuple[Loaded, Registry, Hooks, Namespace]:
    """Settings from a verb's command line.

    Args: verb: for the usage line. extra: adds the verb's own arguments.
    Returns: the settings, registry and hooks that belong to them, and the verb's own arguments.
    Raises: ConfigError, PluginError; SystemExit after --help or for a wrong argument of the verb.
    """
    from minisgl.config.layers import split_options
    from minisgl.config.load import load_settings

    options, rest = split_options(argv)
    parser = _parser(verb, extra)
    own = rest[: rest.index("--")] if "--" in rest else rest
    if {"-h", "--help", "--help-all"} & set(own):
        sys.stdout.write(parser.format_help() + "\n" + settings_help(plugins="--help-all" in own))
        raise SystemExit(0)
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        raise ConfigError(_unknown(unknown[0], parser))
    settings = [f"{e.where}={e.value}" for e in options.entries]
    loaded = load_settings(argv=settings, files=args.config, plugins=args.plugin)
    return loaded, loaded.registry, loaded.hooks, args


def set_logging(loaded: Loaded) -> None:
    """For verbs whose output is the terminal's: warnings are shown, and more if ``log.level`` is set."""
    level = loaded.settings.log.level if ("log", "level") in loaded.origins else "warning"
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def _parser(verb: str, extra: Callable[[ArgumentParser], None] | None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"minisgl {verb}",
        usage=f"minisgl {verb} [options] [settings]" if extra is None else None,
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: HelpFormatter(prog, max_help_position=COLUMN, width=WIDTH),
    )
    if extra is not None:
        extra(parser)
    shared = parser.add_argument_group("configuration")
    shared.add_argument(
        "--config", action="append", type=Path, default=[], metavar="FILE", help="TOML file with settings; repeatable"
    )
    shared.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="hook plugin to enable, or module:attr; repeatable",
    )
    shared.add_argument("-h", "--help", action="store_true", help="this help")
    shared.add_argument("--help-all", action="store_true", help="this help with the options of all plugins")
    return parser


def _unknown(argument: str, parser: ArgumentParser) -> str:
    from minisgl.config.names import ALIASES, KIND_SECTIONS

    name = argument.partition("=")[0]
    short = [f"--{s.replace('_', '-')}" for s in (*ALIASES, *KIND_SECTIONS)]
    own = [s for action in parser._actions for s in action.option_strings]
    near = difflib.get_close_matches(name, [*short, *own], n=1)
    what = "option" if argument.startswith("-") else "argument"
    return f"config: unknown {what} {name}" + (f"; did you mean {near[0]}?" if near else f"; see {parser.prog} --help")


# ------------------------------------------------------------------------------------------------------- help
def settings_help(plugins: bool) -> str:
    """Every setting, by section, with its default. ``plugins``: also the options of all plugins, which imports them."""
    from minisgl.config.names import KIND_SECTIONS, spell
    from minisgl.config.schema import CORE_SECTIONS
    from minisgl.plugin.kinds import KINDS
    from minisgl_cli.main import scan

    lines = ["settings (also in minisgl.toml and as MINISGL_<SECTION>__<KEY>):"]
    for section, model in CORE_SECTIONS.items():
        lines.append(f"\n  [{section}]")
        for name, f in model.model_fields.items():
            option = spell((section, f.alias or name), "option")
            lines += _entry(option, help_text(f), default_text(f))
    registry = scan()
    lines.append("\n  plugins, by kind")
    for kind in KIND_SECTIONS:
        default = KINDS[kind].default
        shown = default if isinstance(default, str) else ",".join(default)
        several = ", one or a,b,c" if KINDS[kind].many else f", one or {m}" if (m := KINDS[kind].names_mean) else ""
        doc = f"{KINDS[kind].doc}{several}: {', '.join(registry.names(kind))}"
        lines += _entry(spell((kind, "use"), "option"), doc, shown)
    if plugins:
        for kind in KIND_SECTIONS:
            for name in registry.names(kind):
                lines += _plugin_help(registry, kind, name)
    return "\n".join(lines) + "\n"


def _plugin_help(registry: Registry, kind: str, name: str) -> Iterator[str]:
    try:
        options = registry.load(kind, name).Settings.model_fields
    except PluginError as exc:
        yield f"\n  [{kind}.{name}]  cannot be loaded: {str(exc).splitlines()[0]}"
        return
    if options:
        yield f"\n  [{kind}.{name}]"
    for key, f in options.items():
        yield from _entry(f"--{kind}.{name}.{key}".replace("_", "-"), help_text(f), default_text(f))


def _entry(option: str, description: str, default: str) -> list[str]:
    first, *more = wrap(f"{description} [{default}]" if default else description, WIDTH - COLUMN) or [""]
    head = f"  {option}"
    lines = [f"{head:<{COLUMN}}{first}"] if len(head) < COLUMN - 1 else [head, " " * COLUMN + first]
    return [*lines, *(" " * COLUMN + line for line in more)]


def help_text(f: Any) -> str:
    """The description of a pydantic field, with the words that it accepts."""
    words = [str(w) for w in get_args(f.annotation)] if get_origin(f.annotation) is Literal else []
    return "; ".join(filter(None, [f.description, " | ".join(words)]))


def default_text(f: Any) -> str:
    """The default of a pydantic field as a user would write it; "" for none."""
    value = f.get_default(call_default_factory=True)
    if value is None or f.is_required() or hasattr(value, "get_secret_value"):
        return "required" if f.is_required() else ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple, set, frozenset)):
        return ",".join(map(str, value))
    return "" if value == {} else str(value)
