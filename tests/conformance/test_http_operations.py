"""Keys, limits, CORS and metrics of the HTTP host, against the scripted engine."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.base.errors import ConfigError
from minisgl.client import keys
from minisgl.client.keys import api_keys
from minisgl.config.schema import ServerSettings
from minisgl.testing.server import wait_until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BODY = {"messages": USER}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---------------------------------------------------------------------------------------------------------------- keys


@pytest.fixture(scope="module")
def keyed(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# of the team\nfile-one\n\n  file-two  \n")
    return start(server={"api_key": "set-one, set-two", "api_keys_file": file, "access_log": True})


def test_20_each_of_several_keys_is_accepted_and_no_other(keyed, api):
    for key in ("set-one", "set-two", "file-one", "file-two"):
        assert httpx.post(keyed.url + CHAT, json=BODY, headers=bearer(key)).status_code == 200
        assert httpx.post(keyed.url + CHAT, json=BODY, headers={"x-api-key": key}).status_code == 200
    for key in ("set", "set-one, set-two", "set-onex", "# of the team", "file-one\t#"):
        for headers in (bearer(key), {"x-api-key": key}, {**bearer(key), "x-api-key": "set-one"}):
            r = httpx.post(keyed.url + CHAT, json=BODY, headers=headers)
            api.refused(r, 401, "invalid_api_key", None)
            assert r.headers["www-authenticate"] == "Bearer"


def test_20_only_probes_are_open(keyed, api):
    for path in ("/health", "/ready", "/ping", "/version"):
        assert httpx.get(keyed.url + path).status_code == 200
    for path in ("/metrics", "/v1/models", "/nope", "/v1/models/x"):
        api.refused(httpx.get(keyed.url + path), 401, "invalid_api_key", None)
    for path in ("/tokenize", "/detokenize", "/v1/tokenize"):
        api.refused(httpx.post(keyed.url + path, json={}), 401, "invalid_api_key", None)
    assert httpx.options(keyed.url + CHAT).status_code == 405  # not 401


def test_metrics_are_open_if_configured(start, api):
    served = start(server={"api_key": "k"}, metrics={"open": True})
    assert httpx.get(f"{served.url}/metrics").status_code == 200
    api.refused(httpx.get(f"{served.url}/v1/models"), 401, "invalid_api_key", None)


def test_keys_are_never_logged(keyed, caplog):
    with caplog.at_level(logging.DEBUG):
        httpx.get(f"{keyed.url}/v1/models", headers=bearer("set-one"))
        httpx.get(f"{keyed.url}/v1/models", headers=bearer("wrong-key"))
        httpx.post(f"{keyed.url}/v1/nope", content=b"{", headers={"x-api-key": "file-two"})
        # a request is logged when its answer is out, which the client may have read by then
        wait_until(lambda: sum(r.name.startswith("minisgl") for r in caplog.records) >= 3)
    ours = [r.getMessage() + str(getattr(r, "fields", "")) for r in caplog.records if r.name.startswith("minisgl")]
    assert not any(key in line for line in ours for key in ("set-one", "wrong-key", "file-two"))


def test_every_key_is_compared_in_full_and_in_constant_time(monkeypatch):
    compared: list[bytes] = []
    true = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: compared.append(b) or true(a, b))
    assert keys.matches(b"a", (b"a", b"b", b"c"))
    assert compared == [b"a", b"b", b"c"]  # also those after the match
    assert not keys.matches("é".encode(), (b"a",))


def test_a_file_without_keys_is_refused_instead_of_opening_the_server(tmp_path: Path):
    (tmp_path / "empty").write_text("# none yet\n")
    with pytest.raises(ConfigError, match="has no key"):
        api_keys(ServerSettings(api_keys_file=tmp_path / "empty"))
    with pytest.raises(ConfigError, match="cannot be read"):
        api_keys(ServerSettings(api_keys_file=tmp_path / "missing"))


# -------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_output_in_time_is_answered_504_and_aborted(start, api, stream):
    served = start(server={"request_timeout_s": 0.1})
    served.hold()
    r = httpx.post(served.url + CHAT, json={**BODY, "stream": stream})
    api.refused(r, 504, "request_timeout", None)
    assert [a.uid for a in served.admitted] == [uid for uid, _ in served.aborted]
    served.go_on()
    served.aborted.clear()
    assert httpx.post(served.url + CHAT, json={**BODY, "stream": stream}).status_code == 200
    assert served.aborted == []


def test_the_timeout_is_of_the_first_token_only(start, api, vocabulary):
    served = start(server={"request_timeout_s": 0.3})
    served.replies([*vocabulary.ids("ab"), 1])
    served.hold(passes=1)
    got: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: got.append(httpx.post(served.url + CHAT, json={**BODY, "stream": True})))
    thread.start()
    thread.join(0.6)  # longer than the timeout
    assert thread.is_alive()
    served.go_on()
    thread.join(20)
    assert api.text(api.chunks(got[0])) == "ab"


def test_a17_too_many_waiting_prompt_tokens_are_answered_503(start, api):
    """The template adds tokens, so completions are used: a prompt is its bytes."""
    served = start(limits={"queue_tokens": 100})
    served.hold()
    url = f"{served.v1}/completions"
    thread = threading.Thread(target=lambda: httpx.post(url, json={"prompt": "x" * 60, "max_tokens": 1}, timeout=20))
    thread.start()
    served.run(lambda: _admitted(served, 1))
    done: list[httpx.Response] = []
    second = threading.Thread(target=lambda: done.append(httpx.post(url, json={"prompt": "y" * 41, "stream": True})))
    second.start()
    served.run(lambda: _admitted(served, 2))
    served.go_on()
    second.join(20)
    message = api.refused(done[0], 503, "server_overloaded", None)
    assert "60 prompt tokens wait, and 41 more would be over the limit of 100" in message
    assert done[0].headers["retry-after"] == "1"
    thread.join(20)
    alone = httpx.post(url, json={"prompt": "x" * 150, "max_tokens": 1})
    assert alone.status_code == 200  # one that waits alone never waits for itself


async def _admitted(served: Any, count: int) -> None:
    while len(served.admitted) < count:
        await asyncio.sleep(0.001)


# ---------------------------------------------------------------------------------------------------------------- CORS


@pytest.fixture(scope="module")
def cors(start: Callable[..., Any]) -> Any:
    return start(server={"cors_origins": ["https://a.org", "http://localhost:3000/"], "api_key": "k"})


def preflight(url: str, origin: str) -> httpx.Response:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return httpx.options(url, headers={"origin": origin, **asks})


@pytest.mark.parametrize("origin", ["https://a.org", "http://localhost:3000"])
def test_pages_of_allowed_origins_may_call(cors, origin):
    r = preflight(cors.url + CHAT, origin)
    assert r.status_code == 204
    assert r.headers["access-control-allow-origin"] == origin
    assert "POST" in r.headers["access-control-allow-methods"]
    assert r.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "x-request-id" in r.headers
    for body, status in ((BODY, 200), ({}, 400)):  # an error that a page cannot read helps nobody
        r = httpx.post(cors.url + CHAT, json=body, headers={"origin": origin, **bearer("k")})
        assert r.status_code == status
        assert r.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in r.headers["access-control-expose-headers"]
        assert r.headers["vary"] == "origin"


def test_other_origins_and_no_origin_get_no_permission(cors):
    for r in (
        preflight(cors.url + CHAT, "https://a.org.evil.com"),
        httpx.post(cors.url + CHAT, json=BODY, headers={"origin": "https://b.org", **bearer("k")}),
        httpx.post(cors.url + CHAT, json=BODY, headers=bearer("k")),
    ):
        assert "access-control-allow-origin" not in r.headers


def test_cors_is_off_by_default_and_a_star_allows_all(served, start):
    r = httpx.post(served.url + CHAT, json=BODY, headers={"origin": "https://a.org"})
    assert not any(name.startswith("access-control") for name in r.headers)
    assert preflight(served.url + CHAT, "https://a.org").status_code == 405
    every = start(server={"cors_origins": "*"})
    r = httpx.post(every.url + CHAT, json={**BODY, "stream": True}, headers={"origin": "https://any.org"})
    assert r.headers["access-control-allow-origin"] == "*"


# ------------------------------------------------------------------------------------------------------------- metrics


def test_metrics_count_requests_as_their_clients_see_them(start, vocabulary):
    served = start()
    served.replies([*vocabulary.ids("abc"), 1], vocabulary.ids("abcdef"))
    assert httpx.post(served.url + CHAT, json=BODY).status_code == 200
    assert httpx.post(f"{served.v1}/completions", json={"prompt": "wxyz", "max_tokens": 2}).status_code == 200
    assert httpx.post(f"{served.v1}/completions", json={"prompt": 5}).status_code == 400
    httpx.get(f"{served.url}/v1/models/what/ever")
    text = httpx.get(f"{served.url}/metrics").text
    found = {
        (s.name, *sorted(s.labels.values())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    of = ("0", "org/name")
    assert found["minisgl_generation_tokens_total", *of] == 4 + 2
    assert found["minisgl_request_success_total", *of, "stop"] == 1  # labels in alphabetical order of their values
    assert found["minisgl_request_success_total", "0", "length", "org/name"] == 1
    assert found["minisgl_request_generation_tokens_sum", *of] == 6
    assert found["minisgl_request_rejected_total", "invalid_type"] == 1
    assert found["minisgl_http_requests_total", "/v1/completions", "200", "POST"] == 1
    handlers = {
        s.labels["handler"] for f in text_string_to_metric_families(text) for s in f.samples if "handler" in s.labels
    }
    assert handlers == {CHAT, "/v1/completions", "/v1/models/{id:path}"}  # templates, not paths
    assert "vllm:" not in text
    assert "minisgl_build_info{version=" in text


def test_request_ids_are_echoed_or_replaced(api):
    """Extra of section 9A: never reflect other bytes."""
    for given, kept in (("abc", True), ("A.b_c:d-1", True), ("a b", False), ("x" * 129, False), ("a\u00e9", False)):
        headers = {"x-request-id": given.encode("latin-1")}
        for r in (api.http.post(CHAT, json=BODY, headers=headers), api.http.get("/nope", headers=headers)):
            got = r.headers["x-request-id"]
            assert (got == given) is kept
            assert kept or (got.startswith("req_") and len(got) == 36)


def test_an_access_line_has_fields_for_a_json_log(keyed, caplog):
    with caplog.at_level(logging.INFO, logger="minisgl.access"):
        httpx.get(f"{keyed.url}/v1/models?x=1", headers={**bearer("set-one"), "x-request-id": "abc"})
        httpx.get(f"{keyed.url}/ping")  # its line comes after the first one's
    fields = next(r.fields for r in caplog.records if getattr(r, "fields", {}).get("request_id") == "abc")
    assert fields["duration_ms"] >= 0
    assert {k: fields[k] for k in ("method", "path", "status", "client")} == {
        "method": "GET", "path": "/v1/models", "status": 200, "client": "127.0.0.1",
    }  # fmt: skip
    json.dumps(fields)
