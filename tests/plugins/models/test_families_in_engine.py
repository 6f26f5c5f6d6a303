"""Architectures in the whole engine: rows batched with others, prompts in chunks, prefixes from the cache."""

from random import Random

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.testing.checkpoints import llama_config, random_checkpoint
from minisgl.testing.oracle import Agreement, transformers_greedy

OUTPUT = 16
MODELS = {
    "Mistral": {"sliding_window": 20},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
}


def prompts():
    rng = Random(3)
    shared = [rng.randrange(3, 199) for _ in range(60)]
    return [shared[:n] for n in (7, 16, 33, 60)] + [
        [*shared[:40], *(rng.randrange(3, 199) for _ in range(n))] for n in (1, 9, 30)
    ]


@pytest.mark.parametrize("family", MODELS)
def test_greedy_output_equals_transformers_with_and_without_cached_prefixes(family, tmp_path):
    """A cached prefix was computed in another batch, and for a longer or shorter prompt."""
    import transformers

    given = llama_config(**MODELS[family])
    if family == "Qwen2":
        del given["head_dim"]
    random_checkpoint(tmp_path, getattr(transformers, f"{family}Config")(**given), seed=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    cases = [transformers_greedy(model, p, OUTPUT) for p in prompts()]
    agreement = Agreement()
    with LLM(
        tmp_path, device="cpu", page_size=4, cache="radix", kv={"num_pages": 256}, show_progress=False,
        engine={"validate": "audit", "threads": 1}, scheduler={"use": "chunked", "chunked": {"max_chunk": 13}},
    ) as llm:  # fmt: skip
        for turn in ("cold", "warm"):
            outs = llm.generate(
                [c.prompt for c in cases], SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
            )
            for case, out in zip(cases, outs, strict=True):
                agreement.check(case, out.ids, f"{turn}, prompt of {len(case.prompt)}")
        assert sum(out.usage.cached_tokens for out in outs) > 0
    agreement.enough(0.8)
