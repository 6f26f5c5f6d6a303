"""The machinery of tests/mutations/generated.py: what it says of mutants whose fate is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = ROOT / "tests" / "mutations"
RULE = "tests/core/test_cache_machine.py::test_pages_are_free_only_when_their_fence_is_done"

# Mutants of PageLedger by hand: name, function, old text, new text.
KNOWN = (
    ("nothing_changed", "give", "", ""),
    ("fence_ignored", "give", "if fence <= self._done:", "if True:"),
    ("property_mutated", "free", "return self._n\n", "return self._n + 1\n"),
    ("never_returns", "retire", "self._done = done_step\n", "while True:\n            pass\n"),
    ("not_python_that_runs", "give", "if not len(pages):", "if not undefined:"),
    ("default_changed", "retire", "done_step: int)", "done_step: int, more: int = 1)"),
    ("not_reached", "clear_cache", "self.version += 1", "self.version -= 1"),
)
SCRIPT = """
import json, sys
import forks
forks.EXTRA_SECONDS = 0.2
file = "core/minisgl/sched/pages.py"
text = (forks.ROOT / file).read_text()

def mutant(name, function, old, new):
    assert old in text, old
    return forks.Mutant(name, file, "PageLedger." + function, text, lambda: text.replace(old, new) if old else text)

known, rule = json.loads(sys.argv[1])
verdicts = forks.run([mutant(*each) for each in known], [rule], jobs=2)
print("VERDICTS", json.dumps({v.mutant.name: (v.outcome, v.tests) for v in verdicts}))
"""


def python(*args: str) -> str:
    path = os.pathsep.join([str(MUTATIONS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_known_mutant_is_killed_and_no_change_survives() -> None:
    out = python("-c", SCRIPT, json.dumps([KNOWN, RULE]))
    verdicts = json.loads(out.split("VERDICTS")[1])
    assert verdicts == {
        "nothing_changed": ["survived", 1],
        "fence_ignored": ["killed", 1],
        "property_mutated": ["killed", 1],
        "never_returns": ["timeout", 1],
        "not_python_that_runs": ["killed", 1],
        "default_changed": ["survived", 1],
        "not_reached": ["survived", 0],
    }


def test_tests_that_fail_without_a_mutation_are_no_judges() -> None:
    script = SCRIPT.replace("json.loads(sys.argv[1])", "[], 'no_such_test.py'")
    with pytest.raises(AssertionError, match="pytest ended with"):
        python("-c", script)


def test_mutants_are_the_same_each_time_and_a_sample_is_even_over_functions() -> None:
    pytest.importorskip("mutmut", reason="the generator of mutants needs mutmut, which is not part of the dev extra")
    every, sample = (
        python(str(MUTATIONS / "generated.py"), "--list", *more) for more in (["pages"], ["--sample=10", "pages"])
    )
    names = [line.split(":")[0] for line in every.splitlines()[:-1]]
    taken = [line.split(":")[0] for line in sample.splitlines()[:-1]]
    assert len(set(names)) == len(names) > 80
    assert set(taken) < set(names)
    assert len({name.split("#")[0] for name in taken}) == len({name.split("#")[0] for name in names}) == len(taken)
