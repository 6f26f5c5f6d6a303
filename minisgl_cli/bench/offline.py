"""``minisgl bench offline``: throughput of batches of random token ids, in one run with transformers on the same weights."""

from __future__ import annotations

import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from minisgl.base.errors import ConfigError
from minisgl_cli.bench.peer import TransformersPeer
from minisgl_cli.bench.report import bar_plot, check_plot, json_line, table
from minisgl_cli.options import parse, set_logging

Range = tuple[int, int]


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


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--case", action="append", type=parse_case, metavar="N:IN:OUT", help="a workload; repeatable")
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="measurements of each case (median is shown)"
    )
    parser.add_argument("--compare", choices=("transformers", "none"), default="transformers", help="the peer")
    parser.add_argument("--bench-seed", type=int, default=0, metavar="N", help="of the random prompts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens per second to FILE")


def run(argv: list[str]) -> int:
    """Measure and report; returns the exit code."""
    loaded, registry, hooks, args = parse(argv, verb="bench offline", extra=arguments)
    set_logging(loaded)
    if args.plot is not None:
        check_plot(args.plot)
    if args.compare != "none" and loaded.settings.weights.format == "dummy":
        raise ConfigError(
            f"--compare {args.compare} needs the model's weights, which --load-format dummy leaves out; give --compare none"
        )
    from minisgl.client.pipeline import Pipeline

    cases: Sequence[Case] = args.case or DEFAULT_CASES
    with ExitStack() as stack:
        peer = TransformersPeer() if args.compare == "transformers" else None
        if peer is not None:
            stack.callback(peer.close)
        pipeline = stack.enter_context(Pipeline(loaded.settings, registry=registry, hooks=hooks))
        if peer is not None:
            peer.load(pipeline.model.path, pipeline.info.dtype, pipeline.info.device)
        rng = Random(args.bench_seed)
        rows = [measure(case, pipeline, peer, args.repeats, rng) for case in cases]
        picks = dict(pipeline.info.picks)
        model = pipeline.info.model
    table(f"bench offline: {model} {' '.join(f'{kind}={name}' for kind, name in sorted(picks.items()))}", rows)
    json_line("offline", model=model, picks=picks, dtype=pipeline.info.dtype, cases=rows)
    if args.plot is not None:
        keys = [k for k in ("minisgl tok/s", "transformers tok/s") if k in rows[0]]
        series = {k.removesuffix(" tok/s"): [row[k] for row in rows] for k in keys}
        bar_plot(args.plot, f"Offline throughput, {model}", [row["case"] for row in rows], series, "output tokens / s")
    return 0


def draw(case: Case, vocab: int, rng: Random) -> Load:
    """Fresh prompts each time, so that no prefix is cached from the last."""
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(*case.input_len))] for _ in range(case.requests)]
    outputs = [rng.randint(*case.output_len) for _ in range(case.requests)]
    return Load(prompts, outputs)


def measure(case: Case, pipeline: Any, peer: TransformersPeer | None, repeats: int, rng: Random) -> dict[str, Any]:
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


def run_ours(pipeline: Any, load: Load) -> float:
    """Seconds for all requests, greedy, EOS ignored."""
    from minisgl.base.types import Delta, GenerateRequest, SamplingParams

    start = time.perf_counter()
    waiting: set[int] = set()
    for ids, n in zip(load.prompts, load.outputs, strict=True):
        sampling = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        waiting.update(pipeline.submit(GenerateRequest(ids=tuple(ids), sampling=sampling)))
    produced = 0
    while waiting:
        for out in pipeline.step():
            if isinstance(out, Delta) and out.finish is not None:
                waiting.discard(out.uid)
                produced += out.usage.completion_tokens if out.usage else 0
    seconds = time.perf_counter() - start
    assert produced == sum(load.outputs), (produced, sum(load.outputs))
    return seconds
