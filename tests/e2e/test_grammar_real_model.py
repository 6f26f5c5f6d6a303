"""Structured output on the real model (conformance case 27): masks under both loops, beside rows without a grammar."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from minisgl import Pipeline
from minisgl.api import Delta, GenerateRequest, GrammarSpec, SamplingParams
from minisgl_plugins.grammar.llguidance import LLGuidanceGrammar

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "people": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def request(seed: int, form: GrammarSpec | None, temperature: float = 1.0, max_tokens: int = 40) -> GenerateRequest:
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    return GenerateRequest(text="A city and its people, as JSON: ", sampling=sampling, grammar=form)


def outputs(llm: Any, requests: list[GenerateRequest]) -> list[tuple[str, str | None]]:
    uids = [llm.submit(r)[0] for r in requests]
    text, why = dict.fromkeys(uids, ""), dict.fromkeys(uids)
    while not all(why.values()):
        for delta in llm.step():
            if not isinstance(delta, Delta):
                continue
            text[delta.uid] += delta.text
            why[delta.uid] = delta.finish
    return [(text[u], why[u]) for u in uids]


@pytest.fixture(scope="module")
def both() -> Any:
    form = GrammarSpec("json_schema", json.dumps(SCHEMA), strict=True)
    choice = GrammarSpec("choice", '["yes", "no"]')
    batch = [request(i, form) for i in range(8)] + [
        request(1, None, 0, 8),
        request(2, choice, 0),
        request(1, None, 1, 8),
    ]
    found = {}
    for loop in ("sync", "overlap"):
        with Pipeline(loop=loop, show_progress=False) as llm:
            found[loop] = outputs(llm, batch)
            if loop == "sync":
                found["alone"] = outputs(llm, [batch[8]]) + outputs(llm, [batch[10]])
    return found


def test_27_every_finished_answer_is_what_the_schema_says(both: Any) -> None:
    for text, why in both["overlap"][:8]:
        assert why == "stop"
        value = json.loads(text)
        assert set(value) == {"city", "people"}
        assert value["city"] in ("Paris", "Rome")
        assert 0 <= value["people"] <= 99
    assert both["overlap"][9][0] in ("yes", "no")


def test_no_grammar_is_compiled_by_the_thread_that_steps_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    matcher = LLGuidanceGrammar.matcher

    def noted(self: Any, compiled: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return matcher(self, compiled)

    monkeypatch.setattr(LLGuidanceGrammar, "matcher", noted)
    forms = [GrammarSpec("json_schema", json.dumps(SCHEMA), strict=True), GrammarSpec("choice", '["yes", "no"]')]
    with Pipeline(show_progress=False) as llm:
        found = outputs(llm, [request(i, form) for i, form in enumerate(forms)])
    assert [why for _, why in found] == ["stop", "stop"]
    assert len(threads) == 2
    assert {name.split("_")[0] for name in threads} == {"minisgl-prepare"}


def test_both_loops_give_the_same_text(both: Any) -> None:
    assert both["sync"] == both["overlap"]


def test_rows_without_a_grammar_are_as_if_alone(both: Any) -> None:
    assert [both["sync"][8], both["sync"][10]] == both["alone"]
