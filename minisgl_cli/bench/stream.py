"""``minisgl bench stream``: what streaming costs: chunks a second and times to the first byte, of a server whose engine replays
tokens, and in the same run of a bare Starlette endpoint that sends the same bytes."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minisgl.base.errors import ConfigError, Fault
from minisgl_cli.bench.host import number
from minisgl_cli.bench.report import bar_plot, check_plot, json_line, table

PROMPT = "hi"
LETTER = "~"  # of every token; the client counts it, and nothing else of a stream has it
PATH = "/v1/completions"
SAMPLE_PACE = 500.0  # tokens a second of the stream whose frames the bare endpoint repeats: one in each
TARGET_CHUNKS, TARGET_P99_MS = 30_000, 50.0


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--connections", type=number, default=256, metavar="N", help="streams at once (256)")
    parser.add_argument("--tokens", type=number, default=500, metavar="N", help="chunks of each stream (500)")
    parser.add_argument(
        "--pace", type=float, default=0.0, metavar="N", help="tokens a second of the engine; 0: as many as it can"
    )
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="length of each measurement (10)")
    parser.add_argument("--new-rate", type=number, default=500, metavar="N", help="new requests a second (500)")
    parser.add_argument("--new-tokens", type=number, default=4, metavar="N", help="tokens of each of those (4)")
    parser.add_argument("--api-workers", type=number, default=1, metavar="N", help="processes that speak HTTP (1)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw chunks a second and times to the first byte")


def run(argv: list[str]) -> int:
    """Measure and report; returns the exit code."""
    parser = ArgumentParser(prog="minisgl bench stream", allow_abbrev=False)
    arguments(parser)
    args = parser.parse_args(argv)
    if args.plot is not None:
        check_plot(args.plot)
    if args.seconds <= 0 or args.pace < 0:
        raise ConfigError(
            f"--seconds {args.seconds:g}, --pace {args.pace:g}: seconds are above 0, a pace is at least 0"
        )
    with tempfile.TemporaryDirectory(prefix="stream-") as folder:
        ours, frames = measure_minisgl(args, Path(folder))
    bare = measure_bare(args, frames)
    rows = {"minisgl": ours, "bare Starlette": bare}
    shown = [
        {"server": name, **{k: v for k, v in row.items() if not k.startswith("cpu")}} for name, row in rows.items()
    ]
    table(f"bench stream: {args.connections} connections, {args.api_workers} api process(es)", shown)
    cores = [{"server": name, **{k: v for k, v in row.items() if k.startswith("cpu")}} for name, row in rows.items()]
    for row in cores:
        table("cores in use while streaming", [row])
    met = {"chunks_s": ours["chunks_s"] >= TARGET_CHUNKS, "p99_ms": ours["p99_ms"] < TARGET_P99_MS}
    settings = {key: value for key, value in vars(args).items() if key != "plot"}
    json_line("stream", settings=settings, minisgl=ours, bare=bare, at_least_chunks_s=TARGET_CHUNKS, met=met)
    if args.plot is not None:
        series = {name: [row["chunks_s"], row["p99_ms"] * 1e3] for name, row in rows.items()}
        bar_plot(args.plot, "Streaming", ["chunks a second", "p99 to first byte, us"], series, "")
    return 0


def measure_minisgl(args: Any, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What was measured, and the frames of one stream."""
    from minisgl.testing.bytemodel import byte_ids, write_byte_model
    from minisgl.testing.server import Server

    model, script = write_byte_model(folder / "model", 4096), folder / "script.json"

    def replay(pace: float) -> None:
        delay = args.connections / pace if pace else 0.0
        reply = byte_ids(LETTER) * args.tokens
        rule = {"prompt": byte_ids(PROMPT), "replies": [reply]}
        new = script.with_suffix(".new")
        new.write_text(json.dumps({"rules": [rule], "step_delay_s": delay}))
        new.replace(script)  # at once: the engine may read at any time

    replay(SAMPLE_PACE * args.connections)
    options = ["--model", str(model), "--executor", "scripted", "--executor.scripted.script", str(script)]
    options += ["--executor.scripted.check", "false", "--limits.max-running", str(max(64, args.connections))]
    options += ["--kv.num-pages", str(64 * args.connections), "--api-workers", str(args.api_workers)]
    with Server(*options) as server:
        frames = one_stream(server.port, body(args.tokens))
        pids = {role: pid for pid, role in server.processes.items()}
        replay(0)
        new = first_bytes(args, server.port)
        replay(args.pace)
        return {**streaming(args, server.port, pids), **new}, frames


