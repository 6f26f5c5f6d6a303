"""Model sources: from what a user names to files on this machine. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.base.component import Component
from minisgl.base.types import LocalModel


@dataclass(frozen=True, slots=True)
class SourceContext:
    """``cache_dir``: where downloads and conversions are kept. ``offline``: never touch the network.
    ``progress(what, done, total)`` in bytes; it raises when the server is told to end meanwhile. ``hub_dir``: where a model
    hub's client keeps its downloads; None: where it does so by itself, shared with other programs. ``dtype``: what the user wants
    the model in, "auto" or torch's name; a source that converts weights may write it."""

    settings: Any
    cache_dir: Path
    offline: bool
    progress: Callable[[str, int, int], None]
    hub_dir: Path | None = None
    dtype: str = "auto"


class ModelSource(Component):
    """Selected by the scheme of the reference: ``dir:PATH``, ``hf:ORG/NAME``, ``gguf:FILE``, ``package:NAME``."""

    @abstractmethod
    def __init__(self, ctx: SourceContext) -> None: ...

    @classmethod
    def claims(cls, ref: str) -> bool:
        """Whether a reference without a scheme is one of this source (a folder that exists, a *.gguf file, ...)."""
        return False

    @abstractmethod
    def resolve(self, ref: str, revision: str | None, weights: bool) -> LocalModel:
        """Make the model available locally. ``ref`` without the scheme; ``weights`` False: its weights are not needed.

        Raises: ModelError saying what was looked for, where, and what to do.
        """
