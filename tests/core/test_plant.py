"""The bugs of tests/mutations/plant.py still fit the source, so that the script can be run at any time."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_plant() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minisgl_tests_plant", ROOT / "tests" / "mutations" / "plant.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


plant = load_plant()


@pytest.mark.parametrize("bug", plant.BUGS, ids=lambda bug: bug.name)
def test_every_bug_fits_the_source_once_and_is_valid_python(bug: Any) -> None:
    text = (ROOT / bug.file).read_text()
    planted = bug.planted(text)
    assert planted != text
    ast.parse(planted)


def test_a_text_that_is_not_there_exactly_once_is_refused_by_name() -> None:
    bug = plant.Bug("twofold", "a.py", "x", "y")
    with pytest.raises(ValueError, match=r"bug twofold: its text is 2 times in a\.py, expected once"):
        bug.planted("x x")
    with pytest.raises(ValueError, match="0 times"):
        bug.planted("")


def test_there_are_at_least_twenty_bugs_each_with_a_name_of_its_own() -> None:
    names = [bug.name for bug in plant.BUGS]
    assert len(set(names)) == len(names) >= 20


def test_an_unknown_name_is_refused_and_known_ones_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="unknown bugs: no_such_bug"):
        plant.main(["--list", "no_such_bug"])
    assert plant.main(["--list", plant.BUGS[0].name]) == 0
    assert capsys.readouterr().out.startswith(plant.BUGS[0].name)
