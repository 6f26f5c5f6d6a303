"""Bodies of /v1/chat/completions and /v1/completions to what the engine client takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from minisgl.api import (
    EngineInfo,
    Fields,
    GenerateRequest,
    Note,
    RequestError,
    bounds,
)

from .openai_constraints import chat_logprobs, token_ids
from .openai_fields import (
    Common,
    OpenAISettings,
    read_common,
    read_model,
    refuse_unknown,
)
from .openai_messages import read_messages
from .openai_tools import read_tools

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TEMPLATE_RESERVED = ("messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "conversation")
DEFAULT_MAX_TOKENS = 16  # of completions, by the OpenAI API


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. ``prompts``: one GenerateRequest for each prompt; choice j of prompt i has the index
    ``i * n + j``. ``echo``: the text that goes before the choices of each prompt, None where there is none. ``echo_ids``:
    prompts that came as token ids are echoed too, as text. ``no_output``: only the echo is wanted. ``return_ids``: token ids
    are given beside the text. ``reasoning_names``: the fields that reasoning goes out in; () drops it. ``forced_name``: a tool
    call was asked for by name. ``logprobs``: alternatives that are given with each output token, None: no log probabilities
    are."""

    chat: bool
    model: str
    prompts: tuple[GenerateRequest, ...]
    common: Common
    echo: tuple[str | None, ...]
    echo_ids: bool = False
    no_output: bool = False
    return_ids: bool = False
    reasoning_names: tuple[str, ...] = ()
    forced_name: bool = False
    logprobs: int | None = None

    @property
    def n(self) -> int:
        return self.common.n

    @property
    def scores_echo(self) -> bool:
        """The echoed prompt has log probabilities, as its output has."""
        return self.echo_ids and self.logprobs is not None

    def counted_for(self, authorization: bytes | None) -> Call:
        """With the key that a fair scheduler shares by: the ``user`` of the body, else a hash of the API key."""
        key = self.common.user
        if len(key) > bounds.MAX_KEY:
            key = _hash(key.encode("utf-8", "surrogatepass"))
        elif not key and authorization:
            key = _hash(authorization)
        return replace(self, prompts=tuple(replace(p, key=key) for p in self.prompts)) if key else self


def _hash(value: bytes) -> str:
    return "sha256:" + sha256(value).hexdigest()[:32]


def read_chat(body: dict[str, Any], info: EngineInfo, settings: OpenAISettings, note: Note | None = None) -> Call:
    """Raises: RequestError."""
    f = Fields(body, note=note)
    model = read_model(f, info)
    messages = read_messages(f)
    common = read_common(f, info, settings, min_max_tokens=1)
    logprobs = chat_logprobs(f)
    tools = read_tools(f)
    hidden = tools.mode == "none" and settings.exclude_tools_when_none
    template = read_template(f, messages, () if hidden else tools.tools)
    if tools.forced and common.form is not None:
        param = common.form.param.partition(".")[0]
        raise RequestError(
            f"'{param}' and a 'tool_choice' that wants calls exclude one another.", code="invalid_value", param=param
        )
    echo = _chat_echo(f, messages, bool(template["continue_final_message"]))
    add_special = f.boolean("add_special_tokens") or False
    _refuse_chat(f)
    separate = f.boolean("separate_reasoning") is not False
    shown = f.boolean("include_reasoning") is not False
    return_ids = f.boolean("return_token_ids") or False
    refuse_unknown(f, settings.strict)
    request = GenerateRequest(
        messages=messages,
        sampling=replace(common.sampling, max_tokens=common.max_tokens, logprobs=logprobs),
        n=common.n,
        template=template,
        add_special_tokens=add_special,
        priority=common.priority,
        cache_salt=common.cache_salt,
        param="messages",
        parse=tools.parse(separate),
        return_prompt_ids=return_ids,
        keep_last=common.keep_last,
        grammar=common.form,
    )
    return Call(
        True,
        model,
        (request,),
        common,
        (echo,),
        return_ids=return_ids,
        reasoning_names=settings.reasoning_names if shown else (),
        forced_name=tools.mode == "named",
        logprobs=logprobs,
    )


