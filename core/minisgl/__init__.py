"""minisgl: LLM inference and serving that people extend with plugins instead of forks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.base.types import SamplingParams
    from minisgl.client.pipeline import LLM, Pipeline, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "Pipeline", "RequestOutput", "SamplingParams", "__version__"]

_WHERE = {
    "LLM": "minisgl.client.pipeline",
    "Pipeline": "minisgl.client.pipeline",
    "RequestOutput": "minisgl.client.pipeline",
    "SamplingParams": "minisgl.base.types",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
