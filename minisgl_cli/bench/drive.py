"""Runs a named workload on a pipeline of this process, and measures it."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from minisgl.base.errors import CapacityError, ConfigError, Fault
from minisgl.base.types import Delta, GenerateRequest, Refused, SamplingParams
from minisgl.observe import Observer, StepStats
from minisgl_cli.bench.others import OthersCPU
from minisgl_cli.bench.workloads import Ids, Job, Waves, Workload

if TYPE_CHECKING:
    from minisgl.client.pipeline import Pipeline

WARM_INPUT, WARM_OUTPUT = 64, 4  # tokens of a request that only warms up


class StepCounter(Observer):
    """Counts steps: with decode rows only, with prefill only, with both."""

    def __init__(self) -> None:
        self.decode = self.prefill = self.mixed = 0

    def step(self, s: StepStats) -> None:
        if s.n_spans == 0:
            self.decode += 1
        elif s.n_decode == 0:
            self.prefill += 1
        else:
            self.mixed += 1

    def counts(self) -> dict[str, int]:
        return {"decode": self.decode, "prefill": self.prefill, "mixed": self.mixed}


@dataclass(frozen=True, slots=True)
class Ran:
    """Jobs that ran together. Times in seconds from the start, one for each job."""

    outputs: list[Ids]
    seconds: float
    first_s: list[float]
    last_s: list[float]
    cached_tokens: int


def run_jobs(pipeline: Pipeline, jobs: Sequence[Job], temperature: float) -> Ran:
    """All at once, EOS ignored. Raises: CapacityError for a job that the engine refuses; Fault for one that it gives up."""
    start = time.perf_counter()
    outputs: list[Ids] = [[] for _ in jobs]
    first, last, cached = [0.0] * len(jobs), [0.0] * len(jobs), 0
    requests = [GenerateRequest(ids=tuple(job.ids), sampling=_sampling(temperature, job.max_new)) for job in jobs]
    waiting = {uid: i for i, [uid] in enumerate(pipeline.submit_all(requests))}  # uid -> job
    while waiting:
        found = pipeline.step()
        now = time.perf_counter() - start
        for out in found:
            if isinstance(out, Refused):
                raise CapacityError(f"a prompt of {len(jobs[waiting[out.uid]].ids)} tokens was refused: {out.message}")
            if not isinstance(out, Delta):
                continue
            i = waiting[out.uid]
            if out.ids and not outputs[i]:
                first[i] = now
            outputs[i] += out.ids
            if out.finish is not None:
                del waiting[out.uid]
                last[i] = now
                cached += out.usage.cached_tokens if out.usage else 0
                _check(jobs[i], outputs[i], out)
    return Ran(outputs, time.perf_counter() - start, first, last, cached)


def _sampling(temperature: float, max_new: int) -> SamplingParams:
    """The model's own defaults do not count: a workload is the same for every model."""
    return SamplingParams(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, max_tokens=max_new, ignore_eos=True)


def _check(job: Job, output: Ids, last: Delta) -> None:
    if len(output) != job.max_new:
        raise Fault(f"a request ended ({last.finish}) after {len(output)} of {job.max_new} tokens: {last.error}")


def check_room(workload: Workload, max_len: int) -> None:
    """Raises: ConfigError for a workload longer than the context."""
    if workload.longest > max_len:
        raise ConfigError(
            f"--workload {workload.name} has requests of up to {workload.longest} tokens and the context here is {max_len}; "
            "give smaller lengths, or more with --max-len and --kv.memory"
        )


def measure(
    workload: Workload, pipeline: Pipeline, steps: StepCounter, repeats: int, seed: int, keep_cache: bool = False
) -> dict[str, Any]:
    """``repeats`` runs after a warm-up, each with an empty prefix cache; ``keep_cache``: only the first, and the others find
    its prompts. Returns: sizes, medians, and every run."""
    warm_up(workload, pipeline, seed)
    runs = [_once(workload, pipeline, steps, seed, clear=i == 0 or not keep_cache) for i in range(repeats)]
    keys = [key for key, value in runs[0].items() if isinstance(value, float)]
    return {
        **asdict(workload),
        **{key: runs[0][key] for key in ("prompt_tokens", "output_tokens")},
        **{key: median(run[key] for run in runs) for key in keys},
        "graph_replays_per_decode_step": runs[-1]["graph_replays_per_decode_step"],
        "cached_tokens": runs[-1]["cached_tokens"],
        "runs": runs,
    }


