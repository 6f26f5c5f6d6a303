"""The server as users start it: ``minisgl serve`` with real processes, sockets and signals, on a device that needs no weights."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.testing.bytemodel import byte_ids, write_byte_model
from minisgl.testing.server import Server, Stream, wait_until

SLOW = {"step_delay_s": 0.01}
ADMIN = {"Authorization": "Bearer boss"}
PLUGINS = '''
import asyncio, os, sys, time
from minisgl.api import Frontend, ModelSource, SchedulerPolicy
from minisgl.api.hookspec import hookimpl

sys.path.insert(0, os.path.dirname(__file__))

class Base(SchedulerPolicy):
    """First come, first served."""
    def __init__(self, ctx): pass
    def plan(self, v, b):
        for r in list(v.prefilling()) + list(v.waiting()):
            if not b.prefill(r): break

class Mine(Base): pass

class Raising(Base):
    def plan(self, v, b): raise KeyError("policy bug")

class Hanging(Base):
    def plan(self, v, b):
        while True: time.sleep(0.05)

class Endless(ModelSource):
    """Downloads for ever."""
    def __init__(self, ctx): self.ctx = ctx
    def resolve(self, ref, revision, weights):
        try:
            while True:
                self.ctx.progress("endless", 1, 2)
                time.sleep(0.01)
        finally:
            with open(os.environ["DIARY"], "a") as f: f.write("let go\\n")

class Quitter(Frontend):
    async def serve(self): pass

class Terminal(Frontend):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.over = asyncio.Event()
    async def serve(self): await self.over.wait()
    async def shutdown(self, grace):
        with open(os.environ["DIARY"], "a") as f: f.write("terminal shut down\\n")
        self.over.set()

@hookimpl
def register_frontends(add):
    add("quitter", Quitter)
    add("terminal", Terminal)

class Middleware:
    def __init__(self, app): self.app = app
    async def __call__(self, scope, receive, send): await self.app(scope, receive, send)

@hookimpl
def register_schedulers(add):
    add("mine", Mine)
    add("raising", Raising)
    add("hanging", "tricks:Hanging")
    add("nowhere", "no_such_module_anywhere:Policy")

@hookimpl
def http_middleware(frontend, add): add(Middleware)

class Diary:
    """Writes down each hook of the life of a process."""
    def _note(self, *what):
        with open(os.environ["DIARY"], "a") as f: f.write(" ".join(map(str, what)) + "\\n")
    @hookimpl
    def process_started(self, role, rank): self._note("started", role, rank)
    @hookimpl
    def process_stopping(self, role, rank): self._note("stopping", role, rank)
    @hookimpl
    def engine_ready(self, info): self._note("ready", info.model)
    @hookimpl
    def engine_failed(self, fault): self._note("failed", fault.role, fault.exit)

class Slow:
    """The model is there when the file `gate` is gone."""
    @hookimpl
    def resolve_model(self, ref):
        end = time.monotonic() + 60
        while os.path.exists(os.environ["GATE"]) and time.monotonic() < end: time.sleep(0.01)
        return None

class OnlyHere:
    """Cannot be made in a child process."""
    @hookimpl
    def process_started(self, role): pass
    def __init__(self):
        if "minisgl.launch.child" in sys.orig_argv: raise RuntimeError("this machine has no fork" + " and no spoon")
'''


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a module of plugins."""
    path = tmp_path_factory.mktemp("processes")
    write_byte_model(path / "model")
    (path / "tricks.py").write_text(PLUGINS)
    return path


