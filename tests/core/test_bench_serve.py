"""``minisgl bench serve``: what the client notes of a stream, how answers are summed up, and real servers under load."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.base.errors import ConfigError
from minisgl.testing.bytemodel import VOCAB, write_byte_model
from minisgl.testing.server import Server
from minisgl_cli.bench import serve
from minisgl_cli.bench.arrivals import Asking, Played, Slo, play, renamed, summary
from minisgl_cli.bench.client import Answer, ask, target
from minisgl_cli.bench.server import started
from minisgl_cli.main import main
from minisgl_cli.simulate.workload import Request


def event(text: str | None, tokens: int | None) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text}]
    usage = None if tokens is None else {"completion_tokens": tokens}
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*pieces: bytes) -> list[bytes]:
    return [HEAD, *(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces), b"0\r\n\r\n"]


def answered(pieces: Sequence[bytes], timeout_s: float = 30.0) -> Answer:
    """What the client notes when a server sends these pieces and closes; with none it keeps silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert await reader.readexactly(size) == b"{}"
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if not pieces:
            await reader.read()
        writer.close()

    async def both() -> Answer:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            answer = Answer(0.0)
            port = server.sockets[0].getsockname()[1]
            await ask(target(f"127.0.0.1:{port}", ""), b"{}", answer, timeout_s)
            return answer

    return asyncio.run(both())


def test_a_stream_is_read_whatever_its_chunks_are() -> None:
    whole = event("a", 1) + b": keep-alive\n\n" + event("bc", 3) + event("", 4) + event(None, 5) + DONE
    for cut in range(1, len(whole), 7):
        found = answered(chunked(whole[:cut], whole[cut:]))
        assert (found.status, found.error, found.tokens) == (200, "", 5)
        assert [tokens for _, tokens in found.seen] == [1, 3]


def test_a_server_that_counts_at_the_end_only_gets_a_token_for_each_text() -> None:
    found = answered(chunked(event("a", None), event("b", None), event(None, 3), DONE))
    assert ([tokens for _, tokens in found.seen], found.tokens) == ([1, 2], 3)


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        (chunked(event("a", 1)), "the stream ended before [DONE]"),
        ([HEAD, b"5\r\nda"], "IncompleteReadError"),
        (chunked(b'data: {"error": {"message": "engine died"}}\n\n'), "engine died"),
        ([b'HTTP/1.1 503 No\r\nContent-Length: 37\r\n\r\n{"error": {"message": "come tomorrow"}}'], "503: come tomorrow"),
        ([b"HTTP/1.1 502 Bad\r\n\r\n<html>"], "502: <html>"),
        (chunked(b"data: {\n\n"), "JSONDecodeError"),
    ],
)  # fmt: skip
def test_a_failure_is_noted_with_its_reason(pieces: list[bytes], why: str) -> None:
    assert why in answered(pieces).error


def test_a_silent_server_is_given_up() -> None:
    assert answered([], timeout_s=0.05).error == "no complete answer within 0.05 s"


def test_tokens_that_come_together_share_their_time() -> None:
    answer = Answer(0.0, sent_s=1.0, head_s=1.5, end_s=4.0, status=200, seen=[(2.0, 1), (3.0, 3), (3.5, 4)], tokens=4)
    assert answer.times() == (1.0, [0.5, 0.5, 0.5])


def test_an_answer_without_text_begins_with_its_status_line() -> None:
    assert Answer(0.0, sent_s=1.0, head_s=1.5, end_s=3.5, status=200, tokens=5).times() == (0.5, [0.5] * 4)
    one = Answer(0.0, sent_s=1.0, head_s=1.1, end_s=2.5, status=200, seen=[(2.0, 1)], tokens=1)
    assert one.times() == (1.0, [])


def request(at_s: float = 0.0, length: int = 10, follows: int | None = None) -> Request:
    return Request(at_s, np.array([7], np.int64), np.array([length], np.int64), 8, 4, follows)


def test_goodput_counts_what_is_within_both_limits() -> None:
    fast = Answer(0.0, sent_s=0.0, head_s=0.1, end_s=1.0, status=200, seen=[(0.1, 1), (0.2, 2)], tokens=2)
    late = Answer(0.0, sent_s=0.0, head_s=0.1, end_s=1.0, status=200, seen=[(0.5, 1), (0.6, 2)], tokens=2)
    slow = Answer(0.5, sent_s=1.0, head_s=0.1, end_s=4.0, status=200, seen=[(1.1, 1), (1.9, 2)], tokens=2)
    failed = Answer(0.0, sent_s=0.0, end_s=0.5, error="status 503: full")
    found = summary(Played([fast, late, slow, failed], 0.4), [request()] * 4, Slo(200, 300))
    assert (found["requests"], found["failed"], found["failures"]) == (3, 1, {"status 503: full": 1})
    assert found["seconds"] == 4.0
    assert found["goodput_per_s"] == 1 / 4
    assert found["requests_per_s"] == 3 / 4
    assert (found["prompt_tokens_per_s"], found["output_tokens_per_s"]) == (30 / 4, 6 / 4)
    assert found["ttft_s"]["p50"] == pytest.approx(0.1)
    assert found["client"]["cpu_share"] == pytest.approx(0.1)
    assert found["client"]["late_s"]["mean"] == pytest.approx(0.125)
    assert Slo(None, None).met(9.0, [9.0])


