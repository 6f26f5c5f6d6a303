"""Piecewise CUDA graphs: all of a model but attention, for steps that prompts take part in.

Only attention knows of rows; the rest of a model works on tokens, whosever they are. So it is captured for some numbers of tokens,
in pieces that end at each attention call, and serves every step of at most so many. A small step would else wait for the host, which
launches hundreds of kernels in the time in which the device runs them several times over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from minisgl.base.types import NO_PAGES
from minisgl.runtime.attention import AttentionBackend
from minisgl.runtime.batch import BatchView, ForwardBatch, OpTable
from minisgl.runtime.model import Model
from minisgl.runtime.record import Captures, Pieces, Recorder


def token_sizes(most: int) -> list[int]:
    """Numbers of tokens worth a capture, up to ``most``."""
    sizes = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, 512, 64), *range(512, most + 1, 128)]
    return [*(n for n in sizes if n < most), most] if most else []


@dataclass(frozen=True, slots=True)
class Call:
    """An attention call of a captured model: of which layer, where its arguments are left, and where its result is expected."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


@dataclass(slots=True)
class Outside:
    """Stands for the attention backend while a model is captured. What is passed between pieces and calls has fixed places, which
    all layers and sizes share: the device runs one after the other."""

    writes_kv: ClassVar[bool] = False

    most: int
    cut: Callable[[], None] = lambda: None
    calls: list[Call] = field(default_factory=list)
    _places: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, layer: int, meta: Any, b: BatchView) -> Tensor:
        call = Call(layer, *(self._place(name, t) for name, t in (("q", q), ("k", k), ("v", v), ("out", q))))
        for place, given in ((call.q, q), (call.k, k), (call.v, v)):
            place.copy_(given)
        self.calls.append(call)
        self.cut()
        return call.out

    def _place(self, name: str, like: Tensor) -> Tensor:
        key = name, tuple(like.shape[1:])
        if key not in self._places:  # found before anything is captured, by the first pass over the layers
            self._places[key] = torch.zeros((self.most, *key[1]), dtype=like.dtype, device=like.device)
        return self._places[key][: len(like)]


@dataclass(frozen=True, slots=True)
class Captured:
    """``hidden``: a list of the one tensor [size, hidden] that the model gives."""

    pieces: Pieces
    calls: list[Call]
    hidden: list[Tensor]


class PiecewiseRunner:
    """Steps of at most as many tokens as the largest of ``sizes``, of any rows. ``replays`` counts them.

    Args: attention: one that leaves the KV write to the op ``store_kv``. dummy: where the KV of padding goes (``BatchView.loc``).
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        ops: OpTable,
        kv: list[Tensor],
        dtype: torch.dtype,
        recorder: Recorder,
        sizes: Sequence[int],
        dummy: int,
        page_table: Tensor,
    ) -> None:
        assert not attention.writes_kv, f"{type(attention).__name__} writes KV"
        self._model, self._attention, self._ops, self._kv, self._dtype = model, attention, ops, kv, dtype
        self._recorder, self._dummy, self._table = recorder, dummy, page_table
        self._captured = Captures[Captured](sizes)
        self.replays = 0
        most, device = self._captured.most, page_table.device
        self._tokens, self._pos = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2))
        self._loc = torch.full((most,), dummy, dtype=torch.int64, device=device)
        self._filled = 0  # tokens of the last step; all after it are padding
        self._outside = Outside(most)

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None]) -> None:
        """Record all sizes."""
        self._captured.make("piecewise CUDA graphs", self._capture, progress)

    def _capture(self, size: int) -> Captured:
        batch = self._batch(size)
        hidden: list[Tensor] = []

        def run(cut: Callable[[], None]) -> None:
            batch.view.pos = self._pos[:size]  # another object: an op may keep what it derives from a step's positions
            self._outside.cut = cut
            self._outside.calls = []
            hidden[:] = [self._model(batch)]

        run(lambda: None)  # kernels compile and libraries take their workspaces outside the graphs
        pieces = self._recorder.record_pieces(run)
        return Captured(pieces, self._outside.calls, hidden)

    def _batch(self, size: int) -> ForwardBatch:
        """``size`` tokens of nobody, with the captured model's own device tensors."""
        pos, loc, tokens = self._pos[:size], self._loc[:size], self._tokens[:size]
        none = NO_PAGES
        view = BatchView(
            -1, 0, 0, size, 0, 0, none, none, none, np.zeros(1, np.int32), pos[:0], pos[:0], pos, loc, self._table
        )
        return ForwardBatch(view, None, tokens, pos[:0], self._kv, self._outside, self._ops, self._dtype)

    def fits(self, tokens: int) -> bool:
        return self._captured.fits(tokens)

    def run(self, b: ForwardBatch) -> Tensor:
        """As the model's forward. Returns: [n_tokens, hidden], overwritten by the next run."""
        n = b.view.n_tokens
        captured = self._captured.of(n)
        self._fill(n, b)

        def attend(i: int) -> None:
            c = captured.calls[i]
            out = self._attention.forward(c.q[:n], c.k[:n], c.v[:n], self._kv[c.layer], c.layer, b.meta, b.view)
            c.out[:n].copy_(out)

        captured.pieces.replay(attend)
        self.replays += 1
        return captured.hidden[0][:n]

    def _fill(self, n: int, b: ForwardBatch) -> None:
        """The inputs of ``n`` tokens; what the last step left after them becomes padding (K2)."""
        for place, given, padding in (
            (self._tokens, b.tokens, 0), (self._pos, b.view.pos, 0), (self._loc, b.view.loc, self._dummy),
        ):  # fmt: skip
            place[:n].copy_(given)
            if self._filled > n:
                place[n : self._filled].fill_(padding)
        self._filled = n

    def close(self) -> None:
        """Let the graphs go before what they read."""
        self._captured.clear()
