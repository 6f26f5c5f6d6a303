"""/v1/responses through the openai SDK and as raw bodies, with an engine that replays given tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pydantic
import pytest

from minisgl.base.errors import RequestError
from minisgl_plugins.frontend.openai_fields import OpenAISettings
from minisgl_plugins.frontend.responses_request import read_response

EOS = 1
URL = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "f", "description": "Does f.", "parameters": PARAMETERS}
OTHER = {"type": "function", "name": "g"}
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"a": oops}}\n</tool_call>'
THOUGHT = "<think>\nLet me see.\n</think>\n\n"


@pytest.fixture
def hermes(family: Any) -> Any:
    return family("hermes")


@pytest.fixture
def client(hermes: Any) -> Any:
    with openai.OpenAI(base_url=hermes.v1, api_key="none", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
def ask(hermes: Any, vocabulary: Any) -> Callable[..., httpx.Response]:
    """The answer to a request that the model answers with ``output``. ``end``: EOS follows."""

    def go(output: str = "", *, end: bool = True, **fields: Any) -> httpx.Response:
        hermes.replies([*vocabulary.ids(output), *([EOS] if end else [])])
        hermes.admitted.clear()
        return httpx.post(hermes.url + URL, json={"input": "hi", **fields}, timeout=20)

    return go


def whole(r: httpx.Response) -> dict[str, Any]:
    assert r.status_code == 200, r.text
    assert r.headers["content-type"] == "application/json"
    return dict(r.json())


def events(r: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream, after a look at its frames."""
    assert r.status_code == 200, r.text
    assert r.headers["content-type"] == "text/event-stream; charset=utf-8"
    every = r.text.removesuffix("\n\n").split("\n\n")
    frames = [frame.split("\n") for frame in every if not frame.startswith(":")]
    assert all(len(frame) == 2 and frame[0][:7] == "event: " and frame[1][:6] == "data: " for frame in frames)
    told = [json.loads(data[6:]) for _, data in frames]
    assert [event[7:] for event, _ in frames] == [e["type"] for e in told]
    assert [e["sequence_number"] for e in told] == list(range(len(told)))
    return told


def kinds(told: list[dict[str, Any]]) -> list[str]:
    """Types of events, those in a row once."""
    out: list[str] = []
    for e in told:
        if not out or out[-1] != e["type"]:
            out.append(e["type"])
    return [kind.removeprefix("response.") for kind in out]


