"""The layers of one rank of several (tensor parallelism, as in Megatron-LM, arXiv 1909.08053).

Outputs of a first layer and inputs of the next one are split, so that one sum per pair is all that ranks exchange. A layer
split by outputs needs no communication: it is a ``Linear`` with ``shard=0``. Sizes that are not called local are those of the
whole layer, as the checkpoint has it; the loader puts in this rank's share.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.base.facts import ModelFacts, MoEFacts
from minisgl.base.parallel import kv_copies, local_heads, vocab_rows
from minisgl.nn.layers import Embedding, Experts, Head, Linear, ParamSpec, QKVLinear
from minisgl.runtime.batch import ForwardBatch
from minisgl.runtime.comm import Comm


class RowLinear(Linear):
    """Split by inputs: each rank has a summand of every output."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, comm: Comm, *, bias: bool) -> None:
        super().__init__(inputs, outputs, dtype, bias=bias, shard=1)
        self.comm = comm

    def finish(self) -> None:
        super().finish()
        if self.comm.rank > 0:  # the bias is whole on every rank; the first one adds it (N7)
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:  # [n, inputs_local] -> [n, outputs]
        return self.comm.all_reduce(super().forward(x))


class SplitQKVLinear(QKVLinear):
    """Whole heads on every rank. With fewer KV heads than ranks, neighbouring ranks have the same one (M14)."""

    def __init__(self, facts: ModelFacts, dtype: torch.dtype, comm: Comm, *, bias: bool) -> None:
        super().__init__(facts.hidden, facts.heads, facts.kv_heads, facts.head_dim, dtype, bias=bias)
        heads, kv_heads = local_heads(facts, comm.size)
        self.split = [heads, kv_heads, kv_heads]
        self.copies = kv_copies(facts, comm.size)

    def specs(self, path: str) -> list[ParamSpec]:
        return [replace(s, copies=(1, self.copies, self.copies)) for s in super().specs(path)]


class VocabEmbedding(Embedding):
    """Split by rows of the vocabulary."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, comm: Comm) -> None:
        super().__init__(vocab, hidden, dtype)
        self.comm, self.rows = comm, vocab_rows(vocab, comm.size)

    def specs(self, path: str) -> list[ParamSpec]:
        return [replace(s, shard=0, pad=True) for s in super().specs(path)]

    def forward(self, tokens: Tensor) -> Tensor:  # [n] int64 -> [n, hidden]
        at = tokens - self.comm.rank * self.rows
        others = (at < 0) | (at >= self.rows)
        mine = F.embedding(at.masked_fill_(others, 0), self.weight).masked_fill_(others.unsqueeze(1), 0.0)
        return self.comm.all_reduce(mine)


class VocabHead(Head):
    """Split by rows of the vocabulary, and cut at its true size when the ranks' logits are together (W4)."""

    def __init__(self, hidden: int, vocab: int, dtype: torch.dtype, embed: Embedding | None, comm: Comm) -> None:
        super().__init__(hidden, vocab, dtype, embed)
        self.comm = comm

    def specs(self, path: str) -> list[ParamSpec]:
        return [replace(s, pad=True) for s in super().specs(path)]

    def forward(self, h: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab] float32
        """A request's logits lie in one row, whatever the number of requests (M11)."""
        local = Linear.forward(self, h)  # [n, vocab_local]
        return self.comm.all_gather(local, dim=1)[:, : self.outputs].float().contiguous()


class SplitExperts(Experts):
    """Every rank has a share of the columns of all experts; their sums are exchanged once for all experts."""

    def __init__(self, hidden: int, moe: MoEFacts, dtype: torch.dtype, comm: Comm) -> None:
        super().__init__(hidden, moe, dtype)
        self.comm = comm

    def forward(self, x: Tensor, logits: Tensor, b: ForwardBatch) -> Tensor:
        return self.comm.all_reduce(super().forward(x, logits, b))
