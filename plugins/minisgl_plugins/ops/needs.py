"""What the ops plugins for CUDA have in common when they say whether they fit."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

import torch

HALVES = (torch.float16, torch.bfloat16)
INSTALL = {
    "flashinfer": "'flashinfer-python': pip install 'minisgl[cuda]'",
    "sgl_kernel": "'sglang-kernel': pip install 'minisgl[cuda]'",
    "triton": "'triton', which torch for CUDA brings: pip install triton",
}


def installed(module: str) -> bool:
    """Imports nothing."""
    return find_spec(module) is not None


def refusal(device: torch.device, dtype: torch.dtype, module: str, dtypes: Collection[torch.dtype]) -> str | None:
    """Why a plugin with kernels of ``module`` for ``dtypes`` cannot run there; None if it can. Imports nothing."""
    if device.type != "cuda":
        return f"device is {device.type!r}; its kernels run on 'cuda'"
    if not installed(module):
        return f"needs package {INSTALL[module]}"
    if dtype not in dtypes:
        *most, last = (str(d).removeprefix("torch.") for d in dtypes)
        return f"dtype is {dtype}; its kernels take {', '.join(most)} and {last}"
    return None
