"""A ``minisgl serve`` that a benchmark starts for itself, and ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from minisgl.base.errors import EXIT_CONFIG, ConfigError, Fault

READY = re.compile(r"^ready: (https?://\S+)\s+(.*)$")
STOP_S = 60.0  # from SIGTERM to SIGKILL: the server's own limits are below


@contextmanager
def started(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The URL of a server on a free port, and what it says of itself. Its log goes to stderr.

    Raises: ConfigError, Fault if it does not get ready; its own message is on stderr then.
    """
    command = [sys.executable, "-m", "minisgl_cli", "serve", *options, "--server.port=0"]
    # A session of its own: Ctrl+C is for this process, which then ends the server.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield _wait_ready(process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stdout is not None
    for line in process.stdout:
        if (found := READY.match(line)) is not None:
            return found[1], found[2].strip()
    code = process.wait()
    kind = ConfigError if code == EXIT_CONFIG else Fault
    raise kind(f"the server did not start (exit code {code}); its message is above")
