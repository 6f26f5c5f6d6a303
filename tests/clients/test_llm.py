"""Simon Willison's ``llm``, a command line with extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import Real, Scripted

pytest.importorskip("llm", reason="the client 'llm' is not installed")

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
Llm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def llm(real: Real, scripted: Scripted, tmp_path: Path) -> Llm:
    models: list[dict[str, Any]] = [
        {"model_id": "real", "model_name": real.model, "api_base": real.v1, "supports_schema": True},
        {
            "model_id": "text",
            "model_name": scripted.model,
            "api_base": scripted.v1,
            "api_key_name": "s",
            "completion": True,
        },
        {
            "model_id": "scripted",
            "model_name": scripted.model,
            "api_base": scripted.v1,
            "api_key_name": "s",
            "supports_tools": True,
        },
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    (tmp_path / "keys.json").write_text(json.dumps({"s": scripted.key}))

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        command = [sys.executable, "-m", "llm", *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)

    return run


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_whole_and_streamed_answers_agree(llm: Llm) -> None:
    ask = ("-m", "real", QUESTION, "-o", "temperature", "0")
    assert succeeded(llm(*ask)) == succeeded(llm(*ask, "--no-stream")) == f"{ANSWER}\n"


def test_usage_is_shown_and_logged(llm: Llm) -> None:
    done = llm("-m", "real", QUESTION, "-o", "temperature", "0", "--usage")
    assert "Token usage: 37 input, 8 output" in done.stderr
    (log,) = json.loads(succeeded(llm("logs", "--json")))
    assert (log["response"], log["input_tokens"], log["output_tokens"]) == (ANSWER, 37, 8)


def test_a_conversation_goes_on(llm: Llm) -> None:
    succeeded(llm("-m", "scripted", "one"))
    assert "user: one\nassistant: user: one\nassistant: \nuser: two\n" in succeeded(llm("-c", "two"))


def test_a_schema_is_kept(llm: Llm) -> None:
    got = json.loads(succeeded(llm("-m", "real", QUESTION, "--schema", "capital bool, large bool")))
    assert {k: type(v) for k, v in got.items()} == {"capital": bool, "large": bool}


@pytest.mark.parametrize("options", [[], ["--no-stream"]])
def test_a_tool_is_run(scripted: Scripted, llm: Llm, options: list[str]) -> None:
    scripted.replies(scripted.call("weather", city="Rome"))
    code = "def weather(city: str) -> str:\n    return 'sunny in ' + city"
    assert "tool: sunny in Rome" in succeeded(llm("-m", "scripted", QUESTION, "--functions", code, *options))


def test_completions(llm: Llm) -> None:
    assert succeeded(llm("-m", "text", "héllo 世界")) == "héllo 世界\n"


def test_errors_show_what_the_server_said(llm: Llm) -> None:
    done = llm("-m", "scripted", QUESTION, "-o", "temperature", "2", "-o", "max_tokens", "200000")
    assert done.returncode == 1
    assert "maximum context length is 200000 tokens" in done.stderr
