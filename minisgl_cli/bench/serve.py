"""``minisgl bench serve``: latency under load, of a server that runs or of one that it starts."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from minisgl.base.errors import ConfigError, Fault
from minisgl_cli.bench.arrivals import Asking, Slo, play, renamed, summary
from minisgl_cli.bench.client import target
from minisgl_cli.bench.offline import positive
from minisgl_cli.bench.report import check_plot, json_line, table
from minisgl_cli.bench.server import started
from minisgl_cli.bench.workloads import VOCAB
from minisgl_cli.options import parse, set_logging
from minisgl_cli.simulate.options import load_arguments, natural, number, synthetic
from minisgl_cli.simulate.plot import load_plot
from minisgl_cli.simulate.synthetic import draw
from minisgl_cli.simulate.trace import read_trace
from minisgl_cli.simulate.workload import Request, at_rate, rate_of

if TYPE_CHECKING:
    from minisgl.config.load import Loaded

WARM_UP, WARM_OUTPUT = 8, 4  # requests and their tokens
KEY = ("server", "api_key")


@dataclass(frozen=True, slots=True)
class Server:
    """``about``: what it says of itself; ``max_len``: of its model, if it tells."""

    url: str
    about: str
    model: str
    max_len: int | None


def server_arguments(parser: ArgumentParser, temperature: float = 0.6) -> _ArgumentGroup:
    """Which server, and how it is asked."""
    where = parser.add_argument_group("server")
    where.add_argument(
        "--base-url", metavar="URL", help="a server that runs; without it one is started with the settings, and ended"
    )
    where.add_argument(
        "--temperature", type=number(0, 2), default=temperature, metavar="T", help="of sampling; 0 is greedy"
    )
    where.add_argument("--timeout-s", type=number(0.001), default=600.0, metavar="S", help="of a request")
    return where


def arguments(parser: ArgumentParser) -> None:
    where = server_arguments(parser)
    where.add_argument("--vocab", type=positive, default=VOCAB, metavar="N", help="prompt tokens are below N")
    load_arguments(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--bench-seed", type=natural, default=0, metavar="N", help="of made-up requests")
    out.add_argument("--slo-ttft", type=number(0), metavar="MS", help="goodput: limit of the time to the first token")
    out.add_argument(
        "--slo-itl", type=number(0), metavar="MS", help="goodput: limit of a request's mean between tokens"
    )
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw latency over load to FILE")


def run(argv: list[str]) -> int:
    """Measure and report; returns the exit code, 70 if no request was answered."""
    loaded, _, _, args = parse(argv, verb="bench serve", extra=arguments)
    set_logging(loaded)
    if args.plot is not None:
        check_plot(args.plot)
        if float("inf") in (args.rate or ()):
            raise ConfigError("--plot draws latency over the rate; --rate inf has no place on it")
    source, requests = requests_of(args)
    slo = Slo(args.slo_ttft, args.slo_itl)
    key = loaded.settings.server.api_key.get_secret_value().split(",")[0].strip()
    with server_of(args, argv, loaded, key) as server:
        check_room(server, requests)
        asking = Asking(target(server.url, key), server.model, args.vocab, args.temperature, args.timeout_s)
        warm_up(asking, requests)
        results = [measure(asking, requests, rate, i, slo) for i, rate in enumerate(args.rate or [None])]
    report(args, server, source, slo, results)
    return 0 if any(r["requests"] for r in results) else Fault.exit_code


def requests_of(args: Namespace) -> tuple[str, list[Request]]:
    """What the requests are called, and they."""
    made_up = synthetic(args)
    if args.trace is None:
        return "synthetic", draw(made_up, args.bench_seed)
    form, requests = read_trace(args.trace, args.requests)
    return f"{form.name} {args.trace.name}", requests


@contextmanager
def server_of(args: Namespace, argv: Sequence[str], loaded: Loaded, key: str) -> Iterator[Server]:
    """The one that is named, or one that lives as long as this. Raises: ConfigError, Fault."""
    if args.base_url is not None:
        for path, origin in loaded.origins.items():
            if origin.where.startswith("--") and path[:2] != KEY:
                raise ConfigError(
                    f"config: {origin.where} is a setting of a server, and --base-url names one that runs"
                )
        yield known(args.base_url, args.base_url, key)
        return
    with started(server_options(args, argv)) as (url, about):
        yield known(url, about, key)


def server_options(args: Namespace, argv: Sequence[str]) -> list[str]:
    """What of the command line is for the server. Raises: ConfigError for a port."""
    from minisgl.config.layers import split_options

    words = [f"{option}={value}" for option in ("config", "plugin") for value in getattr(args, option)]
    given = [f"{e.where}={e.value}" for e in split_options(argv)[0].entries]
    if any(word.startswith(("--port=", "--server.port=")) for word in given):
        raise ConfigError(
            "config: --port: bench serve starts its server on a free port; --base-url names one that runs"
        )
    return ["--log.level=warning", *(f"--{word}" for word in words), *given]


def known(url: str, about: str, key: str) -> Server:
    """Ask for its model. Raises: Fault if it does not answer as the API has it."""
    where = (url if "//" in url else f"http://{url}").rstrip("/").removesuffix("/v1") + "/v1/models"
    ask = HttpRequest(where, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urlopen(ask, timeout=30) as answer:
            model = json.load(answer)["data"][0]
        return Server(url, about, str(model["id"]), model.get("max_model_len"))
    except HTTPError as exc:
        raise Fault(
            f"{where} answered {exc.code} {exc.reason}; a server that needs a key gets that of --api-key"
        ) from exc
    except (URLError, OSError, ValueError, LookupError, TypeError) as exc:
        raise Fault(f"{where} did not say which models there are: {type(exc).__name__}: {exc}") from exc


def check_room(server: Server, requests: Sequence[Request]) -> None:
    longest = max(r.input_len + r.output_len for r in requests)
    if server.max_len is not None and longest > server.max_len:
        raise ConfigError(
            f"a request has {longest} tokens with its output, and {server.model} takes {server.max_len}; give smaller lengths"
        )


def warm_up(asking: Asking, requests: Sequence[Request]) -> None:
    """A few short answers together. Raises: ConfigError with the server's reason if it refuses one."""
    few = [replace(r, at_s=0.0, follows=None, output_len=min(WARM_OUTPUT, r.output_len)) for r in requests[:WARM_UP]]
    for answer in play(renamed(few, -1), asking).answers:
        if answer.error:
            hint = f"; prompt tokens are below --vocab {asking.vocab}" if 400 <= answer.status < 500 else ""
            raise ConfigError(f"the server does not serve these requests: {answer.error}{hint}")


