"""The HTTP host itself: who owns a path, probes, draining, slow starts, what plugins add."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from minisgl.api.hookspec import hookimpl
from minisgl.base.errors import ConfigError, RequestError
from minisgl.client.exchange import LARGE_BODY, route
from minisgl.client.frontend import FrontendContext, HttpFrontend
from minisgl.client.http import HttpHost
from minisgl.config.schema import Settings
from minisgl.observe.meter import Meter
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.registry import Registry
from minisgl.testing.server import wait_until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


class Idle:
    """An engine client of which only the state is asked."""

    info = None
    meter = Meter()

    def __init__(self, code: str | None = None) -> None:
        self.code = code

    def healthy(self) -> str | None:
        return self.code


async def nothing(x: Any) -> None:
    await x.respond(b"")


def frontend(*routes: Any) -> HttpFrontend:
    class Some(HttpFrontend):
        def routes(self) -> list[Any]:
            return list(routes)

    return Some(FrontendContext(None, Idle(), Settings(), None))  # type: ignore[arg-type]


def host(frontends: dict[str, Any], hooks: tuple[object, ...] = (), code: str | None = None) -> HttpHost:
    registry = Registry.scan(bundled_only=True)
    return HttpHost(Settings(), Idle(code), frontends, Hooks(registry, hooks))  # type: ignore[arg-type]


def ask(made: HttpHost, method: str, path: str, **kw: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=made.app, raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.request(method, path, **kw)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (route("GET", "/a", nothing), route("POST", "/a", nothing)),
        (route("GET", "/a/{id}", nothing), route("GET", "/a/{name:path}", nothing)),
    ],
)
def test_a_path_claimed_by_two_frontends_is_a_start_error_naming_both(one, two):
    with pytest.raises(ConfigError, match=r"'/a.*'first'.*'second'"):
        host({"first": frontend(one), "second": frontend(two)})


def test_a_path_of_the_host_cannot_be_claimed():
    with pytest.raises(ConfigError, match=r"'/health' is claimed by the HTTP host and by frontend 'first'"):
        host({"first": frontend(route("GET", "/health", nothing))})


def test_one_frontend_may_have_several_methods_of_a_path_but_each_once():
    get, post = route("GET", "/a", nothing), route("POST", "/a", nothing)
    made = host({"first": frontend(get, post)})
    assert ask(made, "POST", "/a").status_code == 200
    with pytest.raises(ConfigError, match="'/a'"):
        host({"first": frontend(get, route("GET", "/a", nothing))})


class Routes:
    def __init__(self, *routes: Any) -> None:
        self.routes = routes

    @hookimpl
    def http_routes(self, frontend: str, add: Callable[[Any], None]) -> None:
        for r in self.routes:
            add(r)


def test_hooks_add_routes_that_live_under_the_same_rules():
    async def hello(request: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    async def refuse(request: Any) -> PlainTextResponse:
        raise HTTPException(418, "a teapot")

    made = host({"first": frontend()}, (Routes(Route("/hello", hello), Route("/tea", refuse)),))
    r = ask(made, "GET", "/hello")
    assert (r.text, "x-request-id" in r.headers) == ("hello", True)
    r = ask(made, "GET", "/tea")
    assert r.status_code == 418
    assert r.json() == {"error": {"message": "a teapot", "type": "invalid_request_error", "param": None, "code": None}}
    with pytest.raises(ConfigError, match="'/health'"):
        host({"first": frontend()}, (Routes(Route("/health", hello)),))


@pytest.mark.parametrize(
    ("code", "health", "ready"),
    [(None, 200, 200), ("model_loading", 503, 503), ("engine_dead", 503, 503), ("server_draining", 200, 503)],
)
def test_probes_say_what_the_engine_says(code, health, ready):
    made = host({}, code=code)
    for path, status in (("/health", health), ("/ready", ready), ("/ping", 200), ("/version", 200)):
        r = ask(made, "GET", path)
        assert r.status_code == status
        if status == 503:
            assert r.json()["error"]["code"] == code
            assert int(r.headers["retry-after"]) in range(1, 6)
    assert ask(made, "HEAD", "/ping").status_code == 200
    assert ask(made, "GET", "/health").content == b"" or health == 503


def test_while_the_model_loads_requests_are_told_so(start, api):
    served = start()
    served.client.state, info = "loading", served.client.info
    served.client.info = None
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("POST", "/tokenize")):
        r = httpx.request(method, served.url + path, json={"messages": USER} if method == "POST" else None)
        api.refused(r, 503, "model_loading", None)
        assert r.headers["retry-after"] == "1"
    served.client.state, served.client.info = "ready", info


def test_a_large_body_is_read_beside_the_event_loop_and_a_small_one_in_it():
    """The reader of the large one waits until another request is answered, which on the loop it would never be."""
    answered = threading.Event()
    readers: list[int] = []

    def reader(body: dict[str, Any]) -> dict[str, Any]:
        readers.append(threading.get_ident())
        assert len(body["text"]) < LARGE_BODY or answered.wait(20)
        return body

    async def sized(x: Any) -> None:
        await x.respond_json({"size": len((await x.read(reader))["text"])})

    made = host({"first": frontend(route("POST", "/size", sized))})

    async def both() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=made.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            large = asyncio.ensure_future(client.post("/size", json={"text": "x" * LARGE_BODY}))
            while not readers:
                await asyncio.sleep(0.001)
            small = await client.post("/size", json={"text": "x"})
            answered.set()
            return [await large, small]

    large, small = asyncio.run(both())
    assert (large.json(), small.json()) == ({"size": LARGE_BODY}, {"size": 1})
    assert readers[0] != threading.get_ident() == readers[1]


def test_a_refusal_of_a_large_body_has_its_status():
    def refuse(body: dict[str, Any]) -> None:
        raise RequestError("no", code="invalid_value", param="text")

    async def handler(x: Any) -> None:
        await x.read(refuse)

    made = host({"first": frontend(route("POST", "/no", handler))})
    for body in (b'{"text": "%s"}' % (b"x" * LARGE_BODY), b'{"text": "%s' % (b"x" * LARGE_BODY)):
        r = ask(made, "POST", "/no", content=body, headers={"content-type": "application/json"})
        assert (r.status_code, r.json()["error"]["code"] in ("invalid_value", "invalid_json")) == (400, True)


def test_no_header_names_the_server_software(api):
    assert "server" not in api.http.get("/health").headers


def test_connections_send_small_frames_at_once(served, api):
    """Nagle's algorithm and a delayed ACK together cost 40 ms a frame."""
    api.http.get("/health")
    connections = served.host._server.server_state.connections
    assert connections
    for c in connections:
        sock = c.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_serving_leaves_signal_handlers_alone(served):
    # A job that a shell starts in the background ignores SIGINT from its beginning.
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_access_log_has_a_line_for_each_request(start, caplog):
    served = start(server={"access_log": True})
    with caplog.at_level(logging.INFO, logger="minisgl.access"):
        httpx.get(f"{served.url}/nope", headers={"x-request-id": "abc"})
        wait_until(lambda: bool(caplog.records), 5)  # it is written when the answer is out
    [line] = [r.getMessage() for r in caplog.records if r.name == "minisgl.access"]
    assert line.startswith("GET '/nope' 404 ")
    assert line.endswith(" abc")