def built(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as the events build it. Each event is checked against what those before it said."""
    output: list[dict[str, Any]] = []
    done: set[int] = set()
    for e in told:
        at, kind = e.get("output_index"), e["type"].removeprefix("response.")
        if at is None:
            continue
        if kind == "output_item.added":
            assert at == len(output) == len(done), "items come one after another"
            assert e["item"]["status"] == "in_progress"
            output.append(json.loads(json.dumps(e["item"])))
            continue
        item = output[at]
        assert at not in done
        assert e.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"].append(e["part"])
        elif kind == "output_text.delta":
            item["content"][e["content_index"]]["text"] += e["delta"]
            item["content"][e["content_index"]]["logprobs"] += e["logprobs"]
        elif kind == "reasoning_text.delta":
            item["content"] = item["content"] or [{"type": "reasoning_text", "text": ""}]
            item["content"][e["content_index"]]["text"] += e["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += e["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert e["text"] == item["content"][e["content_index"]]["text"]
        elif kind == "content_part.done":
            assert e["part"] == item["content"][e["content_index"]]
        elif kind == "function_call_arguments.done":
            assert (e["name"], e["arguments"]) == (item["name"], item["arguments"])
        else:
            assert kind == "output_item.done", kind
            status = e["item"]["status"]
            assert status in ("completed", "incomplete")
            item |= {k: e["item"][k] for k in ("status", "encrypted_content") if k in e["item"]}
            assert e["item"] == item
            done.add(at)
    assert len(done) == len(output)
    return output


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Without what two answers never share: their ids and times, and the tokens that the second finds in the cache."""
    text = re.sub(r'"((?:resp|msg|rs|fc|call)_)\w+"', r'"\1"', json.dumps(response))
    text = re.sub(r'"cached_tokens": \d+|"(created|completed)_at": \d+', '"": 0', text)
    return dict(json.loads(text))


# -------------------------------------------------------------------------------------------------------- whole answers


def test_a_response(served: Any, sdk: Any, vocabulary: Any) -> None:
    served.replies([*vocabulary.ids("Hello"), EOS])
    r = sdk.responses.create(model="org/name", input="hi", instructions="Be brief.", metadata={"k": "v"}, user="me")
    assert (r.object, r.status, r.model, r.output_text) == ("response", "completed", "org/name", "Hello")
    assert (r.error, r.incomplete_details, r.previous_response_id) == (None, None, None)
    assert (r.instructions, r.metadata, r.user, r.tools, r.tool_choice) == ("Be brief.", {"k": "v"}, "me", [], "auto")
    assert (r.temperature, r.top_p, r.parallel_tool_calls, r.truncation) == (1.0, 1.0, True, "disabled")
    assert r.text.format.type == "text"
    assert r.model_extra["store"] is False
    (item,) = r.output
    assert (item.type, item.role, item.status, item.id[:4]) == ("message", "assistant", "completed", "msg_")
    assert [(c.type, c.text, c.annotations) for c in item.content] == [("output_text", "Hello", [])]
    prompt = served.tokenizer.decode(served.admitted[0].ids.tolist(), True)
    assert prompt == "system\nBe brief.\nuser\nhi\nassistant\n"
    assert (r.usage.output_tokens, r.usage.output_tokens_details.reasoning_tokens) == (6, 0)
    assert r.usage.input_tokens == len(served.admitted[0].ids)
    assert r.usage.total_tokens == r.usage.input_tokens + 6


def test_cached_tokens_are_counted(served: Any, sdk: Any) -> None:
    first, again = (sdk.responses.create(model="org/name", input="z" * 100).usage for _ in range(2))
    assert first.input_tokens_details.cached_tokens < 32
    assert again.input_tokens_details.cached_tokens >= 96


def test_the_id_is_that_of_the_request(ask: Any) -> None:
    r = ask("a", request_id="mine-1")
    assert (r.headers["x-request-id"], r.json()["id"]) == ("mine-1", "resp_mine-1")


def test_a_cut_answer_is_incomplete(ask: Any) -> None:
    r = whole(ask("abcdef", max_output_tokens=3))
    assert (r["status"], r["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (r["output"][0]["status"], r["output"][0]["content"][0]["text"]) == ("incomplete", "abc")
    assert (r["max_output_tokens"], r["completed_at"]) == (3, None)


def test_25_a_call_that_breaks_is_text(ask: Any) -> None:
    (message,) = whole(ask(BROKEN, tools=[TOOL]))["output"]
    assert message["content"][0]["text"] == BROKEN


def test_a_call_that_is_cut_is_incomplete(ask: Any) -> None:
    fields = {"tools": [TOOL, OTHER], "max_output_tokens": len(CALL_G + CALL_F) - 18}
    g, f = whole(ask(CALL_G + CALL_F, **fields))["output"]
    assert (g["status"], g["arguments"]) == ("completed", "{}")
    assert (f["status"], f["arguments"]) == ("incomplete", '{"a"')


def test_an_empty_answer_is_a_message_all_the_same(ask: Any) -> None:
    (item,) = whole(ask(""))["output"]
    assert (item["status"], item["content"][0]["text"]) == ("completed", "")


def test_reasoning_is_an_item_before_the_message(ask: Any) -> None:
    r = whole(ask(THOUGHT + "Yes."))
    thought, message = r["output"]
    assert (thought["type"], thought["id"][:3], thought["summary"]) == ("reasoning", "rs_", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert "encrypted_content" not in thought
    assert message["content"][0]["text"] == "Yes."
    assert r["usage"]["output_tokens_details"]["reasoning_tokens"] > 11


def test_calls_are_items(ask: Any) -> None:
    r = whole(ask(f"Now.\n{CALL_F}\n{CALL_G}", tools=[TOOL, OTHER]))
    message, f, g = r["output"]
    assert r["status"] == "completed"
    assert message["content"][0]["text"] == "Now.\n"
    assert [(c["type"], c["name"], json.loads(c["arguments"]), c["status"]) for c in (f, g)] == [
        ("function_call", "f", {"a": 1}, "completed"),
        ("function_call", "g", {}, "completed"),
    ]
    assert f["id"][:3] == "fc_"
    assert f["call_id"][:5] == "call_"
    assert f["call_id"] != g["call_id"]
    assert r["tools"] == [{**TOOL, "strict": False}, {**OTHER, "strict": False}]


# -------------------------------------------------------------------------------------------------------------- streams

REPLIES = {
    "text": ("Hello", {}),
    "nothing": ("", {}),
    "reasoning": (THOUGHT + "Yes.", {}),
    "only reasoning": ("<think>\nLet me see.\n</think>", {}),
    "calls": (f"Now.\n{CALL_F}\n{CALL_G}", {"tools": [TOOL, OTHER]}),
    "reasoning and a call": (THOUGHT + CALL_F, {"tools": [TOOL]}),
    "one call": (f"{CALL_F}\n{CALL_G}", {"tools": [TOOL, OTHER], "parallel_tool_calls": False}),
    "log probabilities": (f"Now.\n{CALL_F}", {"tools": [TOOL], "include": ["message.output_text.logprobs"]}),
    "cut text": ("abcdef", {"max_output_tokens": 3}),
    "cut reasoning": (THOUGHT, {"max_output_tokens": 12}),
    "cut call": (CALL_F, {"tools": [TOOL], "max_output_tokens": 48}),
    "a call that breaks": (BROKEN, {"tools": [TOOL]}),
    "stop string": ("abcdef", {"stop": ["cd"]}),
    "carried reasoning": (THOUGHT + "Yes.", {"include": ["reasoning.encrypted_content"]}),
}


@pytest.mark.parametrize("reply", REPLIES)
def test_a_stream_builds_the_same_response(ask: Any, reply: str) -> None:
    output, fields = REPLIES[reply]
    answer = whole(ask(output, **fields))
    told = events(ask(output, stream=True, **fields))
    first, second, last = told[0], told[1], told[-1]
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    assert first["response"] == second["response"]
    assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
    assert last["type"] == f"response.{answer['status']}"
    assert {e["response"]["id"] for e in (first, second, last)} == {last["response"]["id"]}
    assert plain(last["response"]) == plain(answer)
    assert built(told) == last["response"]["output"]


def test_events_of_each_item_come_in_their_order(ask: Any) -> None:
    told = events(ask(f"{THOUGHT}Now.\n{CALL_F}", tools=[TOOL], stream=True))
    assert kinds(told) == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]


def test_arguments_that_a_grammar_holds_come_as_they_are_written(ask: Any) -> None:
    told = events(ask(CALL_F, tools=[TOOL], tool_choice="required", stream=True))
    deltas = [e["delta"] for e in told if e["type"] == "response.function_call_arguments.delta"]
    assert deltas == [*'{"a": 1}']


@pytest.mark.parametrize(
    "reply", ["text", "nothing", "reasoning", "calls", "reasoning and a call", "a call that breaks"]
)
def test_the_sdk_collects_the_stream(hermes: Any, client: Any, vocabulary: Any, reply: str) -> None:
    output, fields = REPLIES[reply]
    hermes.replies(*[[*vocabulary.ids(output), EOS]] * 2)
    answer = client.responses.create(model="org/name", input="hi", **fields)
    with client.responses.stream(model="org/name", input="hi", **fields) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == answer.output_text
    assert [(i.type, getattr(i, "arguments", None)) for i in final.output] == [
        (i.type, getattr(i, "arguments", None)) for i in answer.output
    ]


def test_every_event_is_one_of_the_sdk(hermes: Any, client: Any, vocabulary: Any) -> None:
    """With the types of its fields: the SDK itself builds its objects unchecked."""
    output, fields = REPLIES["calls"]
    hermes.replies([*vocabulary.ids(THOUGHT + output), EOS], vocabulary.ids("ab"))
    streams = [
        client.responses.create(model="org/name", input="hi", stream=True, **fields),
        client.responses.create(model="org/name", input="hi", stream=True, max_output_tokens=2, top_logprobs=2),
    ]
    for stream in streams:
        for event in stream:
            assert type(event).__name__ != "BaseModel"
            type(event).model_validate(event.model_dump(by_alias=True, exclude_unset=True))


def test_30_an_error_in_a_stream_ends_it_as_failed(served: Any, api: Any, until: Any, vocabulary: Any) -> None:
    served.replies(vocabulary.ids("abcdef"))
    served.hold(passes=2)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(api.post, URL, {"input": "hi", "stream": True})
        until(lambda: len(served.admitted) == 1 and served._passes == 0)
        served.give_up(served.admitted[0].uid, "no room for this request")
        *told, error, failed = events(answer.result())
    assert "".join(e["delta"] for e in told if e["type"] == "response.output_text.delta") == "ab"
    why = "no room for this request"
    assert (error["type"], error["code"], error["message"], error["param"]) == ("error", "internal_error", why, None)
    assert failed["type"] == "response.failed"
    response = failed["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": why})
    assert (response["id"], response["usage"]) == (told[0]["response"]["id"], None)
    assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == ("incomplete", "ab")


def test_30_a_stream_whose_head_went_before_the_first_output_fails_as_well(start: Any) -> None:
    served = start(server={"sse_header_delay_s": 0.01})
    served.hold()
    with httpx.stream("POST", served.url + URL, json={"input": "hi", "stream": True}, timeout=20) as r:
        frames = r.iter_text()
        head = next(frames)
        served.give_up(served.admitted[0].uid, "no room")
        text = head + "".join(frames)
    told = events(httpx.Response(200, headers=r.headers, text=text))
    assert kinds(told) == ["created", "in_progress", "error", "failed"]
    assert told[-1]["response"]["output"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_30_an_error_before_the_first_token_has_its_status(served: Any, api: Any, until: Any, stream: bool) -> None:
    served.hold()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(api.post, URL, {"input": "hi", "stream": stream})
        until(lambda: len(served.admitted) == 1)
        served.give_up(served.admitted[0].uid, "no room")
        assert api.refused(answer.result(), 500, "internal_error", None) == "no room"


# ---------------------------------------------------------------------------------------------------------------- input


def prompt(hermes: Any) -> str:
    return str(hermes.tokenizer.decode(hermes.admitted[0].ids.tolist(), True))


def test_items_are_messages(hermes: Any, ask: Any) -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "d"}]},
        {"type": "message", "role": "user", "content": "e"},
    ]
    whole(ask("x", input=items, instructions="Be brief."))
    assert prompt(hermes) == (
        "system\nBe brief.\n\nBe kind.\nuser\na\nb\nassistant\nc\nassistant\nd\nuser\ne\nassistant\n"
    )


