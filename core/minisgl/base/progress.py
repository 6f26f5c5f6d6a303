"""Progress of long starts: ``progress(what, done, total)``, in bytes."""

from __future__ import annotations


def no_progress(what: str, done: int, total: int) -> None:
    """The progress callback that shows nothing."""
