"""What the CUDA attention backends have in common when they say whether they fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minisgl.api import PluginError
from minisgl.api.device import AttnFacts


def refusal(f: AttnFacts, module: str, package: str, archs: Collection[int], head_dims: Collection[int]) -> str | None:
    """Why a backend that needs ``module`` of ``package`` cannot serve ``f``; None if it can. Imports nothing, asks no device.

    Args: archs: compute capabilities x 10 that have kernels, each compared exactly (M17). head_dims: that are compiled.
    """
    if f.device != "cuda":
        return f"it needs an NVIDIA GPU; the device is {f.device!r}"
    if f.sm not in archs:
        return f"it has no kernels for compute capability {f.sm / 10:.1f}, only for {_listed(a / 10 for a in sorted(archs))}"
    if f.dtype not in ("float16", "bfloat16"):
        return f"dtype {f.dtype} is not float16 or bfloat16"
    if f.head_dim not in head_dims:
        return f"head_dim {f.head_dim} is not one of {_listed(sorted(head_dims))}"
    if f.heads % f.kv_heads:
        return f"{f.heads} query heads are no multiple of {f.kv_heads} KV heads"
    if not installed(module):
        return f"{package} is not installed: pip install 'minisgl[cuda]'"
    return None


def installed(module: str, part: str = "") -> bool:
    """Whether the package is there, and in it a file whose name begins with ``part``. Imports nothing."""
    spec = find_spec(module)
    if spec is None or not part:
        return spec is not None
    return any(any(Path(place).glob(f"{part}*")) for place in spec.submodule_search_locations or ())


def load(name: str, module: str, package: str) -> Any:
    """Import ``module`` for the backend ``name``. Raises: PluginError."""
    try:
        return import_module(module)
    except ImportError as exc:
        raise PluginError(
            f"attention {name!r} needs package {package!r}, which cannot be imported ({type(exc).__name__}: {exc}): "
            "pip install 'minisgl[cuda]' of versions that fit this torch, or use another attention backend"
        ) from exc


def _listed(values: Iterable[float]) -> str:
    return ", ".join(map(str, values))
