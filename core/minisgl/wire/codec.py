"""Frozen dataclasses as JSON and back. Every value is checked against the field's type when it is read."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from minisgl.base.errors import Fault

T = TypeVar("T")
Reader = Callable[[Any, str], Any]


class WireError(Fault):
    """A message is not what the protocol says; processes of different builds, or a bug."""


def dumps(value: Any) -> bytes:
    """JSON of a dataclass, mapping, sequence or scalar; bytes become hex, paths strings.

    Raises: TypeError for a value of another type.
    """
    return json.dumps(value, default=_plain, separators=(",", ":")).encode()


def loads(cls: type[T], data: bytes) -> T:
    """The dataclass ``cls`` out of its JSON. Raises: WireError naming the field."""
    try:
        value = json.loads(data)
    except ValueError as exc:
        raise WireError(f"{cls.__name__}: not JSON ({exc}): {data[:80]!r}") from exc
    read: Reader = _reader(cls)  # type: ignore[arg-type]  # a class is hashable
    made: T = read(value, cls.__name__)
    return made


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be sent between processes: {value!r}")


@cache
def _reader(hint: Any) -> Reader:
    """What turns a JSON value into ``hint``; made once for each type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value, where: value
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        return _literal(args)
    if origin is tuple:
        return _tuple(_reader(args[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_reader(args[1]), int if args[0] is int else str)
    if is_dataclass(hint):
        return _dataclass(hint)
    return _scalar(hint)


def _scalar(hint: Any) -> Reader:
    made_from: dict[Any, tuple[type, Callable[[Any], Any]]] = {bytes: (str, bytes.fromhex), Path: (str, Path)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        made_from[hint] = (str, hint)
    source, make = made_from.get(hint, (hint, None))
    accepted = (int, float) if source is float else (source,)

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and source is not bool):
            raise WireError(f"{where}: {value!r} is not {getattr(hint, '__name__', hint)}")
        try:
            return value if make is None else make(value)
        except ValueError as exc:
            raise WireError(f"{where}: {exc}") from exc

    return read


def _union(args: tuple[Any, ...]) -> Reader:
    readers = [_reader(a) for a in args if a is not type(None)]
    optional = type(None) in args

    def read(value: Any, where: str) -> Any:
        if value is None and optional:
            return None
        for i, reader in enumerate(readers):
            try:
                return reader(value, where)
            except WireError:
                if i == len(readers) - 1:
                    raise
        raise WireError(f"{where}: {value!r} is of no accepted type")

    return read


def _literal(args: tuple[Any, ...]) -> Reader:
    def read(value: Any, where: str) -> Any:
        if value not in args:
            raise WireError(f"{where}: {value!r} is not one of {args!r}")
        return value

    return read


def _tuple(item: Reader) -> Reader:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise WireError(f"{where}: {value!r} is not a list")
        return tuple(item(v, where) for v in value)

    return read


def _mapping(item: Reader, key: Callable[[str], Any]) -> Reader:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise WireError(f"{where}: {value!r} is not an object")
        try:
            return {key(k): item(v, f"{where}.{k}") for k, v in value.items()}
        except ValueError as exc:
            raise WireError(f"{where}: {exc}") from exc

    return read


def _dataclass(cls: Any) -> Reader:
    hints = typing.get_type_hints(cls)
    readers = {f.name: _reader(hints[f.name]) for f in fields(cls)}
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise WireError(f"{where}: {value!r} is not an object")
        if unknown := value.keys() - readers.keys():
            raise WireError(f"{where}: unknown fields {sorted(unknown)}")
        if missing := required - value.keys():
            raise WireError(f"{where}: fields {sorted(missing)} are missing")
        return cls(**{k: readers[k](v, f"{where}.{k}") for k, v in value.items()})

    return read
