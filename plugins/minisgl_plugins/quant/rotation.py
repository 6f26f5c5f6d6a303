"""Rotation of a linear layer's inputs, so that no few of them are much larger than the rest.

int8 has one scale for all inputs of a token, and in language models a few inputs are so large that the others would be
rounded to little (QuaRot, arXiv 2404.00456, whose remedy this is). A Hadamard matrix spreads each over its block of
inputs; weights rotated alike undo it, exactly but for rounding: x @ w.T = (x @ h) @ (w @ h).T / size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.nn.packed import pack

LARGEST = 64  # block of inputs that are rotated together; see docs/decisions/006
_LARGEST_BASIS = 1024  # block of a basis; larger ones need more memory than they are worth
_MANY = 1 << 15  # values from which oneDNN's product is faster than torch's; both give the same to the bit


def block(inputs: int) -> int:
    """The largest power of two that divides ``inputs``, up to LARGEST."""
    return min(inputs & -inputs, LARGEST)


def hadamard(size: int) -> Tensor:
    """[size, size] of 1 and -1 with orthogonal rows (Sylvester's); symmetric. ``size``: a power of two."""
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def hartley(size: int) -> Tensor:
    """[size, size], orthogonal and symmetric; no element is larger than sqrt(2 / size)."""
    i = torch.arange(size, dtype=torch.float64)
    angle: Tensor = (2 * torch.pi / size) * (i[:, None] * i).remainder(size)
    return angle.cos().add_(angle.sin()).div_(size**0.5).float()


class Rotation:
    """``x @ h`` in each block of a row's inputs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._h = hadamard(size)
        self._many = pack(self._h)  # its transpose, which it equals

    def __call__(self, x: Tensor) -> Tensor:  # [n, inputs] -> [n, inputs]
        if self.size == 1:
            return x
        blocks = x.reshape(-1, self.size)
        if self._many is not None and len(blocks) >= _MANY // self.size:
            return self._many(blocks, None).view(x.shape)
        return torch.mm(blocks, self._h).view(x.shape)

    def weight(self, w: Tensor) -> Tensor:
        """The weight [outputs, inputs] whose product with rotated inputs is that of ``w`` with the inputs themselves."""
        return self(w).div(self.size)


class Basis:
    """An orthogonal matrix that spreads each element over all others, for hidden states that layers keep turned by it: random
    signs, then Hadamard's matrix in blocks and Hartley's between them."""

    def __init__(self, hidden: int) -> None:
        size = min(hidden & -hidden, _LARGEST_BASIS)
        random = torch.Generator().manual_seed(0)  # the same on all ranks
        self._signs = torch.randint(0, 2, (hidden,), generator=random) * 2.0 - 1.0
        self._h = hadamard(size) / size**0.5
        self._between = hartley(hidden // size)

    def __call__(self, x: Tensor) -> Tensor:  # [n, hidden] -> [n, hidden]
        blocks = (x * self._signs).reshape(-1, len(self._h)) @ self._h
        return torch.matmul(self._between, blocks.view(len(x), len(self._between), -1)).view(x.shape)


class Turned:
    """In place of a ``Rotation``, for inputs that come as they should be. ``weight``: what rows of weights become for them."""

    def __init__(self, weight: Callable[[Tensor], Tensor]) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return x


def rotations() -> Callable[[int], Rotation]:
    """A function from a number of inputs to their rotation, which layers of one block size share."""
    made: dict[int, Rotation] = {}

    def of(inputs: int) -> Rotation:
        size = block(inputs)
        if size not in made:
            made[size] = Rotation(size)
        return made[size]

    return of
