"""Random weights, for measuring a model of any size without its files: ``weights.format = "dummy"``."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import torch
from torch import Tensor

from minisgl.nn.checkpoint import Piece
from minisgl.nn.layers import ParamSpec
from minisgl.nn.loader import Filling, LoadReport, pieces_of, rows_of, specs_of
from minisgl.runtime.model import Model, TpInfo

BIAS_STD = 0.02


def dummy_weights(
    model: Model,
    device: torch.device,
    tp: TpInfo = TpInfo(),  # noqa: B008  frozen
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> LoadReport:
    """Fill every parameter of ``model`` with random numbers, made on the device itself.

    A matrix of n inputs has the standard deviation n ** -0.5, which keeps activations at their size from layer to layer and
    logits near 1; norms are 1. The same seed, device and number of ranks give the same weights, and ranks that share a piece
    have the same one. ``progress``: bytes made so far and in all.
    """
    found = [(layer, spec, pieces_of(spec, tp)) for layer, spec in specs_of(model)]
    filling = Filling(model, [layer for layer, _, _ in found])
    total = sum(p.shape[0] * p.shape[1] * filling.dtype(s).itemsize for _, s, pieces in found for p in pieces)
    done = 0
    random = torch.Generator(device)
    for layer, spec, pieces in found:
        value = _value(spec, pieces, filling.dtype(spec), device, tp, random, seed)
        filling.put(layer, spec, value)
        done += value.nbytes
        progress("random weights", done, total)
    filling.end(device)
    return LoadReport(0, 0, ())


def _value(
    spec: ParamSpec,
    pieces: list[Piece],
    dtype: torch.dtype,
    device: torch.device,
    tp: TpInfo,
    random: torch.Generator,
    seed: int,
) -> Tensor:
    inner = spec.parts[0][1][1:]
    rows = sum(p.shape[0] for p in pieces)
    out = torch.zeros(
        (rows_of(spec, rows, tp), *((pieces[0].shape[1],) if len(inner) == 1 else inner)), dtype=dtype, device=device
    )
    if not inner and not spec.name.endswith("bias"):
        return out.fill_(1.0)
    std = pieces[0].width ** -0.5 if inner else BIAS_STD
    at = 0
    for p in pieces:
        random.manual_seed(_seed(seed, p))
        out[at : at + p.shape[0]].normal_(0.0, std, generator=random)
        at += p.shape[0]
    return out


def _seed(seed: int, piece: Piece) -> int:
    """Of one piece, whatever else the rank has."""
    text = f"{seed} {piece.name} {piece.rows} {piece.cols}"
    return int.from_bytes(sha256(text.encode()).digest()[:7], "little")
