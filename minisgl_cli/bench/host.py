"""``minisgl bench host``: what scheduling costs the host, without a model: decode steps, admission, the prefix cache."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl_cli.bench.report import Panel, check_plot, json_line, line_plot, table
from minisgl_cli.options import parse, set_logging

if TYPE_CHECKING:
    from minisgl.base.types import Limits
    from minisgl.config.schema import Settings
    from minisgl.plugin.registry import Registry
    from minisgl.sched.scheduler import Scheduler

Rows = Sequence[dict[str, Any]]
STEP_LIMITS = {256: 150.0, 1024: 400.0}  # rows -> most us of a decode step, page 16
MATCH_LIMIT, EVICT_LIMIT = 300.0, 10.0  # us of a prompt of 4096 tokens, of a page


def number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """``1,64,256``."""
    return tuple(number(part) for part in text.split(","))


def cached(text: str) -> tuple[int, ...]:
    found = numbers(text)
    if min(found) < 1 << 14:
        raise ArgumentTypeError(f"{min(found)} cached tokens are too few to measure; at least {1 << 14}")
    return found


def arguments(parser: ArgumentParser) -> None:
    rows, pages, tokens = (1, 64, 256, 1024), (16, 1), (1 << 14, 1 << 16, 1 << 18, 1 << 20)
    parser.add_argument("--rows", type=numbers, default=rows, metavar="N,N", help="rows that decode (1,64,256,1024)")
    parser.add_argument("--page-sizes", type=numbers, default=pages, metavar="N,N", help="tokens per page (16,1)")
    parser.add_argument("--cached", type=cached, default=tokens, metavar="N,N", help="cached tokens (16384 to 1048576)")
    parser.add_argument("--steps", type=number, default=300, metavar="N", help="steps or calls measured of each")
    parser.add_argument("--requests", type=number, default=1000, metavar="N", help="requests that are admitted at once")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growth with rows and with cached tokens")


def run(argv: list[str]) -> int:
    """Measure and report; returns the exit code."""
    loaded, registry, _, args = parse(argv, verb="bench host", extra=arguments)
    set_logging(loaded)
    if args.plot is not None:
        check_plot(args.plot)
    settings = loaded.settings
    from minisgl_cli.bench.host_steps import admission, decode_steps
    from minisgl_cli.bench.sink import text_worker

    make = partial(scheduler, settings, registry)
    with text_worker() as outbox:
        steps = [decode_steps(make, outbox, rows, size, args.steps) for size in args.page_sizes for rows in args.rows]
        admitted = [admission(make, outbox, args.requests, size) for size in args.page_sizes]
    calls = [cache(settings, registry, size, n, args.steps) for size in args.page_sizes for n in args.cached]
    targets = compare(steps, calls)
    picks = {kind: settings.use(kind)[0] for kind in ("scheduler", "cache")}
    table(f"bench host: {' '.join(f'{k}={v}' for k, v in picks.items())}; us and evicted pages per decode step", steps)
    table("admission of requests that share cached prefixes", admitted)
    table("the cache on its own: match of 4096 tokens, insert of 512, evict 1 page and a page of many", calls)
    if targets:
        table("targets", targets)
    json_line("host", picks=picks, steps=steps, admission=admitted, cache=calls, targets=targets)
    if args.plot is not None:
        line_plot(args.plot, f"Host time, {picks['scheduler']} and {picks['cache']}", panels(steps, calls))
    return 0


def scheduler(settings: Settings, registry: Registry, limits: Limits) -> Scheduler:
    """The configured policy and cache, as the engine builds them."""
    from minisgl.engine.build import component, make_scheduler

    return make_scheduler(limits, settings, partial(component, settings, registry))


def cache(settings: Settings, registry: Registry, page_size: int, tokens: int, repeats: int) -> dict[str, Any]:
    from minisgl.base.types import Limits
    from minisgl_cli.bench.host_cache import cache_calls

    limits = Limits(1, tokens, tokens // page_size, page_size, 1)
    return cache_calls(scheduler(settings, registry, limits).cache, page_size, tokens, repeats)


def compare(steps: Rows, calls: Rows) -> list[dict[str, Any]]:
    """What was measured against what is asked for."""
    found = [
        (f"decode step, {s['rows']} rows, page 16", STEP_LIMITS[s["rows"]], s["median_us"])
        for s in steps
        if s["page"] == 16 and s["rows"] in STEP_LIMITS
    ]
    for c in calls:
        if c["cached"] >= 1 << 20:
            where = f"page {c['page']}, {c['cached']} tokens cached"
            found.append((f"match of 4096 tokens, {where}", MATCH_LIMIT, c["match_us"]))
            found.append((f"evict one page, {where}", EVICT_LIMIT, c["evict_1_us"]))
    return [{"what": w, "at_most_us": limit, "median_us": us, "met": us <= limit} for w, limit, us in found]


def panels(steps: Rows, calls: Rows) -> list[Panel]:
    sizes = sorted({s["page"] for s in steps}, reverse=True)

    def line(rows: Rows, size: int, x: str, y: str) -> list[tuple[float, float]]:
        return [(row[x], row[y]) for row in rows if row["page"] == size]

    decode = {f"page {size}, median": line(steps, size, "rows", "median_us") for size in sizes}
    decode |= {f"page {size}, p99": line(steps, size, "rows", "p99_us") for size in sizes}
    names = {"match_us": "match 4096", "insert_us": "insert 512", "evict_1_us": "evict 1 page"}
    tree = {f"{n}, page {size}": line(calls, size, "cached", k) for k, n in names.items() for size in sizes}
    return [
        Panel(
            "Decode step, every page evicted",
            "rows",
            "us",
            decode,
            list(STEP_LIMITS.items()),
            [name for name in decode if name != "page 16, median"],
        ),
        Panel(
            "Prefix cache",
            "cached tokens",
            "us a call, median",
            tree,
            [(1 << 20, MATCH_LIMIT), (1 << 20, EVICT_LIMIT)],
            [name for name in tree if not name.endswith("page 16")],
        ),
    ]
