"""A model against transformers: the test that every author of a model writes with one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.base.types import LocalModel
from minisgl.testing.checkpoints import make_worker
from minisgl.testing.oracle import transformers_greedy
from minisgl.testing.plans import PlanDriver

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.plugin.registry import Registry

TOLERANCE = 1e-4  # of the range of the logits, in float32
CHUNKS = ((50,), (17, 1, 32))  # the prompt whole, and in three prefills


@dataclass(slots=True)
class Recorder:
    """A sampler that keeps the logits it is shown, on the CPU."""

    sampler: Any
    seen: list[Tensor]

    def set_row(self, *args: Any) -> None:
        self.sampler.set_row(*args)

    def prepare(self) -> None:
        self.sampler.prepare()

    def sample(self, logits: Tensor, rows: Any) -> Any:
        self.seen.append(logits.to("cpu", copy=True))
        return self.sampler.sample(logits, rows)


def random_prompt(vocab: int, length: int = sum(CHUNKS[0]), seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.RandomState(seed).randint(3, vocab, length)]


def check_model(
    local: LocalModel,
    model: type | None = None,
    *,
    new_tokens: int = 64,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """AssertionError where minisgl and transformers, in float32 on a CPU, differ for a small checkpoint.

    A prompt is prefilled whole and in chunks, and both rows decode together: at each position all logits are within
    ``TOLERANCE`` of their range, and the greedy tokens are the same (up to one where both are equally likely).

    Args: local: see ``testing.checkpoints``. model: the class under test; None for a bundled one. new_tokens: decoded
        after the prompt. settings: sections of Settings for the worker, such as
        ``{"model": {"device": "cuda", "dtype": "float32"}}``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from minisgl.plugin.registry import Registry

    reference = AutoModelForCausalLM.from_pretrained(local.path, dtype=torch.float32).eval()
    prompt = random_prompt(reference.config.vocab_size)
    expected = transformers_greedy(reference, prompt, new_tokens)
    registry = Registry.scan(bundled_only=True)
    if model is not None:
        registry.add("model", model.__name__, model)
    for chunks, (logits, tokens) in zip(CHUNKS, greedy_rows(local, prompt, new_tokens, registry, settings)):
        with torch.inference_mode():
            known = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        scale = float(known.max() - known.min())
        error = float((logits - known).abs().max()) / scale
        assert error < TOLERANCE, f"prefill {chunks}: logits are off by {error:.1e} of their range"
        for i, (want, got) in enumerate(zip(expected.output, tokens, strict=True)):
            if want != got:  # from here on the contexts differ
                gap = float(known[i, want] - known[i, got]) / scale
                assert gap < TOLERANCE, f"prefill {chunks}: token {i} is {got}, transformers has {want}"
                break
    assert len(set(expected.output)) > 2, "the model repeats itself, so that contexts hardly differ; change its weights"


def greedy_rows(
    local: LocalModel,
    prompt: Sequence[int],
    new_tokens: int,
    registry: Registry | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[tuple[Tensor, list[int]]]:
    """For each of ``CHUNKS`` a row that is prefilled like that; then all decode together.

    Returns: logits [new_tokens, vocab] and the tokens of each row.
    """
    import torch

    worker = make_worker(local, settings, registry)
    recorder = Recorder(worker.sampler, [])
    worker.sampler = recorder  # type: ignore[assignment]
    driver = PlanDriver(worker.run, worker.info.page_size)
    for slot, chunks in enumerate(CHUNKS):
        driver.start(slot, prompt, room=new_tokens)
        for n in chunks:
            driver.step(prefill={slot: n})
    slots = range(len(CHUNKS))
    for _ in range(new_tokens - 1):
        driver.step(decode=slots)
    first, rest = recorder.seen[: len(CHUNKS)], recorder.seen[len(CHUNKS) :]
    return [(torch.cat([first[i], *(step[i : i + 1] for step in rest)]), driver.out[i]) for i in slots]