def measure_bare(args: Any, frames: list[str]) -> dict[str, Any]:
    with peer(frames) as (port, pid):
        streams = streaming(args, port, {"server": pid})
    with peer([*frames[: args.new_tokens], frames[-1]]) as (port, _):
        return {**streams, **first_bytes(args, port)}


def body(tokens: int) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}


def one_stream(port: int, request: Mapping[str, Any]) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", PATH, json.dumps(request), {"Content-Type": "application/json"})
    text = connection.getresponse().read().decode()
    connection.close()
    return [f"{frame}\n\n" for frame in text.removesuffix("\n\n").split("\n\n")]


@contextmanager
def peer(frames: list[str]) -> Iterator[tuple[int, int]]:
    """Port and pid of the bare endpoint."""
    command = [sys.executable, "-m", "minisgl_cli.bench.stream_peer", json.dumps(frames)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            word, _, port = process.stdout.readline().partition(" ")
            if word != "ready":
                raise Fault("the bare endpoint did not start; its message is above", role="peer")
            yield int(port), process.pid
        finally:
            process.kill()


# ---------------------------------------------------------------------------------------------------------- measurements


def streaming(args: Any, port: int, pids: Mapping[str, int]) -> dict[str, Any]:
    """Chunks a second over all connections, and the share of a core that each process took."""
    got, cpu = client(
        {"what": "throughput", "port": port, "body": body(args.tokens), "connections": args.connections}
        | {"warm_s": 1.0 + args.seconds / 10, "seconds": args.seconds},
        pids,
    )
    per_second = got["chunks"] / got["seconds"]
    shares = {f"cpu_{role}": used / got["seconds"] for role, used in cpu.items()}
    api = sum(used for role, used in cpu.items() if role.startswith(("api", "server")))
    return {
        "chunks_s": per_second,
        "tokens_a_chunk": got["tokens"] / got["chunks"],
        "us_a_chunk": 1e6 * api / got["chunks"],
        "cpu_client": got["client_cpu_s"] / got["seconds"],
        "cpu": sum(shares.values()),
        **{role: share for role, share in shares.items() if role != "cpu_supervisor"},
    }


def first_bytes(args: Any, port: int) -> dict[str, Any]:
    """From the moment a request is due to its first byte, each on a connection of its own."""
    what = {"what": "first_bytes", "port": port, "body": body(args.new_tokens), "rate": args.new_rate}
    got, _ = client(what | {"seconds": args.seconds}, {})
    return {key: got[key] for key in ("p50_ms", "p90_ms", "p99_ms", "max_ms")}


def client(what: Mapping[str, Any], pids: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, float]]:
    """Run the client process. Returns: what it says, and the CPU seconds of ``pids`` while it counted."""
    command = [sys.executable, "-m", "minisgl_cli.bench.stream_client", json.dumps({"path": PATH, **what})]
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said: dict[str, Any] = {}
        for line in process.stdout:
            said = json.loads(line)
            if said.get("at") == "begin":
                before = cpu_seconds(pids)
            elif said.get("at") == "end":
                after = cpu_seconds(pids)
    if process.returncode:
        raise Fault("the client of the benchmark failed; its message is above", role="client")
    return said, {role: after[role] - before[role] for role in pids}


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """User and system time of processes so far."""
    tick = os.sysconf("SC_CLK_TCK")
    fields = {role: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for role, pid in pids.items()}
    return {role: (int(f[11]) + int(f[12])) / tick for role, f in fields.items()}
