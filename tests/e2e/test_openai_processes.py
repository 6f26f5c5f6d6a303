"""The OpenAI API of a server in real processes, through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from minisgl.testing.bytemodel import EOS, byte_ids, write_byte_model
from minisgl.testing.server import Server, wait_until

USER: list[Any] = [{"role": "user", "content": "hi"}]
ADMIN = {"Authorization": "Bearer boss"}


class Scripted:
    def __init__(self, path: Path) -> None:
        self.script = path / "script.json"
        self.hold = path / "hold"
        self.script.write_text("{}")
        options = ["--model", str(write_byte_model(path / "model", 256)), "--model.served-names", "org/name"]
        options += ["--executor", "scripted", "--executor.scripted.script", str(self.script)]
        options += ["--executor.scripted.hold", str(self.hold), "--server.admin-key", "boss"]
        self.server = Server(*options, "--server.api-key", "secret", "--text.workers", "2")

    def replies(self, *texts: str, **script: Any) -> None:
        """The next requests, in order of admission, get these texts and EOS."""
        new = self.script.with_suffix(".new")
        new.write_text(json.dumps({"in_order": [[*byte_ids(t), EOS] for t in texts], **script}))
        new.replace(self.script)  # at once: the engine may read at any time

    def stats(self) -> dict[str, Any]:
        status, value = self.server.get("/stats", headers=ADMIN)
        assert status == 200, value
        return dict(value)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    made = Scripted(tmp_path_factory.mktemp("openai"))
    with made.server:
        yield made


@pytest.fixture(scope="module")
def sdk(scripted: Scripted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.server.url}/v1", api_key="secret", max_retries=0, timeout=20) as client:
        yield client


def test_stream_and_whole_answer_are_the_same(scripted: Scripted, sdk: openai.OpenAI) -> None:
    text = "héllo 👩‍👩‍👧 世界"
    scripted.replies(text, text)
    whole = sdk.chat.completions.create(model="org/name", messages=USER)
    with sdk.chat.completions.stream(model="org/name", messages=USER, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert whole.choices[0].message.content == final.choices[0].message.content == text
    assert whole.choices[0].finish_reason == final.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert final.usage is not None
    count = len(text.encode()) + 1
    assert whole.usage.completion_tokens == final.usage.completion_tokens == count


def test_choices_and_prompts_have_their_indexes(scripted: Scripted, sdk: openai.OpenAI) -> None:
    scripted.replies("one", "another", "third")
    stream = sdk.chat.completions.stream(model="org/name", messages=USER, n=3)
    with stream as events:
        final = events.get_final_completion()
    assert sorted(c.message.content or "" for c in final.choices) == ["another", "one", "third"]
    scripted.replies()  # prompts answer themselves
    got = sdk.completions.create(model="org/name", prompt=["a", "bc"], n=2)
    assert [(c.index, c.text) for c in got.choices] == [(0, "a"), (1, "a"), (2, "bc"), (3, "bc")]
    assert got.usage is not None
    assert got.usage.prompt_tokens == 3


def test_stop_strings_and_echo(scripted: Scripted, sdk: openai.OpenAI) -> None:
    scripted.replies("say END more")
    got = sdk.completions.create(model="org/name", prompt="x", stop=["END"], echo=True, extra_body={"seed": 1})
    assert got.choices[0].text == "xsay "
    assert got.choices[0].model_dump()["stop_reason"] == "END"


def test_errors_arrive_as_the_clients_own_exceptions(scripted: Scripted, sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens") as caught:
        sdk.completions.create(model="org/name", prompt="x" * 300)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    with pytest.raises(openai.AuthenticationError):
        sdk.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="org/name", messages=USER, functions=[{"name": "f"}])
    assert refused.value.code == "unsupported_parameter"


def test_models_and_tokenize(scripted: Scripted, sdk: openai.OpenAI) -> None:
    assert [m.id for m in sdk.models.list()] == ["org/name"]
    assert sdk.models.retrieve("org/name").id == "org/name"
    headers = {"Authorization": "Bearer secret"}
    _, tokens = scripted.server.post("/tokenize", {"prompt": "héllo"}, headers=headers)
    assert tokens["tokens"] == byte_ids("héllo")
    _, text = scripted.server.post("/detokenize", {"tokens": tokens["tokens"]}, headers=headers)
    assert text == {"prompt": "héllo"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_while_the_engine_stands_still(scripted: Scripted, stream: bool) -> None:
    scripted.replies("x" * 200, step_delay_s=0.05)  # 10 s if nobody aborts it
    scripted.hold.touch()
    url, body = f"{scripted.server.url}/v1/chat/completions", {"messages": USER, "stream": stream, "ignore_eos": True}
    headers = {"Authorization": "Bearer secret"}
    with pytest.raises(httpx.ReadTimeout):  # the client gives up and closes its connection
        httpx.post(url, json=body, headers=headers, timeout=0.3)
    scripted.hold.unlink()
    wait_until(lambda: scripted.stats()["running"] == 0, 2)
    assert scripted.stats()["locked"] == 0
