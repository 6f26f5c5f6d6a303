"""The client of ``bench stream``, a process of its own on raw sockets: ``python -m minisgl_cli.bench.stream_client JSON``.

It parses nothing: a stream chunk has two opening braces and nothing else has any, every token is ``~``, and an answer ends as
chunked bodies do.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

END = b"0\r\n\r\n"
BUFFER = 1 << 18


@dataclass(slots=True)
class Connection:
    sock: socket.socket
    due: float  # when the request was to be sent
    first: bool = True  # no byte has come
    tail: bytes = b""

    def read(self, buffer: bytearray) -> int:
        """Take what is there. Returns: its bytes; 0 at the end of the connection."""
        n = self.sock.recv_into(buffer)
        self.tail = (self.tail + bytes(buffer[max(0, n - 5) : n]))[-5:]
        return n


def connect(port: int, request: bytes, due: float) -> Connection:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(request)
    sock.setblocking(False)
    return Connection(sock, due)


def throughput(port: int, request: bytes, connections: int, warm_s: float, seconds: float) -> dict[str, Any]:
    """Each connection asks again as soon as it is answered. Counts between ``warm_s`` and ``warm_s + seconds``."""
    braces = tokens = answers = reads = 0
    buffer = bytearray(BUFFER)
    with selectors.DefaultSelector() as selector:
        for _ in range(connections):
            made = connect(port, request, 0.0)
            selector.register(made.sock, selectors.EVENT_READ, made)
        begin, cpu, started = time.monotonic() + warm_s, 0.0, False
        _tell("warm")
        while (now := time.monotonic()) < begin + seconds:
            if not started and now >= begin:
                begin, started, braces, tokens = now, True, 0, 0
                answers = reads = 0
                cpu = time.process_time()
                _tell("begin")
            for key, _ in selector.select(0.1):
                made = key.data
                n = made.read(buffer)
                if not n:
                    raise ConnectionError("the server closed a connection")
                reads += 1
                braces += buffer.count(b"{", 0, n)
                tokens += buffer.count(b"~", 0, n)
                if made.tail == END:
                    answers += 1
                    made.sock.sendall(request)
        took = time.monotonic() - begin
        result = {"seconds": took, "client_cpu_s": time.process_time() - cpu}
        _tell("end")
        for key in list(selector.get_map().values()):
            key.data.sock.close()
    return {**result, "chunks": braces / 2, "tokens": tokens, "answers": answers, "reads": reads}


def first_bytes(port: int, request: bytes, rate: float, seconds: float) -> dict[str, Any]:
    """``rate`` new connections a second, each with one request, whether or not earlier ones are answered. Times count from
    the moment at which a request was due."""
    buffer = bytearray(BUFFER)
    times: list[float] = []
    _tell("begin")
    begin, cpu = time.monotonic(), time.process_time()
    sent, ended, total = 0, 0, int(rate * seconds)
    with selectors.DefaultSelector() as selector:
        while ended < total:
            now = time.monotonic()
            while sent < total and begin + sent / rate <= now:
                made = connect(port, request, begin + sent / rate)
                selector.register(made.sock, selectors.EVENT_READ, made)
                sent += 1
            wait = begin + sent / rate - time.monotonic() if sent < total else 1.0
            for key, _ in selector.select(max(0.0, wait)):
                made = key.data
                n = made.read(buffer)
                if made.first:
                    if not bytes(buffer[:12]).endswith(b"200"):
                        raise ConnectionError(f"the server answered {bytes(buffer[:n])!r}")
                    times.append(time.monotonic() - made.due)
                    made.first = False
                if made.tail == END or not n:
                    ended += 1
                    selector.unregister(made.sock)
                    made.sock.close()
    took = time.monotonic() - begin
    _tell("end")
    times.sort()
    at = {f"p{q}_ms": 1e3 * times[min(len(times) - 1, int(len(times) * q / 100))] for q in (50, 90, 99)}
    return {
        "seconds": took,
        "requests": total,
        **at,
        "max_ms": 1e3 * times[-1],
        "client_cpu_s": time.process_time() - cpu,
    }


def _tell(what: str) -> None:
    print(json.dumps({"at": what}), flush=True)


def main() -> None:
    args = json.loads(sys.argv[1])
    body, path = json.dumps(args.pop("body")).encode(), args.pop("path")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    measurements: dict[str, Callable[..., Any]] = {"throughput": throughput, "first_bytes": first_bytes}
    what = measurements[args.pop("what")]
    print(json.dumps(what(request=head.encode() + body, **args)), flush=True)


if __name__ == "__main__":
    main()
