"""The request fields that chat completions and completions share.

A field is honoured, or it is refused by name (``unsupported_parameter``), or it asks for nothing that a server without
accounts could do (``IGNORED``). Null and neutral values are the same as absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from minisgl.api import (
    REQUEST_ID,
    EngineInfo,
    Fields,
    GrammarSpec,
    PluginSettings,
    RequestError,
    SamplingParams,
    Value,
    bounds,
)

from .openai_constraints import read_constraints
from .openai_forms import read_form

RANGES = bounds.SAMPLING_RANGES

# Type-checked, then ignored: bookkeeping of the hosted service, and hints that change no token.
IGNORED = {
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "prompt_cache_options": dict,
    "metadata": dict,
    "store": bool,
    "prediction": dict,
    "service_tier": str,
    "verbosity": str,
    "spaces_between_special_tokens": bool,
}


class OpenAISettings(PluginSettings):
    max_n: int = Field(bounds.MAX_N, ge=1, le=bounds.MAX_N, description="largest n")
    max_prompts: int = Field(1024, ge=1, description="most prompts in one completions request")
    max_stop: int = Field(bounds.MAX_STOPS, ge=1, le=bounds.MAX_STOPS, description="most stop strings")
    strict: bool = Field(False, description="refuse unknown fields instead of ignoring them")
    reasoning_field: Literal["both", "reasoning_content", "reasoning"] = Field(
        "both", description="field that reasoning goes out in"
    )
    exclude_tools_when_none: bool = Field(
        False, description="do not show the model tools that tool_choice none forbids"
    )

    @property
    def reasoning_names(self) -> tuple[str, ...]:
        return ("reasoning_content", "reasoning") if self.reasoning_field == "both" else (self.reasoning_field,)


@dataclass(frozen=True, slots=True)
class Common:
    """``max_tokens`` None: not given. ``user``: whom the client asks for, "" if it does not say. ``request_id`` None: the body
    has none. ``keep_last``: tokens of the prompt that are kept, -1 for as many as there is room for, None for all. ``form``: what
    the answer is held to. ``names_as_ids``: tokens of log probabilities are named by their ids."""

    sampling: SamplingParams
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str
    user: str
    request_id: str | None
    keep_last: int | None
    form: GrammarSpec | None
    names_as_ids: bool


def read_common(f: Fields, info: EngineInfo, settings: OpenAISettings, min_max_tokens: int) -> Common:
    """Raises: RequestError for the first field that is wrong or not supported."""
    check_ignored(f)
    n = f.integer("n", 1, settings.max_n) or 1
    max_tokens = _max_tokens(f, min_max_tokens)
    stream = f.boolean("stream") or False
    include_usage, continuous_usage = _stream_options(f, stream)
    sampling = SamplingParams(
        temperature=f.number("temperature", *RANGES["temperature"]),
        top_p=f.number("top_p", *RANGES["top_p"]),
        top_k=f.integer("top_k", *RANGES["top_k"]),
        min_p=f.number("min_p", *RANGES["min_p"]),
        seed=f.integer("seed", *RANGES["seed"]),
        stop=_stop(f, settings.max_stop),
        ignore_eos=f.boolean("ignore_eos") or False,
        include_stop_str_in_output=f.boolean("include_stop_str_in_output") or f.boolean("no_stop_trim") or False,
        skip_special_tokens=f.boolean("skip_special_tokens") is not False,
        **read_constraints(f, info, stream),
    )
    _refuse_unbuilt(f)
    if max_tokens and sampling.min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' may be at most 'max_tokens', which is {max_tokens}; it is {sampling.min_tokens}.",
            code="invalid_value",
            param="min_tokens",
        )
    return Common(
        sampling=sampling,
        max_tokens=max_tokens,
        n=n,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        priority=f.integer("priority") or 0,
        cache_salt=_cache_salt(f),
        user=f.string("user") or "",
        request_id=_request_id(f),
        keep_last=_keep_last(f),
        form=read_form(f),
        names_as_ids=f.boolean("return_tokens_as_token_ids") or False,
    )


def check_ignored(f: Fields) -> None:
    for name, kind in IGNORED.items():
        if kind is str:
            f.string(name)
        elif kind is bool:
            f.boolean(name)
        else:
            f.object(name)


def refuse_unknown(f: Fields, strict: bool) -> None:
    """Unknown fields are ignored, as everywhere, unless the server is strict."""
    unknown = f.unknown()
    if strict and f.note is not None:
        f.note.close()
    if strict and unknown:
        name = f.at(unknown[0])
        raise RequestError(f"'{name}' is not a field of this route.", code="unknown_parameter", param=name)


def read_model(f: Fields, info: EngineInfo) -> str:
    """The model's name as the client says it, the first served name if it says none."""
    name = f.string("model")
    if name is None:
        return info.served_names[0]
    if name not in info.served_names:
        raise model_not_found(name, info)
    return name


def model_not_found(name: str, info: EngineInfo) -> RequestError:
    served = ", ".join(repr(s) for s in info.served_names[:10])
    return RequestError(
        f"The model {name[:100]!r} does not exist; this server has {served}.",
        status=404,
        code="model_not_found",
        param="model",
    )


def _max_tokens(f: Fields, low: int) -> int | None:
    """``max_completion_tokens`` wins over its deprecated alias."""
    old = f.integer("max_tokens", low, RANGES["max_tokens"][1])
    new = f.integer("max_completion_tokens", low, RANGES["max_tokens"][1])
    return old if new is None else new


def _stream_options(f: Fields, stream: bool) -> tuple[bool, bool]:
    """(include_usage, continuous_usage_stats)"""
    options = f.object("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise RequestError("'stream_options' needs 'stream': true.", code="invalid_value", param="stream_options")
    options.boolean("include_obfuscation")  # padding against traffic analysis: a hint
    continuous = options.boolean("continuous_usage_stats") or False
    return options.boolean("include_usage") or False, continuous


def _stop(f: Fields, most: int) -> tuple[str, ...]:
    value = f.value("stop")
    if value is None:
        return ()
    if isinstance(value.raw, str):
        return (_stop_string(value),)
    return tuple(_stop_string(item) for item in value.items(max_len=most))


def _stop_string(value: Value) -> str:
    text = value.string()
    if not text:
        raise value.refused("is empty; a stop string has characters")
    return text


def _cache_salt(f: Fields) -> str:
    salt = f.string("cache_salt", 1, bounds.MAX_SALT)
    if salt is not None and bounds.SALT_FORBIDDEN.intersection(salt):
        raise RequestError(
            "'cache_salt' may not contain NUL, '@', '/' or '\\'.", code="invalid_value", param="cache_salt"
        )
    return salt or ""


def _keep_last(f: Fields) -> int | None:
    count = f.integer("truncate_prompt_tokens", -1)
    if count == 0:
        raise RequestError(
            "'truncate_prompt_tokens' must be -1 or at least 1; it is 0.",
            code="integer_below_min_value",
            param="truncate_prompt_tokens",
        )
    return count


def _request_id(f: Fields) -> str | None:
    for name in ("request_id", "rid"):
        value = f.string(name)
        if value is not None:
            if not REQUEST_ID.fullmatch(value):
                raise RequestError(
                    f"'{name}' must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -",
                    code="invalid_value",
                    param=name,
                )
            return value
    return None


def _refuse_unbuilt(f: Fields) -> None:
    """What this server has no notion of is refused, but for neutral values."""
    f.refuse("use_beam_search", False)
    f.refuse("length_penalty", 1, 1.0, False)
