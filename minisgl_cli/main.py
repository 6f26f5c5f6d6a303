"""``minisgl VERB``: the one console command. Verbs are imported when they are called, never for a listing."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from minisgl.base.errors import EXIT_CONFIG, MiniSGLError, UnknownPlugin

if TYPE_CHECKING:
    from minisgl.plugin.registry import Registry

# verb -> (module with run(argv) -> exit code, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "serve": ("minisgl_cli.serve", "run the server"),
    "generate": ("minisgl_cli.generate", "answer one prompt on the terminal"),
    "bench": ("minisgl_cli.bench", "measure speed"),
    "simulate": ("minisgl_cli.simulate", "compare policies on a simulated device"),
    "plugins": ("minisgl_cli.plugins", "list, show and check plugins"),
    "config": ("minisgl_cli.config", "show and check settings"),
    "version": ("minisgl_cli.version", "print versions"),
}
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns: the exit code; 78 for a wrong setting or plugin, 70 for a fault, 130 for Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    if sys.platform != "linux":
        print(f"error: minisgl runs on Linux; this is {sys.platform}", file=sys.stderr)
        return EXIT_CONFIG
    see_current_folder()
    try:
        code = dispatch(args)
        sys.stdout.flush()
    except MiniSGLError as exc:
        text = str(exc)
        print(text if text.startswith("config:") else f"error: {text}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def see_current_folder() -> None:
    """--plugin names modules of the current folder too, as with python -m; it comes last, to shadow nothing."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def dispatch(args: list[str]) -> int:
    verb, rest = (args[0], args[1:]) if args else ("--help", [])
    if verb in ("-h", "--help", "help"):
        print(usage(scan()))
        return 0
    if verb in ("-V", "--version"):
        verb = "version"
    if verb in VERBS:
        run = import_module(VERBS[verb][0]).run
        return int(run(rest))
    return run_command(scan(), verb, rest)


def scan() -> Registry:
    """The registry as the environment alone wants it: reading the files would need the settings' models, and time."""
    from minisgl.plugin.registry import Registry

    disable = [name.strip() for name in os.environ.get("MINISGL_PLUGINS__DISABLE", "").split(",") if name.strip()]
    return Registry.scan(disable=disable, bundled_only=os.environ.get("MINISGL_PLUGINS__SCAN") == "bundled")


def usage(registry: Registry) -> str:
    verbs = [(verb, line) for verb, (_, line) in VERBS.items()]
    more = [(name, f"from {registry.ref('command', name).package}") for name in command_names(registry)]
    width = max(len(verb) for verb, _ in (*verbs, *more))
    lines = ["usage: minisgl VERB ...", "", *(f"  {verb:<{width}}  {line}" for verb, line in verbs)]
    if more:
        lines += ["", "of plugins:", *(f"  {verb:<{width}}  {line}" for verb, line in more)]
    return "\n".join([*lines, "", "minisgl VERB --help shows what a verb takes."])


def command_names(registry: Registry) -> list[str]:
    """Verbs of plugins that can be called; built-in ones cannot be replaced."""
    return [name for name in registry.names("command") if name not in VERBS]


def run_command(registry: Registry, verb: str, argv: list[str]) -> int:
    """Import a plugin's verb and run it. Its own failure to load is the only one that is shown."""
    from minisgl.plugin.command import CommandContext
    from minisgl.plugin.registry import did_you_mean

    if not any(r.name == verb for r in registry.refs("command")):
        known = [*VERBS, *command_names(registry)]
        raise UnknownPlugin(f"there is no verb {verb!r}.{did_you_mean(verb, known)} Verbs: {', '.join(known)}")
    command = registry.create("command", verb, {}, lambda s: CommandContext(s, registry))
    parser = ArgumentParser(prog=f"minisgl {verb}", description=command.help)
    command.arguments(parser)
    return int(command.run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
