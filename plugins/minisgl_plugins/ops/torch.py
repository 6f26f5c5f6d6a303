"""The ops in plain torch: right on every device, and tuned for few small calls on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.api.device import Ops, OpsContext, OpTable


class TorchOps(Ops):
    def __init__(self, ctx: OpsContext) -> None:
        super().__init__(ctx)
        self._pos: Tensor | None = None
        self._turn: tuple[Tensor, Tensor]  # cosines and signed sines at self._pos
        self._eps: dict[float, Tensor] = {}
        self._device = ctx.device

    def table(self) -> OpTable:
        return {
            "rms_norm": self.rms_norm,
            "add_rms_norm": self.add_rms_norm,
            "rope": self.rope,
            "store_kv": store_kv,
            "silu_mul": silu_mul,
            "moe": moe,
        }

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """In float32 inside, as transformers does it. Five calls: ``F.rms_norm`` takes half as long again on a CPU."""
        if eps not in self._eps:
            self._eps[eps] = torch.tensor(eps, dtype=torch.float32, device=self._device)
        h = x.float()
        length = torch.linalg.vector_norm(h, 2, -1, True)  # [n, 1]
        scale = torch.addcmul(self._eps[eps], length, length, value=1 / x.shape[-1]).rsqrt_()
        return (h * scale).to(x.dtype).mul_(weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = x.add_(residual)
        return self.rms_norm(residual, weight, eps), residual

    def rope(self, q: Tensor, k: Tensor, pos: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines are looked up once per step: every layer passes the same ``pos``."""
        if pos is not self._pos:
            cos, sin = cos_sin.index_select(0, pos).to(q.dtype).chunk(2, dim=1)  # [n, head_dim / 2]
            self._turn = (torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1))
            self._pos = pos
        cos, sin = self._turn
        return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x[i], x[i + head_dim / 2]) turned by its angle. x: [n, heads, head_dim]; cos, sin: [n, 1, head_dim]."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, sin)


def store_kv(k: Tensor, v: Tensor, kv: Tensor, loc: Tensor) -> None:
    places = kv.view(2, -1, *kv.shape[-2:])
    places[0].index_copy_(0, loc, k)
    places[1].index_copy_(0, loc, v)


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def moe(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool) -> Tensor:
    """Sorted by expert, the tokens of each are one product after the other; torch's grouped product is no faster on a CPU.
    Waits for the device, to learn how many tokens each expert has."""
    weights, experts = torch.softmax(logits, -1, dtype=torch.float32).topk(top_k, -1)  # [n, top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    order = experts.view(-1).argsort(stable=True)  # of the n * top_k (token, expert) pairs
    rows = x.index_select(0, order // top_k)
    sizes = torch.bincount(experts.view(-1), minlength=logits.shape[1]).tolist()
    done = [
        F.linear(silu_mul(F.linear(part, gate_up[e])), down[e])
        for e, part in enumerate(torch.split(rows, sizes))
        if part.shape[0]
    ]
    out = torch.empty_like(rows).index_copy_(0, order, torch.cat(done))  # back in the order of tokens
    return (out.view(*experts.shape, -1) * weights.to(x.dtype).unsqueeze(-1)).sum(1)
