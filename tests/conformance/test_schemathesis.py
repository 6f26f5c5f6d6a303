"""Requests that schemathesis makes up from the published description. ``--cases N``: how many in all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

MAIN = ("messages", "prompt", "input", "tokens")
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def operations(document: dict[str, Any], url: str) -> dict[str, Any]:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    made = (result.ok() for result in schema.get_all_operations())
    return {operation.label: operation for operation in made}


def _mend(body: dict[str, Any], example: dict[str, Any], model: str, made_up: str) -> None:
    """Parts that no schema can make fit one another: a model that is served, and unless ``all`` is made up, something to answer;
    ``few``: that and one of the other fields; ``streamed``: the same, as a stream."""
    if "model" in body:
        body["model"] = model
    if made_up != "all":
        kept = sorted(body) if made_up == "main" else sorted(body)[:1]
        mended = {name: body[name] for name in kept} | {n: example[n] for n in MAIN if n in example}
        body.clear()
        body.update(mended | ({"stream": True} if made_up == "streamed" else {}))


def run(operation: Any, mode: GenerationMode, cases: int, headers: dict[str, str], model: str) -> Counter[int]:
    """Returns: the statuses of the answers. A valid request asks for a ``model`` that is served; all ask for few tokens."""
    statuses: Counter[int] = Counter()
    example = next((b.definition["example"] for b in operation.body), {})

    @settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(operation.as_strategy(mode), st.sampled_from(["all", "main", "few", "streamed"]))
    def one(case: Any, made_up: str) -> None:
        if isinstance(case.body, dict):
            if mode is GenerationMode.POSITIVE:
                _mend(case.body, example, model, made_up)
            case.body.setdefault("max_output_tokens" if "responses" in operation.path else "max_tokens", 4)
        response = case.call_and_validate(checks=CHECKS, headers=headers, timeout=60)
        statuses[response.status_code] += 1

    one()
    return statuses


@pytest.mark.timeout(1800)
def test_requests_of_the_published_description(api, target, model_name, pytestconfig):
    """Valid and invalid ones of each route."""
    cases = pytestconfig.getoption("--cases")
    found = operations(api.http.get("/openapi.json").json(), target.url)
    bodies = [op for op in found.values() if op.body]
    statuses: Counter[int] = Counter()
    for op in found.values():
        if not op.body:
            statuses += run(op, GenerationMode.POSITIVE, 3, target.headers, model_name)
    each = -(-(cases - statuses.total()) // (2 * len(bodies)))
    for op in bodies:
        valid = run(op, GenerationMode.POSITIVE, each, target.headers, model_name)
        assert valid[200], (op.label, valid)
        statuses += valid + run(op, GenerationMode.NEGATIVE, each, target.headers, model_name)
    print(f"{statuses.total()} requests: {dict(statuses)}")
    assert statuses.total() >= cases
