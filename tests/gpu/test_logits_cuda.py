"""Logits processors and log probabilities on a GPU in bfloat16, with CUDA graphs and without, on both loops: each greedy token is the
best of transformers' float32 logits, processed for the row's own history, but for what bfloat16 cannot tell apart."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.base.types import SamplingSpec
from minisgl.runtime.pick import Picker
from minisgl.testing.checkpoints import llama_checkpoint
from minisgl.testing.oracle import processed_logits

CUDA = torch.cuda.is_available()
WHERE = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="there is no CUDA device")]),
]
VOCAB, OUTPUT = 199, 32
MARGIN = {"cpu": 1e-3, "cuda": 0.25}  # of logits: what the dtype may change
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True}
ASKED = [
    SamplingParams(**GREEDY, repetition_penalty=1.3, logprobs=2),
    SamplingParams(**GREEDY, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(**GREEDY, frequency_penalty=-0.3, logit_bias={7: 3.0, 11: -100}, logprobs=5, prompt_logprobs=1),
    SamplingParams(**GREEDY, allowed_token_ids=tuple(range(3, 60)), frequency_penalty=2.0),
    SamplingParams(**GREEDY),
    SamplingParams(**GREEDY, stop_token_ids=tuple(range(0, VOCAB, 2)), min_tokens=OUTPUT // 2),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logits") / "llama"
    llama_checkpoint(
        path, hidden_size=192, intermediate_size=384, num_attention_heads=6, num_key_value_heads=2, head_dim=128,
        max_position_embeddings=512, initializer_range=0.05, tie_word_embeddings=False, seed=3, dtype="bfloat16",
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("loop", ["sync", "overlap"])
@pytest.mark.parametrize("graphs", [0, None])
def test_processed_tokens_and_logprobs(
    checkpoint: Path, model: Any, device: str, loop: str, graphs: int | None
) -> None:
    """P1, P3, S8, A7."""
    prompts = [[Random(i).randrange(3, VOCAB) for _ in range(5 + 9 * i)] for i in range(len(ASKED))]
    engine = {"cuda_graph_max_rows": graphs, "threads": 1, "validate": "audit"}
    with LLM(checkpoint, device=device, loop=loop, engine=engine, kv={"num_pages": 300}, show_progress=False) as llm:
        for _ in range(2):  # the second time in other slots, and from the cache
            for prompt, p, out in zip(prompts, ASKED, llm.generate([tuple(x) for x in prompts], ASKED), strict=True):
                check(prompt, p, out, model, MARGIN[device])


@torch.inference_mode()
def check(prompt: list[int], p: SamplingParams, out: Any, model: Any, margin: float) -> None:
    logits = model(torch.tensor([[*prompt, *out.ids]])).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)
    for at, token in enumerate(out.ids):
        x = processed_logits(logits[len(prompt) - 1 + at], prompt, list(out.ids[:at]), p)
        assert float(x[token]) >= float(x.max()) - margin, f"token {at} of {p}"
        if out.logprobs is not None:
            row, told = logprobs[len(prompt) - 1 + at], out.logprobs[at]
            assert told.token.id == token
            for c in (told.token, *told.top):
                assert c.logprob == pytest.approx(float(row[c.id]), abs=margin)
    for at, told in enumerate(out.prompt_logprobs or ()):
        assert told.token.id == prompt[at]
        if at:
            assert told.token.logprob == pytest.approx(float(logprobs[at - 1, prompt[at]]), abs=margin)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="there is no CUDA device")
def test_picking_does_not_wait_for_the_device(checkpoint: Path) -> None:
    """With every kind of processor and log probabilities, once memory is taken."""
    import numpy as np

    from minisgl.base.types import NO_PAGES, RowInit
    from minisgl.nn.choose import LOGITS_OF_FIELDS
    from minisgl.plugin.registry import Registry
    from minisgl.runtime.logits import LogitsContext
    from minisgl.runtime.sampling import SamplerContext, SampleRows

    device, slots = torch.device("cuda", 0), 8
    registry = Registry.scan(bundled_only=True)
    made = {
        name: registry.create("logits", name, {}, lambda s, n=name: LogitsContext(s, n, device, slots, VOCAB, 2))
        for name in LOGITS_OF_FIELDS
    }
    sampler = registry.create("sampler", "fused", {}, lambda s: SamplerContext(s, device, slots, VOCAB, depth=2))
    picker = Picker(sampler, made, device, slots, VOCAB, VOCAB, 2)
    spec = SamplingSpec(
        temperature=0.8, seed=1, bias_ids=(1, 2), biases=(0.5, -1.0), presence_penalty=0.5, repetition_penalty=1.2,
        min_new=99, stop_ids=(3,), allowed_ids=tuple(range(100)), bad_words=((4, 5), (6,)), logprobs=3,
    )  # fmt: skip
    ids = np.array([1, 2, 3], np.int32)
    h_slot = np.arange(6, dtype=np.int32)
    logits = torch.randn(6, VOCAB, device=device, dtype=torch.bfloat16)

    def rounds(n: int, mode: str) -> None:
        for slot in range(0, 6, 2):
            picker.set_row(RowInit(slot, slot, 0, ids, NO_PAGES, spec, 0, 99, prompt=ids))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for out in range(n):
                h_out = np.full(6, out, np.int32)
                rows = SampleRows(h_slot, h_out, slot_ids, torch.zeros_like(slot_ids))
                picker.prepare()
                picker.pick(logits.clone(), rows)
                picker.scored.clear()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for slot in range(1, 6, 2):
        picker.set_row(RowInit(slot, slot, 0, ids, NO_PAGES, SamplingSpec(temperature=0), 0, 99))
    slot_ids = torch.arange(6, device=device)
    rounds(6, "default")
    rounds(4, "error")
