"""``minisgl serve``: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import sys

from minisgl_cli.options import parse


def run(argv: list[str]) -> int:
    """Serve until Ctrl+C or SIGTERM; returns the exit code."""
    loaded, registry, hooks, _ = parse(argv, verb="serve")
    from minisgl.launch.supervisor import Supervisor

    logging.basicConfig(
        level=loaded.settings.log.level.upper(),
        format="%(asctime)s supervisor %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    return Supervisor(loaded.settings, registry, hooks).run()
