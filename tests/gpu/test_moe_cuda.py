"""The torch op for experts on a GPU: right, and without waiting for the device where torch has a grouped kernel."""

from __future__ import annotations

import pytest
import torch

from minisgl.api.device import OpsContext
from minisgl_plugins.ops.torch import TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def case(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    x, logits = torch.randn(40, 64, generator=g), torch.randn(40, 32, generator=g)
    gate_up, down = torch.randn(32, 48, 64, generator=g) / 8, torch.randn(32, 64, 24, generator=g) / 5
    return tuple(t.to(dtype).to(device) for t in (x, logits, gate_up, down))


def op(device: str, dtype: torch.dtype):
    return TorchOps(OpsContext(TorchOps.Settings(), torch.device(device), dtype)).table()["moe"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moe_on_the_gpu_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    exact = op("cpu", torch.float32)(*(t.float() for t in case(dtype, "cpu")), 8, True)
    found = op("cuda", dtype)(*case(dtype, "cuda"), 8, True).float().cpu()
    assert (found - exact).norm() < {torch.float32: 2e-3}.get(dtype, 0.03) * exact.norm()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU or later"
)
def test_moe_in_bfloat16_can_be_captured() -> None:
    """A call that waits for the device cannot be captured. Replayed with other tokens, other experts are chosen."""
    moe, (x, logits, gate_up, down) = op("cuda", torch.bfloat16), case(torch.bfloat16, "cuda")
    moe(x, logits, gate_up, down, 8, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, logits, gate_up, down, 8, True)
    logits.copy_(logits.flip(1))
    x.copy_(x.flip(0))
    graph.replay()
    torch.testing.assert_close(out, moe(x, logits, gate_up, down, 8, True))
