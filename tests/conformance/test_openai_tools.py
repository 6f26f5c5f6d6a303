"""Tools and reasoning over real HTTP, with an engine that replays given tokens. Numbers are those of the conformance list."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

EOS = 1
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
]
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.fixture
def ask(family: Any, vocabulary: Any, api: Any) -> Any:
    """``ask(family, output, stream=..., **fields)``: the response, or the chunks of a stream. ``end``: EOS follows."""

    def go(name: str, output: str, *, stream: bool = False, end: bool = True, **fields: Any) -> Any:
        served = family(name)
        served.replies([*vocabulary.ids(output), *([EOS] if end else [])])
        body = {"messages": USER, "stream": stream, **fields}
        r = httpx.post(f"{served.v1}/chat/completions", json=body, timeout=20)
        return api.chunks(r) if stream else r

    return go


def message(r: httpx.Response) -> dict[str, Any]:
    """Message of the only choice, with its finish_reason beside."""
    assert r.status_code == 200, r.text
    (choice,) = r.json()["choices"]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The deltas of one choice as a message, by the rules of the SDK's accumulator; checks their order."""
    out: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert out["finish_reason"] is None, "a chunk after the last"
            delta = choice["delta"]
            out["finish_reason"] = choice["finish_reason"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    out[name] = (out[name] or "") + delta[name]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(out["tool_calls"]):
                    assert set(call) == {"index", "id", "type", "function"}
                    assert call["function"]["arguments"] == ""
                    out["tool_calls"].append({**call, "function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    assert call["index"] == len(out["tool_calls"]) - 1
                    out["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return out


def calls(m: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in m.get("tool_calls", [])]


# ------------------------------------------------------------------------------------------------------- 22-25: tools


def test_22_text_and_two_calls(ask: Any) -> None:
    output = f"Let me see.\n{CALL_F}\n{CALL_G}"
    m = message(ask("hermes", output, tools=TOOLS))
    assert m["content"] == "Let me see.\n"
    assert m["finish_reason"] == "tool_calls"
    assert calls(m) == [("f", {"a": 1}), ("g", {})]
    ids = [c["id"] for c in m["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", i) for i in ids)
    assert all(set(c) == {"id", "type", "function"} for c in m["tool_calls"])
    streamed = joined(ask("hermes", output, stream=True, tools=TOOLS))
    assert calls(streamed) == calls(m)
    assert [c["index"] for c in streamed["tool_calls"]] == [0, 1]
    assert (streamed["content"], streamed["finish_reason"]) == (m["content"], "tool_calls")


def test_22_arguments_stream_as_they_come_where_a_grammar_holds_them(ask: Any) -> None:
    chunks = ask("hermes", CALL_F, stream=True, tools=TOOLS, tool_choice="required")
    deltas = [c["choices"][0]["delta"] for c in chunks[1:-1]]
    assert [d["tool_calls"][0]["function"]["arguments"] for d in deltas] == ["", *'{"a": 1}']


def test_22_the_sdk_collects_the_calls(family: Any, vocabulary: Any) -> None:
    served = family("hermes")
    served.replies([*vocabulary.ids(f"{CALL_F}\n{CALL_G}"), EOS])
    tools: Any = TOOLS
    sdk = openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0)
    with sdk, sdk.chat.completions.stream(model="org/name", messages=USER, tools=tools) as stream:  # type: ignore[arg-type]
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    assert choice.message.tool_calls is not None
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("f", '{"a": 1}'),
        ("g", "{}"),
    ]


def test_22_a_pure_tool_turn_has_null_content(ask: Any) -> None:
    assert message(ask("hermes", CALL_F, tools=TOOLS))["content"] is None


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("llama3-json", '{"name": "f", "parameters": {"a": 1, "s": "01"}}'),
        ("pythonic", '[f(a=1, s="01")]'),
        (
            "qwen3-xml",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n01\n</parameter>\n</function>\n</tool_call>",
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "s": "01"}}</tool_call>'),
    ],
)
def test_23_every_family_gives_the_same_call(ask: Any, name: str, output: str) -> None:
    whole, streamed = message(ask(name, output, tools=TOOLS)), joined(ask(name, output, stream=True, tools=TOOLS))
    assert calls(whole) == calls(streamed) == [("f", {"a": 1, "s": "01"})]
    assert whole["finish_reason"] == streamed["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "output", ["<tool_call>\n{bad}\n</tool_call>", '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>']
)
def test_25_malformed_calls_are_content_verbatim(ask: Any, output: str) -> None:
    m = message(ask("hermes", output, tools=TOOLS))
    assert (m["content"], m["finish_reason"]) == (output, "stop")
    assert "tool_calls" not in m
    m = joined(ask("hermes", output, stream=True, tools=TOOLS))
    assert (m["content"], m["finish_reason"], m["tool_calls"]) == (output, "stop", [])