def warm_up(workload: Workload, pipeline: Pipeline, seed: int) -> None:
    """Every shape of step once, but short: the first wave with clipped lengths, and its longest prompt whole."""
    jobs = next(workload.waves(pipeline.info.vocab, seed))
    longest = max(jobs, key=lambda job: len(job.ids))
    short = [Job(job.ids[-WARM_INPUT:], min(WARM_OUTPUT, job.max_new)) for job in jobs]
    run_jobs(pipeline, short, workload.temperature)
    run_jobs(pipeline, [Job(longest.ids, min(WARM_OUTPUT, longest.max_new))], workload.temperature)


def prepare(workload: Workload, pipeline: Pipeline, seed: int) -> None:
    """An empty prefix cache, but for what the workload wants cached."""
    while not pipeline.idle:  # a step may still be in flight
        pipeline.step()
    pipeline.engine.scheduler.clear_cache()
    if before := workload.before(pipeline.info.vocab, seed):
        run_jobs(pipeline, before, workload.temperature)


def run_waves(workload: Workload, pipeline: Pipeline, seed: int) -> tuple[list[Ran], int]:
    """All waves, each after the one before. Returns: them, and their prompt tokens."""
    prompt_tokens, ran = 0, []
    waves = workload.waves(pipeline.info.vocab, seed)
    jobs = next(waves)
    while jobs:
        prompt_tokens += sum(len(job.ids) for job in jobs)
        ran.append(run_jobs(pipeline, jobs, workload.temperature))
        jobs = _after(waves, ran[-1].outputs)
    return ran, prompt_tokens


def _once(workload: Workload, pipeline: Pipeline, steps: StepCounter, seed: int, clear: bool) -> dict[str, Any]:
    executor = pipeline.engine.executor
    if clear:
        prepare(workload, pipeline, seed)
    memory = PeakMemory(pipeline.info.device)
    counted, device = steps.counts(), device_counters(executor)
    others = OthersCPU()
    ran, prompt_tokens = run_waves(workload, pipeline, seed)
    cores = others.cores
    return {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(r.cached_tokens for r in ran),
        **_speed(ran, prompt_tokens),
        "steps": {key: value - counted[key] for key, value in steps.counts().items()},
        "graph_replays_per_decode_step": replays_per_step(device, device_counters(executor)),
        "others_cores": cores,
        "peak_memory": memory.read(),
    }


def _after(waves: Waves, outputs: list[Ids]) -> list[Job]:
    try:
        return waves.send(outputs)
    except StopIteration:
        return []


def _speed(ran: Sequence[Ran], prompt_tokens: int) -> dict[str, Any]:
    """``prompt_tokens_per_s`` counts cached tokens too. ``ms_per_token``: of a request, from its first token to its last, on
    average; 0 where there is one token only. Drawing the tokens of a later turn takes no time here."""
    seconds = sum(r.seconds for r in ran)
    outputs = [len(out) for r in ran for out in r.outputs]
    gaps = [
        (last - first) / (len(out) - 1)
        for r in ran
        for first, last, out in zip(r.first_s, r.last_s, r.outputs, strict=True)
        if len(out) > 1
    ]
    return {
        "output_tokens": sum(outputs),
        "seconds": seconds,
        "output_tokens_per_s": sum(outputs) / seconds,
        "prompt_tokens_per_s": prompt_tokens / seconds,
        "first_token_ms": fmean(first for r in ran for first in r.first_s) * 1e3,
        "ms_per_token": fmean(gaps) * 1e3 if gaps else 0.0,
    }


def device_counters(executor: Any) -> dict[str, int]:
    """What the worker in this process has counted (``Worker.stats``); empty if the executor has no such worker."""
    return dict(getattr(getattr(executor, "worker", None), "stats", {}))


def replays_per_step(before: Mapping[str, int], after: Mapping[str, int]) -> float | None:
    """CUDA graph replays per decode step between two readings; None where they are not counted, or there was no such step."""
    if not {"graph_replays", "decode_steps"} <= after.keys():
        return None
    steps = after["decode_steps"] - before["decode_steps"]
    return (after["graph_replays"] - before["graph_replays"]) / steps if steps else None


class PeakMemory:
    """Most memory in bytes: of the device's allocator since this was made, and of this process since its start."""

    def __init__(self, device: str) -> None:
        self._device = device if device.startswith("cuda") else None
        if self._device is not None:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> dict[str, int | None]:
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._device is None:
            return {"device_bytes": None, "host_bytes": host}
        import torch

        return {"device_bytes": torch.cuda.max_memory_reserved(self._device), "host_bytes": host}
