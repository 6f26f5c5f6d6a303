"""docs/clients.md says what was recorded, and what was recorded is of the pinned versions."""

from __future__ import annotations

from typing import Any

import pytest

import run  # isort: skip  # of this folder, which conftest.py adds to the path

CLIENTS = run.clients()


def test_the_page_shows_the_recorded_verdicts() -> None:
    text = run.PAGE.read_text()
    assert text == run.page(text, run.recorded()), "run: python tests/clients/run.py --table"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: c.name)
def test_each_client_has_a_script_and_is_well_at_its_pinned_version(client: Any) -> None:
    assert client.script.exists()
    result = run.recorded()[client.name]
    assert client.pins[0].endswith(f"{'@' if client.is_node else '=='}{result['version']}")
    assert result["verdict"] == "ok"
    assert set(result["checks"].values()) == {"ok"}


def test_a_check_that_fails_once_among_its_cases_has_failed(tmp_path: Any) -> None:
    report = tmp_path / "report.xml"
    cases = '<testcase name="test_it_works[a]"/><testcase name="test_it_works[b]"><failure/></testcase>'
    report.write_text(f"<testsuites>{cases}<testcase name='test_it_works[c]'/><testcase name='x'/></testsuites>")
    assert run.read_report(report) == {"it works": "failure", "x": "ok"}