def test_a_call_cut_by_the_length_stays_a_length(ask: Any) -> None:
    for stream in (False, True):
        r = ask("hermes", CALL_F, stream=stream, tools=TOOLS, max_tokens=len(CALL_F) - len("}}\n</tool_call>"))
        m = joined(r) if stream else message(r)
        assert m["finish_reason"] == "length"
        assert m["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1'}


def test_without_parallel_calls_the_output_ends_after_one(ask: Any, family: Any) -> None:
    for stream in (False, True):
        r = ask("hermes", f"{CALL_F}\n{CALL_G}", stream=stream, tools=TOOLS, parallel_tool_calls=False)
        m = joined(r) if stream else message(r)
        assert calls(m) == [("f", {"a": 1})]
        assert m["finish_reason"] == "tool_calls"


def test_tool_choice_none_shows_tools_and_leaves_the_text_alone(ask: Any, family: Any) -> None:
    m = message(ask("hermes", CALL_F, tools=TOOLS, tool_choice="none"))
    assert (m["content"], m["finish_reason"]) == (CALL_F, "stop")


def test_tools_and_their_results_reach_the_template(family: Any, vocabulary: Any) -> None:
    served = family("hermes")
    served.replies([EOS])
    served.admitted.clear()
    asked = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
    ]
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": None}}  # type: ignore[dict-item]
    r = httpx.post(f"{served.v1}/chat/completions", json={"messages": messages, "tools": [strict]})
    assert r.status_code == 200, r.text
    prompt = served.tokenizer.decode(served.admitted[0].ids.tolist(), True)
    assert prompt == (
        json.dumps(TOOLS[0]) + "\nuser\nhi\nassistant\n(f:{\"a\": 1})\ntool\n42\nassistant\n"
    )  # fmt: skip


def test_allowed_tools_hides_the_others(family: Any) -> None:
    served = family("hermes")
    served.replies([EOS])
    served.admitted.clear()
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    r = httpx.post(f"{served.v1}/chat/completions", json={"messages": USER, "tools": TOOLS, "tool_choice": choice})
    assert r.status_code == 200, r.text
    prompt = served.tokenizer.decode(served.admitted[0].ids.tolist(), True)
    assert '"g"' in prompt
    assert '"f"' not in prompt


TOOL = TOOLS[0]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": []}, "empty_array", "tools"),
        ({"tools": "f"}, "invalid_type", "tools"),
        ({"tools": [{"function": {"name": "f"}}]}, "missing_required_parameter", "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"type": "x"}]}, "invalid_value", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "missing_required_parameter", "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "string_below_min_length", "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a\nb"}}]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "string_above_max_length", "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "invalid_value", "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "invalid_function_parameters",
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 5}, "invalid_type", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "invalid_value", "tool_choice.type"),
        ({"parallel_tool_calls": "no"}, "invalid_type", "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ],
)  # fmt: skip
def test_22_bad_tools(api: Any, fields: dict[str, Any], code: str, param: str) -> None:
    api.refused(api.chat(**fields), 400, code, param)


def test_tools_that_the_template_does_not_show_are_refused(served: Any, api: Any) -> None:
    api.refused(api.chat(tools=TOOLS), 400, "unsupported_parameter", "tools")
    assert served.admitted == []
    assert api.chat(tools=TOOLS, tool_choice="none").status_code == 200


def test_tools_are_counted_by_tokenize(family: Any) -> None:
    served = family("hermes")
    counts = [
        httpx.post(f"{served.url}/tokenize", json={"messages": USER, "tools": tools}).json()["count"]
        for tools in ([], TOOLS)
    ]
    assert counts[1] - counts[0] == sum(len(json.dumps(t)) + 1 for t in TOOLS)


# ------------------------------------------------------------------------------------------------------ 26: reasoning


