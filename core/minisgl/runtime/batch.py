"""What one step looks like to models, attention backends and samplers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minisgl.base.types import I32


@dataclass(slots=True)
class BatchView:
    """The rows of one step: ``n_decode`` rows of one token, then the prefill rows. Valid for one step only.

    Host arrays (``h_*``) mirror the device; ``h_kv`` includes the tokens of this step. ``loc[i]`` is where token i's KV goes:
    ``page * page_size + offset``. ``page_table`` is indexed by slot; a row's first ``ceil(kv / page_size)`` entries are valid.

    In a graph there are ``rows_padded`` rows: those after ``n_rows`` have the slot ``max_slots``, whose pages are all the dummy
    page, position 0 and one token of KV (K2). Elsewhere ``rows_padded`` is ``n_rows``.
    """

    step: int
    n_decode: int
    n_rows: int
    n_tokens: int
    max_q: int
    max_kv: int
    h_slot: I32  # [n_rows]
    h_q: I32  # [n_rows] new tokens
    h_kv: I32  # [n_rows] KV length after this step
    h_q_start: I32  # [n_rows + 1] row offsets into the tokens
    slot: Tensor  # [rows_padded] int64, device
    kv: Tensor  # [rows_padded] int64, device
    pos: Tensor  # [n_tokens], in a graph [rows_padded], int64, device, position of each new token in its row
    loc: Tensor  # as pos
    page_table: Tensor  # [max_slots + 1, pages_per_row] int32, device
    rows_padded: int = 0


OpTable = dict[str, Callable[..., Any]]


@dataclass(slots=True)
class ForwardBatch:
    """All that a model's forward needs. ``kv[layer]`` is the KV pool of a layer in the attention backend's shape."""

    view: BatchView
    meta: Any  # of the attention backend
    tokens: Tensor  # [n_tokens] int64
    sample_at: Tensor  # [n_sample] int64, the tokens whose logits are wanted
    kv: list[Tensor]
    attention: Any  # AttentionBackend
    ops: OpTable
    dtype: torch.dtype = torch.float32