class Maker:
    """Starts servers and ends them whatever happens."""

    def __init__(self, folder: Path, tmp: Path) -> None:
        self.folder, self.tmp = folder, tmp
        self.hold = tmp / "hold"
        self.started: list[Server] = []

    def __call__(self, *args: str, ready: bool = True, script: dict[str, Any] | None = None, **kw: Any) -> Server:
        common = ["--model", str(self.folder / "model"), "--executor", "scripted", "--server.admin-key", "boss"]
        common += ["--executor.scripted.hold", str(self.hold)]
        if script is not None:
            (self.tmp / "script.json").write_text(json.dumps(script))
            common += ["--executor.scripted.script", str(self.tmp / "script.json")]
        own = {"PYTHONPATH": str(self.folder), "GATE": str(self.tmp / "gate"), "DIARY": str(self.tmp / "diary")}
        env = {**own, **kw.pop("env", {})}
        server = Server(*common, *args, env=env, **kw)
        self.started.append(server)
        return server.wait_ready() if ready else server


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Maker]:
    maker = Maker(folder, tmp_path)
    yield maker
    for server in maker.started:
        server.close()


def ask(server: Server, prompt: str = "hi", **kw: Any) -> tuple[int, Any]:
    return server.post("/v1/completions", {"prompt": prompt, **kw})


def stream(server: Server, prompt: str = "hello", **kw: Any) -> Stream:
    return server.stream("/v1/completions", {"prompt": prompt, "stream": True, **kw})


def stats(server: Server) -> dict[str, Any]:
    status, value = server.get("/stats", headers=ADMIN)
    assert status == 200, value
    return dict(value)


class Running:
    """A stream that has begun; with ``hold``, the engine stands still from then on."""

    def __init__(self, server: Server, prompt: str = "a long goodbye", hold: Path | None = None, **kw: Any) -> None:
        self.stream = server.stream("/v1/completions", {"prompt": prompt, "stream": True, **kw})
        assert self.stream.status == 200
        self._events = iter(self.stream)
        self._first = next(self._events)
        if hold is not None:
            hold.touch()

    def finish(self) -> list[Any]:
        return [self._first, *self._events]


def text_of(events: list[Any]) -> str:
    return "".join(c["text"] for e in events if isinstance(e, dict) for c in e.get("choices", ()))


# ------------------------------------------------------------------------------------------------------------- start, stop


def test_server_starts_on_a_free_port_serves_and_leaves_nothing_behind(start: Maker) -> None:
    server = start("--text-workers", "2")
    line = server.stdout.strip()
    for part in (server.url, "model=model", "device=cpu", "pages=4096x16", "cache=radix", "scheduler=chunked"):
        assert part in line
    assert sorted(server.processes.values()) == ["api-0", "engine", "supervisor", "text-0", "text-1"]
    assert server.request("GET", "/health")[0] == 200
    for i in range(4):  # both text workers
        assert ask(server, f"echo {i}")[1]["choices"][0]["text"] == f"echo {i}"
    assert server.post("/tokenize", {"prompt": "ab"})[1]["tokens"] == byte_ids("ab")
    assert server.stop(signal.SIGTERM) == 0


def test_only_the_engine_process_loads_torch(start: Maker, tmp_path: Path) -> None:
    """With a real model: random weights, answers of the expected length."""
    model = write_byte_model(tmp_path / "real", weights=True)
    server = start("--model", str(model), "--executor", "local", "--kv.num-pages", "64", "--engine.threads", "1")
    assert "attention=torch" in server.stdout
    assert "model=real device=cpu" in server.stdout
    assert " arch=LlamaForCausalLM " in server.stdout
    assert {role: server.loads(role, "libtorch") for role in ("engine", "text-0", "api-0", "supervisor")} == {
        "engine": True,
        "text-0": False,
        "api-0": False,
        "supervisor": False,
    }
    status, answer = ask(server, "hello", max_tokens=5, ignore_eos=True, temperature=0)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 5
    assert server.stop() == 0


def test_port_in_use_is_refused_before_anything_starts(start: Maker) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start("--port", str(port), ready=False)
        assert server.wait_exit() == 78
    assert f"server.port = {port} on 127.0.0.1 cannot be used (Address already in use)" in server.stderr
    assert server.left_over() == []


