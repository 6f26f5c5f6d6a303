"""Recorded requests: JSON lines in the formats of the public traces of Mooncake and of Qwen-Bailian.

Both have ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``, one for each block of the prompt; equal ids stand
for equal blocks. Mooncake: milliseconds, blocks of 512 tokens. Qwen-Bailian, told by its ``chat_id``: seconds, blocks of 16.
Sources: github.com/kvcache-ai/Mooncake (FAST25-release/traces), github.com/alibaba-edu/qwen-bailian-usagetraces-anon (README).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.base.errors import ConfigError
from minisgl_cli.simulate.workload import Request

ID_LIMIT = 2**61  # twice an id fits in int64


@dataclass(frozen=True, slots=True)
class Format:
    """``block``: tokens of a hashed block. ``second``: what a second is in its timestamps. ``more``: its other fields, integers
    unless the type says otherwise."""

    name: str
    block: int
    second: float
    more: Mapping[str, type]


MOONCAKE = Format("mooncake", 512, 1000.0, {})
BAILIAN = Format("qwen-bailian", 16, 1.0, {"chat_id": int, "parent_chat_id": int, "type": str, "turn": int})


def read_trace(path: Path, limit: int | None = None) -> tuple[Format, list[Request]]:
    """The format, and the first ``limit`` requests in order of time. Raises: ConfigError with the line that is wrong."""
    try:
        with path.open() as file:
            records = list(_records(path, file, limit))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--trace {path}: it cannot be read: {exc}") from exc
    if not records:
        raise ConfigError(f"--trace {path} has no requests; JSON lines are needed, one for each")
    form = BAILIAN if "chat_id" in records[0][1] else MOONCAKE
    requests = [
        _request(form, f"--trace {path}:{number}", record, serial) for serial, (number, record) in enumerate(records)
    ]
    return form, sorted(requests, key=lambda r: r.at_s)


def _records(path: Path, lines: Any, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object."""
    taken = 0
    for number, line in enumerate(lines, 1):
        if taken == limit:
            return
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as exc:
            raise ConfigError(f"--trace {path}:{number}: not JSON: {exc}") from exc
        if not isinstance(record, dict):
            raise ConfigError(f"--trace {path}:{number}: {line.strip()[:40]!r} is no JSON object")
        taken += 1
        yield number, record


def _request(form: Format, where: str, record: Mapping[str, Any], serial: int) -> Request:
    for key, kind in form.more.items():
        if type(record.get(key)) is not kind:
            raise ConfigError(
                f"{where}: {key} = {record.get(key)!r}; the {form.name} format needs {kind.__name__} there"
            )
    n, output = _length(where, record, "input_length"), _length(where, record, "output_length")
    time = record.get("timestamp")
    if isinstance(time, bool) or not isinstance(time, int | float) or not isfinite(time) or time < 0:
        raise ConfigError(f"{where}: timestamp = {time!r}; a number >= 0 is needed")
    ids = _ids(form, where, record, n)
    keys = [2 * i for i in ids]
    lengths = [min(form.block, n - i * form.block) for i in range(len(ids))]
    if rest := n - sum(lengths):  # a last block that is not full and has no id: like no other
        keys.append(4 * serial + 1)
        lengths.append(rest)
    return Request(time / form.second, np.array(keys, np.int64), np.array(lengths, np.int64), 4 * serial + 3, output)


def _length(where: str, record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {key} = {value!r}; an integer >= 1 is needed")
    return value


def _ids(form: Format, where: str, record: Mapping[str, Any], n: int) -> list[int]:
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < ID_LIMIT for i in ids):
        raise ConfigError(f"{where}: hash_ids = {str(ids)[:40]}; a list of integers from 0 is needed")
    if not n // form.block <= len(ids) <= -(-n // form.block):
        raise ConfigError(
            f"{where}: {len(ids)} hash_ids for input_length {n}; the {form.name} format has one for each {form.block} tokens, "
            f"{-(-n // form.block)} here"
        )
    return ids
