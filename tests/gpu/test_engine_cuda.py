"""The engine on a GPU in bfloat16: its greedy tokens are those of float32 wherever the best logit leads by more than 0.1, with
every attention backend, with graphs and without, on both loops, in any chunks, and under load with aborts and preemptions."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from minisgl.client.pipeline import Pipeline
from minisgl.config.load import load_settings
from minisgl.runtime.attention import AttentionBackend
from minisgl.testing.attention import facts_of
from minisgl.testing.checkpoints import llama_checkpoint
from minisgl.testing.greedy_traffic import Traffic
from minisgl.testing.oracle import Agreement, Expected, transformers_greedy
from minisgl_plugins.attention.fa import FlashAttention
from minisgl_plugins.attention.flashinfer import FlashInferAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

MARGIN = 0.1
HEADS = 6, 2, 128
CLASSES: dict[str, type[AttentionBackend]] = {"flashinfer": FlashInferAttention, "fa": FlashAttention}
NAMES = ("torch", "flashinfer", "fa", "fa,flashinfer")
NUM_PAGES = 400


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "llama"
    heads, kv_heads, head_dim = HEADS
    llama_checkpoint(
        path, hidden_size=192, intermediate_size=384, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, max_position_embeddings=512, initializer_range=0.05, tie_word_embeddings=False, seed=3,
        dtype="bfloat16",
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def cases(checkpoint: Path) -> list[Expected]:
    """Prompts of 1 to 150 tokens, some of which begin alike."""
    from transformers import AutoModelForCausalLM

    rng = Random(11)
    shared = [rng.randrange(3, 199) for _ in range(100)]
    prompts = [[rng.randrange(3, 199) for _ in range(rng.randrange(1, 150))] for _ in range(40)]
    prompts += [[*shared[: rng.randrange(10, 100)], rng.randrange(3, 199)] for _ in range(24)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()
    return [transformers_greedy(model, p, 24, MARGIN) for p in prompts]


def need(attention: str) -> None:
    for name in attention.split(","):
        if name in CLASSES:
            reason = CLASSES[name].supports(facts_of(torch.device("cuda"), *HEADS, torch.bfloat16, 16, None))
            if reason is not None:
                pytest.skip(f"{name}: {reason}")


def settings(checkpoint: Path, attention: str, **sections: Any) -> Any:
    names = attention.split(",")
    overrides: dict[str, Any] = {
        "model": {"path": str(checkpoint), "device": "cuda", "dtype": "bfloat16"},
        "kv": {"page_size": 16, "num_pages": NUM_PAGES},
        "limits": {"max_running": 64, "batch_tokens": 256},
        "attention": {"use": names if len(names) > 1 else names[0]},
        "engine": {"validate": "audit"},
    }
    for name, values in sections.items():
        overrides[name] = overrides.get(name, {}) | values
    return load_settings(overrides=overrides, environ={}).settings


def play(chosen: Any, requests: list[Expected], abort: float = 0.0, seed: int = 1) -> tuple[Traffic, dict[str, int]]:
    with Pipeline(chosen, show_progress=False) as p:
        traffic = Traffic(p, Random(seed), list(requests), abort=abort)
        traffic.play()
        scheduler = p.engine.scheduler
        scheduler.audit()
        counts = dict(scheduler.counts())
        assert counts["free"] + counts["evictable"] == NUM_PAGES, counts
    return traffic, counts


WAYS: dict[str, dict[str, Any]] = {
    "graphs, overlap": {},
    "no graphs": {"engine": {"cuda_graph_max_rows": 0}},
    "graphs of 5 rows, the rest without": {"engine": {"cuda_graph_max_rows": 5}},
    "sync": {"loop": {"use": "sync"}},
    "chunks of 7": {"scheduler": {"use": "chunked", "chunked": {"max_chunk": 7}}},
    "prefill first": {"scheduler": {"use": "prefill-first"}},
    "no cache": {"cache": {"use": "naive"}},
}


@pytest.mark.parametrize("attention", NAMES)
def test_greedy_tokens_are_those_of_float32_in_every_way_of_running(
    attention: str, checkpoint: Path, cases: list[Expected]
) -> None:
    need(attention)
    for way, sections in WAYS.items():
        traffic, _ = play(settings(checkpoint, attention, **sections), cases)
        agreement = Agreement()
        traffic.check(agreement, f"{attention}, {way}")
        agreement.enough(0.1)


@pytest.mark.parametrize("attention", NAMES[1:])
@pytest.mark.parametrize("loop", ["overlap", "sync"])
def test_a_thousand_requests_with_aborts_under_load(
    attention: str, loop: str, checkpoint: Path, cases: list[Expected]
) -> None:
    """M3, M4: pages are audited after every step; preempted requests answer as if alone."""
    need(attention)
    rng = Random(5)
    requests = []
    for _ in range(1000):
        case = rng.choice(cases)
        n = rng.randint(1, len(case.output))
        requests.append(Expected(case.prompt, case.output[:n], min(n, case.sure)))
    sections: dict[str, Any] = {
        "loop": {"use": loop},
        "scheduler": {"use": "chunked", "chunked": {"reserve": 0.05}},
        "kv": {"page_size": 4},
    }
    traffic, counts = play(settings(checkpoint, attention, **sections), requests, abort=0.3)
    assert len(traffic.aborted) >= 50
    assert len(traffic.done) + len(traffic.aborted) == len(requests)
    assert counts["preemptions"] > 0, counts
    agreement = Agreement()
    traffic.check(agreement, f"{attention}, {loop}")
    agreement.enough(0.1)
