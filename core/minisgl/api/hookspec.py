"""Every hook that a plugin can implement, by area. Hooks are for what several plugins contribute; what is chosen by name is
a registry kind. None of them is called per step or per token.

A hook plugin is a module, or an object, with functions marked ``@hookimpl``::

    from minisgl.api.hookspec import hookimpl

    @hookimpl
    def register_cache_policies(add):
        add("lfu", "acme_minisgl:LFUCachePolicy")

It runs only where the configuration names it: ``plugins.enable`` with the name of its entry point in the group
``minisgl.v1.hooks``, or with ``module`` or ``module:attr``; ``--plugin``; or the Python API's ``plugins=[...]``. An
implementation may leave out parameters that it does not need. ``add(name, target)`` takes a class or ``"module:attr"``,
which is imported only when it is selected.

All plugins are called unless it says "first result". "Isolated": an exception is logged with the plugin's name and turns off
that plugin's hooks; in the others it ends what called them, the start or the one request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from minisgl.base.errors import Fault
    from minisgl.base.types import EngineInfo, GenerateRequest, LocalModel

    Add = Callable[[str, type | str], None]

hookspec = pluggy.HookspecMarker("minisgl")
hookimpl = pluggy.HookimplMarker("minisgl")


class ModelHooks:
    """Models."""

    @hookspec
    def register_models(self, add: Add) -> None:
        """Add models; ``name`` is the architecture in a checkpoint's config.json. Called at the start of every process."""

    @hookspec(firstresult=True)
    def resolve_model(self, ref: str, revision: str | None) -> LocalModel | None:
        """Make the model that ``model.path`` names available, before the model sources are asked. First result."""

    @hookspec
    def config_defaults(self, model: str, device: str) -> Mapping[str, Any] | None:
        """Settings below the user's own and above the built-in defaults, as ``{"kv": {"page_size": 32}}``.

        ``model``: ``model.path``. ``device``: ``model.device``, "auto" included. Two plugins that set one key to different
        values are an error. Called in the first process only.
        """


class AttentionHooks:
    """Attention backends."""

    @hookspec
    def register_attention_backends(self, add: Add) -> None:
        """Add attention backends. Called at the start of every process."""

    @hookspec(firstresult=True)
    def prefer(self, kind: str, facts: Any, candidates: Sequence[str]) -> str | None:
        """Which of ``candidates`` a kind's ``use = "auto"`` becomes; for attention, ``facts`` is an AttnFacts. Also asked for
        cache policies and schedulers. First result."""


class CacheHooks:
    """Cache policies; see also ``prefer``."""

    @hookspec
    def register_cache_policies(self, add: Add) -> None:
        """Add cache policies. Called at the start of every process."""


class SchedulerHooks:
    """Schedulers; see also ``prefer``."""

    @hookspec
    def register_schedulers(self, add: Add) -> None:
        """Add schedulers. Called at the start of every process."""


class FrontendHooks:
    """Frontends."""

    @hookspec
    def register_frontends(self, add: Add) -> None:
        """Add frontends. Called at the start of every process."""

    @hookspec
    def check_request(self, request: GenerateRequest, info: EngineInfo) -> None:
        """Raise RequestError to refuse a request; the first refusal counts. Asked for every request of every frontend, in the api
        process, and for those of the Python API, before anything is done for it."""

    @hookspec
    def http_routes(self, frontend: str, add: Callable[[Any], None]) -> None:
        """Add Starlette routes to the HTTP host; a path that is taken is a start error."""

    @hookspec
    def http_middleware(self, frontend: str, add: Callable[[Any], None]) -> None:
        """Add ASGI middleware: ``add(lambda app: MyMiddleware(app))``. Pure ASGI only: it must pass ``receive`` through."""


class ProcessHooks:
    """Life of the processes. All isolated."""

    @hookspec
    def process_started(self, role: str, rank: int) -> None:
        """``role``: supervisor, api, text or engine; ``rank``: its number."""

    @hookspec
    def process_stopping(self, role: str, rank: int) -> None:
        """The process is about to end."""

    @hookspec
    def engine_ready(self, info: EngineInfo) -> None:
        """In the api process: the engine can take requests."""

    @hookspec
    def engine_failed(self, fault: Fault) -> None:
        """In the api process: the engine is gone."""


SPECS = (ModelHooks, AttentionHooks, CacheHooks, SchedulerHooks, FrontendHooks, ProcessHooks)
REGISTERS = {
    "register_models": "model",
    "register_attention_backends": "attention",
    "register_cache_policies": "cache",
    "register_schedulers": "scheduler",
    "register_frontends": "frontend",
}
ISOLATED = frozenset({"process_started", "process_stopping", "engine_ready", "engine_failed"})
