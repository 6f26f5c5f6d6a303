"""The tensors of safetensors files: where they are, and reading them into memory as fast as the disk gives them.

Mapped files are read in the order and the small steps in which their pages are touched: measured at 0.2 to 0.6 GB/s where one
sequential read has 3 GB/s. So two threads read whole stretches with ``preadv``, ahead of whoever takes the tensors, into huge
pages, since making 4 KiB pages takes as long as filling them. That reads at 0.9 to 1.0 of the sequential rate.
"""

from __future__ import annotations

import json
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.base.errors import ModelError

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
THREADS = 2
CHUNK = 2 << 20  # bytes of one read
AHEAD = 256 << 20  # bytes read before they are taken
HUGE = 1 << 20  # bytes from which on a buffer is in huge pages
PINNED = 64 << 20  # bytes up to which a buffer may be pinned: torch keeps that memory for good


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor. ``dtype``: as safetensors calls it. ``start``, ``nbytes``: where it is in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a tensor that is seen as a matrix of rows of ``width`` elements. Ranges are [start, stop)."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]


class Checkpoint:
    """The tensors of some safetensors files by name; only headers are read until a tensor is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = one_copy(files)
        self.stored: dict[str, Stored] = {}
        for file in self.files:
            for name, found in _header(file):
                if name in self.stored:
                    raise ModelError(
                        f"weights: tensor {name!r} is in {self.stored[name].file} and in {file}; remove one copy"
                    )
                self.stored[name] = found
        for folder in {f.parent for f in self.files}:
            self._compare(folder / INDEX, read_index(folder))

    def _compare(self, index: Path, said: Mapping[str, Path]) -> None:
        """Refuse an index that says of a tensor what its files do not: they may be of two downloads."""
        for name, file in said.items():
            found = self.stored.get(name)
            if found is None or found.file != file:
                held = f"{found.file.name} does" if found else "none of its files does"
                raise ModelError(
                    f"weights: {index} says that {file.name} holds tensor {name!r}, but {held}; download index and files again"
                )

    @property
    def names(self) -> set[str]:
        return set(self.stored)


def _header(file: Path) -> Iterator[tuple[str, Stored]]:
    """(name, place) of each tensor; safetensors checks that they are what the file holds. Raises: ModelError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt", device="cpu"), open(file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header: dict[str, Any] = json.loads(f.read(size))
    except (SafetensorError, OSError, ValueError) as exc:
        raise ModelError(f"weights: {file} is not a readable safetensors file ({exc}); {_advice(file)}") from exc
    for name, t in header.items():
        if name != "__metadata__":
            start, stop = t["data_offsets"]
            yield name, Stored(file, t["dtype"], tuple(t["shape"]), 8 + size + start, stop - start)


def _advice(file: Path) -> str:
    """What to do about a file that safetensors refuses, and the first tensor that is cut off if that is what it is."""
    again = "download it again"
    try:
        with open(file, "rb") as f:
            start, end = f.read(8), os.fstat(f.fileno()).st_size
            if start.startswith((b"PK\x03\x04", b"\x80")) and start[1] in b"K\x02\x03\x04\x05":
                return "it looks like a pickle of torch.save, which runs code when it is read; save the model as safetensors"
            size = int.from_bytes(start, "little")
            header = json.loads(f.read(size)) if size < end else {}
        ends = sorted((t["data_offsets"][1], name) for name, t in header.items() if name != "__metadata__")
        cut = next((name for stop, name in ends if 8 + size + stop > end), None)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return again
    return f"it ends within tensor {cut!r}; {again}" if cut else again


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


