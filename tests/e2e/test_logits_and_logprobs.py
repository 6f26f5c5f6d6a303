"""Penalties, bias, bans and log probabilities through the whole engine, against a loop over transformers' logits; in every way of
running: sync and overlap, any chunks, with preemptions, several outputs of a prompt (P1, P3, S8)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any

import pytest
import torch

from minisgl import LLM, RequestOutput, SamplingParams
from minisgl.base.errors import RequestError
from minisgl.base.types import Delta, GenerateRequest, GrammarSpec
from minisgl.client.outputs import Collected
from minisgl.testing.bytemodel import byte_ids, write_byte_model
from minisgl.testing.checkpoints import llama_checkpoint
from minisgl.testing.oracle import processed_logits

VOCAB, OUTPUT, EOS = 199, 24, 2
PROMPTS = [[Random(i).randrange(3, VOCAB) for _ in range(n)] for i, n in enumerate((5, 17, 33, 16, 40, 9))]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True}
ASKED = [
    SamplingParams(**GREEDY, repetition_penalty=1.3),
    SamplingParams(**GREEDY, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(**GREEDY, frequency_penalty=-0.8, repetition_penalty=1.1, logit_bias={7: 3.0, 11: -100}),
    SamplingParams(**GREEDY, bad_words=(), allowed_token_ids=tuple(range(3, 60)), frequency_penalty=2.0),
    SamplingParams(**GREEDY),
    SamplingParams(**GREEDY, stop_token_ids=tuple(range(0, VOCAB, 2)), min_tokens=OUTPUT - 1),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "m"
    llama_checkpoint(path, seed=5, tie_word_embeddings=False)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    @torch.inference_mode()
    def answer(prompt: list[int], p: SamplingParams) -> list[int]:
        out: list[int] = []
        while len(out) < OUTPUT:
            x = model(torch.tensor([prompt + out])).logits[0, -1]
            out.append(int(processed_logits(x, prompt, out, p).argmax()))
            if out[-1] in p.stop_token_ids:
                break
        return out

    answers = [answer(prompt, p) for prompt, p in zip(PROMPTS, ASKED, strict=True)]
    plain = [answer(prompt, SamplingParams(**GREEDY)) for prompt in PROMPTS]
    changed = [a != b for a, b in zip(answers, plain, strict=True)]
    assert changed == [True] * 4 + [False, True], "each set of parameters must matter"
    return answers


def llm(checkpoint: Path, **sections: Any) -> LLM:
    options: dict[str, Any] = {
        "device": "cpu",
        "kv": {"page_size": 4, "num_pages": 400},
        "limits": {"max_running": 8},
        "engine": {"threads": 1, "validate": "audit", "seed": 3},
    }
    return LLM(checkpoint, show_progress=False, **(options | sections))


WAYS: dict[str, dict[str, Any]] = {
    "sync": {"loop": "sync"},
    "overlap": {"loop": "overlap"},
    "small chunks": {"loop": "overlap", "limits": {"max_running": 8, "batch_tokens": 8}},
    "preemptions": {
        "loop": "overlap",
        "kv": {"page_size": 4, "num_pages": 40},
        "scheduler": {"use": "chunked", "chunked": {"reserve": 0.05}},
    },
    "one at a time": {"loop": "overlap", "limits": {"max_running": 1}},
}


@pytest.mark.parametrize("way", WAYS)
def test_processed_greedy_tokens_are_those_of_a_plain_loop(
    checkpoint: Path, expected: list[list[int]], way: str
) -> None:
    """S8: the penalties of a step know the token of the step before, however steps overlap; P1: each row takes its own argmax,
    beside rows that sample."""
    with llm(checkpoint, **WAYS[way]) as engine:
        prompts = [tuple(p) for p in PROMPTS]
        sampled = SamplingParams(temperature=1.2, max_tokens=OUTPUT, ignore_eos=True)
        for _ in range(2):  # the second time from the cache, in slots that others have had
            got = engine.generate([*prompts, (9, 8, 7)], [*ASKED, sampled])
            assert [list(o.ids) for o in got[:-1]] == expected
        if way == "preemptions":
            assert engine.pipeline.engine.stats()["preemptions"] > 0


def test_the_repetition_penalty_of_a_generation_config_is_a_default(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    model = tmp_path / "m"
    copytree(checkpoint, model)
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**config, "repetition_penalty": 1.3}))
    plain, own = SamplingParams(**GREEDY), SamplingParams(**GREEDY, repetition_penalty=1.0)
    with llm(model) as engine, llm(checkpoint) as without:
        (first,), (neutral,) = engine.generate([tuple(PROMPTS[0])], plain), engine.generate([tuple(PROMPTS[0])], own)
        assert list(first.ids) == expected[0]
        assert neutral.ids == without.generate([tuple(PROMPTS[0])], plain)[0].ids != first.ids


def test_every_output_of_a_prompt_has_its_own_history(checkpoint: Path, expected: list[list[int]]) -> None:
    with llm(checkpoint) as engine:
        for prompt, p, want in zip(PROMPTS[:3], ASKED[:3], expected[:3], strict=True):
            assert [list(o.ids) for o in engine.generate(tuple(prompt), p, n=3)] == [want] * 3


def reference(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab] log probabilities of what follows each token."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([list(ids)])).logits[0].float(), -1)


def check_output(out: RequestOutput, prompt: Sequence[int], model: Any, k: int) -> None:
    assert out.logprobs is not None
    assert [t.token.id for t in out.logprobs] == list(out.ids)
    want = reference(model, [*prompt, *out.ids])[len(prompt) - 1 :]
    for told, row in zip(out.logprobs, want, strict=False):
        assert told.token.logprob == pytest.approx(float(row[told.token.id]), abs=1e-3)
        assert told.rank == 1 + int((row > row[told.token.id] + 1e-5).sum())
        assert [c.id for c in told.top] == row.topk(k).indices.tolist()
        assert [c.logprob for c in told.top] == pytest.approx(row.topk(k).values.tolist(), abs=1e-3)
        same = [c.logprob for c in told.top if c.id == told.token.id]
        assert same in ([], [told.token.logprob]), "the same number, bit by bit"


@pytest.mark.parametrize("way", ["sync", "overlap", "small chunks", "preemptions"])
def test_logprobs_are_those_of_transformers_before_anything_changes_them(
    checkpoint: Path, model: Any, way: str
) -> None:
    """A7: every token has its own alternatives. From the logits before penalties and temperature; rows that ask for more or fewer
    alternatives, or none, run beside one another."""
    asked = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.5, max_tokens=9, ignore_eos=True, logprobs=5, frequency_penalty=2.0, top_k=20),
        SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
        SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, logprobs=0, seed=4, logit_bias={5: 9}),
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=4),
    ]
    with llm(checkpoint, **WAYS[way]) as engine:
        for _ in range(2):  # the second time the prompts are cached
            outputs = engine.generate([tuple(p) for p in PROMPTS], asked)
            for prompt, p, out in zip(PROMPTS, asked, outputs, strict=True):
                assert (out.logprobs is None) == (p.logprobs is None)
                assert (out.prompt_logprobs is None) == (p.prompt_logprobs is None)
                if p.logprobs is not None:
                    check_output(out, prompt, model, p.logprobs)
                if p.prompt_logprobs is not None:
                    check_prompt(out, prompt, model, p.prompt_logprobs)


def check_prompt(out: RequestOutput, prompt: Sequence[int], model: Any, k: int) -> None:
    told = out.prompt_logprobs
    assert told is not None
    assert [t.token.id for t in told] == list(prompt)
    assert (told[0].token.logprob, told[0].top) == (None, ())
    assert out.usage.cached_tokens == 0, "a prompt that is scored is computed"
    want = reference(model, prompt)
    for at, t in enumerate(told[1:], 1):
        row = want[at - 1]
        assert t.token.logprob == pytest.approx(float(row[prompt[at]]), abs=1e-3)
        assert [c.id for c in t.top] == row.topk(k).indices.tolist()


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_every_output_of_a_scored_prompt_tells_it_and_it_is_scored_once(
    checkpoint: Path, model: Any, cache: str
) -> None:
    prompt = tuple(PROMPTS[4])
    params = SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=2)
    with llm(checkpoint, cache=cache, limits={"max_running": 8, "batch_tokens": 16}) as engine:
        outputs = engine.generate(prompt, params, n=4)
        admitted = engine.pipeline.engine.stats()["cached_tokens_total"]
    check_prompt(outputs[0], prompt, model, 2)
    assert {o.prompt_logprobs for o in outputs} == {outputs[0].prompt_logprobs}
    for out in outputs:
        check_output(out, prompt, model, 1)
    assert admitted == (3 * 36 if cache == "radix" else 0)


def test_what_a_scored_prompt_computed_is_cached_for_others(checkpoint: Path) -> None:
    with llm(checkpoint) as engine:
        prompt = tuple(PROMPTS[4])
        engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1))
        out = engine.generate(prompt, SamplingParams(max_tokens=1))[0]
        assert out.usage.cached_tokens == 36


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias[0]"),
        (SamplingParams(logit_bias={5: 101.0}), "logit_bias.5"),
        (SamplingParams(allowed_token_ids=(-1,)), "allowed_token_ids[0]"),
        (SamplingParams(stop_token_ids=(VOCAB,)), "stop_token_ids[0]"),
        (SamplingParams(min_tokens=9, max_tokens=8), "min_tokens"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(presence_penalty=2.5), "presence_penalty"),
        (SamplingParams(logprobs=21), "logprobs"),
        (SamplingParams(bad_words=("x",)), "bad_words"),  # there is no tokenizer
        (SamplingParams(logits={"nobody": 1}), "logits.nobody"),
    ],
)
def test_a11_what_no_row_could_have_is_refused(checkpoint: Path, params: SamplingParams, param: str) -> None:
    with llm(checkpoint) as engine, pytest.raises(RequestError) as refused:
        engine.generate((5, 6), params)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_a_grammar_has_the_last_word_and_scores_know_nothing_of_it(tmp_path: Path, loop: str) -> None:
    """Penalties, bias and min_tokens act within what the grammar allows; where it allows only the end, the output ends."""
    from transformers import AutoModelForCausalLM

    folder = write_byte_model(tmp_path / "m", 256, weights=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    grammar = GrammarSpec("choice", '["axx", "bxx"]')
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=9, frequency_penalty=2.0, logprobs=0)
    biased = [replace(params, logit_bias={byte_ids(c)[0]: 50.0}) for c in "ab"]
    with llm(folder, loop=loop) as engine:
        uids = [
            engine.pipeline.submit(GenerateRequest(text="q", sampling=p, grammar=grammar))[0] for p in (*biased, params)
        ]
        got = {uid: Collected() for uid in uids}
        done: dict[int, RequestOutput] = {}
        while len(done) < len(uids):
            for delta in engine.pipeline.step():
                if isinstance(delta, Delta) and (out := got[delta.uid].add(delta)) is not None:
                    done[delta.uid] = out
    outputs = [done[uid] for uid in uids]
    assert [o.text for o in outputs[:2]] == ["axx", "bxx"]
    assert outputs[2].text in ("axx", "bxx")
    for out in outputs:
        assert (out.finish, len(out.ids)) == ("stop", 4)
        check_output(out, byte_ids("q"), model, 0)
