"""Weights: from safetensors files into the parameters of a model, lazily, with nothing missing and nothing left over."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from minisgl.base.errors import ModelError
from minisgl.base.parallel import vocab_rows
from minisgl.nn.checkpoint import DTYPES, Checkpoint, Piece, Reader
from minisgl.nn.layers import Layer, ParamSpec, layers
from minisgl.runtime.model import Model, TpInfo

_SHOWN = 8  # names in an error message


@dataclass(frozen=True, slots=True)
class LoadReport:
    """``tensors``: checkpoint tensors read, ``bytes`` of them. ``unused``: tensors that were left out, as the model says."""

    tensors: int
    bytes: int
    unused: tuple[str, ...]


def load_weights(
    model: Model,
    files: Sequence[Path],
    device: torch.device,
    tp: TpInfo = TpInfo(),  # noqa: B008  frozen
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> LoadReport:
    """Fill every parameter of ``model``.

    Tensors are taken in the order of the files, so that these are read from end to end, and a layer is finished when it has
    its parameters. ``progress``: bytes read so far and in all. Raises: ModelError that lists tensors missing, left over or of a
    wrong shape, with their files.
    """
    if not files:
        raise ModelError(
            "weights: the model has no safetensors file, so no tensor was loaded; give a folder that holds some"
        )
    ckpt = Checkpoint(files)
    found = [(m, _found(_renamed(s, model.rename), ckpt)) for m, s in specs_of(model)]
    unused = _check(ckpt, model, [spec for _, spec in found])
    groups = [(m, spec, pieces_of(spec, tp)) for m, spec in found]
    groups.sort(key=lambda g: _place(g[2], ckpt))
    total, done = sum(_nbytes(ckpt, pieces) for _, _, pieces in groups), 0
    filling = Filling(model, [m for m, _ in found])
    with Reader(ckpt, pinned=device.type == "cuda") as reader:
        for (layer, spec, pieces), parts in zip(groups, reader.read(g[2] for g in groups)):
            filling.put(layer, spec, _joined(parts, spec, filling.dtype(spec), device, tp))
            done += _nbytes(ckpt, pieces)
            progress("weights", done, total)
    filling.end(device)
    return LoadReport(len({n for _, s in found for n, _ in _tensors(s)}), done, tuple(sorted(unused)))


class Filling:
    """Puts the parameters into a model; each layer is finished when it has all of its own. ``owners``: the layer of each
    parameter that will come."""

    def __init__(self, model: Model, owners: Sequence[Layer]) -> None:
        self._model, self._left = model, Counter(map(id, owners))

    def dtype(self, spec: ParamSpec) -> torch.dtype:
        found: torch.dtype = self._model.get_parameter(spec.name).dtype
        return found

    def put(self, layer: Layer, spec: ParamSpec, value: Tensor) -> None:
        holder, _, name = spec.name.rpartition(".")
        setattr(self._model.get_submodule(holder), name, nn.Parameter(value, requires_grad=False))
        self._left[id(layer)] -= 1
        if not self._left[id(layer)]:
            for complete in (layer, *layer.needed_by):
                if id(complete) in self._left and not any(self._left[id(x)] for x in (complete, *complete.needs)):
                    complete.finish()

    def end(self, device: torch.device) -> None:
        """Finish the layers that have no parameters of their own: they may share another's."""
        for _, layer in layers(self._model):
            if id(layer) not in self._left:
                layer.finish()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams will read the parameters


def specs_of(model: Model) -> list[tuple[Layer, ParamSpec]]:
    return [(layer, spec) for path, layer in layers(model) for spec in layer.specs(path)]


def _renamed(spec: ParamSpec, rename: Sequence[tuple[str, str]]) -> ParamSpec:
    def back(name: str) -> str:
        for theirs, ours in rename:
            if name.startswith(ours):
                return theirs + name[len(ours) :]
        return name

    stacked = spec.stacked and (back(spec.stacked[0]), spec.stacked[1])
    return replace(spec, parts=tuple((back(n), shape) for n, shape in spec.parts), stacked=stacked)


def _found(spec: ParamSpec, ckpt: Checkpoint) -> ParamSpec:
    """``stacked`` is left where the checkpoint has it."""
    return spec if spec.stacked is None or spec.stacked[0] in ckpt.names else replace(spec, stacked=None)


