"""``minisgl bench step`` on a CPU: it measures what it says, and refuses what does not fit."""

import json
from pathlib import Path

import pytest

from minisgl.base.errors import ConfigError
from minisgl.nn.assemble import add_piecewise
from minisgl.runtime.attention import GraphSupport
from minisgl.runtime.record import EagerRecorder
from minisgl.testing.checkpoints import llama_checkpoint, local_model, make_worker
from minisgl_cli.bench import step

CASES = ["greedy", "temperature", "top-p"]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    path = llama_checkpoint(tmp_path_factory.mktemp("llama")).path
    return ["--model", str(path), "--device", "cpu", "--max-len", "200", "--kv.num-pages", "64"]


def test_each_case_has_its_times(options, capsys):
    assert step.run([*options, "--rows", "1,3", "--context", "20", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["bench"] == "step"
    assert [(r["rows"], r["sampling"], r["graph"]) for r in result["rows"]] == [
        (n, sampling, "no") for n in (1, 3) for sampling in CASES
    ]
    assert all(r["ms"] > 0 and r["host_us"] > 0 for r in result["rows"])


def test_steps_with_a_prompt_cost_more_of_them(options, capsys):
    assert step.run([*options, "--rows", "2", "--context", "20", "--steps", "2", "--prompt", "100"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [r["changes"] for r in rows] == ["none"] * 3 + ["a prompt of 100 tokens"]
    assert rows[-1]["graph"] == "no"
    assert rows[-1]["ms"] > 0


def test_a_prompt_is_measured_in_pieces_and_without(options):
    worker = make_worker(local_model(Path(options[1])), {"kv": {"page_size": 4, "num_pages": 64}})
    worker.attention.graph, worker.piecewise = GraphSupport.DECODE, None
    add_piecewise(worker, 32, EagerRecorder())
    found = step.measure_prompt(worker, 2, 20, 3, 30)
    assert [r["graph"] for r in found] == ["pieces", "no"]
    assert worker.stats["piecewise_replays"] == 2 * 3 + 2 * 2  # two steps set up each case
    assert [r["graph"] for r in step.measure_prompt(worker, 2, 20, 3, 31)] == ["no"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rows", "32", "--prompt", "5"], r"--rows 32 leave no row of limits.max_running = 32 for --prompt"),
        (
            ["--rows", "1", "--context", "20", "--prompt", "256"],
            r"--prompt 256 beside 1 rows is more than limits.batch_tokens = 256",
        ),
        (["--rows", "33"], r"--rows 33 is more than limits.max_running = 32"),
        (["--rows", "1", "--context", "200"], r"are 206 tokens; a row can have 200"),
        (["--rows", "20", "--context", "100"], r"20 rows of 106 tokens need 140 KV pages; there are 64"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(options, more, message):
    with pytest.raises(ConfigError, match=message):
        step.run([*options, *more, "--steps", "2"])