@pytest.mark.parametrize(
    ("output", "kwargs", "reasoning"),
    [
        ("<think>\nA\n</think>\n\nB", {}, "A"),
        ("A\n</think>\n\nB", {"enable_thinking": True}, "A"),
        ("B", {"enable_thinking": False}, None),
    ],
)
def test_26_reasoning_is_split_from_the_content(ask: Any, output: str, kwargs: dict[str, Any], reasoning: Any) -> None:
    r = ask("hermes", output, chat_template_kwargs=kwargs)
    m = message(r)
    assert m["content"] == "B"
    assert m["reasoning_content"] == m["reasoning"] == reasoning
    thought = r.json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thought == (0 if reasoning is None else output.index("</think>") + len("</think>"))
    chunks = ask("hermes", output, stream=True, chat_template_kwargs=kwargs)
    streamed = joined(chunks)
    assert (streamed["content"], streamed["reasoning_content"]) == ("B", reasoning)
    assert all("reasoning_content" in c["choices"][0]["delta"] for c in chunks[:-1])


def test_26_reasoning_cut_by_the_length(ask: Any) -> None:
    for stream in (False, True):
        r = ask("hermes", "<think>\nAB", stream=stream, max_tokens=9)
        m = joined(r) if stream else message(r)
        assert (m["content"], m["reasoning_content"], m["finish_reason"]) == (None, "A", "length")


def test_26_reasoning_can_be_dropped_or_left_in(ask: Any) -> None:
    output = "<think>\nA\n</think>\n\nB"
    for stream in (False, True):
        r = ask("hermes", output, stream=stream, include_reasoning=False)
        m = joined(r) if stream else message(r)
        assert m["content"] == "B"
        assert m.get("reasoning_content") is None
        r = ask("hermes", output, stream=stream, separate_reasoning=False)
        assert (joined(r) if stream else message(r))["content"] == output


def test_stop_strings_do_not_match_within_reasoning(ask: Any) -> None:
    m = message(ask("hermes", "<think>\nan END\n</think>\n\nB END C", stop=["END"]))
    assert (m["reasoning_content"], m["content"], m["finish_reason"]) == ("an END", "B ", "stop")


def test_a_call_after_reasoning(ask: Any) -> None:
    m = message(ask("hermes", f"<think>\nA\n</think>\n\n{CALL_F}", tools=TOOLS))
    assert (m["reasoning"], m["content"], calls(m)) == ("A", None, [("f", {"a": 1})])


# -------------------------------------------------------------------------------------------------- token ids, prompt


def test_token_ids_on_request(ask: Any, family: Any, vocabulary: Any) -> None:
    output = "<think>A</think>B"
    ids = [*vocabulary.ids(output), EOS]
    family("hermes").admitted.clear()
    body = ask("hermes", output, return_token_ids=True).json()
    prompt = family("hermes").admitted[0].ids.tolist()
    assert body["prompt_token_ids"] == prompt
    assert body["choices"][0]["token_ids"] == ids
    chunks = ask("hermes", output, return_token_ids=True, stream=True)
    assert [c.get("prompt_token_ids") for c in chunks] == [prompt] + [None] * (len(chunks) - 1)
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == ids
    body = ask("hermes", output, return_token_ids=True, include_reasoning=False).json()
    assert body["choices"][0]["token_ids"] == [*vocabulary.ids("B"), EOS]


@pytest.mark.parametrize("shown", [True, False])
def test_a7_logprobs_go_with_the_tokens_of_reasoning_and_calls(ask: Any, vocabulary: Any, shown: bool) -> None:
    """Each token once, whatever its text becomes; reasoning that is dropped takes its log probabilities along."""
    output = f"<think>A b</think>{CALL_F}"
    told = output if shown else CALL_F
    fields: dict[str, Any] = {"logprobs": True, "tools": TOOLS, "include_reasoning": shown}
    whole = ask("hermes", output, **fields).json()["choices"][0]
    assert whole["message"]["tool_calls"]
    entries = whole["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"] or ()).decode() == told
    chunks = ask("hermes", output, stream=True, **fields)
    parts = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert all(parts), "no chunk for tokens that are not shown"
    streamed = [e for part in parts for e in part]
    # The first bytes of the tag may be of anything; models that think have a token for it.
    assert streamed == entries if shown else streamed[-len(entries) :] == entries