def _tensors(spec: ParamSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The checkpoint tensors that fill the parameter, and their shapes."""
    return spec.parts if spec.stacked is None else (spec.stacked,)


def _check(ckpt: Checkpoint, model: Model, specs: Sequence[ParamSpec]) -> set[str]:
    """Refuse a checkpoint that does not fit the model. Returns: the tensors that are not used."""
    wanted = {name: shape for s in specs for name, shape in _tensors(s)}
    where = f"{ckpt.files[0]}" + (f" and {len(ckpt.files) - 1} more" if len(ckpt.files) > 1 else "")
    missing = sorted(set(wanted) - ckpt.names)
    if len(missing) == len(wanted):
        raise ModelError(
            f"weights: no tensor of this model is in {where}; is it the checkpoint of another architecture?"
        )
    if missing:
        raise ModelError(
            f"weights: {_list(missing)} missing from {where}; the checkpoint is incomplete or its config is wrong"
        )
    declared = {n for path, m in layers(model) for n in m.unused(path)}
    unused = ckpt.names - set(wanted)
    extra = sorted(n for n in unused - declared if not any(re.fullmatch(p, n) for p in model.ignore))
    if extra:
        raise ModelError(
            f"weights: {_list(extra)} in {ckpt.stored[extra[0]].file} but not used by this model; its config is wrong"
        )
    for name, shape in wanted.items():
        stored = ckpt.stored[name]
        if stored.shape != shape:
            raise ModelError(
                f"weights: {stored.file}: tensor {name!r} has shape {list(stored.shape)}, the config asks for {list(shape)}"
            )
        if stored.dtype not in DTYPES:
            raise ModelError(
                f"weights: {stored.file}: tensor {name!r} has dtype {stored.dtype}; supported: {', '.join(DTYPES)}"
            )
    return unused


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{len(names)} tensors ({', '.join(names[:_SHOWN])}{more}) are" if len(names) > 1 else f"tensor {names[0]!r} is"
    )


def _nbytes(ckpt: Checkpoint, pieces: Sequence[Piece]) -> int:
    return sum(prod(p.shape) * DTYPES[ckpt.stored[p.name].dtype].itemsize for p in pieces)


def _place(pieces: Sequence[Piece], ckpt: Checkpoint) -> tuple[int, int]:
    """Where the first of them is: number of the file, byte."""
    first = ckpt.stored[pieces[0].name]
    return ckpt.files.index(first.file), first.start


def pieces_of(spec: ParamSpec, tp: TpInfo) -> list[Piece]:
    """What a rank reads of the checkpoint to fill the parameter: its share of each part, no more (M13)."""
    pieces, above = [], 0
    for (name, shape), share in zip(spec.parts, _shares(spec, tp)):
        assert spec.shard in (None, 0) or len(shape) == 2, f"{name}: {shape} is split along dimension {spec.shard}"
        whole = (shape[0], prod(shape[1:]))
        (top, bottom), cols = (s.indices(n)[:2] for s, n in zip((*share, slice(None), slice(None)), whole))
        if spec.stacked is None:
            pieces.append(Piece(name, (top, bottom), cols, whole[1]))
        else:  # the parts lie one below the other
            pieces.append(Piece(spec.stacked[0], (above + top, above + bottom), cols, whole[1]))
            above += shape[0]
    return pieces


def rows_of(spec: ParamSpec, rows: int, tp: TpInfo) -> int:
    """Of the parameter that ``rows`` are read for; it has more where the rank's share ends in padding."""
    return vocab_rows(spec.parts[0][1][0], tp.size) if spec.pad else rows


def _joined(parts: Sequence[Tensor], spec: ParamSpec, dtype: torch.dtype, device: torch.device, tp: TpInfo) -> Tensor:
    """The parameter of this rank from what was read, on the device; ``parts`` are matrices one below the other."""
    inner = spec.parts[0][1][1:] if len(spec.parts[0][1]) != 2 else parts[0].shape[1:]
    rows = sum(p.shape[0] for p in parts)
    room = rows_of(spec, rows, tp)
    pinned = device.type == "cuda"
    if len(parts) == 1 and rows == room:
        return parts[0].view(rows, *inner).to(device=device, dtype=dtype, non_blocking=pinned)
    out = torch.empty((room, *inner), dtype=dtype, device=device)
    out[rows:].zero_()
    at = 0
    for p in parts:
        out[at : at + p.shape[0]].copy_(p.view(p.shape[0], *inner), non_blocking=pinned)
        at += p.shape[0]
    return out


def _shares(spec: ParamSpec, tp: TpInfo) -> list[tuple[slice, ...]]:
    """For each part the index of this rank's share."""
    if spec.shard is None:
        return [()] * len(spec.parts)
    copies = spec.copies or (1,) * len(spec.parts)
    return [
        _slice(name, shape, spec.shard, TpInfo(tp.rank // n, tp.size // n), spec.pad)
        for (name, shape), n in zip(spec.parts, copies)
    ]


def _slice(name: str, shape: tuple[int, ...], shard: int, tp: TpInfo, pad: bool) -> tuple[slice, ...]:
    """The index of this rank's share of a tensor split along dimension ``shard``; with ``pad`` the last ones may be short."""
    whole = shape[shard]
    if whole % tp.size and not pad:
        raise ModelError(
            f"weights: {name!r} of shape {list(shape)} cannot be split in {tp.size} along dimension {shard}"
        )
    size = -(-whole // tp.size)
    return (*[slice(None)] * shard, slice(min(tp.rank * size, whole), min((tp.rank + 1) * size, whole)))
