"""``minisgl bench simulator``: what a simulation predicts, against the real engine on the same requests."""

from __future__ import annotations

import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from minisgl.base.errors import ConfigError
from minisgl_cli.bench.offline import parse_range, positive, show
from minisgl_cli.bench.others import OthersCPU
from minisgl_cli.bench.report import json_line, table
from minisgl_cli.options import parse, set_logging
from minisgl_cli.simulate.options import number

if TYPE_CHECKING:
    from minisgl.client.pipeline import Pipeline
    from minisgl_cli.simulate.calibrate import MeasuredStep
    from minisgl_cli.simulate.cost import Fitted
    from minisgl_cli.simulate.workload import Request

BOUNDS = {"output_tokens_per_s": 0.10, "ttft_s": 0.20}  # share of the real value by which a prediction may be off
REPEATS = 2
Range = tuple[int, int]
BUSY = 0.1  # cores of other processes, above which a run on a CPU says little
WAIT_S = 1.0  # in which it is seen whether the machine is quiet


@dataclass(frozen=True, slots=True)
class Trace:
    """``requests`` made-up prompts that share nothing, ``rate`` a second in a Poisson process; lengths in tokens."""

    requests: int
    input_len: Range
    output_len: Range
    rate: float

    @property
    def label(self) -> str:
        return f"{self.requests}:{show(self.input_len)}:{show(self.output_len)}:{self.rate:g}"


CALIBRATE_ON = Trace(32, (16, 256), (8, 64), 2.4)
PREDICT = (Trace(20, (64, 400), (32, 80), 1.3), Trace(40, (16, 128), (32, 96), 4.0))


def parse_trace(text: str) -> Trace:
    """``REQUESTS:INPUT:OUTPUT:RATE``, lengths as a number or ``LOW-HIGH``."""
    try:
        requests, inputs, outputs, per_s = text.split(":")
        found = Trace(positive(requests), parse_range(inputs), parse_range(outputs), float(per_s))
        if found.requests < 2 or not 0 < found.rate < float("inf"):
            raise ValueError("two requests and a rate above 0")
    except ValueError as exc:
        raise ArgumentTypeError(
            f"{text!r} is not REQUESTS:INPUT:OUTPUT:RATE with 2 requests or more, for example {CALIBRATE_ON.label}"
        ) from exc
    return found


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate-on",
        type=parse_trace,
        default=CALIBRATE_ON,
        metavar="N:IN:OUT:RATE",
        help=f"requests whose steps are measured ({CALIBRATE_ON.label})",
    )
    parser.add_argument(
        "--predict",
        action="append",
        type=parse_trace,
        metavar="N:IN:OUT:RATE",
        help=f"requests that are predicted; repeatable ({', '.join(t.label for t in PREDICT)})",
    )
    parser.add_argument("--bench-seed", type=int, default=0, metavar="N", help="of the requests")
    parser.add_argument(
        "--patience",
        type=number(0),
        default=60.0,
        metavar="S",
        help="seconds to spend, on a CPU, on waiting for other processes and on runs that they disturbed (60)",
    )
    parser.add_argument("--steps", type=Path, metavar="FILE", help="keep the measured steps, for simulate --calibrate")


def run(argv: list[str]) -> int:
    """Measure and report; returns the exit code."""
    loaded, registry, hooks, args = parse(argv, verb="bench simulator", extra=arguments)
    set_logging(loaded)
    if args.steps is not None and not args.steps.parent.is_dir():
        raise ConfigError(f"--steps {args.steps}: there is no folder {str(args.steps.parent)!r}")
    from minisgl.client.pipeline import Pipeline
    from minisgl_cli.simulate.calibrate import fit, write_steps

    traces: Sequence[Trace] = args.predict or PREDICT
    with Pipeline(loaded.settings, registry=registry, hooks=hooks) as pipeline:
        steps, real = Bench(pipeline, args.bench_seed, args.patience).measure(args.calibrate_on, traces)
        cost = fit(steps)
        rows, verdicts = [], []
        for trace in traces:
            simulated = _simulate(pipeline, cost, _requests(trace, args.bench_seed))
            runs = real[trace]
            rows += [_row(trace, f"real {i}", r) for i, r in enumerate(runs, 1)]
            rows.append(_row(trace, "simulated", simulated))
            verdicts += [compare(trace.label, key, [r[key] for r in runs], simulated[key]) for key in BOUNDS]
        model, picks, device = pipeline.info.model, dict(pipeline.info.picks), pipeline.info.device
    if args.steps is not None:
        write_steps(args.steps, steps)
    busiest = max((r["others"] for runs in real.values() for r in runs if r["others"] is not None), default=0.0)
    _report(model, picks, device, args.calibrate_on, steps, cost, rows, verdicts, busiest)
    return 0


def _requests(trace: Trace, seed: int) -> list[Request]:
    from minisgl_cli.simulate.synthetic import Synthetic, draw
    from minisgl_cli.simulate.workload import at_rate

    return at_rate(draw(Synthetic(trace.requests, trace.input_len, trace.output_len), seed), trace.rate)