def measure(asking: Asking, requests: Sequence[Request], rate: float | None, serial: int, slo: Slo) -> dict[str, Any]:
    """One rate; None: as they come by themselves."""
    timed = requests if rate is None else at_rate(requests, rate)
    offered = rate_of(requests) if rate is None else rate
    found = summary(play(renamed(timed, serial), asking), timed, slo)
    return {"rate": offered if isfinite(offered) else "inf", **found}


def report(args: Namespace, server: Server, source: str, slo: Slo, results: Sequence[dict[str, Any]]) -> None:
    title = f"bench serve: {source} requests, {server.about}"
    table(title, [throughput(r, slo) for r in results])
    if any(r["requests"] for r in results):
        table("latency in ms", [latency(r) for r in results])
    for reason, times in {k: v for r in results for k, v in r["failures"].items()}.items():
        print(f"failed ({times}): {reason}")
    json_line(
        "serve", server=server.about, model=server.model, source=source, seed=args.bench_seed,
        temperature=args.temperature, slo=asdict(slo), results=list(results),
    )  # fmt: skip
    if args.plot is not None:
        load_plot(args.plot, f"Served: {server.model}, {source} requests", {server.model: results})


def throughput(r: Mapping[str, Any], slo: Slo) -> dict[str, Any]:
    limited = slo != Slo(None, None)
    return {
        "rate": rate_text(r),
        "done": r["requests"],
        "failed": r["failed"],
        "req/s": r["requests_per_s"],
        "in tok/s": r["prompt_tokens_per_s"],
        "out tok/s": r["output_tokens_per_s"],
        "goodput": r["goodput_per_s"] if limited else "-",
        "late p99 ms": r["client"]["late_s"]["p99"] * 1e3,
        "client CPU": f"{r['client']['cpu_share']:.0%}",
    }


def latency(r: Mapping[str, Any]) -> dict[str, str]:
    cells = {"rate": rate_text(r)}
    for key in ("ttft_s", "itl_s", "e2e_s"):
        for percentile in ("p50", "p90", "p99"):
            value = "-" if r[key] is None else f"{r[key][percentile] * 1e3:.4g}"
            cells[f"{key.removesuffix('_s').upper()}\n{percentile}"] = value
    return cells


def rate_text(r: Mapping[str, Any]) -> str:
    return r["rate"] if isinstance(r["rate"], str) else f"{r['rate']:.4g}"
