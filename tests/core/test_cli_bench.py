"""``minisgl bench``: what its options accept, and one small measurement."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from minisgl.testing.bytemodel import write_byte_model
from minisgl_cli.bench import load, report
from minisgl_cli.bench.offline import Case, parse_case
from minisgl_cli.main import main


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
