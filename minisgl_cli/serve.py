"""``minisgl serve``: an OpenAI-compatible server."""

from __future__ import annotations

from minisgl_cli.options import parse


def run(argv: list[str]) -> int:
    """Serve until Ctrl+C or SIGTERM; returns the exit code."""
    loaded, registry, hooks, _ = parse(argv, verb="serve")
    from minisgl.launch.supervisor import Supervisor
    from minisgl.observe.logs import set_logging

    set_logging("supervisor", loaded.settings.log)
    return Supervisor(loaded.settings, registry, hooks).run()
