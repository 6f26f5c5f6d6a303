"""Models on a CUDA device against transformers on the CPU, both in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minisgl.testing.checkpoints import llama_config, random_checkpoint
from minisgl.testing.models import check_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 20},
    "Qwen3": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "Qwen3Moe": EXPERTS,
}


@pytest.mark.parametrize("family", MODELS)
def test_logits_and_greedy_tokens_equal_transformers_on_the_cpu(family: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{family}Config")(**llama_config(**MODELS[family]))
    settings = {"model": {"device": "cuda", "dtype": "float32"}, "kv": {"num_pages": 64}}
    check_model(random_checkpoint(tmp_path, config, seed=4), settings=settings)
