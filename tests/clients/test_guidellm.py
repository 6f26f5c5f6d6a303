"""GuideLLM, which measures servers: a short run of each kind of request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import Real

pytest.importorskip("guidellm", reason="the client 'guidellm' is not installed")

REQUESTS, PROMPT, OUTPUT = 6, 24, 12


def measure(real: Real, folder: Path, form: str, profile: str) -> dict[str, Any]:
    """The only benchmark of the report."""
    report = folder / "report.json"
    options = {
        "backend": f"kind=openai_http,target={real.url},request_format={form}",
        "profile": profile,
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={real.folder}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console", *words]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return dict(benchmark)


@pytest.mark.parametrize("form", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_run_ends_without_errors_and_counts_every_token(real: Real, tmp_path: Path, form: str) -> None:
    told = measure(real, tmp_path, form, "kind=concurrent,streams=2")["metrics"]
    totals = told["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    tokens = told["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (OUTPUT, OUTPUT)  # as the server's usage says
    assert told["prompt_token_count"]["successful"]["min"] >= PROMPT
    assert told["inter_token_latency_ms"]["successful"]["count"] == REQUESTS * (OUTPUT - 1)  # each token was a chunk
