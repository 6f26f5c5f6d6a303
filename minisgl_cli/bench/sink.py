"""The other end of a benchmark's outputs: ``python -m minisgl_cli.bench.sink ADDRESS`` takes messages until its stdin closes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from minisgl.wire.sockets import Inbox, Outbox, RuntimeDir, address


@contextmanager
def text_worker() -> Iterator[Outbox]:
    """The way to a process that takes what a text worker would, and drops it."""
    folder, context = RuntimeDir(), zmq.Context()
    where = address(folder.path, "text-0")
    command = [sys.executable, "-m", "minisgl_cli.bench.sink", where]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sink:
        assert sink.stdin is not None
        assert sink.stdout is not None
        try:
            if sink.stdout.readline() != b"ready\n":
                raise OSError(f"{' '.join(command)} did not start")
            outbox = Outbox(context, where)
            try:
                yield outbox
            finally:
                outbox.close()
        finally:
            context.term()
            sink.stdin.close()
            folder.remove()


def main() -> None:
    context = zmq.Context()
    inbox = Inbox(context, sys.argv[1])
    poller = zmq.Poller()
    poller.register(inbox.socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    print("ready", flush=True)
    while sys.stdin.fileno() not in dict(poller.poll()):
        while inbox.receive(0):
            pass
    inbox.close()
    context.term()


if __name__ == "__main__":
    main()
