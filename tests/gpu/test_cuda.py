"""The engine on a CUDA device: greedy output equals transformers' on the same device, and seeds hold."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.testing.checkpoints import llama_checkpoint
from minisgl.testing.oracle import Agreement, transformers_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

OUTPUT = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "llama"
    llama_checkpoint(path, initializer_range=0.5, tie_word_embeddings=False, seed=1)
    return path


def prompts() -> list[list[int]]:
    rng = Random(7)
    shared = [rng.randrange(199) for _ in range(80)]
    return [shared[:n] for n in (1, 15, 16, 17, 48, 64, 80)] + [
        [rng.randrange(199) for _ in range(n)] for n in range(1, 50, 2)
    ]


@pytest.mark.parametrize("loop", ["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 512), (16, 7), (64, 512)])
def test_greedy_output_equals_transformers(checkpoint: Path, loop: str, page_size: int, chunk: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()
    cases = [transformers_greedy(model, p, OUTPUT) for p in prompts()]
    options: dict[str, Any] = {"scheduler": {"use": "chunked", "chunked": {"max_chunk": chunk}}, "loop": loop}
    agreement = Agreement()
    with LLM(
        checkpoint,
        device="cuda",
        dtype="float32",
        show_progress=False,
        page_size=page_size,
        kv={"num_pages": 8192 // page_size},
        engine={"validate": "audit"},
        **options,
    ) as llm:
        assert llm.info.device.startswith("cuda")
        for turn in ("cold", "warm"):
            outs = llm.generate(
                [c.prompt for c in cases], SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
            )
            for case, out in zip(cases, outs, strict=True):
                agreement.check(case, out.ids, f"{turn}, prompt of {len(case.prompt)}")
    agreement.enough()


def test_seeded_request_depends_on_its_seed_alone(checkpoint: Path) -> None:
    """P2 on the device's sampler."""
    seeded = SamplingParams(temperature=1.0, top_p=0.95, seed=1234, max_tokens=24, ignore_eos=True)
    free = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    mine, others = prompts()[10], prompts()
    with LLM(checkpoint, device="cuda", dtype="float32", show_progress=False, kv={"num_pages": 512}) as llm:
        alone = llm.generate([mine], seeded)[0].ids
        among = llm.generate([*others, mine], [free] * len(others) + [seeded])[-1].ids
    assert among == alone


def test_pages_come_from_free_memory(checkpoint: Path) -> None:
    with LLM(checkpoint, device="cuda", show_progress=False, kv={"memory": "64MiB"}) as llm:
        per_page = 2 * 2 * 16 * 2 * 8 * torch.tensor([], dtype=getattr(torch, llm.info.dtype)).element_size()
        assert llm.info.num_pages <= (64 << 20) // per_page
        assert llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].ids