class Bench:
    """Plays traces into ``pipeline``. ``patience``: seconds that may go into waiting for a quiet machine."""

    def __init__(self, pipeline: Pipeline, seed: int, patience: float) -> None:
        from minisgl_cli.simulate.replay import timed

        self._pipeline, self._seed = pipeline, seed
        self._patience = patience if pipeline.info.device.startswith("cpu") else 0.0
        self._timer = timed(pipeline)

    def measure(
        self, on: Trace, traces: Sequence[Trace]
    ) -> tuple[list[MeasuredStep], dict[Trace, list[dict[str, Any]]]]:
        """The steps of the trace ``on``, and the medians of each of ``traces``. Everything runs twice, the second time in the
        opposite order, so that a machine that gets slower or faster meanwhile does so for all alike."""
        self._play(Trace(4, (16, 64), (8, 8), 20.0))  # warm up
        steps: list[MeasuredStep] = []
        found: dict[Trace, list[dict[str, Any]]] = {t: [] for t in (on, *traces)}
        order = list(found)
        for turn in range(REPEATS):
            for trace in order if turn % 2 == 0 else order[::-1]:
                found[trace].append(self._undisturbed(trace))
                if trace == on:
                    steps += self._timer.steps
        return steps, found

    def _undisturbed(self, trace: Trace) -> dict[str, Any]:
        """One run, in a quiet machine if there is patience left to wait for it."""
        while True:
            start = time.perf_counter()
            while self._patience > time.perf_counter() - start and _busy_for(WAIT_S):
                pass
            waited = time.perf_counter() - start
            found = self._play(trace)
            if found["others"] is None or found["others"] <= BUSY or self._patience <= 0:
                return found
            self._patience -= waited + found["seconds"]

    def _play(self, trace: Trace) -> dict[str, Any]:
        from minisgl_cli.simulate.replay import replay

        self._timer.steps.clear()
        others = OthersCPU()
        return _medians(replay(self._pipeline, _requests(trace, self._seed))) | {"others": others.cores}


def _busy_for(seconds: float) -> bool:
    """Whether other processes use the machine for the next ``seconds``."""
    others = OthersCPU()
    time.sleep(seconds)
    return (others.cores or 0.0) > BUSY


def _simulate(pipeline: Pipeline, cost: Fitted, requests: Sequence[Request]) -> dict[str, Any]:
    """With the settings and limits of the real engine."""
    from minisgl_cli.simulate.cluster import Cluster, World

    limits = pipeline.engine.scheduler.limits
    return _medians(Cluster(World(pipeline.registry, limits, cost, 1), pipeline.settings, None, requests).run())


def _medians(summary: dict[str, Any]) -> dict[str, Any]:
    times = {key: summary[key] and summary[key]["p50"] for key in ("ttft_s", "itl_s", "e2e_s")}
    return {key: summary[key] for key in ("seconds", "output_tokens_per_s")} | times


def compare(trace: str, key: str, real: Sequence[float], simulated: float) -> dict[str, Any]:
    """``off``: of the prediction, as a share of the mean of the real runs. ``at_most``: what it may be, twice the difference of
    the real runs if that is larger than the bound."""
    middle = mean(real)
    off = abs(simulated - middle) / middle
    bound = max(BOUNDS[key], 2 * (max(real) - min(real)) / middle)
    return {"trace": trace, "what": key, "real": middle, "simulated": simulated, "off": off, "at_most": bound,
            "within": off <= bound}  # fmt: skip


def _row(trace: Trace, name: str, found: dict[str, Any]) -> dict[str, Any]:
    others = found.get("others")
    return {
        "trace": trace.label,
        "run": name,
        "seconds": found["seconds"],
        "out tok/s": found["output_tokens_per_s"],
        **{f"{key.removesuffix('_s').upper()} ms": (found[key] or 0.0) * 1e3 for key in ("ttft_s", "itl_s", "e2e_s")},
        "others' cores": "-" if others is None else others,
    }


def _report(
    model: str,
    picks: dict[str, str],
    device: str,
    on: Trace,
    steps: Sequence[MeasuredStep],
    cost: Fitted,
    rows: Sequence[dict[str, Any]],
    verdicts: Sequence[dict[str, Any]],
    busiest: float,
) -> None:
    table(f"bench simulator: {model} on {device}, calibrated on {len(steps)} steps of {on.label}; medians", rows)
    table("prediction against the mean of the real runs", [_shown(v) for v in verdicts])
    if device.startswith("cpu") and busiest > BUSY:
        print(f"Other processes used up to {busiest:.1f} cores meanwhile: measure again when the machine is quiet.")
    fitted = {name: getattr(cost, name) for name in ("step_s", "token_s", "decode_s", "kv_s", "pair_s")}
    json_line(
        "simulator",
        model=model,
        picks=picks,
        device=device,
        calibrated_on=on.label,
        steps=len(steps),
        fitted=fitted,
        runs=rows,
        predictions=verdicts,
        others_cores=busiest,
        within=all(v["within"] for v in verdicts),
    )


def _shown(v: dict[str, Any]) -> dict[str, Any]:
    unit: Callable[[float], str] = lambda x: f"{x * 1e3:.0f} ms" if v["what"] == "ttft_s" else f"{x:.1f} tok/s"  # noqa: E731
    return v | {key: unit(v[key]) for key in ("real", "simulated")} | {k: f"{v[k]:.1%}" for k in ("off", "at_most")}
