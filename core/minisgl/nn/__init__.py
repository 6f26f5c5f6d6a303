"""Building blocks for model authors, and the assembly of a model, its kernels and its KV cache into a worker."""

from minisgl.nn.assemble import build_worker
from minisgl.nn.builder import Builder
from minisgl.nn.decoder import Decoder, DecoderLayer, DecoderLM, GatedMLP, SelfAttention, SparseMLP
from minisgl.nn.layers import Attention, Embedding, Experts, Head, Layer, Linear, Norm, ParamSpec, QKVLinear, SiluMul
from minisgl.nn.loader import LoadReport, load_weights
from minisgl.nn.rope import cos_sin_table

__all__ = [
    "Attention", "Builder", "Decoder", "DecoderLM", "DecoderLayer", "Embedding", "Experts", "GatedMLP", "Head", "Layer",
    "Linear", "LoadReport", "Norm", "ParamSpec", "QKVLinear", "SelfAttention", "SiluMul", "SparseMLP", "build_worker",
    "cos_sin_table", "load_weights",
]  # fmt: skip