def test_a_later_run_shares_no_tokens_with_an_earlier_one_but_as_much_within_itself() -> None:
    same = [request(length=64), request(length=64)]
    first, second = renamed(same, 0), renamed(same, 1)
    assert (first[0].prompt() == first[1].prompt()).all()
    assert (second[0].prompt() == second[1].prompt()).all()
    assert (first[0].prompt() != second[0].prompt()).all()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL such as"):
        target(url, "")


def test_a_key_is_sent_and_a_path_kept() -> None:
    head = target("http://h:1/api/v1/", "secret").head
    assert head.startswith(b"POST /api/v1/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in head


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_byte_model(tmp_path_factory.mktemp("model"), 1024)
    with Server("--model", str(model), "--executor", "scripted", "--api-key", "k") as running:
        yield running


def result(out: str) -> dict[str, Any]:
    [line] = [line for line in out.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_request_that_follows_waits_for_the_end_of_the_other(server: Server) -> None:
    _, models = server.get("/v1/models", headers={"Authorization": "Bearer k"})
    asking = Asking(target(server.url, "k"), models["data"][0]["id"], VOCAB, 0.0, 30.0)
    first, second, other = play([request(), request(0.05, follows=0), request(0.02)], asking).answers
    assert [a.error for a in (first, second, other)] == ["", "", ""]
    assert second.due_s >= first.end_s + 0.05
    assert second.sent_s >= second.due_s
    assert other.due_s == pytest.approx(first.due_s + 0.02)


def test_rates_are_measured_on_a_server_that_runs(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "load.png"
    argv = ["bench", "serve", "--base-url", server.url, "--api-key", "k", "--vocab", "97", "--rate", "40,100"]
    argv += [
        "--requests",
        "12",
        "--input-len",
        "8-16",
        "--output-len",
        "4-6",
        "--slo-ttft",
        "60000",
        "--slo-itl",
        "60000",
    ]
    assert main([*argv, "--plot", str(plot)]) == 0
    found = result(capsys.readouterr().out)
    assert [r["rate"] for r in found["results"]] == [40, 100]
    for r in found["results"]:
        assert (r["requests"], r["failed"]) == (12, 0)
        assert r["goodput_per_s"] == r["requests_per_s"]
        assert 0 < r["ttft_s"]["p50"] <= r["e2e_s"]["p99"]
        assert r["itl_s"] is not None
        assert r["client"]["cpu_s"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_played(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 40 * i, "input_length": 600, "output_length": 3, "hash_ids": [0, i + 1]} for i in range(3)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["bench", "serve", "--base-url", server.url, "--api-key", "k", "--vocab", str(VOCAB), "--trace", str(trace)]
    assert main(argv) == 0
    found = result(capsys.readouterr().out)
    [r] = found["results"]
    assert (found["source"], r["requests"], r["rate"]) == ("mooncake trace.jsonl", 3, 3 * (2 / 3) / 0.08)
    assert r["prompt_tokens_per_s"] == pytest.approx(1800 / r["seconds"])


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--vocab", "300"], 78, "prompt tokens are below --vocab 300"),
        (["--input-len", "2000"], 78, "takes 1024; give smaller lengths"),
        (["--cache", "naive"], 78, "--cache is a setting of a server, and --base-url names one that runs"),
        (["--rate", "inf", "--plot", "x.png"], 78, "has no place on it"),
    ],
)
def test_what_the_server_cannot_serve_is_refused(
    words: list[str], code: int, why: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    argv = ["bench", "serve", "--base-url", server.url, "--api-key", "k", "--requests", "400", "--input-len", "64"]
    assert main([*argv, *words]) == code
    assert why in capsys.readouterr().err


def test_a_wrong_key_and_an_absent_server_are_told(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", server.url, "--requests", "1"]) == 70
    assert "answered 401 Unauthorized; a server that needs a key gets that of --api-key" in capsys.readouterr().err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers
        assert main(["bench", "serve", "--base-url", f"127.0.0.1:{free.getsockname()[1]}", "--requests", "1"]) == 70
    assert "did not say which models there are" in capsys.readouterr().err


def test_a_server_is_started_with_the_settings_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ports: list[int] = []

    @contextmanager
    def watched(options: Sequence[str]) -> Iterator[tuple[str, str]]:
        with started(options) as (url, about):
            ports.append(int(url.rpartition(":")[2]))
            yield url, about

    monkeypatch.setattr(serve, "started", watched)
    model = write_byte_model(tmp_path / "model", 1024)
    argv = ["bench", "serve", "--model", str(model), "--executor", "scripted", "--cache=naive", f"--vocab={VOCAB}"]
    assert main([*argv, "--rate", "inf", "--requests", "5", "--input-len", "8"]) == 0
    found = result(capsys.readouterr().out)
    assert "executor=scripted" in found["server"]
    assert "cache=naive" in found["server"]
    assert found["results"][0]["requests"] == 5
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]))


@pytest.mark.parametrize(
    ("words", "why"),
    [(["--port", "1"], "starts its server on a free port"), (["--page-size", "0"], "kv.page_size")],
)
def test_settings_that_no_server_could_start_with_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *words, "--requests", "1"]) == 78
    assert why in capsys.readouterr().err
