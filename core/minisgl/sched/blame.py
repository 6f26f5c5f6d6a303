"""Calls into plugins, so that what they raise names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def call(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``method(...)`` of a plugin; an exception gets a note that names the plugin's class and the method."""
    try:
        return method(*args, **kwargs)
    except Exception as exc:
        exc.add_note(f"in {blamed(method)}()")
        raise


def blamed(method: Callable[..., object]) -> str:
    """``module.Class.method`` of a bound method."""
    owner = type(getattr(method, "__self__", method))
    return f"{owner.__module__}.{owner.__qualname__}.{getattr(method, '__name__', '?')}"