def read_completion(body: dict[str, Any], info: EngineInfo, settings: OpenAISettings, note: Note | None = None) -> Call:
    """Raises: RequestError."""
    f = Fields(body, note=note)
    model = read_model(f, info)
    prompts = read_prompts(f, info.vocab, settings.max_prompts)
    echo = f.boolean("echo") or False
    common = read_common(f, info, settings, min_max_tokens=0 if echo else 1)
    add_special = f.boolean("add_special_tokens") is not False
    logprobs = f.integer("logprobs", *bounds.SAMPLING_RANGES["logprobs"])
    _refuse_completion(f, common.n)
    return_ids = f.boolean("return_token_ids") or False
    refuse_unknown(f, settings.strict)
    given = common.max_tokens is not None
    asked = common.sampling.prompt_logprobs
    sampling = replace(
        common.sampling,
        max_tokens=common.max_tokens if given else DEFAULT_MAX_TOKENS,
        logprobs=logprobs,
        prompt_logprobs=asked if logprobs is None or not echo else max(logprobs, asked or 0),
    )
    nothing = common.max_tokens == 0
    if nothing and sampling.prompt_logprobs is not None:
        sampling = replace(sampling, max_tokens=1)  # the prompt has to be computed all the same
    requests = tuple(
        GenerateRequest(
            text=p if isinstance(p, str) else None,
            ids=None if isinstance(p, str) else p,
            sampling=sampling,
            n=common.n,
            add_special_tokens=add_special if isinstance(p, str) else None,
            clamp_max_tokens=not given,
            priority=common.priority,
            cache_salt=common.cache_salt,
            param="prompt",
            return_prompt_ids=return_ids,
            keep_last=common.keep_last,
            grammar=common.form,
        )
        for p in prompts
    )
    texts = tuple(p if echo and isinstance(p, str) else None for p in prompts)
    return Call(
        False,
        model,
        requests,
        common,
        texts,
        echo_ids=echo,
        no_output=nothing,
        return_ids=return_ids,
        logprobs=logprobs,
    )


def read_prompts(f: Fields, vocab: int, most: int) -> list[str | tuple[int, ...]]:
    """A string, strings, token ids, or arrays of token ids; told apart by the first item."""
    value = f.need("prompt")
    if isinstance(value.raw, str):
        return [value.string()]
    if not isinstance(value.raw, list):
        raise value.wrong_type("a string, an array of strings, or an array of token ids")
    first = value.raw[0] if value.raw else None
    if not isinstance(first, (str, list)):
        return [token_ids(value, vocab, min_len=1)]
    items = value.items(max_len=most)
    return [item.string() if isinstance(first, str) else token_ids(item, vocab, min_len=1) for item in items]


def read_template(
    f: Fields, messages: tuple[dict[str, Any], ...], tools: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    """Variables of the chat template; always with add_generation_prompt and continue_final_message."""
    extra = f.object("chat_template_kwargs")
    template = {} if extra is None else dict(extra.body)
    for name in TEMPLATE_RESERVED:
        if name in template:
            path = f"chat_template_kwargs.{name}"
            raise RequestError(f"'{path}' is reserved for the server.", code="invalid_value", param=path)
    final = f.boolean("continue_final_message") or False
    prompt = f.boolean("add_generation_prompt")
    if final and prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude one another.",
            code="invalid_value",
            param="continue_final_message",
        )
    if final and messages[-1]["role"] not in ("assistant", "user"):
        raise RequestError(
            "'continue_final_message' needs a last message of role 'assistant' or 'user'.",
            code="invalid_value",
            param="continue_final_message",
        )
    template["add_generation_prompt"] = not final if prompt is None else prompt
    template["continue_final_message"] = final
    _effort(f, template)
    documents = f.array("documents")
    if documents is not None:
        template["documents"] = documents
    if tools:
        template["tools"] = list(tools)
    return template


def _effort(f: Fields, template: dict[str, Any]) -> None:
    effort = f.one_of("reasoning_effort", EFFORTS)
    if effort is not None:
        template.setdefault("reasoning_effort", effort)
        template.setdefault("enable_thinking", effort != "none")


def _chat_echo(f: Fields, messages: tuple[dict[str, Any], ...], final: bool) -> str | None:
    if not f.boolean("echo"):
        return None
    if not final:
        raise RequestError("'echo' needs 'continue_final_message': true.", code="invalid_value", param="echo")
    return str(messages[-1]["content"])


def _refuse_chat(f: Fields) -> None:
    modalities = f.array("modalities")
    if modalities is not None and modalities != ["text"]:
        raise RequestError(
            "'modalities' must be ['text']; this server makes text only.", code="unsupported_value", param="modalities"
        )
    for name in ("audio", "web_search_options", "moderation", "chat_template"):
        f.refuse(name)
    f.refuse("thinking_token_budget", -1)


def _refuse_completion(f: Fields, n: int) -> None:
    if f.integer("best_of", 1) not in (None, 1, n):
        raise f.unsupported("best_of", "must be 1 or equal to 'n'; choosing the best of more is not supported")
    f.refuse("suffix", "")
