"""The servers as fixtures. This file is also read in environments that have a client and pytest alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from servers import Real, Scripted, from_environment, start_real, start_scripted


@pytest.fixture(scope="session")
def real() -> Iterator[Real]:
    if told := from_environment():
        yield told[0]
    else:
        with start_real() as started:
            yield started


@pytest.fixture(scope="session")
def _scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    if told := from_environment():
        yield told[1]
    else:
        with start_scripted(tmp_path_factory.mktemp("scripted")) as started:
            yield started


@pytest.fixture
def scripted(_scripted: Scripted) -> Scripted:
    """With no replies left from another test."""
    _scripted.replies()
    return _scripted
