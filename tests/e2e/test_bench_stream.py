"""``minisgl bench stream`` in small: its counts agree with one another."""

from __future__ import annotations

import json

import pytest

from minisgl.base.errors import ConfigError
from minisgl_cli.bench import stream


def test_counts_chunks_tokens_and_cpu_of_both_servers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--connections", "4", "--tokens", "50", "--pace", "400", "--seconds", "1", "--new-rate", "20"]
    assert stream.run(arguments) == 0
    out = capsys.readouterr().out
    assert "bare Starlette" in out
    (line,) = [json.loads(text) for text in out.splitlines() if text.startswith("{")]
    for server in ("minisgl", "bare"):
        found = line[server]
        assert found["chunks_s"] > 0
        assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
        assert found["cpu_client"] > 0
    assert line["minisgl"]["tokens_a_chunk"] >= 0.9  # no chunk without a token, but for one at each end of the window
    assert line["minisgl"]["chunks_s"] * line["minisgl"]["tokens_a_chunk"] < 2 * 400
    assert {"cpu_api-0", "cpu_text-0", "cpu_engine"} < line["minisgl"].keys()
    assert line["met"].keys() == {"chunks_s", "p99_ms"}


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seconds 0, --pace 0"):
        stream.run(["--seconds", "0"])
