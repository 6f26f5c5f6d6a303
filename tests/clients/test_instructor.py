"""Instructor, in the modes that it uses servers of this kind in."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from servers import Real, Scripted

instructor = pytest.importorskip("instructor", reason="the client 'instructor' is not installed")
openai = pytest.importorskip("openai", reason="the client 'openai' is not installed")

USER: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


def client(url: str, key: str, mode: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key=key, max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"])
def test_a_small_real_model_gives_valid_objects_at_the_first_try(real: Real, mode: str) -> None:
    sdk = client(real.v1, "none", instructor.Mode[mode])
    got = sdk.create(model=real.model, messages=USER, response_model=Weather, max_retries=0, max_tokens=100)
    assert isinstance(got, Weather)


def test_partial_objects_are_streamed(real: Real) -> None:
    sdk = client(real.v1, "none", instructor.Mode.TOOLS)
    parts = list(sdk.create_partial(model=real.model, messages=USER, response_model=Weather, max_tokens=100))
    assert len(parts) > 2
    Weather.model_validate(parts[-1].model_dump())


def test_several_objects_are_streamed(scripted: Scripted) -> None:
    items = [{"city": "Paris", "days": 1}, {"city": "Rome", "days": 2}]
    scripted.replies(scripted.call("IterableWeather", tasks=items))
    sdk = client(scripted.v1, scripted.key, instructor.Mode.TOOLS)
    got = list(sdk.create_iterable(model=scripted.model, messages=USER, response_model=Weather))
    assert [w.model_dump() for w in got] == items


def test_an_invalid_object_is_asked_for_again_with_the_reason(scripted: Scripted) -> None:
    scripted.replies(
        scripted.call("Weather", city="Paris", days=99),
        scripted.call("Weather", city="Paris", days=3),
    )
    sdk = client(scripted.v1, scripted.key, instructor.Mode.TOOLS)
    got = sdk.create(model=scripted.model, messages=USER, response_model=Weather, max_retries=1)
    assert got.days == 3


def test_a_cut_answer_is_reported_as_incomplete(scripted: Scripted) -> None:
    from instructor.core import IncompleteOutputException

    scripted.replies(scripted.call("Weather", city="Paris", days=3))
    sdk = client(scripted.v1, scripted.key, instructor.Mode.TOOLS)
    with pytest.raises(IncompleteOutputException):
        sdk.create(model=scripted.model, messages=USER, response_model=Weather, max_retries=0, max_tokens=30)
