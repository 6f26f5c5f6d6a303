"""Waiting OpenMP threads sleep soon. OpenMP reads the limit when torch is imported, so it must be set before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.testing.bytemodel import write_byte_model

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
BUILD = """
import os, sys, importlib.abc
class WhenTorchIsImported(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("limit:", os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, WhenTorchIsImported())
from minisgl import LLM
LLM(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("given", "limit"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_an_engine_bounds_the_spinning_before_torch_is_imported(
    tmp_path: Path, given: dict[str, str], limit: str
) -> None:
    model = write_byte_model(tmp_path, 64, weights=True)
    env = {k: v for k, v in os.environ.items() if k not in VARIABLES} | given
    out = subprocess.run([sys.executable, "-c", BUILD, str(model)], capture_output=True, text=True, check=True, env=env)
    assert out.stdout == f"limit: {limit}\n"
