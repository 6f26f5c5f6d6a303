"""EleutherAI's lm-evaluation-harness on tasks made here, each answer beside that of the same checkpoint in transformers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from servers import Real

lm_eval = pytest.importorskip("lm_eval", reason="the client 'lm-eval' is not installed")

CITIES = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}
TEXTS = ("The sea is calm today. " * 6, "Ein kurzer Satz: é und 世界.", "def f(x):\n    return x + 1\n")
Samples = list[dict[str, Any]]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By output type; read from files, without the network."""
    folder: Path = tmp_path_factory.mktemp("tasks")
    choices = list(CITIES.values())
    rows = [{"country": c, "choices": choices, "label": i, "city": city} for i, (c, city) in enumerate(CITIES.items())]
    for name, lines in (("cities", rows), ("texts", [{"text": text} for text in TEXTS])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def task(name: str, data: str, **more: Any) -> dict[str, Any]:
        files = {"test": str(folder / f"{data}.jsonl")}
        base = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        return {**base, "output_type": name, "num_fewshot": 0, **more}

    question = "The capital of {{country}} is"
    return {
        "multiple_choice": task(
            "multiple_choice", "cities", doc_to_text=question, doc_to_choice="{{choices}}", doc_to_target="label"
        ),
        "loglikelihood_rolling": task("loglikelihood_rolling", "texts", doc_to_text="", doc_to_target="{{text}}"),
        "generate_until": task(
            "generate_until",
            "cities",
            doc_to_text="What is the capital of {{country}}?",
            doc_to_target="{{city}}",
            generation_kwargs={"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
        ),
    }


@pytest.fixture(scope="module")
def transformers(real: Real, tasks: Any) -> Any:
    """``transformers(kind, chat)``: samples of the harness's own backend, in float32."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=real.folder, dtype="float32", device="cpu", batch_size=4)
    return cache(lambda kind, chat=False: evaluate(model, tasks[kind], chat))


def evaluate(backend: Any, task: dict[str, Any], chat: bool = False, **args: Any) -> Samples:
    told = lm_eval.simple_evaluate(backend, args or None, [task], apply_chat_template=chat, bootstrap_iters=0)
    return sorted(told["samples"][task["task"]], key=lambda sample: sample["doc_id"])


def served(real: Real, **args: Any) -> dict[str, Any]:
    return {"model": real.model, "base_url": f"{real.v1}/completions", "tokenizer": real.folder, **args}


def same_likelihoods(got: Samples, want: Samples) -> None:
    assert len(got) == len(want) > 0
    for mine, theirs in zip(got, want, strict=True):
        for (a,), (b,) in zip(mine["resps"], theirs["resps"], strict=True):
            if isinstance(b, tuple):
                assert a[1] == b[1]
                a, b = a[0], b[0]
            assert a == pytest.approx(b, abs=1e-3)


@pytest.mark.parametrize("batch", [{"batch_size": 1}, {"batch_size": 4, "num_concurrent": 2}])
def test_local_completions_has_the_loglikelihoods_of_transformers(
    real: Real, tasks: Any, transformers: Any, batch: Any
) -> None:
    got = evaluate("local-completions", tasks["multiple_choice"], **served(real, **batch))
    same_likelihoods(got, transformers("multiple_choice"))
    assert [s["acc"] for s in got] == [s["acc"] for s in transformers("multiple_choice")]


def test_local_completions_has_the_rolling_loglikelihoods_of_transformers(
    real: Real, tasks: Any, transformers: Any
) -> None:
    got = evaluate("local-completions", tasks["loglikelihood_rolling"], **served(real))
    same_likelihoods(got, transformers("loglikelihood_rolling"))


def test_local_completions_generates_what_transformers_does(real: Real, tasks: Any, transformers: Any) -> None:
    got = evaluate("local-completions", tasks["generate_until"], **served(real, batch_size=3))
    assert [s["resps"] for s in got] == [s["resps"] for s in transformers("generate_until")]


def test_local_chat_completions_generates_what_transformers_does(real: Real, tasks: Any, transformers: Any) -> None:
    address = f"{real.v1}/chat/completions"
    got = evaluate("local-chat-completions", tasks["generate_until"], True, **served(real, base_url=address))
    assert [s["resps"] for s in got] == [s["resps"] for s in transformers("generate_until", True)]
    assert "Paris" in got[0]["resps"][0][0]
