"""The attention backends of a GPU pass the contract of their kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.testing import contract
from minisgl_plugins.attention.fa import FlashAttention
from minisgl_plugins.attention.flashinfer import FlashInferAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

FlashInfer: Any = contract("attention", FlashInferAttention, {"prefill": "fa2"})
TestFlashAttention = contract("attention", FlashAttention)


class TestFlashInfer(FlashInfer):
    @pytest.mark.slow  # windows are kernels of their own, compiled when first used
    @pytest.mark.parametrize("layer", [0, 1])
    @pytest.mark.parametrize("window", [1, 7, 30])
    def test_a_window_holds_in_its_layers_only(self, make: Any, window: int, layer: int) -> None:
        FlashInfer.test_a_window_holds_in_its_layers_only(self, make, window, layer)


FlashInfer.__test__ = False
TestFlashInfer.__test__ = True  # type: ignore[attr-defined]
