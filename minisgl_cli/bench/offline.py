"""``minisgl bench offline``: throughput of batches of random token ids: named workloads, or cases of one's own in one run with
transformers on the same weights."""

from __future__ import annotations

import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from minisgl.base.errors import ConfigError
from minisgl_cli.bench.drive import StepCounter, check_room, prepare, run_jobs, run_waves
from minisgl_cli.bench.drive import measure as measure_workload
from minisgl_cli.bench.peer import TransformersPeer
from minisgl_cli.bench.report import bar_plot, check_plot, json_line, table
from minisgl_cli.bench.workloads import WORKLOADS, Job, Range, Workload, find_workloads
from minisgl_cli.options import parse, set_logging
from minisgl_cli.profile import Tracer, profile_arguments, tracer_of

if TYPE_CHECKING:
    from minisgl.base.types import EngineInfo
    from minisgl.client.pipeline import Pipeline
    from minisgl.config.schema import Settings
    from minisgl.observe import Observer
    from minisgl.plugin.hooks import Hooks
    from minisgl.plugin.registry import Registry


@dataclass(frozen=True, slots=True)
class Case:
    """``requests`` prompts; lengths in tokens, drawn from the ranges (both ends included)."""

    requests: int
    input_len: Range
    output_len: Range

    @property
    def label(self) -> str:
        return f"{self.requests} x {show(self.input_len)} in, {show(self.output_len)} out"


@dataclass(frozen=True, slots=True)
class Load:
    """One drawing of a case: ``prompts`` of token ids, and how many tokens each is to get."""

    prompts: list[list[int]]
    outputs: list[int]


DEFAULT_CASES = (Case(1, (64, 64), (128, 128)), Case(16, (64, 64), (64, 64)), Case(16, (64, 64), (16, 256)))


def show(r: Range) -> str:
    return str(r[0]) if r[0] == r[1] else f"{r[0]}-{r[1]}"


def parse_range(text: str) -> Range:
    low, _, high = text.partition("-")
    found = int(low), int(high or low)
    if not 1 <= found[0] <= found[1]:
        raise ValueError("from the lesser to the greater, at least 1")
    return found


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("at least 1")
    return number


def parse_case(text: str) -> Case:
    """``REQUESTS:INPUT:OUTPUT``, lengths as a number or ``LOW-HIGH``."""
    try:
        requests, inputs, outputs = text.split(":")
        return Case(positive(requests), parse_range(inputs), parse_range(outputs))
    except ValueError as exc:
        raise ArgumentTypeError(
            f"{text!r} is not REQUESTS:INPUT:OUTPUT, each at least 1, for example 16:64:16-256"
        ) from exc


def lengths(text: str) -> Range:
    try:
        return parse_range(text)
    except ValueError as exc:
        raise ArgumentTypeError(f"{text!r} is no number of tokens and no LOW-HIGH, each at least 1") from exc


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--case", action="append", type=parse_case, metavar="N:IN:OUT", help="a workload; repeatable")
    parser.add_argument(
        "--repeats", "--repeat", type=positive, default=3, metavar="N", help="measurements of each (median is shown)"
    )
    parser.add_argument("--compare", choices=("transformers", "none"), help="the peer of cases; default transformers")
    parser.add_argument("--bench-seed", type=int, default=0, metavar="N", help="of the random prompts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens per second to FILE")
    profile_arguments(parser)
    named = parser.add_argument_group("named workloads, instead of cases; sizes replace those of the workload")
    shown = "; ".join(f"{w.name}: {w.doc}" for w in WORKLOADS.values())
    named.add_argument("--workload", action="append", metavar="NAME", help=f"repeatable; {shown}; all: all of these")
    named.add_argument("--requests", type=positive, metavar="N", help="sequences or conversations")
    named.add_argument("--input-len", type=lengths, metavar="LOW-HIGH", help="tokens of a prompt, or of a turn")
    named.add_argument("--output-len", type=lengths, metavar="LOW-HIGH", help="tokens of an answer")
    named.add_argument("--prefix-len", type=positive, metavar="N", help="tokens that all prompts begin with")
    named.add_argument("--turns", type=positive, metavar="N", help="turns of a conversation")
    named.add_argument("--temperature", type=float, metavar="T", help="of sampling; 0 is greedy")
    named.add_argument(
        "--keep-cache",
        action="store_const",
        const=True,
        help="runs after the first find its prompts in the prefix cache",
    )


