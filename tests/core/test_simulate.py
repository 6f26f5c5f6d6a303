"""``minisgl simulate``: what comes out of virtual time, against arithmetic and theory."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from minisgl.api import ReplicaLoad, Router, RouterContext, SchedContext, SchedulerPolicy, SchedView, StepBuilder
from minisgl.base.errors import PluginError
from minisgl.base.types import I32, Ended, Finish, Limits, Refused, Tokens
from minisgl.config.schema import KindSection, Settings
from minisgl.plugin.registry import Registry
from minisgl_cli.main import main
from minisgl_cli.simulate.calibrate import fit
from minisgl_cli.simulate.cluster import Cluster, World
from minisgl_cli.simulate.cost import HARDWARE, Cost, Fitted, Roofline
from minisgl_cli.simulate.limits import with_policies
from minisgl_cli.simulate.measure import Recorder, spread
from minisgl_cli.simulate.replay import TimedExecutor
from minisgl_cli.simulate.shapes import SHAPES
from minisgl_cli.simulate.synthetic import Synthetic, draw
from minisgl_cli.simulate.workload import Request, at_rate

LIMITS = Limits(max_slots=16, max_len=4096, num_pages=2048, page_size=16, batch_tokens=256)
H200 = Roofline(SHAPES["qwen3-0.6b"], HARDWARE["h200"])


class ShortestFirst(SchedulerPolicy):
    """The request with the least work goes first."""

    def __init__(self, ctx: SchedContext) -> None: ...

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        for r in v.prefilling():
            b.prefill(r)
        for r in sorted(v.waiting(), key=lambda r: (len(r.ids) + r.max_new, r.arrived)):
            if not b.prefill(r, reserve=1.0):
                return


@pytest.fixture(scope="module")
def registry() -> Registry:
    found = Registry.scan(bundled_only=True)
    found.add("scheduler", "shortest", ShortestFirst)
    return found


def one(at_s: float, prompt: int, output: int, key: int = 1, follows: int | None = None) -> Request:
    return Request(at_s, np.array([key], np.int64), np.array([prompt], np.int64), -key, output, follows)


def simulate(
    registry: Registry,
    requests: Sequence[Request],
    cost: Cost = H200,
    limits: Limits = LIMITS,
    scheduler: str = "chunked",
    cache: str = "radix",
    loop: str = "sync",
    replicas: int = 1,
    router: str | None = None,
    seed: int = 0,
) -> Cluster:
    settings = Settings(kinds={"loop": KindSection(use=loop)}, engine={"validate": "plans"})
    made = router and registry.create("router", router, {}, lambda s: RouterContext(s, replicas, Random(seed)))
    world = World(registry, limits, cost, replicas)
    return Cluster(world, with_policies(settings, scheduler, cache, seed), made or None, requests)


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_calibration_finds_the_cost_model_that_made_the_steps(loop: str, registry: Registry) -> None:
    """The steps of a simulation, timed on its own clock as a real engine's are on the wall's."""
    cost = Fitted(step_s=0.02, token_s=6e-4, kv_s=5e-6, decode_s=1.5e-3, pair_s=4e-7)
    requests = at_rate(draw(Synthetic(40, (16, 700), (4, 40), system_prompts=2, system_len=100), 0), 4.0)
    cluster = simulate(registry, requests, cost, loop=loop)
    [replica] = cluster.replicas
    timer = TimedExecutor(replica.engine.executor, LIMITS.max_slots, lambda: replica.clock.now)
    replica.engine.executor = timer
    assert cluster.run()["steps"] == len(timer.steps) > 50
    found = fit(timer.steps)
    parts = [found.step_s, found.token_s, found.kv_s, found.decode_s, found.pair_s]
    assert parts == pytest.approx([0.02, 6e-4, 5e-6, 1.5e-3, 4e-7], rel=1e-6)


# ------------------------------------------------------------------------------------------------- one request, by hand

COST = Fitted(step_s=1.0, token_s=0.01, kv_s=0.001)


def test_one_request_takes_the_closed_form(registry: Registry) -> None:
    """Prefill of 100: 1 + 1 + 0.1. Then tokens 2 to 5 with 101 to 104 KV tokens: 4 * 1.01 + 0.001 * 410."""
    found = simulate(registry, [one(3.0, 100, 5)], COST).run()
    assert found["ttft_s"]["p50"] == pytest.approx(2.1)
    assert found["e2e_s"]["p50"] == pytest.approx(2.1 + 4.04 + 0.410)
    assert found["itl_s"]["p50"] == pytest.approx(1.01 + (0.102 + 0.103) / 2)
    assert (found["requests"], found["steps"], found["seconds"]) == (1, 5, pytest.approx(6.55))
    assert found["output_tokens_per_s"] == pytest.approx(5 / 6.55)
    assert found["busy"] == pytest.approx(1.0)


def test_a_prompt_longer_than_a_step_takes_several(registry: Registry) -> None:
    """300 tokens in steps of 256 and 44: 1 + 2.56 + 0.256, then 1 + 0.44 + 0.3."""
    found = simulate(registry, [one(0.0, 300, 1)], COST).run()
    assert found["ttft_s"]["p50"] == found["e2e_s"]["p50"] == pytest.approx(3.816 + 1.74)
    assert found["itl_s"] is None


def test_overlap_hides_the_host_behind_the_device(registry: Registry) -> None:
    """0.5 s of the host for each of 5 steps: all of them seen with sync, only the first with overlap."""
    cost = Fitted(1.0, 0.01, 0.001, host_s=0.5)
    device = 2.1 + 4.04 + 0.410
    for loop, seen in (("sync", 5), ("overlap", 1)):
        found = simulate(registry, [one(0.0, 100, 5)], cost, loop=loop).run()
        assert found["e2e_s"]["p50"] == pytest.approx(device + 0.5 * seen), loop


def test_a_request_waits_for_the_step_in_progress(registry: Registry) -> None:
    """The second comes at 0.5 s, in the first one's prefill, which ends at 2.1; then one step decodes a token and prefills 100:
    1 + 1.01 + 0.001 * (101 + 100)."""
    cluster = simulate(registry, [one(0.0, 100, 2), one(0.5, 100, 1, key=2)], COST)
    cluster.run()
    assert cluster.recorder.first.tolist() == pytest.approx([2.1, 2.1 + 2.211])


def test_an_idle_engine_begins_at_the_arrival(registry: Registry) -> None:
    cluster = simulate(registry, [one(0.0, 100, 1), one(50.0, 100, 1, key=2)], COST)
    cluster.run()
    assert cluster.recorder.ended.tolist() == pytest.approx([2.1, 52.1])


def test_a_turn_comes_after_the_end_of_the_one_before(registry: Registry) -> None:
    cluster = simulate(registry, [one(0.0, 100, 1), one(7.0, 50, 1, key=2, follows=0)], COST)
    cluster.run()
    assert cluster.recorder.arrived.tolist() == pytest.approx([0.0, 9.1])
    assert cluster.recorder.ended[1] == pytest.approx(9.1 + 1 + 0.5 + 0.05)


def test_a_cached_prefix_is_not_computed_again(registry: Registry) -> None:
    """Of 100 equal tokens the first 96, six pages, are cached: 4 are computed, 100 read; 96 of 200 prompt tokens are hits."""
    found = simulate(registry, [one(0.0, 100, 1), one(50.0, 100, 1)], COST).run()
    assert found["ttft_s"]["mean"] == pytest.approx((2.1 + 1 + 0.04 + 0.1) / 2)
    assert found["hit_rate"] == 96 / 200


def test_answers_are_cached_for_the_next_turn(registry: Registry) -> None:
    """The second turn is all that was said, 16 + 17 tokens, and 7 more: two pages are known, the last answered token is not."""
    pieces = np.array([[5, 16], [6, 17], [7, 7]], np.int64)
    first = Request(0.0, pieces[:1, 0], pieces[:1, 1], 6, 17)
    second = Request(1.0, pieces[:, 0], pieces[:, 1], 8, 1, follows=0)
    assert simulate(registry, [first, second], COST).run()["hit_rate"] == 32 / (16 + 40)


# --------------------------------------------------------------------------------------------------------- what is noted


def test_percentiles_are_interpolated() -> None:
    """Of 0, 10, ..., 100 the 99th percentile is 0.9 of the way from 90 to 100."""
    found = spread(np.arange(0.0, 101.0, 10.0))
    assert found == pytest.approx({"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0})
    assert spread(np.empty(0)) is None


def test_the_recorder_keeps_requests_apart() -> None:
    r = Recorder(3)
    r.arrived[:] = [0.0, 1.0, 1.5]

    def tokens(*uids: int) -> Tokens:
        return Tokens(0, np.array(uids, np.int64), np.zeros(len(uids), np.int32))

    assert r.take([tokens(0)], 2.0) == []
    assert r.take([tokens(0, 1)], 5.0) == []
    assert r.take([tokens(1), Ended(1, Finish.LENGTH, 4, 2, 0), Refused(2, 400, "no")], 6.0) == [1]
    assert r.take([Ended(0, Finish.ERROR, 4, 2, 0, "gave up")], 7.0) == []
    found = r.summary()
    assert (found["requests"], found["refused"], found["failed"]) == (1, 1, 1)
    assert found["ttft_s"]["mean"] == 5.0 - 1.0
    assert found["e2e_s"]["mean"] == 6.0 - 1.0
    assert found["itl_s"]["mean"] == (3.0 + 1.0) / 2  # request 0 after 3 s, request 1 after 1 s
    assert found["seconds"] == 6.0


def test_refused_requests_are_counted_and_end_their_conversation(registry: Registry) -> None:
    requests = [one(0.0, 5000, 4), one(1.0, 10, 1, key=2, follows=0), one(0.0, 10, 1, key=3)]
    found = simulate(registry, requests).run()
    assert (found["requests"], found["refused"], found["unsent"]) == (1, 1, 1)


# --------------------------------------------------------------------------------------------------------------- theory


def test_shortest_first_lowers_the_mean_wait_under_load(registry: Registry) -> None:
    """In one queue, first come first served is never better on average than the shortest first (Conway et al., 1967)."""
    mixed = draw(Synthetic(requests=120, input_len=(16, 256), output_len=(8, 200)), 1)
    tight = Limits(4, 4096, 2048, 16, 256)
    waits = {
        name: simulate(registry, at_rate(mixed, 60.0), limits=tight, scheduler=name).run()
        for name in ("chunked", "shortest")
    }
    assert waits["shortest"]["ttft_s"]["mean"] < 0.8 * waits["chunked"]["ttft_s"]["mean"]
    assert waits["shortest"]["ttft_s"]["p50"] < waits["chunked"]["ttft_s"]["p50"]


def test_longest_prefix_first_hits_more_in_a_small_pool(registry: Registry) -> None:
    """Eight long system prompts come in turn, and the pool keeps three: what is taken together is computed once."""
    requests = [
        Request(0.0, np.array([i % 8, 100 + i], np.int64), np.array([1024, 32], np.int64), -1 - i, 8) for i in range(64)
    ]
    small = Limits(4, 4096, 256, 16, 512)
    hits = {
        name: simulate(registry, requests, limits=small, scheduler=name).run()["hit_rate"]
        for name in ("chunked", "lpm")
    }
    assert hits["lpm"] > hits["chunked"] + 0.2


def test_waiting_grows_with_the_load(registry: Registry) -> None:
    requests = draw(Synthetic(requests=100, output_len=(32, 64)), 0)
    tight = Limits(4, 4096, 2048, 16, 256)
    waits = [simulate(registry, at_rate(requests, rate), limits=tight).run()["ttft_s"]["mean"] for rate in (5, 40, 80)]
    assert waits == sorted(waits)
    assert waits[2] > 5 * waits[0]


def test_bursts_wait_longer_than_poisson_arrivals_of_the_same_rate(registry: Registry) -> None:
    tight = Limits(4, 4096, 2048, 16, 256)
    waits = [
        simulate(registry, at_rate(draw(Synthetic(requests=200, cv=cv), 0), 12.0), limits=tight).run()["ttft_s"]["p90"]
        for cv in (0.3, 1.0, 4.0)
    ]
    assert waits == sorted(waits)


def test_the_radix_cache_hits_and_the_naive_one_does_not(registry: Registry) -> None:
    requests = at_rate(draw(Synthetic(requests=60, system_prompts=1, system_len=512, input_len=(16, 64)), 0), 5.0)
    radix, naive = (simulate(registry, requests, cache=cache).run() for cache in ("radix", "naive"))
    prompt = sum(r.input_len for r in requests)
    assert naive["hit_rate"] == 0
    assert radix["hit_rate"] == pytest.approx(59 * 512 / prompt)  # all but the first request find the system prompt
    assert radix["ttft_s"]["mean"] < naive["ttft_s"]["mean"]


def test_a_pool_that_is_too_small_preempts(registry: Registry) -> None:
    """16 rows of up to 64 + 256 tokens in 64 pages of 16: with all of the output reserved nothing is preempted."""
    small = Limits(16, 4096, 64, 16, 256)
    requests = at_rate(draw(Synthetic(requests=40, input_len=(64, 64), output_len=(256, 256)), 0), float("inf"))
    found = simulate(registry, requests, limits=small)
    assert found.run()["preemptions"] == 0
    section = {"chunked": {"reserve": 0.05}}
    settings = Settings(kinds={"scheduler": KindSection(use="chunked", options=section)})
    greedy = Cluster(World(registry, small, H200, 1), with_policies(settings, "chunked", "radix", 0), None, requests)
    result = greedy.run()
    assert result["preemptions"] > 0
    assert result["requests"] == 40


# -------------------------------------------------------------------------------------------------------------- routers


def test_prefix_aware_routing_hits_more_than_round_robin(registry: Registry) -> None:
    """Eight system prompts over four engines, each with room for few of them."""
    shared = Synthetic(requests=160, system_prompts=8, system_len=1024, input_len=(16, 64), output_len=(8, 16))
    requests = at_rate(draw(shared, 0), 40.0)
    small = Limits(16, 4096, 256, 16, 512)
    found = {
        router: simulate(registry, requests, limits=small, replicas=4, router=router).run()
        for router in ("round-robin", "prefix-aware")
    }
    assert found["prefix-aware"]["hit_rate"] > found["round-robin"]["hit_rate"] + 0.1
    assert found["prefix-aware"]["ttft_s"]["mean"] < found["round-robin"]["ttft_s"]["mean"]


def test_least_loaded_routing_is_quicker_than_round_robin(registry: Registry) -> None:
    """Every second request is long, so that in turn one of two engines gets all of them; rows of a step add to its time."""
    requests = [one(0.1 * i, 16, 200 if i % 2 == 0 else 2, key=i + 1) for i in range(60)]
    cost, roomy = Fitted(0.001, 0.002, 0.0), Limits(64, 4096, 2048, 16, 256)
    mean = {
        router: simulate(registry, requests, cost, roomy, replicas=2, router=router).run()["e2e_s"]["mean"]
        for router in ("round-robin", "least-loaded")
    }
    assert mean["least-loaded"] < 0.8 * mean["round-robin"]


def test_two_engines_are_twice_one_when_they_share_nothing(registry: Registry) -> None:
    """Requests that come in pairs, one for each of two engines: each pair takes as long as one request on one engine."""
    pairs = [one(10.0 * (i // 2), 100, 5, key=i + 1) for i in range(6)]
    found = simulate(registry, pairs, COST, replicas=2, router="round-robin").run()
    assert found["e2e_s"] == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p99"), 6.55))


def test_a_router_that_chooses_no_engine_is_named(registry: Registry) -> None:
    class Wrong(Router):
        def __init__(self, ctx: RouterContext) -> None: ...

        def route(self, ids: I32, namespace: bytes, loads: Sequence[ReplicaLoad]) -> int:
            return len(loads)

    mine = Registry.scan(bundled_only=True)
    mine.add("router", "wrong", Wrong)
    with pytest.raises(PluginError, match=r"Wrong chose 2; an index from 0 to 1 is needed"):
        simulate(mine, [one(0.0, 4, 1)], replicas=2, router="wrong").run()


# ------------------------------------------------------------------------------------------------ repeatable, and quick


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_equal_seeds_give_equal_results(loop: str, registry: Registry) -> None:
    def result(seed: int) -> dict[str, Any]:
        requests = at_rate(draw(Synthetic(requests=40, turns=(1, 3), system_prompts=2, think_s=0.5), seed), 10.0)
        return simulate(registry, requests, loop=loop, replicas=2, router="prefix-aware", seed=seed).run()

    assert result(1) == result(1)
    assert result(1) != result(2)


def test_at_least_200_requests_are_simulated_per_second(registry: Registry) -> None:
    """A small setting with room to spare: 400 requests of 32 tokens in and 32 out, under load."""
    requests = at_rate(draw(Synthetic(requests=400, input_len=(32, 32), output_len=(32, 32)), 0), 200.0)
    cluster = simulate(registry, requests)
    started = time.process_time()
    assert cluster.run()["requests"] == 400
    assert time.process_time() - started < 2.0


# ------------------------------------------------------------------------------------------------------ the command line

SMALL = ["--requests", "8", "--input-len", "16-64", "--output-len", "2-8", "--sim-seed", "3"]


def result_of(out: str) -> dict[str, Any]:
    [line] = [line for line in out.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(line)["simulate"]
    return found


def test_the_verb_compares_policies_at_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot, file = tmp_path / "load.png", tmp_path / "result.json"
    argv = ["simulate", *SMALL, "--rate", "5,50", "--cache", "naive,radix", "--replicas", "2", "--router"]
    assert main([*argv, "round-robin,least-loaded", "--plot", str(plot), "--json", str(file)]) == 0
    out = capsys.readouterr().out
    found = result_of(out)
    picked = [(r["cache"], r["router"], r["rate"]) for r in found["results"]]
    caches, routers = ("naive", "radix"), ("round-robin", "least-loaded")
    assert picked == [(c, r, rate) for c in caches for r in routers for rate in (5.0, 50.0)]
    assert all(r["requests"] == 8 for r in found["results"])
    assert "TTFT" in out
    assert json.loads(file.read_text())["simulate"] == found
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_options_of_routers_count(capsys: pytest.CaptureFixture[str]) -> None:
    """A router that may never prefer an engine with more requests, and counts no prefix below the whole prompt."""
    argv = ["simulate", "--replicas", "2", "--router", "prefix-aware", "--rate", "50", "--requests", "40"]
    argv += ["--system-prompts", "2", "--input-len", "16-32", "--output-len", "4"]
    hits = []
    for options in ([], ["--router.prefix-aware.min-match", "1", "--router.prefix-aware.max-lead=0"]):
        assert main([*argv, *options]) == 0
        hits.append(result_of(capsys.readouterr().out)["results"][0]["hit_rate"])
    assert hits[0] != hits[1]


def test_the_verb_replays_a_trace_as_recorded_and_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 2000 * i, **record}) + "\n" for i in range(5)))
    assert main(["simulate", "--trace", str(path)]) == 0
    [found] = result_of(capsys.readouterr().out)["results"]
    assert (found["requests"], found["rate"]) == (5, 0.5)  # 4 gaps of 2 s
    assert found["hit_rate"] == 4 * 592 / 3000  # 37 pages of 600 tokens
    assert 8.0 < found["seconds"] < 8.1
    assert main(["simulate", "--trace", str(path), "--rate", "4"]) == 0
    [found] = result_of(capsys.readouterr().out)["results"]
    assert 1.0 < found["seconds"] < 1.1


def test_the_verb_follows_settings(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", *SMALL, "--rate", "inf", "--page-size", "4", "--kv.num-pages", "100", "--loop", "overlap"]
    assert main([*argv, "--scheduler.chunked.max-chunk", "8", "--max-len", "40", "--shape", "llama-3.1-8b"]) == 0
    found = result_of(capsys.readouterr().out)
    assert (found["page_size"], found["num_pages"], found["loop"], found["shape"]) == (
        4,
        100,
        "overlap",
        "llama-3.1-8b",
    )
    [result] = found["results"]
    assert result["refused"] > 0  # prompts of 40 tokens and more
    assert result["rate"] == "inf"


def test_step_times_can_be_measured_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 1 s, whatever is in them: 8 requests that come at once, in one prefill and 7 decode steps at most."""
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps({"tokens": t, "kv": 10 * t, "seconds": 1.0}) + "\n" for t in (1, 5, 9)))
    assert main(["simulate", *SMALL, "--rate", "inf", "--calibrate", str(path)]) == 0
    [found] = result_of(capsys.readouterr().out)["results"]
    assert found["ttft_s"]["p99"] == pytest.approx(1.0)
    assert found["seconds"] == pytest.approx(found["steps"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--scheduler", "chunky"], "scheduler"),
        (["--replicas", "2", "--router", "nearest"], "router"),
        (["--router", "prefix-aware"], "with --replicas 1 there is nothing to choose"),
        (["--replicas", "2", "--router.round-robin.x"], "write --router.NAME.OPTION VALUE"),
        (["--replicas", "2", "--router.round-robin.x", "1"], "unknown option router.round-robin.x"),
        (["--replicas", "2", "--router.prefix-aware.max-lead=1"], "but --router is round-robin"),
        (["--server.port", "1"], "--server.port has no effect on a simulation"),
        (["--shape", "gpt"], "--shape 'gpt' is neither"),
        (["--long-len", "1-2"], "--long-len has no effect without --long-share above 0"),
        (["--system-len", "9"], "--system-len has no effect without --system-prompts above 0"),
        (["--think-s", "1"], "--think-s has no effect without --turns above 1"),
        (["--trace", "t.jsonl", "--turns", "2"], "--turns shapes made-up requests"),
        (["--trace", "gone.jsonl"], "it cannot be read"),
        (["--plot", "gone/x.png"], "there is no folder"),
        (["--plot", "x.png", "--rate", "inf"], "has no place on it"),
        (["--json", "gone/x.json"], "there is no folder"),
        (["--shape", "qwen3-14b", "--hardware", "laptop-cpu"], "no KV page fits"),
    ],
)
def test_what_cannot_be_simulated_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *argv]) == 78
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--rate", "0"], ["--rate", "fast"], ["--cv", "0"], ["--long-share", "2"], ["--turns", "3-2"]]
)
def test_numbers_out_of_range_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["simulate", *argv])
    assert refused.value.code == 2
    assert f"argument {argv[0]}" in capsys.readouterr().err
