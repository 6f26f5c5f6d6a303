"""``minisgl bench step`` on a CPU: it measures what it says, and refuses what does not fit."""

import json

import pytest

from minisgl.base.errors import ConfigError
from minisgl.testing.checkpoints import llama_checkpoint
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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rows", "33"], r"--rows 33 is more than limits.max_running = 32"),
        (["--rows", "1", "--context", "200"], r"are 206 tokens; a row can have 200"),
        (["--rows", "20", "--context", "100"], r"20 rows of 106 tokens need 140 KV pages; there are 64"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(options, more, message):
    with pytest.raises(ConfigError, match=message):
        step.run([*options, *more, "--steps", "2"])