def test_what_follows_one_another_is_one_message_of_the_assistant(hermes: Any, ask: Any) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "Now."},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "function_call", "call_id": "3", "name": "g", "arguments": "{}"},
    ]
    whole(ask("x", input=items))
    assert prompt(hermes) == (
        'user\na\nassistant\n[hm]Now.(f:{"a": 1})(g:{})\ntool\none\ntool\ntwo\nassistant\n[so](g:{})\nassistant\n'
    )


def test_a_function_is_called_and_its_output_answered(hermes: Any, client: Any, vocabulary: Any) -> None:
    """The loop of every agent: what came out goes in again."""
    hermes.replies([*vocabulary.ids(THOUGHT + CALL_F), EOS], [*vocabulary.ids("It is 42."), EOS])
    hermes.admitted.clear()
    items: list[Any] = [{"role": "user", "content": "hi"}]
    first = client.responses.create(model="org/name", input=items, tools=[TOOL])
    items += first.output
    call = first.output[-1]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
    second = client.responses.create(model="org/name", input=items, tools=[TOOL])
    assert second.output_text == "It is 42."
    asked = hermes.tokenizer.decode(hermes.admitted[1].ids.tolist(), True)
    assert asked.endswith('user\nhi\nassistant\n[Let me see.](f:{"a": 1})\ntool\n42\nassistant\n')