def test_token_ids_of_completions(served: Any, api: Any, vocabulary: Any) -> None:
    a, b = [*vocabulary.ids("xy"), EOS], [*vocabulary.ids("z"), EOS]
    served.replies(a, b)
    body = api.complete(["a", "bc"], return_token_ids=True).json()
    assert [(c["token_ids"], c["prompt_token_ids"]) for c in body["choices"]] == [
        (a, vocabulary.ids("a")),
        (b, vocabulary.ids("bc")),
    ]
    served.replies(a, b)
    chunks = api.chunks(api.complete(["a", "bc"], return_token_ids=True, stream=True))
    for index, (ids, prompt) in enumerate(((a, "a"), (b, "bc"))):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [i for c in own for i in c.get("token_ids", [])] == ids
        assert [c["prompt_token_ids"] for c in own if "prompt_token_ids" in c] == [vocabulary.ids(prompt)]


def test_a_prompt_can_be_cut_to_its_last_tokens(served: Any, api: Any, vocabulary: Any) -> None:
    served.replies([EOS], [EOS], [EOS])
    api.complete("abcdef", truncate_prompt_tokens=3)
    api.complete("x" * 400, truncate_prompt_tokens=-1, max_tokens=6)
    assert served.admitted[0].ids.tolist() == vocabulary.ids("def")
    assert len(served.admitted[1].ids) == 250
    api.refused(api.complete("a", truncate_prompt_tokens=0), 400, "integer_below_min_value", "truncate_prompt_tokens")


# ---------------------------------------------------------------------------------------- 24: calls that must be made


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "output", "finish", "names"),
    [(NAMED, CALL_F, "stop", ["f"]), ("required", CALL_F, "tool_calls", ["f"]), ("required", "no call", "stop", [])],
)
def test_24_forced_calls_and_their_finish_reason(ask: Any, choice: Any, output: str, finish: str, names: Any) -> None:
    for stream in (False, True):
        r = ask("hermes", output, stream=stream, tools=TOOLS, tool_choice=choice)
        m = joined(r) if stream else message(r)
        assert [name for name, _ in calls(m)] == names
        assert m["finish_reason"] == finish
        if not names:
            assert m["content"] == output
            assert stream or "tool_calls" not in m


DEEP = '{"a":' + "[" * 300 + "]" * 300 + "}"  # can be read, but not written
SCHEMA_PATH = "response_format.json_schema.schema"
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def schema_format(schema: Any, strict: bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"response_format": {"type": "x"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "missing_required_parameter",
            SCHEMA_PATH,
        ),
        ({"response_format": schema_format(UNIQUE, True)}, "invalid_json_schema", SCHEMA_PATH),
        ({"guided_json": DEEP}, "invalid_json_schema", "guided_json"),
        (
            {"response_format": schema_format({"type": "object", "properties": {"value": "bar"}}, False)},
            "invalid_json_schema",
            SCHEMA_PATH,
        ),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "invalid_grammar", "structured_outputs.regex"),
        ({"guided_regex": "(?=a)"}, "invalid_grammar", "guided_regex"),
        ({"guided_json": "{"}, "invalid_json_schema", "guided_json"),
        ({"guided_choice": []}, "empty_array", "guided_choice"),
        ({"ebnf": "%%%"}, "invalid_grammar", "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "invalid_value", "regex"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "invalid_value",
            "response_format",
        ),
    ],
)
def test_27_a12_forms_that_cannot_be_enforced_are_refused(
    family: Any, api: Any, fields: Any, code: str, param: str
) -> None:
    r = httpx.post(f"{family('hermes').v1}/chat/completions", json={"messages": USER, **fields}, timeout=20)
    api.refused(r, 400, code, param)


def test_27_what_is_not_strict_is_taken(ask: Any) -> None:
    assert message(ask("hermes", "[1]", response_format=schema_format(UNIQUE, False)))["content"] == "[1]"


def test_strict_tools_with_a_bad_schema_are_refused(family: Any, api: Any) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": UNIQUE}}}
    body = {"messages": USER, "tools": [{"type": "function", "function": function}]}
    r = httpx.post(f"{family('hermes').v1}/chat/completions", json=body, timeout=20)
    api.refused(r, 400, "invalid_function_parameters", "tools[0].function.parameters")
