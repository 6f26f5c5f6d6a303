"""Hidden states in another basis, for quantization (QuaRot, arXiv 2404.00456).

A decoder's hidden states are sums of what its layers write, and are divided by their length before others read them. Turned by
an orthogonal matrix they keep that length. So if all that write them write them turned, and all that read them expect that, the
model computes the same, and its weights have done all the turning when they are loaded. The weights of norms, which belong to
single elements of the old basis, move into the layers that read.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from minisgl.nn.decoder import Decoder, DecoderLayer, DecoderLM, GatedMLP, SelfAttention
from minisgl.nn.layers import Linear, Norm
from minisgl.runtime.model import Model
from minisgl.runtime.quant import Apply, QuantMethod, Turn

_CHUNK = 1 << 24  # elements turned at a time, which bounds the memory that takes


def change_basis(model: Model, quant: QuantMethod, hidden: int) -> None:
    """Let ``model``, whose weights are not loaded yet, keep its hidden states in the basis of ``quant``, if that has one and if
    nothing but dense layers of ``nn.decoder`` sees them."""
    found = _dense(model)
    turn = quant.basis(hidden) if found else None
    if turn is None or not isinstance(model, DecoderLM):
        return
    head, embed = model.lm_head, model.model.embed_tokens
    readers: list[tuple[Norm, Linear]] = [(model.model.norm, head)]
    for layer, attention, mlp in found:
        readers += [(layer.input_layernorm, attention.qkv_proj), (layer.post_attention_layernorm, mlp.gate_up_proj)]
        for writer in (attention.o_proj, mlp.down_proj):
            writer.pack = partial(_write, quant, turn, writer)
    for norm, reader in readers:
        norm.needed_by, reader.needs = (reader,), (norm,)
        reader.pack = partial(_read, quant, norm, reader is head)
    if head.tied:  # it needs the rows as they were
        head.pack = partial(_read_and_turn, quant, norm=model.model.norm, turn=turn)
    else:
        embed.prepare = partial(_turn_rows, turn)


def _dense(model: Model) -> list[tuple[DecoderLayer, SelfAttention, GatedMLP]]:
    """The layers of a model that has no others; none of any other model."""
    if not isinstance(model, DecoderLM) or type(model.model) is not Decoder:
        return []
    if (type(model).forward, type(model).logits) != (DecoderLM.forward, DecoderLM.logits):
        return []
    found = [(m, getattr(m, "self_attn", None), getattr(m, "mlp", None)) for m in model.model.layers]
    wanted = (DecoderLayer, SelfAttention, GatedMLP)
    return found if all(tuple(map(type, parts)) == wanted for parts in found) else []  # type: ignore[return-value]


def _read(quant: QuantMethod, norm: Norm, head: bool, weight: Tensor) -> Apply:
    product = quant.reader(weight, norm.weight.detach(), head)
    norm.weight = nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)
    return product


def _read_and_turn(quant: QuantMethod, embedding: Tensor, *, norm: Norm, turn: Turn) -> Apply:
    product = _read(quant, norm, True, embedding)
    _turn_rows(turn, embedding)
    return product


def _write(quant: QuantMethod, turn: Turn, layer: Linear, weight: Tensor) -> Apply:
    if layer.bias is not None:
        layer.bias.copy_(turn(layer.bias[None])[0])
    return quant.linear(turn(weight.T).T.contiguous(), False)


def _turn_rows(turn: Turn, weight: Tensor) -> None:
    for rows in torch.split(weight, max(1, _CHUNK // weight.shape[1])):
        rows.copy_(turn(rows))