SIZES = ("requests", "input_len", "output_len", "prefix_len", "turns", "temperature")


def run(argv: list[str]) -> int:
    """Measure and report; returns the exit code."""
    loaded, registry, hooks, args = parse(argv, verb="bench offline", extra=arguments)
    set_logging(loaded)
    if args.plot is not None:
        check_plot(args.plot)
    check_combination(args)
    tracer = tracer_of(args)
    start = partial(pipeline_of, loaded.settings, registry, hooks)
    if args.workload:
        sizes = {key: getattr(args, key) for key in SIZES}
        return run_workloads(args, [w.scaled(**sizes) for w in find_workloads(args.workload)], start, tracer)
    args.compare = args.compare or "transformers"
    if args.compare != "none" and loaded.settings.weights.format == "dummy":
        raise ConfigError(
            f"--compare {args.compare} needs the model's weights, which --load-format dummy leaves out; give --compare none"
        )
    return run_cases(args, args.case or DEFAULT_CASES, start, tracer)


def check_combination(args: Namespace) -> None:
    """Raises: ConfigError for options that would be ignored."""
    if not args.workload:
        given = [key for key in (*SIZES, "keep_cache") if getattr(args, key) is not None]
        if given:
            raise ConfigError(
                f"--{given[0].replace('_', '-')} is of a named workload; give --workload, or --case N:IN:OUT"
            )
        return
    if args.case:
        raise ConfigError("--case and --workload are two ways to say what runs; give one of them")
    if args.compare == "transformers":
        raise ConfigError("--compare transformers runs cases; give --case instead of --workload, or --compare none")


def pipeline_of(settings: Settings, registry: Registry, hooks: Hooks, observers: Sequence[Observer] = ()) -> Pipeline:
    from minisgl.client.pipeline import Pipeline

    return Pipeline(settings, registry=registry, hooks=hooks, observers=observers)


def one_to_trace(tracer: Tracer | None, what: Sequence[object]) -> None:
    if tracer is not None and len(what) != 1:
        raise ConfigError(
            f"--profile traces one workload, and {len(what)} are to run; name one with --workload or --case"
        )


def run_workloads(
    args: Namespace, workloads: Sequence[Workload], start: Callable[..., Pipeline], tracer: Tracer | None
) -> int:
    """A trace is of a run of its own, after those that are measured."""
    one_to_trace(tracer, workloads)
    steps = StepCounter()
    began = time.perf_counter()
    with start(observers=[steps] if tracer is None else [steps, tracer]) as pipeline:
        start_s = time.perf_counter() - began
        for workload in workloads:
            check_room(workload, pipeline.info.max_len)
        found = [
            measure_workload(w, pipeline, steps, args.repeats, args.bench_seed, bool(args.keep_cache))
            for w in workloads
        ]
        info = pipeline.info
        if tracer is not None:
            prepare(workloads[0], pipeline, args.bench_seed)
            with tracer.tracing():
                run_waves(workloads[0], pipeline, args.bench_seed)
    table(title(info), [brief(row) for row in found])
    json_line(
        "offline", model=info.model, picks=dict(info.picks), device=info.device, dtype=info.dtype, seed=args.bench_seed,
        num_pages=info.num_pages, page_size=info.page_size, start_s=start_s, keep_cache=bool(args.keep_cache), workloads=found,
    )  # fmt: skip
    if args.plot is not None:
        series = {
            f"run {i + 1}": [tokens_per_s(row["runs"][i], row["output_len"]) for row in found]
            for i in range(args.repeats)
        }
        labels = [f"{row['name']}\n({'prompt' if row['output_len'] == (1, 1) else 'output'})" for row in found]
        bar_plot(args.plot, f"Offline workloads, {info.model}", labels, series, "tokens / s")
    return 0


