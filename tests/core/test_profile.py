"""``--profile`` and NVTX: steps by name in a trace of the steps that were asked for, and clear refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.api.device import StepRanges
from minisgl.base.errors import ConfigError
from minisgl.base.types import NO_PAGES, Span, StepPlan
from minisgl.runtime.profile import StepTrace
from minisgl.testing.bytemodel import write_byte_model
from minisgl_cli.main import main

PLAN = StepPlan(12, NO_PAGES, (), NO_PAGES, NO_PAGES, NO_PAGES, NO_PAGES, NO_PAGES, 3, (Span(4, 7, True),))
STEP = re.compile(r"step (\d+): (\d+) decode \+ (\d+) prefill")


def names(path: Path) -> list[str]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [e["name"] for e in events if e.get("ph") == "X"]


def test_a_range_is_in_the_trace_only_while_it_records(tmp_path: Path) -> None:
    ranges, path = StepRanges(), tmp_path / "trace.json"
    trace = StepTrace(path, steps=2, skip=1)
    for step in range(5):
        with ranges.step(PLAN), ranges.part(f"part {step}"):
            torch.zeros(3).add_(1)
        assert ranges.on == (step in (1, 2))
        trace.step()
    trace.close()
    found = names(path)
    assert [n for n in found if n.startswith("part")] == ["part 1", "part 2"]
    assert found.count("step 12: 3 decode + 7 prefill") == 2
    assert found.count("aten::add_") == 2


def test_a_run_that_ends_early_is_written_and_one_without_steps_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTrace(path, steps=100)
    with StepRanges().part("only"):
        trace.step()
    trace.close()
    assert "only" in names(path)
    late = StepTrace(tmp_path / "late.json", steps=1, skip=3)
    for _ in range(3):
        late.step()
    with pytest.raises(ConfigError, match="no step was traced: 3 ran, and the first 3 were to be left out"):
        late.close()
    assert not (tmp_path / "late.json").exists()
    assert not StepRanges().on


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which NVTX needs")
def test_nvtx_without_cuda_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="NVTX ranges need a CUDA device"):
        StepRanges(nvtx=True)
    model = write_byte_model(tmp_path / "model", 64, weights=True)
    assert main(["generate", "hi", "--raw", "--model", str(model), "--executor.local.nvtx", "true"]) == 78
    assert "NVTX ranges need a CUDA device" in capsys.readouterr().err


def test_generate_traces_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = write_byte_model(tmp_path / "model", 64, weights=True), tmp_path / "trace.json"
    argv = ["generate", "hi", "--raw", "--model", str(model), "--max-tokens", "6", "--quiet", "--engine.threads", "1"]
    argv += ["--loop", "sync", "--seed", "1", "--profile", str(path), "--profile-skip", "1", "--profile-steps", "2"]
    assert main(argv) == 0
    assert f"trace written to {path}" in capsys.readouterr().err
    steps = [found.groups() for n in names(path) if (found := STEP.fullmatch(n))]
    assert steps == [("1", "1", "0"), ("2", "1", "0")]  # step 0 was the prefill


def test_bench_offline_traces_a_run_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = write_byte_model(tmp_path / "model", 256, weights=True), tmp_path / "trace.json"
    argv = ["bench", "offline", "--model", str(model), "--engine.threads", "1", "--repeat", "1", "--loop", "sync"]
    sizes = ["--requests", "2", "--input-len", "9", "--output-len", "4"]
    assert main([*argv, "--workload", "perf", *sizes, "--profile", str(path)]) == 0
    steps = [found.groups()[1:] for n in names(path) if (found := STEP.fullmatch(n))]
    assert steps == [("0", "18"), ("2", "0"), ("2", "0"), ("2", "0")]
    assert main([*argv, "--case", "2:9:4", "--compare", "none", "--profile", str(path)]) == 0
    assert len([n for n in names(path) if STEP.fullmatch(n)]) == 4


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--profile-steps", "3"], "--profile-steps has no effect without --profile"),
        (["--profile", "/nowhere/at/all.json"], "cannot be written"),
        (["--profile", "x.json", "--profile-steps", "0"], "leaves nothing to trace"),
        (["--profile", "x.json", "--workload", "all"], "traces one workload, and 6 are to run"),
        (["--profile", "x.json", "--compare", "none"], "traces one workload, and 3 are to run"),
    ],
)
def test_a_trace_that_could_not_be_made_is_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", *words]) == 78
    assert why in capsys.readouterr().err
