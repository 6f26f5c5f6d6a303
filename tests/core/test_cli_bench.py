"""``minisgl bench``: what its options accept, and one small measurement."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path

import numpy as np
import pytest

from minisgl.base.types import Tokens
from minisgl.testing.bytemodel import write_byte_model
from minisgl_cli.bench import load, others, report
from minisgl_cli.bench.offline import Case, parse_case
from minisgl_cli.bench.simulator import compare, parse_trace
from minisgl_cli.bench.sink import text_worker
from minisgl_cli.main import main
from minisgl_cli.simulate.calibrate import calibrate


def test_a_case_is_requests_and_two_lengths_or_ranges() -> None:
    assert parse_case("16:64:16-256") == Case(16, (64, 64), (16, 256))


@pytest.mark.parametrize("text", ["", "1:2", "1:2:3:4", "0:1:1", "1:0:1", "1:1:0", "1:3-1:1", "a:1:1", "1:1-:1-x"])
def test_other_cases_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not REQUESTS:INPUT:OUTPUT"):
        parse_case(text)


def test_repeats_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["bench", "offline", "--repeats", "0"])
    assert refused.value.code == 2
    assert "argument --repeats" in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("minisgl.client.pipeline.Pipeline", None)  # it would be called
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert main(["bench", "offline", "--plot", str(tmp_path / "x.png")]) == 78
    assert "--plot needs package 'matplotlib'" in capsys.readouterr().err
    monkeypatch.setattr(report, "find_spec", lambda name: name)
    assert main(["bench", "offline", "--plot", str(tmp_path / "gone" / "x.png")]) == 78
    assert "there is no folder" in capsys.readouterr().err


def test_offline_prints_a_line_of_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    model, plot = write_byte_model(tmp_path / "model", 64, weights=True), tmp_path / "bars.png"
    argv = ["bench", "offline", "--case", "2:4:3-5", "--repeats", "1", "--compare", "none", "--plot", str(plot)]
    assert main([*argv, "--model", str(model), "--engine.threads", "1"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    [case] = json.loads(line)["cases"]
    assert case["case"] == "2 x 4 in, 3-5 out"
    assert case["minisgl tok/s"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_simulator_plays_the_same_requests_for_real_and_in_virtual_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, steps = write_byte_model(tmp_path / "model", 128, weights=True), tmp_path / "steps.jsonl"
    argv = [
        "bench",
        "simulator",
        "--calibrate-on",
        "6:4-40:3-9:100",
        "--predict",
        "5:8-60:5:80",
        "--patience",
        "0",
        "--steps",
        str(steps),
    ]
    assert main([*argv, "--model", str(model), "--engine.threads", "1"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert [run["run"] for run in found["runs"]] == ["real 1", "real 2", "simulated"]
    assert [p["what"] for p in found["predictions"]] == ["output_tokens_per_s", "ttft_s"]
    assert found["steps"] == len(steps.read_text().splitlines())
    assert calibrate(steps).step_s == found["fitted"]["step_s"]
    assert all(run["out tok/s"] > 0 and run["TTFT ms"] > 0 for run in found["runs"])


def test_a_prediction_may_be_off_by_a_share_or_by_twice_what_real_runs_differ() -> None:
    """By hand: runs of 95 and 105 differ by 10 of 100, so that 20% is allowed instead of 10; equal ones leave it at 10%."""
    assert compare("", "output_tokens_per_s", [95.0, 105.0], 119.0)["within"]
    assert not compare("", "output_tokens_per_s", [95.0, 105.0], 121.0)["within"]
    assert not compare("", "output_tokens_per_s", [100.0, 100.0], 89.0)["within"]
    assert compare("", "ttft_s", [0.1, 0.1], 0.119)["within"]


@pytest.mark.parametrize("text", ["", "4:8:8", "1:8:8:1", "4:8:8:0", "4:8:8:inf", "4:9-8:8:1", "a:8:8:1"])
def test_other_traces_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not REQUESTS:INPUT:OUTPUT:RATE"):
        parse_trace(text)


def test_other_processes_are_seen_where_the_system_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """1,000 ticks more of the machine, none of this process: with 100 ticks a second 10 s, over the 5 that pass."""
    stat, now = tmp_path / "stat", iter([0.0, 5.0, 5.0])
    monkeypatch.setattr(others, "STAT", stat)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    monkeypatch.setattr("time.process_time", lambda: 3.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    stat.write_text("cpu  1000 0 0 7 7 0 0 0 0 0\n")
    seen = others.OthersCPU()
    stat.write_text("cpu  1300 200 300 9 9 50 50 100 0 0\n")
    assert seen.cores == pytest.approx(2.0)
    stat.unlink()
    assert others.OthersCPU().cores is None


def test_load_compares_with_a_sequential_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_byte_model(tmp_path / "model", 64, weights=True)
    argv = ["bench", "load", "--model", str(model), "--repeats", "1", "--engine.threads", "1", "--device", "cpu"]
    assert main(argv) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert [case["what"] for case in found["cases"]] == ["sequential read", "into memory", "ready to run"]
    assert found["bytes"] == sum(f.stat().st_size for f in model.glob("*.safetensors"))
    assert found["cases"][0]["of sequential"] == 1
    assert main([*argv, "--load-format", "dummy"]) == 78
    assert "give --generate GIB" in capsys.readouterr().err


def test_what_is_dropped_from_the_page_cache_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(1 << 20))
    with file.open("rb") as f:
        assert sum(b & 1 for b in load.resident(f.fileno())) == 256
        assert load.drop([file]) in (0, 1)  # 1: a file system that lives in the page cache


def test_host_measures_steps_whose_pages_are_evicted_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "growth.png"
    argv = [
        "bench",
        "host",
        "--rows",
        "1,16,256",
        "--page-sizes",
        "16,1",
        "--cached",
        "16384,32768",
        "--steps",
        "16",
        "--requests",
        "20",
    ]
    assert main([*argv, "--plot", str(plot)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    result = json.loads(line)
    pages = [(s["rows"], s["page"], s["evicted_pages"]) for s in result["steps"]]
    assert pages == [(1, 16, 1 / 16), (16, 16, 1), (256, 16, 16), (1, 1, 1), (16, 1, 16), (256, 1, 256)]
    assert [(a["requests"], a["cached_share"]) for a in result["admission"]] == [(20, 2048 / 2112)] * 2
    assert [(c["page"], c["cached"]) for c in result["cache"]] == [(16, 16384), (16, 32768), (1, 16384), (1, 32768)]
    assert [t["what"] for t in result["targets"]] == ["decode step, 256 rows, page 16"]
    for row in (*result["steps"], *result["cache"]):
        assert all(value > 0 for value in row.values())
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_host_refuses_a_cache_that_keeps_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--cache", "naive", "--rows", "1", "--steps", "1"]) == 78
    assert "needs a cache that keeps every finished prompt; of 256 pages it kept 0" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--rows", "0"), ("--rows", "1,x"), ("--cached", "100")])
def test_host_refuses_sizes_that_it_cannot_measure(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["bench", "host", option, value])
    assert refused.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


def test_outputs_of_a_benchmark_go_to_another_process_that_ends_with_it() -> None:
    with text_worker() as outbox:
        for step in range(100):
            outbox.send(Tokens(step, np.arange(8), np.arange(8, dtype=np.int32)))
