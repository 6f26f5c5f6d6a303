"""``minisgl simulate``: policies compared in virtual time, with the real scheduler on a device that is only calculated."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from random import Random
from typing import Any

from minisgl.base.errors import ConfigError

KEYS = ("scheduler", "cache", "router")  # of a result: what is compared


@dataclass(frozen=True, slots=True)
class Policy:
    """One combination that is compared. ``router``: None with one engine; ``options``: of it."""

    scheduler: str
    cache: str
    router: str | None
    options: Mapping[str, str]


def run(argv: list[str]) -> int:
    """Simulate and report; returns the exit code."""
    from minisgl_cli.bench.report import check_plot
    from minisgl_cli.options import parse, set_logging
    from minisgl_cli.simulate.options import arguments, check_used, compared

    picked, rest = compared(argv)
    loaded, registry, _, args = parse(rest, verb="simulate", extra=arguments)
    set_logging(loaded)
    check_used(loaded.origins)
    if args.plot is not None:
        check_plot(args.plot)
        if float("inf") in (args.rate or ()):
            raise ConfigError("--plot draws latency over the rate; --rate inf has no place on it")
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no folder {str(args.json.parent)!r}")
    settings = loaded.settings
    routers = args.router if args.replicas > 1 else [None]
    if args.replicas == 1 and (args.router != ["round-robin"] or picked.router_options):
        raise ConfigError("--router chooses between engines; with --replicas 1 there is nothing to choose")
    if unused := sorted(picked.router_options.keys() - set(args.router)):
        raise ConfigError(f"config: --router.{unused[0]} has options, but --router is {','.join(args.router)}")
    schedulers = picked.schedulers or list(settings.use("scheduler"))
    caches = picked.caches or list(settings.use("cache"))
    policies = [
        Policy(scheduler, cache, router, picked.router_options.get(router or "", {}))
        for scheduler, cache, router in product(schedulers, caches, routers)
    ]
    _report(args, _simulate(args, settings, registry, policies))
    return 0


def _simulate(args: Namespace, settings: Any, registry: Any, policies: Sequence[Policy]) -> dict[str, Any]:
    """Results of every policy at every rate, and what they depend on."""
    from minisgl_cli.simulate.calibrate import calibrate
    from minisgl_cli.simulate.cluster import World
    from minisgl_cli.simulate.cost import HARDWARE, Roofline
    from minisgl_cli.simulate.limits import sim_limits
    from minisgl_cli.simulate.shapes import find_shape

    shape, hardware = find_shape(args.shape), HARDWARE[args.hardware]
    cost = Roofline(shape, hardware) if args.calibrate is None else calibrate(args.calibrate)
    limits = sim_limits(settings, shape, hardware)
    source, requests = _requests(args)
    world = World(registry, limits, cost, args.replicas)
    started = time.perf_counter()
    results = [
        _one(args, world, settings, policy, requests, rate) for policy in policies for rate in args.rate or [None]
    ]
    wall = time.perf_counter() - started
    return {
        "shape": shape.name,
        "hardware": hardware.name if args.calibrate is None else str(args.calibrate),
        "loop": settings.use("loop")[0],
        "source": source,
        "replicas": args.replicas,
        "num_pages": limits.num_pages,
        "page_size": limits.page_size,
        "seed": args.sim_seed,
        "results": results,
        "wall_s": wall,
        "simulated_requests_per_wall_s": sum(r["requests"] for r in results) / wall,
    }


def _requests(args: Namespace) -> tuple[str, list[Any]]:
    """What the requests are called, and they."""
    from minisgl_cli.simulate.options import synthetic
    from minisgl_cli.simulate.synthetic import draw
    from minisgl_cli.simulate.trace import read_trace

    made_up = synthetic(args)
    if args.trace is None:
        return "synthetic", draw(made_up, args.sim_seed)
    form, requests = read_trace(args.trace, args.requests)
    return f"{form.name} {args.trace.name}", requests


def _one(
    args: Namespace, world: Any, settings: Any, policy: Policy, requests: Sequence[Any], rate: float | None
) -> dict[str, Any]:
    from minisgl_cli.simulate.cluster import Cluster
    from minisgl_cli.simulate.limits import with_policies
    from minisgl_cli.simulate.workload import at_rate, rate_of

    chosen = with_policies(settings, policy.scheduler, policy.cache, args.sim_seed)
    router = None
    if policy.router is not None:
        from minisgl.client.router import RouterContext

        rng = Random(args.sim_seed)
        router = world.registry.create(
            "router", policy.router, policy.options, lambda s: RouterContext(s, world.replicas, rng)
        )
    timed = requests if rate is None else at_rate(requests, rate)
    found = Cluster(world, chosen, router, timed).run()
    offered = rate_of(requests) if rate is None else rate
    named = {"scheduler": policy.scheduler, "cache": policy.cache, "router": policy.router}
    return {**named, "rate": offered if isfinite(offered) else "inf", **found}


def _report(args: Namespace, found: dict[str, Any]) -> None:
    from minisgl_cli.bench.report import environment, table
    from minisgl_cli.simulate.plot import load_plot

    results = found["results"]
    where = f"{found['replicas']} x {found['shape']} on {found['hardware']}"
    first = results[0]
    fixed = " ".join(f"{k}={first[k]}" for k in KEYS if first[k] and len({r[k] for r in results}) == 1)
    title = f"simulate: {where}, {found['source']} requests, {fixed} loop={found['loop']}"
    table(title, [_policy(r, results) | _throughput(r) for r in results])
    table("latency in ms", [_policy(r, results) | _latency(r) for r in results])
    line = json.dumps({"simulate": found, "environment": environment()})
    print(line, flush=True)
    if args.json is not None:
        args.json.write_text(line + "\n")
    if args.plot is not None:
        series: dict[str, list[Any]] = {}
        for r in results:
            series.setdefault(_label(r, results), []).append(r)
        load_plot(args.plot, f"Simulated: {where}, {found['source']} requests", series)


def _label(r: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """The parts of a policy in which the results differ."""
    keys = [k for k in KEYS if len({x[k] for x in results}) > 1] or ["scheduler"]
    return " ".join(str(r[k]) for k in keys)


def _policy(r: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rate = r["rate"] if isinstance(r["rate"], str) else f"{r['rate']:.4g}"
    return {"policy": _label(r, results), "rate": rate}


def _throughput(r: dict[str, Any]) -> dict[str, Any]:
    def per_s(key: str) -> str:
        return "-" if r[key] is None else _short(r[key])

    return {
        "done": r["requests"],
        "req/s": per_s("requests_per_s"),
        "out tok/s": per_s("output_tokens_per_s"),
        "hits": f"{r['hit_rate']:.1%}",
        "preempted": r["preemptions"],
        "refused": r["refused"],
        "failed": r["failed"],
        "busy": f"{r['busy']:.0%}",
    }


def _latency(r: dict[str, Any]) -> dict[str, str]:
    cells = {}
    for key in ("ttft_s", "itl_s", "e2e_s"):
        for percentile in ("p50", "p90", "p99"):
            value = "-" if r[key] is None else _short(r[key][percentile] * 1e3)
            cells[f"{key.removesuffix('_s').upper()}\n{percentile}"] = value
    return cells


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
