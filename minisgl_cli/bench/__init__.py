"""``minisgl bench NAME``: measurements, each one JSON line, a table and, on request, a plot."""

from __future__ import annotations

from importlib import import_module

BENCHES = {
    "offline": ("minisgl_cli.bench.offline", "tokens per second of named workloads, or in turn with transformers"),
    "serve": ("minisgl_cli.bench.serve", "latency under load, of a server that runs or of one that it starts"),
    "stream": ("minisgl_cli.bench.stream", "stream chunks a second and times to the first byte, without a model"),
    "step": ("minisgl_cli.bench.step", "one decode step: device, host, graphs, changes and sampling"),
    "host": ("minisgl_cli.bench.host", "time of scheduling and of the prefix cache, without a model"),
    "simulator": ("minisgl_cli.bench.simulator", "what minisgl simulate predicts, against the real engine"),
    "schemas": ("minisgl_cli.bench.schemas", "does every answer held to a JSON schema of a public suite fit it"),
    "load": ("minisgl_cli.bench.load", "how fast weights are read, in turn with one sequential read"),
}


def usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in BENCHES.items()]
    return "\n".join(
        ["usage: minisgl bench NAME [options]", "", *lines, "", "minisgl bench NAME --help shows the options."]
    )


def run(argv: list[str]) -> int:
    """Dispatch to one benchmark; returns the exit code."""
    from minisgl.base.errors import ConfigError

    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] not in BENCHES:
        raise ConfigError(f"no benchmark is named {argv[0]!r}; there are: {', '.join(BENCHES)}")
    code: int = import_module(BENCHES[argv[0]][0]).run(argv[1:])
    return code
