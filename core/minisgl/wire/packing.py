"""Messages to frames and back.

Frame 0 is a version byte, a tag byte and the cold part (JSON, or a packed number); the frames after it are raw little-endian
arrays. What is sent for every token (Tokens, Deltas) carries only arrays, and nothing is ever pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minisgl.base.types import (
    PART_KINDS,
    Accepted,
    Admit,
    Delta,
    Ended,
    GenerateRequest,
    LogprobBlock,
    Part,
    Refused,
    SamplingSpec,
    Scores,
    Tokens,
    Usage,
)
from minisgl.wire import codec
from minisgl.wire.codec import WireError
from minisgl.wire.messages import (
    Abort,
    Beat,
    Cancel,
    Control,
    Deltas,
    Detokenize,
    Detokenized,
    Drain,
    Drained,
    FaultReport,
    Go,
    Hello,
    Lost,
    Message,
    Progress,
    Ready,
    Reply,
    Stop,
    Submit,
    Tokenize,
    Tokenized,
)
from minisgl.wire.told import pack_told, parse_told

WIRE_VERSION = 1
_I32, _I64, _F32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
_PART = {kind: i for i, kind in enumerate(PART_KINDS)}


def encode(message: Message) -> list[bytes]:
    """The frames of a message.

    Raises: TypeError for content that JSON has no word for; OverflowError for an id outside 64 bits.
    """
    tag, pack, _ = _BY_TYPE[type(message)]
    body, frames = pack(message)
    return [bytes((WIRE_VERSION, tag)) + body, *frames]


def decode(frames: Sequence[bytes]) -> Message:
    """Raises: WireError saying what is wrong with the frames."""
    head = frames[0] if frames else b""
    if len(head) < 2:
        raise WireError(f"a message needs a version and a tag byte; got {bytes(head)!r}")
    if head[0] != WIRE_VERSION:
        raise WireError(
            f"message version {head[0]}, this process speaks version {WIRE_VERSION}; start all processes of one build"
        )
    known = _BY_TAG.get(head[1])
    if known is None:
        raise WireError(f"unknown message tag {head[1]}; known: 1 to {len(_BY_TAG)}")
    cls, parse, n_frames = known
    if len(frames) != n_frames + 1:
        raise WireError(f"{cls.__name__}: {len(frames) - 1} arrays, expected {n_frames}")
    message: Message = parse(head[2:], frames[1:])
    return message


# -------------------------------------------------------------------------------------------------------------- packing

Packed = tuple[bytes, list[bytes]]
Pack = Callable[[Any], Packed]
Parse = Callable[[bytes, Sequence[bytes]], Any]


def _json_pack(message: Any) -> Packed:
    return codec.dumps(message), []


def _json_parse(cls: type) -> Parse:
    return lambda body, frames: codec.loads(cls, body)


def _raw(values: Sequence[int] | np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bytes:
    return np.asarray(values, dtype).tobytes()


def _array(name: str, frame: bytes, dtype: np.dtype[Any]) -> Any:
    if len(frame) % dtype.itemsize:
        raise WireError(f"{name}: {len(frame)} bytes are not a whole number of {dtype.name}")
    return np.frombuffer(frame, dtype)


def _uids_parse(cls: Callable[[tuple[int, ...]], Any]) -> Parse:
    return lambda body, frames: cls(tuple(_array("uids", frames[0], _I64).tolist()))


def _uids_pack(message: Cancel | Abort) -> Packed:
    return b"", [_raw(message.uids, _I64)]


def _request_pack(uids: Sequence[int], request: GenerateRequest) -> Packed:
    ids = request.ids
    body = codec.dumps(request if ids is None else replace(request, ids=()))
    return body, [_raw(uids, _I64), _raw(ids or (), _I64)]


def _request_parse(body: bytes, frames: Sequence[bytes]) -> tuple[tuple[int, ...], GenerateRequest]:
    request = codec.loads(GenerateRequest, body)
    ids = _array("ids", frames[1], _I64)
    if request.ids is not None:
        request = replace(request, ids=tuple(ids.tolist()))
    return tuple(_array("uids", frames[0], _I64).tolist()), request


def _one_uid(uids: tuple[int, ...]) -> int:
    if len(uids) != 1:
        raise WireError(f"{len(uids)} uids, expected 1")
    return uids[0]


def _submit_parse(body: bytes, frames: Sequence[bytes]) -> Submit:
    return Submit(*_request_parse(body, frames))


def _tokenize_parse(body: bytes, frames: Sequence[bytes]) -> Tokenize:
    uids, request = _request_parse(body, frames)
    return Tokenize(_one_uid(uids), request)


def _ids_pack(message: Tokenized | Detokenize) -> Packed:
    return b"", [_raw((message.uid,), _I64), _raw(message.ids, _I64)]


def _ids_parse(cls: Callable[[int, tuple[int, ...]], Any]) -> Parse:
    def parse(body: bytes, frames: Sequence[bytes]) -> Any:
        uids = tuple(_array("uid", frames[0], _I64).tolist())
        return cls(_one_uid(uids), tuple(_array("ids", frames[1], _I64).tolist()))

    return parse


@dataclass(frozen=True, slots=True)
class _AdmitHead:
    """An Admit without its ids."""

    uid: int
    sampling: SamplingSpec
    owner: int
    priority: int
    namespace: bytes
    arrived_ns: int
    key: str


def _admit_pack(a: Admit) -> Packed:
    head = _AdmitHead(a.uid, a.sampling, a.owner, a.priority, a.namespace, a.arrived_ns, a.key)
    return codec.dumps(head), [_raw(a.ids, _I32)]


def _admit_parse(body: bytes, frames: Sequence[bytes]) -> Admit:
    h = codec.loads(_AdmitHead, body)
    ids = _array("ids", frames[0], _I32)
    return Admit(h.uid, ids, h.sampling, h.owner, h.priority, h.namespace, h.arrived_ns, h.key)


def _tokens_pack(t: Tokens) -> Packed:
    return struct.pack("<q", t.step), [_raw(t.uids, _I64), _raw(t.tokens, _I32)]


def _tokens_parse(body: bytes, frames: Sequence[bytes]) -> Tokens:
    if len(body) != 8:
        raise WireError(f"Tokens: step has {len(body)} bytes, expected 8")
    uids, tokens = _array("uids", frames[0], _I64), _array("tokens", frames[1], _I32)
    if len(uids) != len(tokens):
        raise WireError(f"Tokens: {len(uids)} uids and {len(tokens)} tokens")
    return Tokens(struct.unpack("<q", body)[0], uids, tokens)


_SCORES = (("row", _I32), ("position", _I32), ("token", _I32), ("logprob", _F32), ("rank", _I32))
_TOPS = (("top_ids", _I32), ("top_logprobs", _F32))


def _scores_pack(s: Scores) -> Packed:
    frames = [_raw(getattr(s.block, name).ravel(), dtype) for name, dtype in (*_SCORES, *_TOPS)]
    return b"", [_raw(s.uids, _I64), *frames]


def _scores_parse(body: bytes, frames: Sequence[bytes]) -> Scores:
    uids = _array("uids", frames[0], _I64)
    arrays = {name: _array(name, f, dtype) for (name, dtype), f in zip((*_SCORES, *_TOPS), frames[1:], strict=True)}
    n = len(arrays["row"])
    if any(len(arrays[name]) != n for name, _ in _SCORES) or (n and not 0 <= int(arrays["row"].max()) < len(uids)):
        raise WireError(f"Scores: { ({k: len(a) for k, a in arrays.items()}) } numbers for {len(uids)} uids")
    tops = {name: arrays[name] for name, _ in _TOPS}
    if len({len(a) for a in tops.values()}) != 1 or (len(tops["top_ids"]) % n if n else len(tops["top_ids"])):
        raise WireError(f"Scores: { ({k: len(a) for k, a in tops.items()}) } alternatives for {n} tokens")
    return Scores(uids, LogprobBlock(**{**arrays, **{k: a.reshape(n, -1 if n else 0) for k, a in tops.items()}}))


def _reply_pack(r: Reply) -> Packed:
    return struct.pack("<q", r.uid), [r.payload]


def _reply_parse(body: bytes, frames: Sequence[bytes]) -> Reply:
    if len(body) != 8:
        raise WireError(f"Reply: uid has {len(body)} bytes, expected 8")
    return Reply(struct.unpack("<q", body)[0], bytes(frames[0]))


@dataclass(frozen=True, slots=True)
class _Tail:
    """The rare fields of a delta: ``at`` is its position in the batch."""

    at: int
    finish: str | None
    stop_reason: str | int | None
    usage: Usage | None
    error: str


@dataclass(frozen=True, slots=True)
class _Tails:
    tails: tuple[_Tail, ...]


def _is_plain(d: Delta) -> bool:
    return d.finish is None and d.stop_reason is None and d.usage is None and not d.error


def _deltas_pack(message: Deltas) -> Packed:
    """Per delta: uid | index, n_ids, n_text_bytes, n_reasoning, n_parts; then all ids, all text (that of the parts goes before
    ``text``), kind and n_text_bytes of all parts, and log probabilities in one piece each."""
    items = message.items
    pieces = [[t.encode("utf-8", "surrogatepass") for t in (*(p.text for p in d.parts), d.text)] for d in items]
    texts = [b"".join(p) for p in pieces]
    shape = [(d.index, len(d.ids), len(t), d.n_reasoning, len(d.parts)) for d, t in zip(items, texts, strict=True)]
    parts = [(_PART[p.kind], len(t)) for d, own in zip(items, pieces, strict=True) for p, t in zip(d.parts, own)]
    tails = tuple(
        _Tail(at, d.finish, d.stop_reason, d.usage, d.error) for at, d in enumerate(items) if not _is_plain(d)
    )
    ids = [i for d in items for i in d.ids]
    frames = [_raw([d.uid for d in items], _I64), _raw(np.array(shape, _I32).ravel(), _I32), _raw(ids, _I32)]
    frames += [b"".join(texts), _raw(np.array(parts, _I32).ravel(), _I32), pack_told(items)]
    return codec.dumps(_Tails(tails)) if tails else b"", frames


def _deltas_parse(body: bytes, frames: Sequence[bytes]) -> Deltas:
    uids = _array("uids", frames[0], _I64).tolist()
    shape = _array("shape", frames[1], _I32)
    ids, text = _array("ids", frames[2], _I32).tolist(), bytes(frames[3])
    parts = _array("parts", frames[4], _I32)
    if len(shape) != 5 * len(uids) or (shape < 0).any() or len(parts) % 2 or (parts < 0).any():
        raise WireError(f"Deltas: shape of {len(shape)} and {len(parts)} numbers for {len(uids)} deltas")
    _, n_ids, n_text, _, n_parts = sums = shape.reshape(-1, 5).T
    if n_ids.sum() != len(ids) or n_text.sum() != len(text) or 2 * n_parts.sum() != len(parts):
        raise WireError(f"Deltas: lengths do not add up to {len(ids)} ids and {len(text)} bytes of text")
    tails = {t.at: t for t in codec.loads(_Tails, body).tails} if body else {}
    told = parse_told(bytes(frames[5]), len(uids))
    kinds = iter(parts.reshape(-1, 2).tolist())
    items, i, b = [], 0, 0
    for at, (uid, (index, k, n, thought, m)) in enumerate(zip(uids, sums.T.tolist(), strict=True)):
        own, rest = _parts_parse([next(kinds) for _ in range(m)], text[b : b + n]) if m else ((), text[b : b + n])
        piece = rest.decode("utf-8", "surrogatepass") if rest else ""
        delta = Delta(uid, index, piece, tuple(ids[i : i + k]), None, None, None, "", own, thought, *told[at])
        if (t := tails.get(at)) is not None:
            delta = replace(delta, finish=t.finish, stop_reason=t.stop_reason, usage=t.usage, error=t.error)
        items.append(delta)
        i, b = i + k, b + n
    return Deltas(tuple(items))


def _parts_parse(kinds: Sequence[Sequence[int]], text: bytes) -> tuple[tuple[Part, ...], bytes]:
    """Parts of one delta, and the text after theirs."""
    parts, b = [], 0
    for kind, n in kinds:
        if kind >= len(PART_KINDS) or b + n > len(text):
            raise WireError(f"Deltas: part of kind {kind} with {n} bytes of {len(text) - b}")
        parts.append(Part(PART_KINDS[kind], text[b : b + n].decode("utf-8", "surrogatepass")))
        b += n
    return tuple(parts), text[b:]


_TABLE: tuple[tuple[type, Pack, Parse, int], ...] = (
    *(
        (cls, _json_pack, _json_parse(cls), 0)
        for cls in (Hello, Go, Ready, Progress, Beat, FaultReport, Lost, Drain, Drained, Stop)
    ),
    *((cls, _json_pack, _json_parse(cls), 0) for cls in (Ended, Refused, Accepted, Control, Detokenized)),
    (Submit, lambda m: _request_pack(m.uids, m.request), _submit_parse, 2),
    (Tokenize, lambda m: _request_pack((m.uid,), m.request), _tokenize_parse, 2),
    (Tokenized, _ids_pack, _ids_parse(Tokenized), 2),
    (Detokenize, _ids_pack, _ids_parse(Detokenize), 2),
    (Cancel, _uids_pack, _uids_parse(Cancel), 1),
    (Abort, _uids_pack, _uids_parse(Abort), 1),
    (Admit, _admit_pack, _admit_parse, 1),
    (Tokens, _tokens_pack, _tokens_parse, 2),
    (Scores, _scores_pack, _scores_parse, 8),
    (Reply, _reply_pack, _reply_parse, 1),
    (Deltas, _deltas_pack, _deltas_parse, 6),
)
_BY_TYPE: dict[type, tuple[int, Pack, int]] = {cls: (i, pack, n) for i, (cls, pack, _, n) in enumerate(_TABLE, 1)}
_BY_TAG: dict[int, tuple[type, Parse, int]] = {i: (cls, parse, n) for i, (cls, _, parse, n) in enumerate(_TABLE, 1)}
