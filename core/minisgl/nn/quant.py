"""Which quantization method a worker uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minisgl.base.errors import ConfigError
from minisgl.config.schema import Settings
from minisgl.plugin.registry import Registry
from minisgl.runtime.quant import QuantContext, QuantMethod


def make_quant(
    settings: Settings, registry: Registry, checkpoint: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[str, QuantMethod | None]:
    """The configured method, or with ``auto`` what the checkpoint asks for.

    Args: checkpoint: the model's config.json.
    Returns: the name, "none" if nothing is quantized, and the method.
    Raises: ConfigError if it does not fit device or dtype, or if no method knows the checkpoint's; PluginError.
    """
    (name,) = settings.use("quant")
    if name == "auto":
        wanted = checkpoint.get("quantization_config")
        if not wanted:
            return "none", None
        name = _detect(registry, wanted)
    cls: type[QuantMethod] = registry.load("quant", name)
    dtype_name = str(dtype).removeprefix("torch.")
    reason = cls.supports(device.type, dtype_name)
    if reason is not None:
        raise ConfigError(f"quant={name!r} cannot be used on {device} in {dtype_name}: {reason}")
    method: QuantMethod = registry.create(
        "quant", name, settings.options("quant", name), lambda s: QuantContext(s, device, dtype)
    )
    return name, method


def _detect(registry: Registry, wanted: Mapping[str, Any]) -> str:
    names = registry.names("quant")
    for name in names:
        if registry.load("quant", name).detect(wanted):
            return name
    raise ConfigError(
        f"config: quantization_config asks for {wanted.get('quant_method', wanted)!r}, which no quant plugin detects; "
        f"registered: {', '.join(map(repr, names)) or 'none'}"
    )
