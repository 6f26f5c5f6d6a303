"""Things that are made once and kept in the cache: built aside, then renamed into place; one process builds, others wait."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from minisgl.api import ModelError

Progress = Callable[[str, int, int], None]
CONVERTER = "minisgl_plugins.source.convert"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """``target``, made by ``build(path)`` if it is not there yet.

    ``build`` gets a path beside the target on which nothing is, and makes a file or folder of it. The target is never seen
    half made: not by other processes, not after a crash.
    """
    if target.exists():
        return target
    with lock(target):
        if target.exists():  # another process made it meanwhile
            return target
        stale = f".{target.name}.new-"
        for left in target.parent.iterdir():
            if left.name.startswith(stale):  # of a process that was killed: the lock's holder is the only one at work
                remove(left)
        aside = target.with_name(
            f"{stale}{secrets.token_hex(4)}"
        )  # a killed process may have a child that still writes
        try:
            build(aside)
            os.rename(aside, target)
        finally:
            remove(aside)
    return target


@contextmanager
def lock(target: Path) -> Iterator[None]:
    """Held by one process at a time, and released with it. Raises: ModelError if the folder cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as e:
        raise ModelError(
            f"the cache folder {target.parent} cannot be written: {e.strerror}. Choose another with model.cache_dir"
        ) from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def convert(kind: str, source: Path, target: Path, what: str, progress: Progress, *options: str) -> None:
    """Run a converter in a process of its own, so that its memory and imports go with it.

    Args: kind: "gguf" or "tokenizer". what: what ``progress`` is told is being done. options: the converter's.
    Raises: ModelError with the converter's reason.
    """
    # -P: what lies in the user's folder, such as one named gguf, is not to be imported.
    command = [sys.executable, "-P", "-m", CONVERTER, kind, str(source), str(target), *options]
    with TemporaryFile("w+") as noise:  # a file, not a pipe: nobody reads it while the converter runs
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=noise, text=True)
        try:
            assert process.stdout is not None
            with process.stdout:
                reason = _follow(process.stdout, what, progress)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        if code != 0:
            noise.seek(0)
            last = noise.read().strip().splitlines()[-1:] or [f"exit code {code}"]
            raise ModelError(f"{source} could not be converted: {reason or last[0]}")


def _follow(lines: IO[str], what: str, progress: Progress) -> str:
    """Pass the converter's progress on until it ends. Returns: why it failed, "" if it did not say."""
    reason = ""
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            continue  # a library's own chatter
        if isinstance(said, dict) and "error" in said:
            reason = str(said["error"])
        elif isinstance(said, list) and len(said) == 2:
            progress(what, int(said[0]), int(said[1]))
    return reason
