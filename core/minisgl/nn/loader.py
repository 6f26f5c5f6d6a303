"""Weights: from safetensors files into the parameters of a model, lazily, with nothing missing and nothing left over."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.base.errors import ModelError
from minisgl.base.parallel import vocab_rows
from minisgl.nn.layers import ParamSpec, layers
from minisgl.runtime.model import Model, TpInfo

INDEX = "model.safetensors.index.json"
_SHOWN = 8  # names in an error message


@dataclass(frozen=True, slots=True)
class LoadReport:
    """``tensors``: checkpoint tensors read, ``bytes`` of them. ``unused``: tensors that were left out, as the model says."""

    tensors: int
    bytes: int
    unused: tuple[str, ...]


class Checkpoint:
    """The tensors of some safetensors files by name; only headers are read until a tensor is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = one_copy(files)
        self._where: dict[str, tuple[Path, Any]] = {}
        for file in self.files:
            handle = _open(file)
            for name in handle.keys():  # noqa: SIM118  not a dict
                if name in self._where:
                    raise ModelError(
                        f"weights: tensor {name!r} is in {self._where[name][0]} and in {file}; remove one copy"
                    )
                self._where[name] = (file, handle)

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def file(self, name: str) -> Path:
        return self._where[name][0]

    def slice(self, name: str) -> Any:
        """A lazy slice with ``get_shape``, ``get_dtype`` and indexing."""
        return self._where[name][1].get_slice(name)

    def tensor(self, name: str) -> Tensor:
        """The whole tensor on the CPU, mapped from the file and not copied."""
        t: Tensor = self._where[name][1].get_tensor(name)
        return t


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as exc:
        raise ModelError(f"weights: {file} is not a readable safetensors file ({exc}); download it again") from exc


def one_copy(files: Sequence[Path]) -> tuple[Path, ...]:
    """Of files that may hold the weights twice, those of one copy: what the index names, else all but ``consolidated*``."""
    for folder in {f.parent for f in files}:
        named = sorted(set(read_index(folder).values()))
        missing = [f.name for f in named if not f.exists()]
        if missing:
            raise ModelError(
                f"weights: {folder / INDEX} names files that do not exist: {', '.join(missing)}; download them"
            )
        if named:
            return tuple(named)
    rest = tuple(f for f in files if not f.name.startswith("consolidated"))
    return rest or tuple(files)


def read_index(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index in ``folder`` says; {} without one. Raises: ModelError."""
    index = folder / INDEX
    if not index.exists():
        return {}
    try:
        found = json.loads(index.read_text())["weight_map"].items()
        return {str(name): folder / file for name, file in found}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelError(f"weights: {index} is not an index of safetensors files ({exc!r}); download it again") from exc


def load_weights(
    model: Model,
    files: Sequence[Path],
    device: torch.device,
    tp: TpInfo = TpInfo(),  # noqa: B008  frozen
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> LoadReport:
    """Fill every parameter of ``model``.

    On a CPU a tensor that needs no merge and no conversion stays mapped from its file. ``progress``: bytes read so far and in
    all. Raises: ModelError that lists tensors missing, left over or of a wrong shape, with their files.
    """
    if not files:
        raise ModelError(
            "weights: the model has no safetensors file, so no tensor was loaded; give a folder that holds some"
        )
    ckpt = Checkpoint(files)
    specs = [_found(_renamed(s, model.rename), ckpt) for path, m in layers(model) for s in m.specs(path)]
    unused = _check(ckpt, model, specs)
    names = {name for s in specs for name, _ in _tensors(s)}
    total, done, read = sum(_nbytes(ckpt, n) for n in names), 0, 0
    for spec in specs:
        holder, _, attr = spec.name.rpartition(".")
        owner = model.get_submodule(holder)
        dtype = getattr(owner, attr).dtype
        setattr(owner, attr, nn.Parameter(_fill(ckpt, spec, dtype, device, tp), requires_grad=False))
        done += sum(_nbytes(ckpt, n) for n, _ in _tensors(spec))
        read += len(_tensors(spec))
        progress("weights", done, total)
    for _, layer in layers(model):
        layer.finish()
    return LoadReport(read, done, tuple(sorted(unused)))


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
        said = read_index(ckpt.files[0].parent).get(missing[0])
        raise ModelError(
            f"weights: {_list(missing)} missing from {where}"
            + (f", though {INDEX} says that {said.name} has {missing[0]!r}" if said else "")
            + "; the checkpoint is incomplete or its config is wrong"
        )
    declared = {n for path, m in layers(model) for n in m.unused(path)}
    unused = ckpt.names - set(wanted)
    extra = sorted(n for n in unused - declared if not any(re.fullmatch(p, n) for p in model.ignore))
    if extra:
        raise ModelError(
            f"weights: {_list(extra)} in {ckpt.file(extra[0])} not used by this model; its config is wrong"
        )
    for name, shape in wanted.items():
        found = ckpt.slice(name)
        if tuple(found.get_shape()) != shape:
            raise ModelError(
                f"weights: {ckpt.file(name)}: tensor {name!r} has shape {list(found.get_shape())}, the config asks for {list(shape)}"
            )
        if found.get_dtype() not in ("F32", "F16", "BF16", "F64"):
            raise ModelError(
                f"weights: {ckpt.file(name)}: tensor {name!r} has dtype {found.get_dtype()}; supported: F32, F16, BF16, F64"
            )
    return unused


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{len(names)} tensors ({', '.join(names[:_SHOWN])}{more}) are" if len(names) > 1 else f"tensor {names[0]!r} is"
    )


def _nbytes(ckpt: Checkpoint, name: str) -> int:
    found = ckpt.slice(name)
    width = {"F64": 8, "F32": 4}.get(found.get_dtype(), 2)
    return int(prod(found.get_shape())) * width


def _fill(ckpt: Checkpoint, spec: ParamSpec, dtype: torch.dtype, device: torch.device, tp: TpInfo) -> Tensor:
    """The tensor of one parameter; only this rank's slice of each part is read (M13)."""
    if spec.stacked is not None:
        parts = _unstacked(ckpt.tensor(spec.stacked[0]), spec, tp)
    else:
        parts = [_read(ckpt, name, at, spec, tp) for (name, _), at in zip(spec.parts, _shares(spec, tp))]
    rows = sum(p.shape[0] for p in parts)
    room = vocab_rows(spec.parts[0][1][0], tp.size) if spec.pad else rows
    if len(parts) == 1 and rows == room:
        return parts[0].to(device=device, dtype=dtype)
    out = torch.empty((room, *parts[0].shape[1:]), dtype=dtype, device=device)
    out[rows:].zero_()
    at = 0
    for p in parts:
        out[at : at + p.shape[0]].copy_(p)
        at += p.shape[0]
    return out


def _unstacked(stacked: Tensor, spec: ParamSpec, tp: TpInfo) -> list[Tensor]:
    """A stacked tensor as the rank's slices of its parts; views of what is mapped from the file."""
    flat = stacked.flatten(0, 1)
    if spec.shard is None or tp.size == 1:
        return [flat]
    pieces = torch.split(flat, [shape[0] for _, shape in spec.parts])
    return [p[at] for p, at in zip(pieces, _shares(spec, tp))]


def _read(ckpt: Checkpoint, name: str, at: tuple[slice, ...], spec: ParamSpec, tp: TpInfo) -> Tensor:
    if spec.shard is None or tp.size == 1:
        return ckpt.tensor(name)
    piece: Tensor = ckpt.slice(name)[at]
    return piece


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
