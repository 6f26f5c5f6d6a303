"""Several api processes on one engine: one port, one set of metrics; and a text worker that dies."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.base.errors import ConfigError
from minisgl.launch.start import bind_all
from minisgl.testing.bytemodel import write_byte_model
from minisgl.testing.server import Server, wait_until

COMPLETIONS = "/v1/completions"


class Workers:
    """A server whose steps take a while."""

    def __init__(self, path: Path, *more: str) -> None:
        self.script = path / "script.json"
        self.pace(0)
        options = ["--model", str(write_byte_model(path / "model", 256)), "--executor", "scripted"]
        self.server = Server(*options, "--executor.scripted.script", str(self.script), *more)

    def pace(self, step_s: float) -> None:
        """From the next admitted request on, each step takes so long."""
        new = self.script.with_suffix(".new")
        new.write_text(json.dumps({"step_delay_s": step_s}))
        new.replace(self.script)  # at once: the engine may read at any time

    def open_requests(self) -> float:
        found = samples(self.server)
        return sum(value(found, f"minisgl_num_requests_{state}") for state in ("running", "waiting"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    made = Workers(
        tmp_path_factory.mktemp("two"), "--api-workers", "2", "--text.workers", "2", "--metrics-compat", "vllm"
    )
    with made.server:
        yield made


def samples(server: Server) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of /metrics, read by the official parser; each scrape has a connection of its own."""
    status, headers, body = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(body.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def value(found: dict[Any, float], name: str, **labels: str) -> float:
    """The only sample of a name with these labels."""
    fits = [v for (n, has), v in found.items() if n == name and set(labels.items()) <= set(has)]
    assert len(fits) == 1, (name, labels, [k for k in found if k[0] == name])
    return fits[0]


def served_by_each(server: Server, requests: int) -> None:
    """One connection for each request: the kernel spreads them over the processes."""
    for _ in range(requests):
        status, body = server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 4, "ignore_eos": True})
        assert status == 200, body


def test_all_api_processes_count_into_one_set_of_metrics(two: Workers) -> None:
    before = samples(two.server)
    served_by_each(two.server, 24)
    scrapes = [samples(two.server) for _ in range(8)]  # by either process

    def grown(name: str, **labels: str) -> list[float]:
        old = [v for (n, has), v in before.items() if n == name and set(labels.items()) <= set(has)]
        return [value(s, name, **labels) - sum(old) for s in scrapes]

    assert grown("minisgl_generation_tokens_total") == [24 * 4.0] * 8
    assert grown("minisgl_prompt_tokens_total") == [24 * 3.0] * 8
    assert grown("minisgl_request_success_total", finished_reason="length") == [24.0] * 8
    assert grown("minisgl_http_requests_total", handler=COMPLETIONS, method="POST", status="200") == [24.0] * 8
    assert grown("minisgl_time_to_first_token_seconds_count") == [24.0] * 8
    (gaps,) = set(grown("minisgl_inter_token_latency_seconds_count"))
    assert 0 < gaps <= 24 * 3  # tokens that come together have no time between them
    assert grown("minisgl_request_queue_time_seconds_count") == [24.0] * 8
    handled = [value(s, "minisgl_http_requests_total", handler="/metrics", method="GET", status="200") for s in scrapes]
    assert handled == sorted(handled)
    assert handled[-1] - handled[0] == 7


def test_metrics_have_vllms_names_too_if_asked(two: Workers) -> None:
    served_by_each(two.server, 1)
    found = samples(two.server)
    names = {name for name, _ in found}
    for ours in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"):
        assert value(found, f"vllm:{ours}", model_name="model", engine="0") == value(found, f"minisgl_{ours}")
    assert {
        "vllm:gpu_cache_usage_perc",
        "vllm:time_per_output_token_seconds_count",
        "vllm:iteration_tokens_total_count",
    } < names
    bounds = {float(dict(has)["le"]) for n, has in found if n == "vllm:time_to_first_token_seconds_bucket"}
    assert {0.001, 0.005, 0.01, 0.02, 2560.0} < bounds


def test_gauges_follow_what_runs_and_a_client_that_leaves_is_an_abort(two: Workers) -> None:
    """Case 29: the running gauge falls back to 0 within a second."""
    aborted = {"name": "minisgl_request_success_total", "finished_reason": "abort"}
    before = value(samples(two.server), **aborted)  # type: ignore[arg-type]
    two.pace(0.02)
    stream = two.server.stream(COMPLETIONS, {"prompt": "abc", "max_tokens": 100, "ignore_eos": True, "stream": True})
    next(iter(stream))
    assert two.open_requests() == 1
    stream.close()
    two.pace(0)
    wait_until(lambda: value(samples(two.server), "minisgl_num_requests_running") == 0, 5)
    wait_until(lambda: value(samples(two.server), **aborted) == before + 1, 5)  # type: ignore[arg-type]
    assert value(samples(two.server), "minisgl_kv_cache_usage_perc") == 0


