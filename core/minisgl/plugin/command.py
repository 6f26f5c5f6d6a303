"""A command-line verb that a plugin adds: ``minisgl VERB``."""

from __future__ import annotations

from abc import abstractmethod
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from minisgl.base.component import Component

if TYPE_CHECKING:
    from minisgl.plugin.registry import Registry


@dataclass(frozen=True, slots=True)
class CommandContext:
    """``registry``: every plugin, for verbs that load some."""

    settings: Any
    registry: Registry


class Command(Component):
    """Imported only when the verb is called. ``help``: one line. Built-in verbs cannot be replaced."""

    help: ClassVar[str] = ""

    def __init__(self, ctx: CommandContext) -> None:
        self.ctx = ctx

    @abstractmethod
    def arguments(self, parser: ArgumentParser) -> None: ...

    @abstractmethod
    def run(self, args: Namespace) -> int:
        """Returns: the exit code."""
