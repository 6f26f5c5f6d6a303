"""Frontends: what speaks with users. One event loop runs all of them; none may block it. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from minisgl.base.component import Component
from minisgl.client.exchange import ErrorShape

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from minisgl.client.client import EngineClient
    from minisgl.config.schema import Settings
    from minisgl.plugin.hooks import Hooks


@dataclass(frozen=True, slots=True)
class FrontendContext:
    """``client``: the way to the engine. ``config``: all settings."""

    settings: Any
    client: EngineClient
    config: Settings
    hooks: Hooks


class Frontend(Component):
    """A frontend that runs as a task of its own: a terminal, a socket protocol, ..."""

    stability: ClassVar[Literal["stable", "experimental"]] = "stable"

    def __init__(self, ctx: FrontendContext) -> None:
        self.ctx = ctx

    @abstractmethod
    async def serve(self) -> None:
        """Returns only on shutdown."""

    async def shutdown(self, grace: float) -> None:
        """Stop taking requests; finish those running within ``grace`` seconds."""


class HttpFrontend(Frontend):
    """A frontend that is a set of routes on the core's HTTP host, which owns socket, keys, limits and request ids. Handlers
    raise RequestError; they never answer errors by themselves before the first byte.

    ``errors``: how errors are written on its paths and below them, also those that no handler sees: a missing key, a body that
    is too large, a wrong method, a server that drains. A handler may set others for one request.
    """

    errors: ClassVar[ErrorShape] = ErrorShape()

    async def serve(self) -> None:
        """The HTTP host serves it."""

    @abstractmethod
    def routes(self) -> list[BaseRoute]:
        """Starlette routes. A path that two frontends claim is a start error."""
