"""What evaluation tools do with echo and logprobs, over HTTP through a server in real processes, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from minisgl.testing.bytemodel import VOCAB, byte_ids, write_byte_model
from minisgl.testing.server import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("real") / "model", 256, weights=True)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server("--model", str(folder), "--model.device", "cpu", "--limits.batch-tokens", "64") as running:
        yield running


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def complete(server: Server, **body: Any) -> dict[str, Any]:
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return dict(answer)


@torch.inference_mode()
def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def test_loglikelihood_is_that_of_transformers(server: Server, model: Any) -> None:
    """As lm-eval's local-completions does it: batches of token ids, cut to the continuation, without the one generated token; greedy is what
    has the same number as the best. Twice, since the second time the prompts are cached."""
    rng = Random(5)
    cases = [(rng.randrange(1, 60), rng.randrange(1, 30)) for _ in range(8)]
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n + m)] for n, m in cases]
    best = logprobs_of(model, prompts[0][: cases[0][0]])[-1].argmax()
    prompts[0] = [*prompts[0][: cases[0][0]], int(best)]  # a continuation that is greedy
    for _ in range(2):
        answer = complete(server, prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
        assert [c["index"] for c in answer["choices"]] == list(range(8))
        for (n, _), ids, choice in zip(cases, prompts, answer["choices"], strict=True):
            told = choice["logprobs"]
            numbers, tops = told["token_logprobs"][n:-1], told["top_logprobs"][n:-1]
            rows = logprobs_of(model, ids)[n - 1 : -1]
            want = [float(row[token]) for row, token in zip(rows, ids[n:], strict=True)]
            assert sum(numbers) == pytest.approx(sum(want), abs=1e-3)
            greedy = all(number == max(top.values()) for number, top in zip(numbers, tops, strict=True))
            assert greedy == all(int(row.argmax()) == token for row, token in zip(rows, ids[n:], strict=True))


def test_a_scored_prompt_without_output_and_its_text(server: Server, model: Any) -> None:
    text = "Ein Prompt: é und 世界."
    answer = complete(server, prompt=text, max_tokens=0, logprobs=0, echo=True)
    choice, ids = answer["choices"][0], byte_ids(text)
    assert (choice["text"], answer["usage"]["completion_tokens"]) == (text, 0)
    rows = logprobs_of(model, ids)
    want = [float(row[token]) for row, token in zip(rows[:-1], ids[1:], strict=True)]
    assert choice["logprobs"]["token_logprobs"] == [None, *(pytest.approx(w, abs=1e-3) for w in want)]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[: len("Ein Prompt: ") + 1] == list(range(len("Ein Prompt: ") + 1))
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(text) - 1


def test_penalties_and_bans_act_over_http(server: Server) -> None:
    """P3: the effect, not the status."""
    plain = complete(server, prompt="abc", max_tokens=24, temperature=0, ignore_eos=True, return_token_ids=True)
    ids = plain["choices"][0]["token_ids"]
    assert len(set(ids)) < len(ids), "the model repeats itself"
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    allowed = list(range(3, 40))
    never = complete(server, prompt="abc", frequency_penalty=2, presence_penalty=2, **fields)["choices"][0]
    assert len(set(never["token_ids"])) > len(set(ids))
    only = complete(server, prompt="abc", allowed_token_ids=allowed, **fields)["choices"][0]["token_ids"]
    assert set(only) <= set(allowed)
    banned = complete(server, prompt="abc", logit_bias={str(i): -100 for i in set(ids)}, **fields)["choices"][0]
    assert not set(banned["token_ids"]) & set(ids)