class Reader:
    """Reads pieces of a checkpoint, in a few threads. ``pinned``: into memory that a GPU copies from. ``bytes_read``: of
    files, so far asked for."""

    def __init__(self, ckpt: Checkpoint, pinned: bool = False) -> None:
        self.ckpt, self.pinned, self.bytes_read = ckpt, pinned, 0
        self._files: dict[Path, int] = {}
        self._pool = ThreadPoolExecutor(THREADS, "minisgl-read")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for fd in self._files.values():
            os.close(fd)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def read(self, wanted: Iterable[Sequence[Piece]]) -> Iterator[list[Tensor]]:
        """For each group of pieces its tensors [rows, cols]; the next ones are read meanwhile.

        Pieces of one group and one dtype that follow one another are one tensor, one below the other, if as wide.
        Raises: ModelError if a file cannot be read to its end.
        """
        begun: deque[tuple[list[Tensor], list[Future[None]], int]] = deque()
        ahead = 0
        for group in wanted:
            begun.append(self._begin(group))
            ahead += begun[-1][2]
            while ahead > AHEAD:
                yield _taken(begun[0])
                ahead -= begun.popleft()[2]
        while begun:
            yield _taken(begun[0])
            begun.popleft()

    def _begin(self, group: Sequence[Piece]) -> tuple[list[Tensor], list[Future[None]], int]:
        """The tensors of a group, the reads that fill them, and their bytes."""
        tensors, reads, total = [], [], 0
        for dtype, pieces in _runs(group, self.ckpt):
            width = pieces[0].shape[1]
            rows, size = sum(p.shape[0] for p in pieces), DTYPES[dtype].itemsize
            flat = self._buffer(rows * width * size)
            into, at = memoryview(flat.numpy()), 0  # type: ignore[arg-type]  # an array is a buffer
            for p in pieces:
                n = prod(p.shape) * size
                reads += self._reads(p, size, into[at : at + n])
                at += n
            total += at
            tensors.append(flat.view(DTYPES[dtype]).view(rows, width))
        self.bytes_read += total
        return tensors, reads, total

    def _buffer(self, nbytes: int) -> Tensor:
        """[nbytes] uint8."""
        pin = self.pinned and nbytes <= PINNED
        if pin or nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _reads(self, piece: Piece, size: int, into: memoryview) -> list[Future[None]]:
        stored, fd = self.ckpt.stored[piece.name], self._file(self.ckpt.stored[piece.name].file)
        width = piece.width * size
        at, row = stored.start + piece.rows[0] * width + piece.cols[0] * size, piece.shape[1] * size
        if row == width:  # one stretch of the file
            return [
                self._pool.submit(_fill, fd, at + i, into[i : i + CHUNK], stored.file)
                for i in range(0, len(into), CHUNK)
            ]
        return [self._pool.submit(_fill_rows, fd, at, width, row, into, stored.file)]

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[path]


def _runs(group: Sequence[Piece], ckpt: Checkpoint) -> Iterator[tuple[str, list[Piece]]]:
    """Neighbours of one dtype and width."""
    run: list[Piece] = []
    for piece in group:
        if run and _kind(run[0], ckpt) != _kind(piece, ckpt):
            yield ckpt.stored[run[0].name].dtype, run
            run = []
        run.append(piece)
    if run:
        yield ckpt.stored[run[0].name].dtype, run


def _kind(piece: Piece, ckpt: Checkpoint) -> tuple[str, int]:
    return ckpt.stored[piece.name].dtype, piece.shape[1]


def _taken(begun: tuple[list[Tensor], list[Future[None]], int]) -> list[Tensor]:
    for read in begun[1]:
        read.result()
    return begun[0]


def _fill(fd: int, at: int, into: memoryview, file: Path) -> None:
    while into:
        try:
            n = os.preadv(fd, [into], at)
        except OSError as exc:
            raise ModelError(f"weights: {file} cannot be read at byte {at}: {exc.strerror}") from exc
        if n == 0:
            raise ModelError(f"weights: {file} ends at byte {at}, within a tensor; download it again")
        into, at = into[n:], at + n


def _fill_rows(fd: int, at: int, width: int, row: int, into: memoryview, file: Path) -> None:
    """``row`` bytes of each ``width``."""
    for i in range(len(into) // row if row else 0):
        _fill(fd, at + i * width, into[i * row : (i + 1) * row], file)
