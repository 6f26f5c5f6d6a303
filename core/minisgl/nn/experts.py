"""Mixtures of experts in plain torch: which experts a token goes to, and their products one expert after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.base.facts import MoEFacts
from minisgl.nn.layers import Experts
from minisgl.runtime.batch import ForwardBatch
from minisgl.runtime.comm import Comm
from minisgl.runtime.quant import Apply

# (rows [m, hidden] sorted by expert, the expert of each [m] int64) -> [m, hidden], each row through its expert
Products = Callable[[Tensor, Tensor], Tensor]


def mixture(x: Tensor, logits: Tensor, top_k: int, renormalize: bool, products: Products) -> Tensor:
    """The op ``moe`` (see ``minisgl.api.device.Ops``) but for the experts themselves, which are ``products``."""
    weights, experts = torch.softmax(logits, -1, dtype=torch.float32).topk(top_k, -1)  # [n, top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    ids, order = experts.view(-1).sort(stable=True)  # of the n * top_k (token, expert) pairs
    done = products(x.index_select(0, order // top_k), ids)
    out = torch.empty_like(done).index_copy_(0, order, done)  # back in the order of tokens
    return (out.view(*experts.shape, -1) * weights.to(x.dtype).unsqueeze(-1)).sum(1)


def one_by_one(rows: Tensor, ids: Tensor, experts: int, mlp: Callable[[int, Tensor], Tensor]) -> Tensor:
    """``Products`` by ``mlp(expert, its rows)``. Waits for the device, to learn how many rows each expert has."""
    sizes = torch.bincount(ids, minlength=experts).tolist()
    return torch.cat([mlp(e, part) for e, part in enumerate(torch.split(rows, sizes)) if part.shape[0]])


class PackedExperts(Experts):
    """Experts whose two products are quantized, or packed for the CPU, when they are loaded; the weights are then gone.
    ``pack``: makes a product from a weight; never None here. The op ``moe`` works on plain weights, and is not called."""

    def __init__(
        self, hidden: int, moe: MoEFacts, dtype: torch.dtype, comm: Comm, pack: Callable[[Tensor], Apply | None]
    ) -> None:
        super().__init__(hidden, moe, dtype)
        self.comm, self.pack = comm, pack
        self._products: list[tuple[Apply, Apply]] = []

    def finish(self) -> None:
        super().finish()
        both = zip(self.gate_up.detach(), self.down.detach())
        self._products = [(self._made(gate_up), self._made(down)) for gate_up, down in both]
        del self.gate_up, self.down

    def _made(self, weight: Tensor) -> Apply:
        product = self.pack(weight)
        assert product is not None, f"no product for a weight of {weight.dtype} on {weight.device}"
        return product

    def forward(self, x: Tensor, logits: Tensor, b: ForwardBatch) -> Tensor:
        def mlp(expert: int, rows: Tensor) -> Tensor:
            gate_up, down = self._products[expert]
            return down(b.ops["silu_mul"](gate_up(rows, None)), None)

        moe = self.moe
        out = mixture(x, logits, moe.top_k, moe.renormalize, lambda rows, ids: one_by_one(rows, ids, moe.experts, mlp))
        return out if self.comm.size == 1 else self.comm.all_reduce(out)
