"""What every plugin component is: a class with Settings that is built from one context object."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict


class PluginSettings(BaseModel):
    """Options of one plugin. Unknown options are refused; instances do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Component:
    """Base of every registry kind's base class.

    A component is built as ``cls(ctx)``, where ``ctx`` is the context object of its kind and ``ctx.settings`` its validated
    ``Settings``. ``needs``: the plugin API version (major, minor) it was written for.
    """

    Settings: ClassVar[type[PluginSettings]] = PluginSettings
    needs: ClassVar[tuple[int, int]] = (1, 0)
    stability: ClassVar[Literal["stable", "experimental"]] = "experimental"
