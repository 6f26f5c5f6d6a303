"""The ops in plain torch: right on every device, and tuned for few small calls on a CPU."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.api.device import Ops, OpsContext, OpTable
from minisgl.nn.experts import mixture, one_by_one


class TorchOps(Ops):
    def __init__(self, ctx: OpsContext) -> None:
        super().__init__(ctx)
        self._pos: Tensor | None = None
        self._turn: tuple[Tensor, Tensor]  # cosines and signed sines at self._pos
        self._eps: dict[float, Tensor] = {}
        self._device = ctx.device

    def table(self) -> OpTable:
        table: OpTable = {
            "rms_norm": self.rms_norm,
            "add_rms_norm": self.add_rms_norm,
            "rope": self.rope,
            "store_kv": store_kv,
            "silu_mul": silu_mul,
            "moe": moe,
        }
        if self._device.type == "cpu":  # elsewhere another plugin may have the two that it stands for
            table["qk_norm_rope_store"] = self.qk_norm_rope_store
        return table

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
        """Cosines and sines are looked up once per step: every layer passes the same ``pos``. On a GPU each time, since a
        graph fills the same tensor anew at each replay."""
        cos, sin = self._angles(q.dtype, pos, cos_sin)
        return _turn(q, cos, sin), _turn(k, cos, sin)

    def qk_norm_rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        pos: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        loc: Tensor,
    ) -> Tensor:
        """Without head norms, heads of q and k lie side by side and are turned at once where they are, and so are k and v stored."""
        if q_weight is not None and k_weight is not None:
            q, turned = self.rope(self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps), pos, cos_sin)
            store_kv(k.copy_(turned), v, kv, loc)  # attention reads k as well
            return q
        n, kv_heads, size = k.shape
        cos, sin = self._angles(q.dtype, pos, cos_sin)
        both = q.as_strided((n, q.shape[1] + kv_heads, size), q.stride(), q.storage_offset())
        swapped = both.roll(size // 2, -1)
        both.mul_(cos).addcmul_(swapped, sin)
        new = k.as_strided((2, n, kv_heads, size), (kv_heads * size, *k.stride()), k.storage_offset())
        kv.view(2, -1, kv_heads, size).index_copy_(1, loc, new)
        return q

    def _angles(self, dtype: torch.dtype, pos: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        if pos is not self._pos or pos.is_cuda:
            cos, sin = cos_sin.index_select(0, pos).to(dtype).chunk(2, dim=1)  # [n, head_dim / 2]
            self._turn = (torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1))
            self._pos = pos
        return self._turn


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
    """Sorted by expert, the tokens of each are one product after the other, or all at once where torch has a kernel for it."""

    def mlp(expert: int, rows: Tensor) -> Tensor:
        return F.linear(silu_mul(F.linear(rows, gate_up[expert])), down[expert])

    def products(rows: Tensor, ids: Tensor) -> Tensor:
        if _has_grouped(rows.device, rows.dtype) and _aligned(gate_up) and _aligned(down):
            return grouped(rows, ids, gate_up, down)
        return one_by_one(rows, ids, len(gate_up), mlp)

    return mixture(x, logits, top_k, renormalize, products)


def grouped(rows: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Each row through its expert, in two products that do not wait for the device: their shapes are the same whatever the
    router chose, so that the step can be captured as a CUDA graph. Args: as ``Products`` and the op have them."""
    experts = torch.arange(len(gate_up), device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True).to(torch.int32)  # [experts], where the rows of each end
    inner = silu_mul(F.grouped_mm(rows, gate_up.mT, offs=ends))
    return F.grouped_mm(inner, down.mT, offs=ends)


@cache
def _has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Elsewhere ``F.grouped_mm`` is a loop itself, which waits as well: see docs/decisions/005."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)


def _aligned(weight: Tensor) -> bool:
    """The kernel reads rows in pieces of 16 bytes."""
    return weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
