"""Reading safetensors: pieces, chunks, what is read ahead, and files that are not what their headers say."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.base.errors import ModelError
from minisgl.nn import checkpoint
from minisgl.nn.checkpoint import Checkpoint, Piece, Reader
from minisgl.nn.layers import Linear
from minisgl.nn.loader import load_weights


def whole(name: str, t: torch.Tensor) -> Piece:
    width = prod(t.shape[1:])
    return Piece(name, (0, t.shape[0]), (0, width), width)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"a": (64, 33), "b": (32, 33), "c": (7,), "d": (3, 4, 5), "e": (0, 4)}
    return {n: torch.randn(s).to(torch.bfloat16 if n == "b" else torch.float32) for n, s in shapes.items()}


@pytest.mark.parametrize(("chunk", "ahead", "huge"), [(100, 0, 0), (4096, 10_000, 1 << 20), (1 << 20, 1 << 30, 1)])
def test_every_tensor_is_what_was_saved(
    chunk: int, ahead: int, huge: int, tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK", chunk)
    monkeypatch.setattr(checkpoint, "AHEAD", ahead)
    monkeypatch.setattr(checkpoint, "HUGE", max(huge, 1))
    save_file(tensors, tmp_path / "m.safetensors")
    with Reader(Checkpoint([tmp_path / "m.safetensors"])) as reader:
        got = [t for (t,) in reader.read([whole(n, t)] for n, t in tensors.items())]
        assert reader.bytes_read == sum(t.nbytes for t in tensors.values())
    for (name, want), have in zip(tensors.items(), got, strict=True):
        assert have.dtype == want.dtype, name
        assert torch.equal(have.view(want.shape), want), name


def test_neighbours_of_one_kind_are_joined_and_others_are_not(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "m.safetensors")
    group = [Piece("a", (2, 5), (0, 33), 33), Piece("a", (60, 64), (0, 33), 33), Piece("b", (1, 3), (30, 33), 33)]
    with Reader(Checkpoint([tmp_path / "m.safetensors"])) as reader:
        ((rows, corner),) = reader.read([group])
        assert reader.bytes_read == 7 * 33 * 4 + 2 * 3 * 2
    assert torch.equal(rows, torch.cat((tensors["a"][2:5], tensors["a"][60:])))
    assert torch.equal(corner, tensors["b"][1:3, 30:])


def test_no_more_is_read_ahead_than_the_limit(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "AHEAD", 2 * 33 * 4)
    save_file(tensors, tmp_path / "m.safetensors")
    with Reader(Checkpoint([tmp_path / "m.safetensors"])) as reader:
        taken = reader.read([Piece("a", (i, i + 1), (0, 33), 33)] for i in range(64))
        next(taken)
        assert reader.bytes_read == 3 * 33 * 4  # the one that is taken, and two ahead


def test_a_file_that_was_cut_while_it_was_open_is_an_error_w2(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file(tensors, file)
    ckpt = Checkpoint([file])
    with file.open("r+b") as f:
        f.truncate(ckpt.stored["a"].start + 100)
    with Reader(ckpt) as reader, pytest.raises(ModelError, match=r"ends at byte .* within a tensor; download it again"):
        list(reader.read([[whole("a", tensors["a"])]]))


class Sharing(torch.nn.Module):
    """Two layers, the second without parameters, as a tied head is."""

    rename = ignore = ()

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.one, self.two = (
            Linear(4, 3, torch.float32, bias=True, shard=0),
            Linear(4, 3, torch.float32, bias=False, shard=0),
        )
        del self.two.weight
        self.two.specs = lambda path: []  # type: ignore[method-assign]
        self.one.pack = lambda weight: None
        for name in ("one", "two"):
            layer = getattr(self, name)
            layer.finish = lambda name=name: order.append(
                f"{name}: {[n for n, p in self.one.named_parameters() if p.is_meta]}"
            )


def test_a_layer_is_finished_once_when_it_has_its_parameters_and_those_without_come_last(tmp_path: Path) -> None:
    save_file({"one.weight": torch.randn(3, 4), "one.bias": torch.randn(3)}, tmp_path / "m.safetensors")
    order: list[str] = []
    told: list[tuple[int, int]] = []
    model = Sharing(order)
    load_weights(
        model,  # type: ignore[arg-type]
        [tmp_path / "m.safetensors"],
        torch.device("cpu"),
        progress=lambda what, done, total: told.append((done, total)),
    )
    assert order == ["one: []", "two: []"]
    assert told[-1] == (60, 60)  # 12 + 3 numbers of 4 bytes
