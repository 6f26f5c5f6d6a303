"""Hidden states in another basis, for quantization (QuaRot, arXiv 2404.00456).

A decoder's hidden states are sums of what its layers write, and are divided by their length before others read them. Turned by
an orthogonal matrix they keep that length. So if all that write them write them turned, and all that read them expect that, the
model computes the same, and its weights have done all the turning when they are loaded. The weights of norms, which belong to
single elements of the old basis, move into the layers that read. Attention adds up values, so those are turned as well, each head
by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from minisgl.nn.decoder import Decoder, DecoderLayer, DecoderLM, GatedMLP, SelfAttention
from minisgl.nn.layers import Linear, Norm, QKVLinear
from minisgl.runtime.model import Model
from minisgl.runtime.quant import Apply, QuantMethod, Turn

_CHUNK = 1 << 24  # elements turned at a time, which bounds the memory that takes


def change_basis(model: Model, quant: QuantMethod, hidden: int, head_dim: int) -> None:
    """Let ``model``, whose weights are not loaded yet, keep hidden states and values in bases of ``quant``, if that has any and
    if nothing but dense layers of ``nn.decoder`` sees them."""
    found = _dense(model)
    states, values = (quant.basis(hidden), quant.basis(head_dim)) if found else (None, None)
    if states is None or values is None or not isinstance(model, DecoderLM):
        return
    change = _Change(quant, states, values, head_dim)
    for layer, attention, mlp in found:
        qkv, gate_up, out, down = attention.qkv_proj, mlp.gate_up_proj, attention.o_proj, mlp.down_proj
        _wait(qkv, layer.input_layernorm)
        _wait(gate_up, layer.post_attention_layernorm)
        qkv.pack = partial(change.qkv, qkv, layer.input_layernorm)
        gate_up.pack = partial(change.read, layer.post_attention_layernorm)
        out.pack, down.pack = partial(change.attention_out, out), partial(change.down, down)
    head, embed, norm = model.lm_head, model.model.embed_tokens, model.model.norm
    _wait(head, norm)
    if head.tied:  # it needs the rows as they were
        head.pack = partial(change.tied_head, norm)
    else:
        head.pack, embed.prepare = partial(change.read, norm, head=True), change.rows


def _dense(model: Model) -> list[tuple[DecoderLayer, SelfAttention, GatedMLP]]:
    """The layers of a model that has no others; none of any other model."""
    if not isinstance(model, DecoderLM) or type(model.model) is not Decoder:
        return []
    if (type(model).forward, type(model).logits) != (DecoderLM.forward, DecoderLM.logits):
        return []
    found = [(m, getattr(m, "self_attn", None), getattr(m, "mlp", None)) for m in model.model.layers]
    wanted = (DecoderLayer, SelfAttention, GatedMLP)
    return found if all(tuple(map(type, parts)) == wanted for parts in found) else []  # type: ignore[return-value]


def _wait(reader: Linear, norm: Norm) -> None:
    norm.needed_by, reader.needs = (reader,), (norm,)


@dataclass(frozen=True, slots=True)
class _Change:
    """Quantizes the weights of layers, turned by the basis of hidden ``states`` and of ``values``; overwrites what it is given."""

    quant: QuantMethod
    states: Turn
    values: Turn
    head_dim: int

    def read(self, norm: Norm, weight: Tensor, head: bool = False) -> Apply:
        scale = norm.weight.detach()
        product = self.quant.turned(weight, lambda rows: self.states(rows * scale), head)
        norm.weight = nn.Parameter(torch.ones_like(scale), requires_grad=False)
        return product

    def qkv(self, layer: QKVLinear, norm: Norm, weight: Tensor) -> Apply:
        v = layer.split[2] * layer.head_dim
        weight[-v:] = self._heads(weight[-v:].T).T
        if layer.bias is not None:
            layer.bias[-v:] = self._heads(layer.bias[None, -v:])[0]
        return self.read(norm, weight)

    def attention_out(self, layer: Linear, weight: Tensor) -> Apply:
        return self.quant.turned(self._written(layer, weight), self._heads, False)

    def down(self, layer: Linear, weight: Tensor) -> Apply:
        return self.quant.linear(self._written(layer, weight), False)

    def tied_head(self, norm: Norm, embedding: Tensor) -> Apply:
        product = self.read(norm, embedding, head=True)
        self.rows(embedding)
        return product

    def rows(self, embedding: Tensor) -> None:
        for rows in torch.split(embedding, max(1, _CHUNK // embedding.shape[1])):
            rows.copy_(self.states(rows))

    def _written(self, layer: Linear, weight: Tensor) -> Tensor:
        if layer.bias is not None:
            layer.bias.copy_(self.states(layer.bias[None])[0])
        return self.states(weight.T).T.contiguous()

    def _heads(self, rows: Tensor) -> Tensor:  # [n, heads * head_dim], as it returns
        return self.values(rows.reshape(-1, self.head_dim)).view(rows.shape)
