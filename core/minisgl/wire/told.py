"""Log probabilities of a batch of deltas as one frame: each token's name once, and arrays of numbers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from minisgl.base.types import Candidate, Delta, TokenLogprob
from minisgl.wire.codec import WireError

Told = tuple[TokenLogprob, ...]
_HEAD = struct.Struct("<III")  # bytes of names, numbers of shape, candidates
_I32, _F64 = np.dtype("<i4"), np.dtype("<f8")


def pack_told(items: Sequence[Delta]) -> bytes:
    """b"" if no delta has any. Per delta and kind the count of tokens, -1 for None; per token rank, offset and count of
    alternatives; per candidate the place of its name and its number, NaN for None."""
    if all(d.logprobs is None and d.prompt_logprobs is None for d in items):
        return b""
    names: dict[tuple[int, str, bytes | None], int] = {}
    shape: list[int] = []
    places: list[int] = []
    numbers: list[float] = []
    for told in (t for d in items for t in (d.logprobs, d.prompt_logprobs)):
        shape.append(-1 if told is None else len(told))
        for t in told or ():
            shape += (t.rank, t.offset, len(t.top))
            for c in (t.token, *t.top):
                places.append(names.setdefault((c.id, c.text, c.data), len(names)))
                numbers.append(math.nan if c.logprob is None else c.logprob)
    table = json.dumps([(i, text, None if data is None else data.hex()) for i, text, data in names]).encode()
    arrays = np.array(shape, _I32), np.array(places, _I32), np.array(numbers, _F64)
    return _HEAD.pack(len(table), len(shape), len(places)) + table + b"".join(a.tobytes() for a in arrays)


def parse_told(frame: bytes, count: int) -> list[tuple[Told | None, Told | None]]:
    """Of each of ``count`` deltas its ``logprobs`` and ``prompt_logprobs``. Raises: WireError."""
    if not frame:
        return [(None, None)] * count
    try:
        names, shape, candidates = _read(frame)
        pairs = [(_told(shape, candidates), _told(shape, candidates)) for _ in range(count)]
    except (ValueError, TypeError, IndexError, StopIteration, struct.error) as exc:
        raise WireError(f"Deltas: log probabilities of {len(frame)} bytes do not read: {exc}") from exc
    if next(shape, None) is not None or next(candidates, None) is not None:
        raise WireError(f"Deltas: log probabilities of more than {count} deltas, with {len(names)} tokens")
    return pairs


Names = list[tuple[int, str, bytes | None]]


def _read(frame: bytes) -> tuple[Names, Iterator[int], Iterator[Candidate]]:
    n_table, n_shape, n = _HEAD.unpack_from(frame)
    at = _HEAD.size + n_table
    if len(frame) != at + 4 * (n_shape + n) + 8 * n:
        raise ValueError(f"lengths {n_table}, {n_shape} and {n} do not add up")
    names = [(i, t, None if d is None else bytes.fromhex(d)) for i, t, d in json.loads(frame[_HEAD.size : at])]
    shape = np.frombuffer(frame, _I32, n_shape, at)
    places = np.frombuffer(frame, _I32, n, at + 4 * n_shape)
    numbers = np.frombuffer(frame, _F64, n, at + 4 * (n_shape + n)).tolist()
    if n and not 0 <= int(places.min()) <= int(places.max()) < len(names):
        raise ValueError(f"a token beyond the {len(names)} names")

    def candidates() -> Iterator[Candidate]:
        for place, number in zip(places.tolist(), numbers):
            i, text, data = names[place]
            yield Candidate(i, None if number != number else number, text, data)

    return names, iter(shape.tolist()), candidates()


def _told(shape: Iterator[int], candidates: Iterator[Candidate]) -> Told | None:
    count = next(shape)
    if count < 0:
        return None
    out: list[TokenLogprob] = []
    for _ in range(count):
        rank, offset, n_top = next(shape), next(shape), next(shape)
        token = next(candidates)
        out.append(TokenLogprob(token, rank, tuple([next(candidates) for _ in range(n_top)]), offset))
    return tuple(out)
