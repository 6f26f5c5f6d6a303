"""What every plugin component is: a class with Settings that is built from one context object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class TextModel(BaseModel):
    """A model whose fields may also come as text, as from a command line or the environment: a list is ``a,b`` or JSON, a
    mapping ``k=v,k2=v2`` or JSON, and ``none`` is None where the field is optional and no text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _fields_from_text(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        types = {f.alias or name: f.annotation for name, f in cls.model_fields.items()}
        return {k: _from_text(v, types.get(k)) if isinstance(v, str) else v for k, v in data.items()}


def _from_text(text: str, annotation: Any) -> Any:
    """``text`` as a list, a mapping or None if ``annotation`` is one of these, else as it is."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = [get_origin(m) or m for m in members]
    classes = [k for k in kinds if isinstance(k, type)]
    if NoneType in classes and text.lower() == "none" and all(k in (NoneType, int, float, bool) for k in classes):
        return None
    if str in classes:
        return text
    sequence = any(issubclass(k, (list, tuple, set, frozenset)) for k in classes)
    if sequence or any(issubclass(k, Mapping) for k in classes):
        if text.lstrip()[:1] in ("[", "{"):
            try:
                return json.loads(text)
            except ValueError:
                return text  # refused by the field, which shows it
        parts = [p.strip() for p in text.split(",") if p.strip()]
        if sequence:
            return parts
        pairs = [p.partition("=") for p in parts]
        return {k.strip(): v.strip() for k, _, v in pairs} if all(eq for _, eq, _ in pairs) else text
    return text


class PluginSettings(TextModel):
    """Options of one plugin. Unknown options are refused; instances do not change."""


class Component:
    """Base of every registry kind's base class.

    A component is built as ``cls(ctx)``, where ``ctx`` is the context object of its kind and ``ctx.settings`` its validated
    ``Settings``. ``needs``: the plugin API version (major, minor) it was written for.
    """

    Settings: ClassVar[type[PluginSettings]] = PluginSettings
    needs: ClassVar[tuple[int, int]] = (1, 0)
    stability: ClassVar[Literal["stable", "experimental"]] = "experimental"