def test_a_rejected_request_is_counted_by_its_code(two: Workers) -> None:
    for path in ("/nope", "/also/not"):
        assert two.server.get(path)[0] == 404
    found = samples(two.server)
    assert value(found, "minisgl_request_rejected_total", code="unknown_url") == 2
    assert value(found, "minisgl_http_requests_total", handler="none", method="GET", status="404") == 2


def test_connections_reach_both_processes(two: Workers) -> None:
    """The ids of completions come from the api process, so look at who holds the connections."""
    held = [http.client.HTTPConnection("127.0.0.1", two.server.port) for _ in range(32)]
    try:
        for connection in held:
            connection.connect()
            connection.request("GET", "/ping")
            connection.getresponse().read()
        for role in ("api-0", "api-1"):
            fds = list(Path(f"/proc/{two.server.pid(role)}/fd").iterdir())
            sockets = [fd for fd in fds if fd.readlink().name.startswith("socket:")]
            assert len(sockets) > 5, f"{role} holds {len(sockets)} sockets"
    finally:
        for connection in held:
            connection.close()


def test_a_text_worker_that_dies_is_restarted_and_only_its_requests_end(two: Workers) -> None:
    """Design 9.4: the stream of the other worker goes on; the new one takes requests."""
    two.pace(0.05)
    body = {"prompt": "x" * 40, "max_tokens": 40, "stream": True}
    streams = [two.server.stream(COMPLETIONS, body) for _ in range(8)]  # text-0 has some, whichever process takes them
    wait_until(lambda: two.open_requests() == 8, 10)
    pid = two.server.pid("text-0")
    two.server.signal(signal.SIGKILL, "text-0")
    two.server.wait_stderr(rf"text-0 \(pid {pid}\) was killed by SIGKILL \(signal 9\), so it is started again")
    two.pace(0)
    ended: dict[int, list[Any]] = {}
    readers = [threading.Thread(target=lambda i=i, s=s: ended.update({i: _outcome(s)})) for i, s in enumerate(streams)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    outcomes = sorted(ended.values())
    failed = outcomes.count("error internal_error")
    assert 1 <= failed < 8
    assert outcomes == ["error internal_error"] * failed + ["text " + "x" * 40] * (8 - failed)
    wait_until(lambda: "text-0" in two.server.processes.values(), 10)
    assert two.server.pid("text-0") != pid
    served_by_each(two.server, 8)  # by either text worker
    wait_until(lambda: value(samples(two.server), "minisgl_num_requests_running") == 0, 5)


def _outcome(stream: Any) -> str:
    if stream.status != 200:
        return f"error {json.loads(stream.answer.read())['error']['code']}"
    events = list(stream)
    assert events[-1] == "[DONE]"
    if "error" in events[-2]:
        return f"error {events[-2]['error']['code']}"
    return "text " + "".join(c["text"] for e in events[:-1] for c in e["choices"])


def test_a_text_worker_that_keeps_dying_ends_the_server(tmp_path: Path) -> None:
    made = Workers(tmp_path)
    try:
        server = made.server.wait_ready()
        for _ in range(3):
            pid = server.pid("text-0")
            server.signal(signal.SIGKILL, "text-0")
            wait_until(lambda old=pid: bool(set(server.pids("text-0")) - {old}), 10)  # type: ignore[misc]
            served_by_each(server, 1)
        server.signal(signal.SIGKILL, "text-0")
        assert server.wait_exit(15) == 70
        assert "so the server stops" in server.stderr
        assert server.left_over() == []
    finally:
        made.server.close()


def test_drain_lets_requests_of_every_process_finish(tmp_path: Path) -> None:
    made = Workers(tmp_path, "--api-workers", "2")
    try:
        server = made.server.wait_ready()
        made.pace(0.1)
        streams = [server.stream(COMPLETIONS, {"prompt": "abcdefghij", "stream": True}) for _ in range(6)]
        wait_until(lambda: made.open_requests() == 6, 10)
        server.signal(signal.SIGTERM)
        server.wait_stderr("no new requests")
        assert [_outcome(s) for s in streams] == ["text abcdefghij"] * 6
        assert server.wait_exit(20) == 0
        assert server.left_over() == []
    finally:
        made.server.close()


def test_port_zero_is_one_port_for_all_and_a_used_port_is_refused() -> None:
    socks = bind_all("127.0.0.1", 0, 3)
    try:
        (port,) = {s.getsockname()[1] for s in socks}
        for sock in socks:
            sock.listen()
        for count in (1, 2):
            with pytest.raises(ConfigError, match=f"server.port = {port} on 127.0.0.1 cannot be used"):
                bind_all("127.0.0.1", port, count)
    finally:
        for sock in socks:
            sock.close()
