"""Greedy output equals transformers' token for token, whatever the page size, chunk size, cache, batch and prefix hits.

A new attention backend, scheduler, loop or cache joins by its name in ``COMPONENTS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from minisgl.base.types import Delta, GenerateRequest, SamplingParams
from minisgl.client.pipeline import Pipeline
from minisgl.config.load import load_settings
from minisgl.testing.checkpoints import llama_checkpoint
from minisgl.testing.oracle import Agreement, Expected, load, transformers_greedy
from minisgl.testing.recorder import StepRecorder

COMPONENTS = (
    {"attention": "torch", "scheduler": "chunked", "loop": "sync"},
    {"attention": "torch", "scheduler": "chunked", "loop": "overlap"},
    {"attention": "torch", "scheduler": "prefill-first", "loop": "overlap"},
)
PAGE_SIZES = (1, 16, 64)
CHUNKS = (1, 7, 512)
CACHES = ("naive", "radix")
ROWS = 32
OUTPUT = 48
PROMPT_LENGTHS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 80)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "gqa_untied": {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False, "seed": 1},
    "mqa_tied": {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True, "seed": 2},
    "mha_llama3_rope": {"num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE, "seed": 3},
}


@dataclass
class Oracle:
    path: Path
    cases: list[Expected] = field(default_factory=list)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def random_llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A random checkpoint and what transformers answers to 32 prompts of boundary lengths, half of them sharing a prefix."""
    import torch
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("llama") / request.param
    llama_checkpoint(path, initializer_range=0.5, **CHECKPOINTS[request.param])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rng = Random(7)
    shared = [rng.randrange(model.config.vocab_size) for _ in range(max(PROMPT_LENGTHS))]
    prompts = [shared[:n] for n in PROMPT_LENGTHS]
    prompts += [[rng.randrange(model.config.vocab_size) for _ in range(n)] for n in PROMPT_LENGTHS]
    cases = [transformers_greedy(model, p, OUTPUT) for p in prompts]
    distinct = {t for c in cases for t in c.output}
    assert len(distinct) > 20, "the random model repeats itself; its output would prove little"
    return Oracle(path, cases)


