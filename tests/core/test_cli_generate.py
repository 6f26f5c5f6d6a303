"""``minisgl generate``, with a device that answers with the prompt."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from minisgl.testing.bytemodel import write_byte_model
from minisgl_cli import options
from minisgl_cli.generate import arguments
from minisgl_cli.main import main


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the verb; returns its exit code, standard output and standard error."""
    model = write_byte_model(tmp_path / "model", 256)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = main(["generate", *argv, "--model", str(model), "--executor", "scripted"])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_answer_goes_to_stdout_and_the_summary_to_stderr(generate) -> None:
    code, out, err = generate("hello", "--raw", "--max-tokens", "5")
    assert (code, out) == (0, "hello\n")
    assert "[5 prompt tokens, 5 generated]" in err


def test_the_newline_that_ends_standard_input_is_not_part_of_the_prompt(generate) -> None:
    assert generate("-", "--raw", "--max-tokens", "20", stdin="hello\nyou\n")[1] == "hello\nyou\n"
    assert "[9 prompt tokens" in generate("-", "--raw", "--max-tokens", "1", stdin="hello\nyou\n")[2]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--max-tokens", "0", "max_tokens = 0 is too small"), ("--temperature", "-2", "temperature = -2.0 is too small")],
)
def test_wrong_sampling_is_refused_before_a_model_is_loaded(generate, monkeypatch, option, value, message) -> None:
    monkeypatch.setattr("minisgl.client.pipeline.Pipeline", None)  # it would be called
    code, out, err = generate("hello", option, value)
    assert (code, out) == (1, "")
    assert message in err


def test_a_log_level_that_is_set_is_the_terminals_and_warning_otherwise(monkeypatch) -> None:
    for argv, level in (([], logging.WARNING), (["--log-level", "debug"], logging.DEBUG)):
        root = logging.RootLogger(logging.NOTSET)
        monkeypatch.setattr(logging, "root", root)
        options.set_logging(options.parse(["x", *argv], verb="generate", extra=arguments)[0])
        assert root.level == level