def tokens_per_s(run: Mapping[str, Any], output_len: Range) -> float:
    """Of the prompt where each output is one token."""
    return float(run["prompt_tokens_per_s" if output_len == (1, 1) else "output_tokens_per_s"])


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the table shows of a result."""
    replays = row["graph_replays_per_decode_step"]
    return {
        "workload": row["name"],
        "requests": row["requests"],
        "in": row["prompt_tokens"],
        "cached": row["cached_tokens"],
        "out": row["output_tokens"],
        "s": row["seconds"],
        "out tok/s": row["output_tokens_per_s"],
        "first ms": row["first_token_ms"],
        "ms/token": row["ms_per_token"],
        "graphs": "-" if replays is None else f"{replays:.3f}",
    }


def title(info: EngineInfo) -> str:
    return f"bench offline: {info.model} {' '.join(f'{kind}={name}' for kind, name in sorted(info.picks.items()))}"


def run_cases(args: Namespace, cases: Sequence[Case], start: Callable[..., Pipeline], tracer: Tracer | None) -> int:
    one_to_trace(tracer, cases)
    with ExitStack() as stack:
        peer = TransformersPeer() if args.compare == "transformers" else None
        if peer is not None:
            stack.callback(peer.close)
        pipeline = stack.enter_context(start(observers=[] if tracer is None else [tracer]))
        if peer is not None:
            peer.load(pipeline.model.path, pipeline.info.dtype, pipeline.info.device)
        rng = Random(args.bench_seed)
        rows = [measure(case, pipeline, peer, args.repeats, rng) for case in cases]
        info = pipeline.info
        if tracer is not None:
            load = draw(cases[0], info.vocab, rng)
            with tracer.tracing():
                run_ours(pipeline, load)
    table(title(info), rows)
    json_line("offline", model=info.model, picks=dict(info.picks), device=info.device, dtype=info.dtype, cases=rows)
    if args.plot is not None:
        keys = [k for k in ("minisgl tok/s", "transformers tok/s") if k in rows[0]]
        series = {k.removesuffix(" tok/s"): [row[k] for row in rows] for k in keys}
        bar_plot(
            args.plot, f"Offline throughput, {info.model}", [row["case"] for row in rows], series, "output tokens / s"
        )
    return 0


def draw(case: Case, vocab: int, rng: Random) -> Load:
    """Fresh prompts each time, so that no prefix is cached from the last."""
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(*case.input_len))] for _ in range(case.requests)]
    outputs = [rng.randint(*case.output_len) for _ in range(case.requests)]
    return Load(prompts, outputs)


def measure(case: Case, pipeline: Pipeline, peer: TransformersPeer | None, repeats: int, rng: Random) -> dict[str, Any]:
    """Both sides in turn on the same prompts; medians of useful output tokens per second."""
    ours: list[float] = []
    theirs: list[float] = []
    run_ours(pipeline, draw(Case(case.requests, (8, 8), (4, 4)), pipeline.info.vocab, rng))  # warm up
    if peer is not None:
        peer.generate(draw(Case(case.requests, (8, 8), (4, 4)), pipeline.info.vocab, rng).prompts, 4)
    for _ in range(repeats):
        load = draw(case, pipeline.info.vocab, rng)
        useful = sum(load.outputs)
        ours.append(useful / run_ours(pipeline, load))
        if peer is not None:
            theirs.append(useful / peer.generate(load.prompts, max(load.outputs)))
    row: dict[str, Any] = {"case": case.label, "minisgl tok/s": median(ours)}
    if peer is not None:
        row["transformers tok/s"] = median(theirs)
        row["ratio"] = median(a / b for a, b in zip(ours, theirs, strict=True))
    return row


def run_ours(pipeline: Pipeline, load: Load) -> float:
    """Seconds for all requests, greedy, EOS ignored."""
    jobs = [Job(ids, n) for ids, n in zip(load.prompts, load.outputs, strict=True)]
    return run_jobs(pipeline, jobs, temperature=0.0).seconds