# ------------------------------------------------------------------------------------------------- slow answers


@pytest.fixture(scope="module")
def slow(start: Callable[..., Any]) -> Any:
    return start(server={"sse_header_delay_s": 0.05, "sse_keep_alive_s": 0.05})


def test_a_slow_first_token_sends_the_head_and_then_keeps_alive(slow, vocabulary):
    slow.replies([*vocabulary.ids("ab"), 1])
    slow.hold()
    with httpx.stream("POST", slow.url + CHAT, json={"messages": USER, "stream": True}) as r:
        assert r.status_code == 200
        lines = r.iter_lines()
        assert '"role":"assistant"' in next(lines)
        comments = [line for line in (next(lines) for _ in range(7)) if line]
        assert comments == [": keep-alive"] * len(comments)
        assert len(comments) >= 3
        slow.go_on()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert '"content":"a"' in rest[0]


def test_an_error_after_the_head_is_a_frame(slow):
    slow.admitted.clear()
    slow.hold()
    with httpx.stream("POST", slow.url + CHAT, json={"messages": USER, "stream": True}) as r:
        lines = r.iter_lines()
        next(lines)
        slow.give_up(slow.admitted[0].uid, "no room")
        rest = [line for line in lines if line.startswith("data: ")]
    assert len(rest) == 2
    assert '"code":"internal_error"' in rest[0]
    assert rest[1] == "data: [DONE]"
    slow.go_on()


# ----------------------------------------------------------------------------------------------------- draining


def _ask_in_thread(url: str, stream: bool) -> tuple[threading.Thread, list[httpx.Response]]:
    got: list[httpx.Response] = []
    body = {"messages": USER, "stream": stream}
    thread = threading.Thread(target=lambda: got.append(httpx.post(url + CHAT, json=body, timeout=20)))
    thread.start()
    return thread, got


def _running(served: Any, count: int) -> None:
    async def look() -> None:
        while len(served.admitted) < count or served._passes > 0:
            await asyncio.sleep(0.001)

    served.run(look)


def test_drain_refuses_new_requests_and_lets_running_ones_finish(start, api, vocabulary):
    served = start()
    served.replies([*vocabulary.ids("abc"), 1])
    served.hold(passes=2)
    thread, got = _ask_in_thread(served.url, stream=True)
    _running(served, 1)
    drained = asyncio.run_coroutine_threadsafe(served.host.drain(20), served.loop)
    served.run(lambda: asyncio.sleep(0))  # the drain has begun
    api.refused(httpx.post(served.url + CHAT, json={"messages": USER}), 503, "server_draining", None)
    api.refused(httpx.get(f"{served.url}/ready"), 503, "server_draining", None)
    assert httpx.get(f"{served.url}/health").status_code == 200
    served.go_on()
    thread.join(20)
    assert api.text(api.chunks(got[0])) == "abc"
    drained.result(20)
    served._thread.join(20)  # serve() has returned
    assert not served._thread.is_alive()


def test_drain_cuts_what_is_over_its_time_with_an_error(start, api, vocabulary):
    served = start()
    served.replies(vocabulary.ids("abc" * 20), vocabulary.ids("abc" * 20))
    served.hold(passes=2)
    threads = [_ask_in_thread(served.url, True)]
    _running(served, 1)  # both passes are its own, so that its answer has begun
    threads.append(_ask_in_thread(served.url, False))
    _running(served, 2)
    asyncio.run_coroutine_threadsafe(served.host.drain(0.05), served.loop).result(20)
    for thread, _ in threads:
        thread.join(20)
    ((_, (stream,)), (_, (whole,))) = threads
    assert api.chunks(stream)[-1]["error"]["code"] == "server_draining"
    api.refused(whole, 503, "server_draining", None)
    assert len(served.aborted) == 2
