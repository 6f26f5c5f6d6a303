"""A command-line verb that a plugin adds: ``minisgl VERB``."""

from __future__ import annotations

from abc import abstractmethod
from argparse import ArgumentParser, Namespace
from typing import Any, ClassVar

from minisgl.base.component import Component


class Command(Component):
    """Imported only when the verb is called. ``help``: one line."""

    help: ClassVar[str] = ""

    def __init__(self, ctx: Any = None) -> None:
        self.ctx = ctx

    @abstractmethod
    def arguments(self, parser: ArgumentParser) -> None: ...

    @abstractmethod
    def run(self, args: Namespace) -> int:
        """Returns: the exit code."""
