"""Ranges and traces on a CUDA device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minisgl.runtime.profile import StepRanges, StepTrace
from minisgl.testing.bytemodel import write_byte_model
from minisgl_cli.main import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_a_trace_has_the_kernels_of_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTrace(path, steps=1)
    with StepRanges().part("only"):
        torch.ones(64, 64, device="cuda").mm(torch.ones(64, 64, device="cuda"))
    trace.step()
    trace.close()
    kinds = {e.get("cat") for e in json.loads(path.read_text())["traceEvents"]}
    assert {"kernel", "user_annotation"} <= kinds


def test_steps_run_inside_nvtx_ranges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_byte_model(tmp_path / "model", 256, weights=True)
    argv = ["generate", "hi", "--raw", "--model", str(model), "--max-tokens", "4", "--temperature", "0", "--quiet"]
    assert main(argv) == 0
    plain = capsys.readouterr().out
    assert main([*argv, "--executor.local.nvtx", "true"]) == 0
    assert capsys.readouterr().out == plain
