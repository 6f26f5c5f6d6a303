"""The attention backends that run on a CPU pass the contract of their kind; ``tests/gpu`` has the others."""

from __future__ import annotations

from minisgl.testing import contract
from minisgl.testing.static_attention import StaticAttention

TestTorch = contract("attention", "torch")
TestStatic = contract("attention", StaticAttention)
