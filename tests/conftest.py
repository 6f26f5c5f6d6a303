"""Fixtures that several folders of tests share."""

from __future__ import annotations

import pytest

from minisgl.base.errors import ModelError
from minisgl.base.types import LocalModel
from minisgl.config.schema import Settings
from minisgl.plugin.registry import Registry
from minisgl.text.resolve import resolve_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--base-url", help="server that tests/conformance asks, instead of one of the repository")
    parser.addoption("--api-key", default="", help="key of that server")
    parser.addoption("--cases", type=int, default=300, help="requests that schemathesis makes up, in all")


@pytest.fixture(scope="session")
def smollm2() -> LocalModel:
    """The default model, from the user's cache; the first run downloads 89 MiB and converts them, in about 10 s."""
    try:
        return resolve_model(Settings(), Registry.scan())
    except ModelError as e:
        pytest.fail(f"this test needs the default model: {e}", pytrace=False)