def test_reasoning_comes_back_as_encrypted_content(hermes: Any, ask: Any) -> None:
    """For clients that keep nothing else of it."""
    thought, message = whole(ask(THOUGHT + "Yes.", include=["reasoning.encrypted_content"]))["output"]
    kept = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": thought["encrypted_content"]}
    foreign = {**kept, "encrypted_content": "gAAAAABm"}
    broken = [{**kept, "encrypted_content": f"text:{code}"} for code in ("%", "\u00e9", "/w==")]
    user = {"role": "user", "content": "a"}
    whole(ask("x", input=[user, kept, message, user]))
    assert prompt(hermes) == "user\na\nassistant\n[Let me see.]Yes.\nuser\na\nassistant\n"
    whole(ask("x", input=[user, foreign, *broken, message]))
    assert prompt(hermes) == "user\na\nassistant\nYes.\nassistant\n"


def test_tools_of_other_types_are_left_out(hermes: Any, ask: Any) -> None:
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [OTHER]}, {"type": "custom"}, TOOL]
    r = whole(ask(CALL_F, tools=tools, tool_choice="auto"))
    assert r["tools"] == [{**TOOL, "strict": False}]
    assert r["output"][0]["name"] == "f"
    assert prompt(hermes).count('"type": "function"') == 1
    assert whole(ask("x", tools=tools[:3]))["tools"] == []
    assert whole(ask("x", tools=[]))["tools"] == []


