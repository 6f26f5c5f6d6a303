"""``minisgl bench offline --workload``: the requests are those of the peer's figures, and a run reports what it did."""

from __future__ import annotations

import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minisgl.testing.bytemodel import write_byte_model
from minisgl_cli.bench.drive import device_counters, replays_per_step
from minisgl_cli.bench.report import installed
from minisgl_cli.bench.workloads import WORKLOADS, Job, Workload
from minisgl_cli.main import main

VOCAB = 151_936


def waves(w: Workload, vocab: int = VOCAB) -> list[list[Job]]:
    """All waves; every answer is as long as it should be, of token 7."""
    drawing = w.waves(vocab)
    found = [next(drawing)]
    while True:
        try:
            found.append(drawing.send([[7] * job.max_new for job in found[-1]]))
        except StopIteration:
            return found


def test_perf_is_the_workload_that_the_peer_ran() -> None:
    """The draws written out, and the sums of the peer's run."""
    random.seed(0)
    prompts = [[random.randint(0, 10_000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    [jobs] = waves(WORKLOADS["perf"])
    assert [job.ids for job in jobs] == prompts
    assert [job.max_new for job in jobs] == outputs
    assert (sum(map(len, prompts)), sum(outputs)) == (142_827, 133_966)
    assert WORKLOADS["perf"].temperature == 0.6


def test_a_small_vocabulary_changes_no_length() -> None:
    [large], [small] = waves(WORKLOADS["perf"]), waves(WORKLOADS["perf"], 259)
    assert [(len(a.ids), a.max_new) for a in large] == [(len(b.ids), b.max_new) for b in small]
    assert max(max(job.ids) for job in small) == 258


def test_one_sequence_and_prefills_have_their_sizes() -> None:
    sizes = {name: [(len(j.ids), j.max_new) for j in waves(w)[0]] for name, w in WORKLOADS.items() if w.requests == 1}
    assert sizes == {"single": [(512, 128)], "prefill-8k": [(8192, 1)], "prefill-32k": [(32768, 1)]}
    assert {WORKLOADS[name].temperature for name in sizes} == {0.0}


def test_shared_prefix_is_cached_before_and_begins_every_prompt() -> None:
    w = WORKLOADS["shared-prefix"]
    [jobs], [before] = waves(w), w.before(VOCAB)
    assert len(before.ids) == 4096
    assert [(len(j.ids), j.max_new, j.ids[:4096] == before.ids) for j in jobs] == [(4224, 128, True)] * 256
    assert len({tuple(j.ids[4096:]) for j in jobs}) == 256


def test_a_turn_of_a_conversation_follows_the_answer_to_the_one_before() -> None:
    turns = waves(WORKLOADS["conversations"])
    assert [len(turn) for turn in turns] == [64] * 4
    assert [len(turn[0].ids) for turn in turns] == [2064, 2256, 2448, 2640]
    for before, after in pairwise(turns):
        assert all(b.ids[: len(a.ids) + 128] == a.ids + [7] * 128 for a, b in zip(before, after, strict=True))
    assert len({tuple(j.ids[:2000]) for j in turns[0]}) == 1


def result(out: str) -> dict[str, Any]:
    [line] = [line for line in out.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    return found


def test_workloads_run_small_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    model, plot = write_byte_model(tmp_path / "model"), tmp_path / "bars.png"
    argv = ["bench", "offline", "--model", str(model), "--load-format", "dummy", "--engine.threads", "1"]
    argv += ["--requests", "3", "--input-len", "20", "--output-len", "4-6", "--repeat", "2"]
    both = ["--workload", "shared-prefix", "--workload", "conversations", "--prefix-len", "32"]
    assert main([*argv, *both, "--plot", str(plot)]) == 0
    found = result(capsys.readouterr().out)
    shared, talks = found["workloads"]
    assert [len(w["runs"]) for w in (shared, talks)] == [2, 2]
    assert (shared["prompt_tokens"], shared["cached_tokens"]) == (3 * 52, 3 * 32)
    outputs = talks["output_tokens"]
    assert 3 * 4 * 4 <= outputs <= 3 * 4 * 6
    for run in (*shared["runs"], *talks["runs"]):
        assert run["output_tokens_per_s"] == pytest.approx(run["output_tokens"] / run["seconds"])
        assert run["steps"]["decode"] >= 3
        assert not run["graph_replays_per_decode_step"]  # None or 0: no graphs on a CPU
        assert run["peak_memory"]["host_bytes"] > 1 << 20
        assert run["others_cores"] >= 0
    assert (found["device"], found["picks"]["attention"], found["picks"]["sampler"]) == ("cpu", "torch", "torch")
    assert {"torch", "date"} < found["environment"].keys()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_runs_that_keep_the_cache_find_the_prompts_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_byte_model(tmp_path / "model")
    argv = ["bench", "offline", "--model", str(model), "--load-format", "dummy", "--engine.threads", "1"]
    argv += ["--workload", "perf", "--requests", "2", "--input-len", "33", "--output-len", "4", "--repeat", "3"]
    assert main([*argv, "--keep-cache"]) == 0
    [perf] = result(capsys.readouterr().out)["workloads"]
    assert [run["cached_tokens"] for run in perf["runs"]] == [0, 64, 64]  # two pages of 16 each
    assert main(argv) == 0
    [perf] = result(capsys.readouterr().out)["workloads"]
    assert [run["cached_tokens"] for run in perf["runs"]] == [0, 0, 0]


def test_graph_replays_are_of_the_decode_steps_in_between() -> None:
    class Worker:
        stats = {"decode_steps": 300, "graph_replays": 199}

    class InProcess:
        worker = Worker()

    after = device_counters(InProcess())
    assert replays_per_step({"decode_steps": 100, "graph_replays": 0}, after) == 199 / 200
    assert replays_per_step(after, after) is None
    assert device_counters(object()) == {}
    assert replays_per_step({}, {}) is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--workload", "pref"], "'pref' is not known; there are: perf, single"),
        (["--workload", "perf", "--turns", "2"], "--turns 2 has no effect on the workload 'perf'"),
        (["--workload", "perf", "--prefix-len", "2"], "--prefix-len 2 has no effect on the workload 'perf'"),
        (["--workload", "perf", "--case", "1:1:1"], "give one of them"),
        (["--workload", "perf", "--compare", "transformers"], "runs cases"),
        (["--requests", "3"], "--requests is of a named workload"),
        (["--keep-cache"], "--keep-cache is of a named workload"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", *words]) == 78
    assert why in capsys.readouterr().err


def test_a_workload_longer_than_the_context_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_byte_model(tmp_path / "model", 4096)
    argv = ["bench", "offline", "--model", str(model), "--load-format", "dummy", "--engine.threads", "1"]
    assert main([*argv, "--workload", "prefill-32k"]) == 78
    assert "requests of up to 32769 tokens and the context here is 4096" in capsys.readouterr().err


def test_versions_are_of_what_is_installed_or_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed("pytest", "pytest") == pytest.__version__
    assert installed("no-such-package", "no_such_module") is None
    copied = ModuleType("no_such_module")
    copied.__version__ = "4.2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "no_such_module", copied)
    assert installed("no-such-package", "no_such_module") == "4.2"
