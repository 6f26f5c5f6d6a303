"""Greedy output of transformers, and how to compare with it: the judge of every backend, scheduler, cache and loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minisgl.base.types import SamplingParams

MARGIN = 1e-3  # where the two best logits are closer than this, both answers are right


@dataclass(frozen=True, slots=True)
class Expected:
    """One prompt's greedy continuation. ``sure``: leading output tokens before the first whose top-2 margin is under a bound,
    ``MARGIN`` in float32; only these are compared."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sure: int


@dataclass(slots=True)
class Agreement:
    """Counts what was compared, so that a test can demand that it was enough."""

    compared: int = 0
    total: int = 0

    def check(self, expected: Expected, got: Sequence[int], where: str) -> None:
        """AssertionError at the first sure position where ``got`` differs."""
        n = min(len(got), len(expected.output))
        assert n == len(got), f"{where}: {len(got)} tokens, the oracle has {len(expected.output)}"
        sure = min(n, expected.sure)
        want, have = list(expected.output[:sure]), list(got[:sure])
        if want != have:
            at = next(i for i in range(sure) if want[i] != have[i])
            raise AssertionError(f"{where}: token {at} is {have[at]}, transformers has {want[at]}")
        self.compared += sure
        self.total += n

    def enough(self, share: float = 0.95) -> None:
        assert self.total > 0, "nothing was compared"
        assert self.compared >= share * self.total, f"only {self.compared} of {self.total} positions were compared"


def transformers_greedy(model: Any, prompt: Sequence[int], max_new: int, margin: float = MARGIN) -> Expected:
    """Greedy continuation by transformers ``generate``, EOS ignored, one prompt at a time. ``margin``: see ``Expected``."""
    import torch

    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt)], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=model.device),
            max_new_tokens=max_new,
            min_new_tokens=max_new,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
    ids = out.sequences[0, len(prompt) :].tolist()
    sure = len(ids)
    for i, logits in enumerate(out.logits):
        top = torch.topk(logits[0].float(), 2).values
        if float(top[0] - top[1]) < margin:
            sure = i
            break
    return Expected(tuple(prompt), tuple(ids), sure)


def processed_logits(logits: Any, prompt: Sequence[int], output: Sequence[int], p: SamplingParams) -> Any:
    """What the next token is picked from: [vocab] float32 logits after bias, penalties and bans, with transformers' repetition
    penalty and OpenAI's formula, mu[j] - c[j] * frequency - float(c[j] > 0) * presence, for the others."""
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    x = logits.clone()
    for token, bias in p.logit_bias.items():
        x[token] += bias
    if p.repetition_penalty is not None:
        seen = torch.tensor([[*prompt, *output]], device=x.device)
        x = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(seen, x[None])[0]
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(x)).to(x.device)
    x = x - counts * p.frequency_penalty - (counts > 0) * p.presence_penalty
    if len(output) < p.min_tokens:
        x[list(p.stop_token_ids)] = -torch.inf
    if p.allowed_token_ids:
        x[sorted(set(range(len(x))) - set(p.allowed_token_ids))] = -torch.inf
    return x


def save(path: Path, cases: Sequence[Expected], about: str) -> None:
    text = ",\n".join(json.dumps(asdict(c), separators=(",", ":")) for c in cases)
    path.write_text(f'{{"about": {json.dumps(about)},\n"cases": [\n{text}\n]}}\n')


def load(path: Path) -> list[Expected]:
    return [Expected(tuple(c["prompt"]), tuple(c["output"]), c["sure"]) for c in json.loads(path.read_text())["cases"]]