def test_choices_of_tools(hermes: Any, ask: Any) -> None:
    tools = [TOOL, OTHER]
    named = {"type": "function", "name": "g"}
    r = whole(ask(CALL_G, tools=tools, tool_choice=named))
    assert (r["tool_choice"], r["output"][0]["name"]) == (named, "g")
    assert whole(ask(CALL_F, tools=tools, tool_choice="required"))["output"][0]["name"] == "f"
    assert whole(ask(CALL_F, tools=tools, tool_choice="none"))["output"][0]["type"] == "message"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named, {"type": "web_search"}]}
    whole(ask(CALL_G, tools=tools, tool_choice=allowed))
    assert '"f"' not in prompt(hermes)


def test_effort_and_verbosity(hermes: Any, ask: Any) -> None:
    r = whole(ask("x", reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"}))
    assert r["reasoning"] == {"effort": "low", "summary": "auto"}
    assert r["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert prompt(hermes).endswith("<think>\n")
    whole(ask("x", reasoning={"effort": "none"}))
    assert prompt(hermes).endswith("assistant\n")


def test_log_probabilities_are_of_the_text(ask: Any) -> None:
    r = whole(ask(f"{THOUGHT}héllo\n{CALL_F}", tools=[TOOL], top_logprobs=2))
    told = r["output"][1]["content"][0]["logprobs"]
    text = bytes(b for entry in told for b in entry["bytes"]).decode()
    assert text.removeprefix("\n\n") == r["output"][1]["content"][0]["text"] == "héllo\n"  # newlines end the thought
    assert all(set(e) == {"token", "bytes", "logprob", "top_logprobs"} and len(e["top_logprobs"]) == 2 for e in told)
    assert r["top_logprobs"] == 2
    r = whole(ask("a", include=["message.output_text.logprobs"]))
    assert [e["top_logprobs"] for e in r["output"][0]["content"][0]["logprobs"]] == [[]]
    assert whole(ask("a", top_logprobs=0))["output"][0]["content"][0]["logprobs"] == []


# ----------------------------------------------------------------------------------------------------- structured output


class Answer(pydantic.BaseModel):
    value: int


def test_parse(hermes: Any, client: Any, vocabulary: Any) -> None:
    reply = [*vocabulary.ids('{"value": 42}'), EOS]
    hermes.replies(reply, reply)
    r = client.responses.parse(model="org/name", input="hi", text_format=Answer)
    assert r.output_parsed == Answer(value=42)
    assert (r.text.format.type, r.text.format.name, r.text.format.strict) == ("json_schema", "Answer", True)
    with client.responses.stream(model="org/name", input="hi", text_format=Answer) as stream:
        assert stream.get_final_response().output_parsed == Answer(value=42)


def test_parse_has_the_arguments_of_a_strict_function(hermes: Any, client: Any, vocabulary: Any) -> None:
    class F(pydantic.BaseModel):
        a: int

    hermes.replies([*vocabulary.ids(CALL_F), EOS])
    tools = [openai.pydantic_function_tool(F, name="f")]
    r = client.responses.parse(model="org/name", input="hi", tools=tools)
    assert r.output[0].parsed_arguments == F(a=1)
    assert r.tools[0].strict is True


def test_json_object(hermes: Any, ask: Any) -> None:
    r = whole(ask("{}", text={"format": {"type": "json_object"}}))
    assert r["text"]["format"] == {"type": "json_object"}
    assert hermes.admitted[0].sampling.grammar


# -------------------------------------------------------------------------------------------------------------- refused

UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def form(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema, **fields}}}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": None}, "missing_required_parameter", "input"),
        ({"input": []}, "empty_array", "input"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": ["hi"]}, "invalid_type", "input[0]"),
        ({"input": [{}]}, "missing_required_parameter", "input[0].role"),
        ({"input": [{"role": "tool", "content": "a"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
        ({"input": [{"role": "user", "content": []}]}, "empty_array", "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "unsupported_value", "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "unsupported_value", "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "invalid_value", "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "unsupported_value", "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "missing_required_parameter", "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "missing_required_parameter", "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "missing_required_parameter", "input[0].output"),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, "missing_required_parameter", "input[0].content[0].text"),
        ({"input": "x" * 3000}, "context_length_exceeded", "input"),
        ({"instructions": 5}, "invalid_type", "instructions"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"prompt": {"id": "pmpt_1"}}, "unsupported_parameter", "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "unsupported_parameter", "context_management"),
        ({"moderation": {"model": "m"}}, "unsupported_parameter", "moderation"),
        ({"truncation": "auto"}, "unsupported_value", "truncation"),
        ({"truncation": "x"}, "invalid_value", "truncation"),
        ({"store": "no"}, "invalid_type", "store"),
        ({"messages": []}, "unsupported_parameter", "messages"),
        ({"max_tokens": 5}, "unsupported_parameter", "max_tokens"),
        ({"response_format": {"type": "text"}}, "unsupported_parameter", "response_format"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"max_output_tokens": 0}, "integer_below_min_value", "max_output_tokens"),
        ({"max_output_tokens": "5"}, "invalid_type", "max_output_tokens"),
        ({"max_output_tokens": 5000}, "context_length_exceeded", "input"),
        ({"max_tool_calls": 0}, "integer_below_min_value", "max_tool_calls"),
        ({"temperature": 2.1}, "decimal_above_max_value", "temperature"),
        ({"top_p": "1"}, "invalid_type", "top_p"),
        ({"top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
        ({"top_logprobs": True}, "invalid_type", "top_logprobs"),
        ({"stream_options": {}}, "invalid_value", "stream_options"),
        ({"include": ["x"]}, "invalid_value", "include[0]"),
        ({"metadata": 5}, "invalid_type", "metadata"),
        ({"metadata": {"a": {}}}, "invalid_type", "metadata.a"),
        ({"reasoning": {"effort": "much"}}, "invalid_value", "reasoning.effort"),
        ({"reasoning": {"summary": "x"}}, "invalid_value", "reasoning.summary"),
        ({"reasoning": {"mode": "pro"}}, "unsupported_parameter", "reasoning.mode"),
        ({"text": {"verbosity": 5}}, "invalid_type", "text.verbosity"),
        ({"text": {"format": {}}}, "missing_required_parameter", "text.format.type"),
        ({"text": {"format": {"type": "x"}}}, "invalid_value", "text.format.type"),
        (form(None), "missing_required_parameter", "text.format.schema"),
        (form(UNIQUE, strict=True), "invalid_json_schema", "text.format.schema"),
        ({**form({}), "regex": "a"}, "invalid_value", "regex"),
        ({**form({}), "tools": [TOOL], "tool_choice": "required"}, "invalid_value", "text.format"),
        ({"tools": [{"name": "f"}]}, "missing_required_parameter", "tools[0].type"),
        ({"tools": [{"type": "x"}, {"type": "function"}]}, "missing_required_parameter", "tools[1].name"),
        ({"tools": [TOOL, {"type": "x"}, TOOL]}, "invalid_value", "tools[2].name"),
        ({"tools": [{**TOOL, "parameters": {"type": "string"}}]}, "invalid_function_parameters", "tools[0].parameters"),
        (
            {"tools": [{"type": "x"}, {**TOOL, "parameters": 5}, {"type": "x"}, OTHER]},
            "invalid_function_parameters",
            "tools[1].parameters",
        ),
        (
            {"tools": [{"type": "x"}, {**TOOL, "parameters": UNIQUE, "strict": True}]},
            "invalid_function_parameters",
            "tools[1].parameters",
        ),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "no"}}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "unsupported_value", "tool_choice.type"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": [TOOL]}},
            "invalid_value",
            "tool_choice.mode",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "empty_array", "tool_choice.tools"),
    ],
)  # fmt: skip
def test_refused(hermes: Any, ask: Any, api: Any, fields: dict[str, Any], code: str, param: str) -> None:
    message = api.refused(ask(**fields), 400, code, param)
    assert not re.search(r"max_completion_tokens|response_format|reasoning_effort|\.function", message) or code == (
        "unsupported_parameter"
    ), message
    assert hermes.admitted == []


def test_unknown_models_and_stored_responses_are_not_found(served: Any, sdk: Any, api: Any) -> None:
    with pytest.raises(openai.NotFoundError) as e:
        sdk.responses.create(model="none", input="hi")
    assert e.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve("resp_1")
    api.refused(api.http.get(URL), 405, "method_not_allowed", None)


def test_17_what_asks_for_nothing_is_accepted(ask: Any) -> None:
    fields = {
        "background": False,
        "store": True,
        "previous_response_id": None,
        "max_tool_calls": 3,
        "truncation": "disabled",
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "tool_choice": "auto",
        "include": ["file_search_call.results"],
        "reasoning": None,
        "text": None,
        "context_management": [],
    }
    r = whole(ask("a", **fields))
    assert (r["store"], r["safety_identifier"], r["prompt_cache_key"]) == (False, "s", "k")
    assert "service_tier" not in r


def test_unknown_fields_are_refused_if_configured(hermes: Any) -> None:
    settings = OpenAISettings(strict=True)
    known = {
        "input": "hi",
        "top_k": 1,
        "metadata": {},
        "text": {},
        "reasoning": {},
        "max_output_tokens": 1,
        "background": False,
    }
    assert read_response(known, hermes.engine.info, settings).call.common.max_tokens == 1
    with pytest.raises(RequestError) as e:
        read_response({**known, "foo": 1}, hermes.engine.info, settings)
    assert (e.value.code, e.value.param) == ("unknown_parameter", "foo")