def test_port_opens_at_once_and_says_that_the_model_is_loading(start: Maker, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    server = start("--plugin", "tricks:Slow", ready=False)
    assert server.url
    wait_until(lambda: _connects(server.port), 30)
    for path in ("/health", "/ready"):
        status, _, body = server.request("GET", path)
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_loading")
    assert ask(server)[0] == 503
    (tmp_path / "gate").unlink()
    server.wait_ready()
    assert server.request("GET", "/ready")[0] == 200
    assert ask(server)[0] == 200
    assert server.stop() == 0


def test_stop_while_the_model_is_loading_ends_it_at_once(start: Maker, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    server = start("--plugin", "tricks:Slow", ready=False)
    wait_until(lambda: _connects(server.port), 30)
    assert server.stop(signal.SIGINT, seconds=10) == 0


@pytest.mark.parametrize("how", ["SIGTERM to the supervisor", "Ctrl+C in the terminal"])
def test_stop_refuses_new_requests_and_lets_running_streams_finish(start: Maker, how: str) -> None:
    server = start(script=SLOW)
    running = Running(server, hold=start.hold)
    if how.startswith("SIGTERM"):
        server.signal(signal.SIGTERM)
    else:
        server.signal_all(signal.SIGINT)
    wait_until(lambda: server.request("GET", "/ready")[0] == 503)
    status, answer = ask(server)
    assert (status, answer["error"]["code"]) == (503, "server_draining")
    assert server.process.poll() is None
    start.hold.unlink()
    events = running.finish()
    assert text_of(events) == "a long goodbye"
    assert [c["finish_reason"] for e in events if isinstance(e, dict) for c in e["choices"]][-1] == "stop"
    assert events[-1] == "[DONE]"
    assert server.wait_exit() == 0
    assert server.left_over() == []


def test_a17_stream_that_outlasts_the_drain_time_ends_with_an_error_frame(start: Maker) -> None:
    """A17"""
    server = start("--server.drain-s", "0.2", script=SLOW)
    running = Running(server, hold=start.hold)
    server.signal(signal.SIGTERM)
    events = running.finish()
    assert events[-2]["error"]["code"] == "server_draining"
    assert events[-1] == "[DONE]"
    assert server.wait_exit() == 0
    assert "requests that were cut off: 1" in server.stderr
    assert server.left_over() == []


def test_second_interrupt_kills_at_once(start: Maker) -> None:
    server = start("--server.drain-s", "60", script=SLOW)
    running = Running(server, hold=start.hold)
    server.signal_all(signal.SIGINT)
    server.wait_stderr("no new requests")
    server.signal_all(signal.SIGINT)
    assert server.wait_exit(5) == 130
    assert server.left_over() == []
    running.stream.close()


# ---------------------------------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("role", ["engine", "api-0"])
def test_killed_process_ends_the_server_with_its_name_and_how_it_ended(start: Maker, role: str) -> None:
    """A17: a stream that has begun gets one error frame and its end."""
    server = start(script=SLOW)
    running = Running(server, hold=start.hold)
    pid = server.pid(role)
    server.signal(signal.SIGKILL, role)
    if role != "api-0":
        events = running.finish()
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "engine_dead"
        assert f"{role} (pid {pid}) was killed by SIGKILL" in events[-2]["error"]["message"]
        assert sum("error" in e for e in events if isinstance(e, dict)) == 1
        assert not any(c["finish_reason"] for e in events[:-2] for c in e["choices"])
    assert server.wait_exit(10) == 70
    assert f"error: {role} (pid {pid}) was killed by SIGKILL (signal 9), so the server stops." in server.stderr
    assert server.left_over() == []
    running.stream.close()


def test_engine_fault_in_mid_stream_ends_the_stream_with_one_error_frame(start: Maker) -> None:
    """A17"""
    reply = {"tokens": byte_ids("hello"), "fail_after": 3}
    server = start(script={**SLOW, "in_order": [reply]})
    events = Running(server, max_tokens=10).finish()
    assert text_of(events) == "hel"
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "engine_dead"
    assert not any(c["finish_reason"] for e in events[:-2] for c in e["choices"])
    assert server.wait_exit(10) == 70
    assert "after 3 tokens" in server.stderr
    assert server.left_over() == []


def test_engine_that_gives_no_sign_of_life_is_killed_and_named(start: Maker) -> None:
    program = _script(start, head="import minisgl.launch.supervisor as s\ns.BEAT_LOST_S = 1.5\n")
    server = start("--engine.stall-s=1", command=program)
    assert server.request("GET", "/health")[0] == 200
    server.signal(signal.SIGSTOP, "engine")
    assert server.wait_exit(15) == 70
    assert "the engine gave no sign of life for 1.5 s" in server.stderr
    assert server.left_over() == []


def test_killed_supervisor_takes_its_processes_along_and_the_next_server_cleans_up(start: Maker) -> None:
    server = start()
    folders = list(server.temp.glob("minisgl-*"))
    assert len(folders) == 1
    server.signal(signal.SIGKILL)
    server.wait_exit(5)
    wait_until(lambda: not server.processes, 5)
    after = start(env={"TMPDIR": str(server.temp)})
    assert folders[0] not in list(server.temp.glob("minisgl-*"))
    assert after.stop() == 0
    assert list(server.temp.glob("minisgl-*")) == []


def test_exception_in_a_scheduler_plugin_is_a_fault_that_names_the_plugin(start: Maker) -> None:
    server = start("--plugin", "tricks", "--scheduler", "raising")
    status, answer = ask(server)
    assert (status, answer["error"]["code"]) == (500, "engine_dead")
    assert server.wait_exit(10) == 70
    assert "KeyError: 'policy bug'" in server.stderr
    assert re.search(r"in (scheduler 'raising'|tricks\.Raising\.plan)", server.stderr)
    assert server.left_over() == []


def test_hanging_plugin_is_found_by_the_watchdog_with_the_stack_of_the_hang(start: Maker) -> None:
    server = start("--plugin", "tricks", "--scheduler", "hanging", "--engine.stall-s", "1")
    status, answer = ask(server)
    assert (status, answer["error"]["code"]) == (500, "engine_dead")
    assert server.wait_exit(10) == 70
    assert "more than engine.stall_s = 1" in server.stderr
    assert re.search(r'tricks\.py", line \d+ in plan', server.stderr)
    assert server.left_over() == []


# ---------------------------------------------------------------------------------------------------------------- plugins


def test_frontend_with_a_task_of_its_own_runs_beside_http_and_is_shut_down_with_the_server(start: Maker) -> None:
    server = start("--plugin", "tricks", "--frontend", "openai,terminal")
    assert ask(server)[0] == 200
    assert server.stop() == 0
    assert (start.tmp / "diary").read_text() == "terminal shut down\n"


def test_frontend_that_ends_by_itself_is_a_fault_that_names_it(start: Maker) -> None:
    server = start("--plugin", "tricks", "--frontend", "openai,quitter", ready=False)
    assert server.wait_exit(10) == 70
    assert "frontend Quitter ended by itself" in server.stderr
    assert server.left_over() == []


def test_plugin_that_does_not_import_stops_the_start_with_code_78_and_its_reason(start: Maker) -> None:
    server = start("--plugin", "tricks", "--scheduler", "nowhere", ready=False)
    assert server.wait_exit(10) == 78
    assert "scheduler 'nowhere' could not be loaded" in server.stderr
    assert "No module named 'no_such_module_anywhere'" in server.stderr
    assert server.stdout == ""
    assert server.left_over() == []


def test_plugin_that_fails_in_a_child_process_only_is_code_78_too(start: Maker) -> None:
    server = start("--plugin", "tricks:OnlyHere", ready=False)
    assert server.wait_exit(10) == 78
    assert "no fork and no spoon" in server.stderr
    assert server.left_over() == []


def test_architecture_that_no_plugin_has_is_refused_before_the_engine_loads_anything(
    start: Maker, tmp_path: Path
) -> None:
    model = write_byte_model(tmp_path / "odd", weights=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCasualLM"]}))
    server = start("--model", str(model), "--executor", "local", ready=False)
    assert server.wait_exit(20) == 78
    assert "no model plugin is named 'LlamaForCasualLM'. Did you mean 'LlamaForCausalLM'?" in server.stderr
    assert "engine failed" not in server.stderr
    assert server.left_over() == []


def test_unknown_plugin_name_is_refused_before_any_process_starts(start: Maker) -> None:
    server = start("--cache", "radx", ready=False)
    assert server.wait_exit(10) == 78
    assert "radx" in server.stderr
    assert "radix" in server.stderr
    assert "listening" not in server.stderr


def test_hooks_of_a_plugin_are_called_in_every_process_from_start_to_end(start: Maker) -> None:
    server = start("--plugin", "tricks:Diary", "--text-workers", "2")
    assert server.stop() == 0
    every = ["api 0", "engine 0", "supervisor 0", "text 0", "text 1"]
    lines = (start.tmp / "diary").read_text().splitlines()
    assert sorted(lines) == sorted([f"{w} {p}" for w in ("started", "stopping") for p in every] + ["ready model"])
    assert lines.index("ready model") > lines.index("started api 0")


def test_hook_engine_failed_is_called_in_the_api_process_with_who_failed(start: Maker) -> None:
    server = start("--plugin", "tricks:Diary")
    server.signal(signal.SIGKILL, "engine")
    assert server.wait_exit(10) == 70
    lines = (start.tmp / "diary").read_text().splitlines()
    assert "failed engine 70" in lines
    assert sorted(x for x in lines if x.startswith("stopping")) == [
        "stopping api 0",
        "stopping supervisor 0",
        "stopping text 0",
    ]


SCRIPT = """
import sys
from dataclasses import replace
from minisgl.base.errors import MiniSGLError
from minisgl.config.load import load_settings
from minisgl.launch.supervisor import Supervisor
from minisgl.plugin.lock import PluginLock
from minisgl.plugin.registry import Registry
try:
    registry = Registry.scan()
    {before}
    loaded = load_settings(argv=sys.argv[1:], registry=registry)
    s = Supervisor(loaded.settings, loaded.registry, loaded.hooks)
    {after}
    import logging
    logging.basicConfig(level="INFO")
    sys.exit(s.run())
except MiniSGLError as exc:
    print("error:", exc, file=sys.stderr)
    sys.exit(exc.exit_code)
"""


def _script(start: Maker, before: str = "", after: str = "", head: str = "") -> tuple[str, ...]:
    file = start.tmp / "program.py"
    file.write_text(head + SCRIPT.format(before=before, after=after))
    return (sys.executable, str(file))


def test_download_ends_with_a_server_that_is_stopped_while_loading(start: Maker) -> None:
    """The source is told by its progress callback, and ends what it has started."""
    before = 'registry.add("model_source", "endless", "tricks:Endless")'
    server = start("--model", "endless:model", command=_script(start, before=before), ready=False)
    server.wait_stderr("^endless")
    assert server.stop() == 0
    assert (start.tmp / "diary").read_text() == "let go\n"


def test_child_with_another_version_of_a_plugin_is_refused_with_the_difference(start: Maker) -> None:
    doctored = (
        's.lock = PluginLock.of(s.lock.core, [e._replace(version="9.9") if e.kind == "cache" else e'
        " for e in s.lock.entries])"
    )
    server = start(ready=False, command=_script(start, after=doctored))
    assert server.wait_exit(20) == 78
    assert re.search(
        r"(engine|text-0|api-0) \(host .*, pid \d+\) has a different plugin set, so it was not started:", server.stderr
    )
    assert "cache 'radix': version here 9.9, there 0.1.0" in server.stderr
    assert server.left_over() == []


def test_x1_plugin_added_by_a_script_is_known_in_the_engine_process(start: Maker) -> None:
    """X1"""
    server = start(
        "--scheduler=mine", command=_script(start, before='registry.add("scheduler", "mine", "tricks:Mine")')
    )
    assert "scheduler=mine" in server.stdout
    assert ask(server, "works")[1]["choices"][0]["text"] == "works"
    assert server.stop() == 0


def test_x1_plugin_of_a_hook_module_is_known_in_the_engine_process(start: Maker) -> None:
    """X1"""
    server = start("--plugin", "tricks", "--scheduler", "mine")
    assert "scheduler=mine" in server.stdout
    assert ask(server, "works")[1]["choices"][0]["text"] == "works"
    assert server.stop() == 0


def test_x1_plugin_that_other_processes_cannot_import_is_refused_with_the_way_out(start: Maker) -> None:
    """X1"""
    head = "from tricks import Base\nclass Policy(Base): pass\n"
    server = start(
        "--scheduler=local",
        ready=False,
        command=_script(start, before='registry.add("scheduler", "local", Policy)', head=head),
    )
    assert server.wait_exit(10) == 78
    assert "scheduler 'local' is defined in __main__" in server.stderr
    assert "Put it in a module" in server.stderr


# --------------------------------------------------------------------------------------------------------------- requests


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with a plugin's middleware, and the file that holds its engine."""
    maker = Maker(folder, tmp_path_factory.mktemp("shared"))
    server = maker("--plugin", "tricks", "--max-running", "1", "--limits.queue", "2", "--max-len", "4000", script=SLOW)
    yield server, maker.hold
    try:
        assert server.stop() == 0
    finally:
        server.close()


@pytest.mark.parametrize("streaming", [True, False])
def test_m1_client_that_leaves_ends_its_request_and_frees_its_pages(
    shared: tuple[Server, Path], streaming: bool
) -> None:
    """M1, A16: with a middleware installed. The request would take 20 seconds."""
    server, _ = shared
    before = stats(server)
    body = {"prompt": "x" * 100, "stream": streaming, "max_tokens": 2000, "ignore_eos": True}
    request = server.stream("/v1/completions", body)
    wait_until(lambda: stats(server)["running"] == 1)
    request.close()
    wait_until(lambda: stats(server)["running"] == 0, 5)
    after = stats(server)
    assert after["device_ok"] is True
    assert after["free"] + after["evictable"] == before["free"] + before["evictable"]
    assert after["locked"] == after["waiting"] == 0


def test_a17_full_queue_is_503_before_the_stream_begins_and_there_is_room_again_afterwards(
    shared: tuple[Server, Path],
) -> None:
    """A17: one runs and two wait, so of five more three are refused, while nothing moves."""
    server, hold = shared
    running = Running(server, hold=hold)
    refused: list[dict[str, Any]] = []
    served: list[str] = []

    def client(i: int) -> None:
        s = stream(server, f"request {i}")
        if s.status == 200:
            served.append(text_of(list(s)))
        else:
            refused.append(
                {"status": s.status, "after": s.answer.headers["retry-after"], **json.loads(s.answer.read())}
            )

    threads = [threading.Thread(target=client, args=(i,)) for i in range(5)]
    for t in threads:
        t.start()
    try:
        wait_until(lambda: len(refused) == 3)
    finally:
        hold.unlink()
    for t in threads:
        t.join(20)
    assert [(r["status"], r["after"], r["error"]["code"]) for r in refused] == [(503, "1", "server_overloaded")] * 3
    assert len(served) == 2
    assert all(text.startswith("request ") for text in served)
    assert text_of(running.finish()) == "a long goodbye"
    assert ask(server)[0] == 200


def test_a9_prompt_over_the_context_is_400_with_the_counts_while_others_go_on(shared: tuple[Server, Path]) -> None:
    """A9"""
    server, hold = shared
    running = Running(server, hold=hold)
    status, answer = ask(server, "x" * 5000)
    hold.unlink()
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "4000" in answer["error"]["message"]
    assert "5000" in answer["error"]["message"]
    assert text_of(running.finish()) == "a long goodbye"


def test_many_requests_at_once_each_get_their_own_answer(start: Maker) -> None:
    server = start("--text-workers", "2", "--max-running", "4", script=SLOW)
    answers: dict[int, Any] = {}

    def client(i: int) -> None:
        answers[i] = ask(server, f"number {i}", n=2)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    texts = {i: [c["text"] for c in answer["choices"]] for i, (_, answer) in answers.items()}
    assert texts == {i: [f"number {i}"] * 2 for i in range(16)}


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