def pipeline(
    path: Path | None, page_size: int, chunk: int, cache: str, names: Mapping[str, str], recorder: StepRecorder
):
    overrides: dict[str, Any] = {
        "kv": {"page_size": page_size, "num_pages": 8192 // page_size},
        "limits": {"max_running": ROWS, "batch_tokens": 256},
        "cache": {"use": cache},
        "engine": {"validate": "audit", **({"threads": 1} if path is not None else {})},
        **{kind: {"use": name} for kind, name in names.items()},
    }
    overrides["scheduler"][names["scheduler"]] = {"max_chunk": chunk}
    if path is not None:
        overrides["model"] = {"path": str(path)}
    settings = load_settings(overrides=overrides, environ={}).settings
    return Pipeline(settings, observers=[recorder], show_progress=False)


def generate(p: Pipeline, cases: list[Expected]) -> list[tuple[list[int], int]]:
    """(output ids, cached prompt tokens) of each case, all in one batch."""
    uids = []
    for case in cases:
        sampling = SamplingParams(temperature=0.0, max_tokens=len(case.output), ignore_eos=True)
        uids += p.submit(GenerateRequest(ids=case.prompt, sampling=sampling))
    ids: dict[int, list[int]] = {uid: [] for uid in uids}
    cached: dict[int, int] = {}
    while len(cached) < len(uids):
        for out in p.step():
            assert isinstance(out, Delta), out
            ids[out.uid] += out.ids
            if out.finish is not None:
                assert out.finish == "length", out
                assert out.usage is not None
                cached[out.uid] = out.usage.cached_tokens
    return [(ids[uid], cached[uid]) for uid in uids]


def check_everything(
    p: Pipeline, recorder: StepRecorder, cases: list[Expected], page_size: int, chunk: int, cache: str
) -> None:
    """Alone, then in a mixed batch of 32, each without and with a prefix hit."""
    agreement = Agreement()
    alone = cases[5], cases[-2]
    for turn in ("cold", "warm"):
        for case in alone:
            [(ids, cached)] = generate(p, [case])
            agreement.check(case, ids, f"alone, {turn}, prompt of {len(case.prompt)}")
            full_pages = (len(case.prompt) - 1) // page_size * page_size
            assert cached == (full_pages if turn == "warm" and cache == "radix" else 0)
    p.engine.scheduler.clear_cache()
    recorder.steps.clear()
    for turn in ("cold", "warm"):
        outputs = generate(p, cases)
        for case, (ids, _) in zip(cases, outputs, strict=True):
            agreement.check(case, ids, f"batch, {turn}, prompt of {len(case.prompt)}")
        if turn == "warm":
            hits = [cached for _, cached in outputs]
            want = [(len(c.prompt) - 1) // page_size * page_size if cache == "radix" else 0 for c in cases]
            assert hits == want
    agreement.enough()
    if chunk > 1:  # with chunks of one token, the shortest prompts end before the longest are read
        assert max(s.n_decode for s in recorder.steps) == ROWS, "no decode step had all rows"
    mixed = any(s.n_decode and s.n_spans for s in recorder.steps)
    assert mixed == (p.info.picks["scheduler"] != "prefill-first"), "steps that mix prefill and decode"
    counts = p.engine.scheduler.counts()
    assert counts["free"] + counts["evictable"] + counts["locked"] == p.info.num_pages


@pytest.mark.parametrize(("page_size", "chunk", "cache"), [*product(PAGE_SIZES, CHUNKS, CACHES)], ids=lambda v: str(v))
@pytest.mark.parametrize("names", COMPONENTS[:1], ids=lambda n: "-".join(n.values()))
def test_random_llama_full_product(
    random_llama: Oracle, names: Mapping[str, str], page_size: int, chunk: int, cache: str
) -> None:
    recorder = StepRecorder()
    with pipeline(random_llama.path, page_size, chunk, cache, names, recorder) as p:
        check_everything(p, recorder, random_llama.cases, page_size, chunk, cache)


# Every pair of values of two factors is in one of these rows.
PAIRWISE = (
    (1, 1, "naive"),
    (1, 7, "radix"),
    (1, 512, "radix"),
    (16, 1, "radix"),
    (16, 7, "naive"),
    (16, 512, "radix"),
    (64, 1, "radix"),
    (64, 7, "radix"),
    (64, 512, "naive"),
)


@pytest.mark.parametrize(("page_size", "chunk", "cache"), PAIRWISE, ids=lambda v: str(v))
@pytest.mark.parametrize("names", COMPONENTS[1:], ids=lambda n: "-".join(n.values()))
def test_random_llama_other_components(
    random_llama: Oracle, names: Mapping[str, str], page_size: int, chunk: int, cache: str
) -> None:
    recorder = StepRecorder()
    with pipeline(random_llama.path, page_size, chunk, cache, names, recorder) as p:
        check_everything(p, recorder, random_llama.cases, page_size, chunk, cache)


REAL = [
    pytest.param(*row, COMPONENTS[i % len(COMPONENTS)], id="-".join(map(str, row)) + f"-{i % len(COMPONENTS)}")
    for i, row in enumerate(PAIRWISE)
]


@pytest.mark.parametrize(("page_size", "chunk", "cache", "names"), REAL)
def test_smollm2_pairwise(smollm2: Any, page_size: int, chunk: int, cache: str, names: Mapping[str, str]) -> None:
    """The real model; the expected ids come from oracle/make_smollm2.py."""
    cases = load(Path(__file__).parent / "oracle" / "smollm2.json")
    recorder = StepRecorder()
    with pipeline(None, page_size, chunk, cache, names, recorder) as p:
        check_everything(p, recorder, cases, page_size, chunk, cache)
