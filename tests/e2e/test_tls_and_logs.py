"""HTTPS by the server itself, logs as JSON, and files that are checked before anything starts."""

from __future__ import annotations

import json
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from minisgl.testing.bytemodel import write_byte_model
from minisgl.testing.server import Server


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--model", str(write_byte_model(tmp_path_factory.mktemp("model"), 256)), "--executor", "scripted"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Self-signed, for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert), *names], check=True, capture_output=True)
    return cert, key


def test_https_and_a_json_log(options: list[str], certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    tls = ["--server.tls-cert", str(cert), "--server.tls-key", str(key)]
    with Server(*options, *tls, "--log.format", "json", "--server.access-log", "--api-key", "sesame") as server:
        assert server.url.startswith("https://127.0.0.1:")
        headers = {"Authorization": "Bearer sesame", "X-Request-Id": "abc"}
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=str(cert))) as client:
            body = {"prompt": "hi", "stream": True}
            assert client.post("/v1/completions", json=body, headers=headers).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):  # plain HTTP is not answered
            httpx.get(server.url.replace("https", "http") + "/ping")
        server.wait_stderr('"request_id": "abc"')
    lines = [json.loads(line) for line in server.stderr.splitlines()]  # every line of every process
    assert {line["role"] for line in lines} >= {"supervisor", "api-0"}
    (access,) = [line for line in lines if line.get("request_id") == "abc"]
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert "sesame" not in server.stderr + server.stdout


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--server.tls-cert={cert}"], "server.tls_cert is set without server.tls_key"),
        (["--server.tls-key={key}"], "server.tls_key is set without server.tls_cert"),
        (["--server.tls-cert={key}", "--server.tls-key={cert}"], "cannot be used"),
        (["--server.tls-cert={cert}", "--server.tls-key=/nowhere"], "cannot be used"),
        (["--server.api-keys-file=/nowhere"], "server.api_keys_file = '/nowhere' cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_anything_starts(
    options: list[str], certificate: tuple[Path, Path], given: list[str], text: str
) -> None:
    cert, key = certificate
    server = Server(*options, *(g.format(cert=cert, key=key) for g in given))
    try:
        assert server.wait_exit(30) == 78
        assert text in server.stderr
        assert "listening" not in server.stderr
    finally:
        server.close()
