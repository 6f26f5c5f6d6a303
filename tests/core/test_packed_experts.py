"""Experts packed for the CPU: those of the op, and without it where no packing is."""

import pytest
import torch

from minisgl.base.facts import ModelFacts, MoEFacts
from minisgl.nn import Builder
from minisgl.nn.experts import PackedExperts
from minisgl.nn.packed import packs
from minisgl.runtime.comm import NoComm
from minisgl.testing.checkpoints import llama_config

MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


def made(dtype, device="cpu"):
    from dataclasses import replace

    config = {**llama_config(), **MOE, "architectures": ["X"]}
    facts = replace(ModelFacts.from_hf(config, {}), moe=MoEFacts.from_hf(config))
    return Builder(facts, NoComm(), dtype, torch.device(device), 8).experts()


def test_float_experts_are_packed_on_a_cpu_that_has_it():
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.float16):
        assert isinstance(made(dtype), PackedExperts) == packs(cpu, dtype)
    assert not packs(cpu, torch.float16)  # oneDNN has no product in float16 that is faster


def test_experts_on_a_gpu_are_left_to_the_op():
    assert not isinstance(made(torch.float32, "cuda"), PackedExperts)


@pytest.mark.skipif(not packs(torch.device("cpu"), torch.float32), reason="no packing for this CPU")
def test_packed_experts_give_what_each_token_gets_of_its_own_experts():
    layer, g = made(torch.float32), torch.Generator().manual_seed(0)
    hidden, n = layer.hidden, 11
    gate_up = torch.randn(6, 48, hidden, generator=g) / 8
    down = torch.randn(6, hidden, 24, generator=g) / 8
    layer.gate_up = torch.nn.Parameter(gate_up.view(-1, hidden), requires_grad=False)
    layer.down = torch.nn.Parameter(down.view(-1, 24), requires_grad=False)
    layer.finish()
    assert not list(layer.parameters())

    class Batch:
        ops = {"silu_mul": lambda x: torch.nn.functional.silu(x[:, :24]) * x[:, 24:]}

    x, logits = torch.randn(n, hidden, generator=g), torch.randn(n, 6, generator=g)
    found = layer(x, logits, Batch())
    for i in range(n):
        top = sorted(range(6), key=lambda e: -float(logits[i, e]))[:2]
        weights = torch.softmax(logits[i, top].double(), 0)  # as the softmax of all, divided by their sum
        exact = torch.zeros(hidden, dtype=torch.float64)
        for w, e in zip(weights, top):
            gate, up = (gate_up[e].double() @ x[i].double()).chunk(2)
            exact += w * (down[e].double() @ (gate * torch.sigmoid(gate) * up))
        assert torch.allclose(found[i].double(), exact, atol=1e-5)
