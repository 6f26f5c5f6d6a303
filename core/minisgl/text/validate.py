"""Checks of what users ask for, with the error codes of the OpenAI API. Raises RequestError, status 400."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from minisgl.base.bounds import (
    BIAS_RANGE,
    INT64_MAX,
    INT64_MIN,
    MAX_BAD_WORD,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_KEY,
    MAX_N,
    MAX_SALT,
    MAX_STOPS,
    SALT_FORBIDDEN,
    SAMPLING_RANGES,
)
from minisgl.base.errors import RequestError
from minisgl.base.types import GenerateRequest, SamplingParams

RESERVED = frozenset({"self", "messages", "conversation", "tokenize"})  # never variables of a chat template


def integer(value: Any, param: str, low: float | None = None, high: float | None = None) -> int:
    """``value`` if it is an integer in [low, high]. Booleans, strings and floats are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(_type_text(value, param, "an integer"), code="invalid_type", param=param)
    _range(value, param, low, high, "integer")
    return value


def number(value: Any, param: str, low: float | None = None, high: float | None = None) -> float:
    """``value`` if it is a finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(_type_text(value, param, "a number"), code="invalid_type", param=param)
    if not math.isfinite(value):
        raise RequestError(f"{param} = {value} is not a finite number", code="invalid_value", param=param)
    _range(value, param, low, high, "decimal")
    return value


def _type_text(value: Any, param: str, wanted: str) -> str:
    return f"{param} must be {wanted}, not {type(value).__name__}"


def _range(value: float, param: str, low: float | None, high: float | None, what: str) -> None:
    if low is not None and value < low:
        raise RequestError(
            f"{param} = {value} is too small: it must be at least {low}", code=f"{what}_below_min_value", param=param
        )
    if high is not None and value > high:
        raise RequestError(
            f"{param} = {value} is too large: it must be at most {high}", code=f"{what}_above_max_value", param=param
        )


def check_sampling(params: SamplingParams, vocab: int | None = None) -> None:
    """Check types and ranges of every field; token ids against ``vocab`` if it is known (fault A11)."""
    p = params
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(p, name)
        if value is not None:
            (integer if isinstance(low, int) else number)(value, name, low, high)
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        if not isinstance(getattr(p, name), bool):
            raise RequestError(_type_text(getattr(p, name), name, "true or false"), code="invalid_type", param=name)
    check_stops(p.stop)
    check_ids(p.stop_token_ids, "stop_token_ids", vocab)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise RequestError(
            f"min_tokens = {p.min_tokens} is more than max_tokens = {p.max_tokens}; it may be as many at most",
            param="min_tokens",
        )
    _check_biases(p.logit_bias, vocab)
    _mapping(p.logits, "logits")
    check_ids(p.allowed_token_ids, "allowed_token_ids", vocab)
    _check_bad_words(p.bad_words)


def _check_biases(biases: Mapping[int, float], vocab: int | None) -> None:
    _mapping(biases, "logit_bias")
    if len(biases) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(biases)} tokens; at most {MAX_BIASES} are allowed", param="logit_bias")
    check_ids(biases, "logit_bias", vocab)
    for token, bias in biases.items():
        number(bias, f"logit_bias.{token}", *BIAS_RANGE)


def _mapping(value: Any, param: str) -> None:
    if not isinstance(value, Mapping):
        raise RequestError(_type_text(value, param, "a mapping"), code="invalid_type", param=param)


def _check_bad_words(words: Any) -> None:
    _check_strings(words, "bad_words", MAX_BAD_WORDS)
    for i, word in enumerate(words):
        if not word.strip() or len(word) > MAX_BAD_WORD:
            raise RequestError(
                f"bad_words[{i}] has {len(word)} characters; a word has 1 to {MAX_BAD_WORD}, not only spaces",
                param=f"bad_words[{i}]",
            )


def _check_strings(values: Any, param: str, most: int) -> None:
    if isinstance(values, str) or not isinstance(values, (list, tuple)):
        raise RequestError(_type_text(values, param, "a list of strings"), code="invalid_type", param=param)
    if len(values) > most:
        raise RequestError(
            f"{param} has {len(values)} strings; at most {most} are allowed",
            code="array_above_max_length",
            param=param,
        )
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise RequestError(
                _type_text(value, f"{param}[{i}]", "a string"), code="invalid_type", param=f"{param}[{i}]"
            )


def check_stops(stops: Any) -> None:
    _check_strings(stops, "stop", MAX_STOPS)
    for i, stop in enumerate(stops):
        if not stop:
            raise RequestError(f"stop[{i}] is empty; a stop string has at least one character", param=f"stop[{i}]")


def check_ids(ids: Iterable[Any], param: str, vocab: int | None) -> None:
    """Refuse ids that are not integers in [0, vocab), naming the first (fault A11)."""
    bound = (1 << 31) if vocab is None else vocab
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise RequestError(_type_text(ids, param, "a list of token ids"), code="invalid_type", param=param)
    for i, token in enumerate(ids):
        if type(token) is not int:
            integer(token, f"{param}[{i}]")
        if not 0 <= token < bound:
            raise RequestError(
                f"{param}[{i}] = {token} is not a token of this model: ids are 0 to {bound - 1}", param=f"{param}[{i}]"
            )


def check_request(request: GenerateRequest, vocab: int | None = None) -> None:
    """Check a whole request, except what needs the tokenizer."""
    given = [k for k in ("text", "ids", "messages") if getattr(request, k) is not None]
    if len(given) != 1:
        raise RequestError(
            f"exactly one of text, ids and messages is needed; got {', '.join(given) or 'none'}",
            code="missing_required_parameter" if not given else "invalid_value",
            param=request.param,
        )
    integer(request.n, "n", 1, MAX_N)
    integer(request.priority, "priority", INT64_MIN, INT64_MAX)
    _check_salt(request.cache_salt)
    _check_key(request.key)
    if reserved := sorted(RESERVED.intersection(request.template)):
        raise RequestError(
            f"chat_template_kwargs.{reserved[0]} cannot be set: the messages are the request's own",
            param=f"chat_template_kwargs.{reserved[0]}",
        )
    check_sampling(request.sampling, vocab)
    if request.keep_last is not None and request.keep_last != -1:
        integer(request.keep_last, "truncate_prompt_tokens", 1, INT64_MAX)
    if request.ids is not None:
        check_ids(request.ids, request.param, vocab)
    if request.text is not None and not isinstance(request.text, str):
        raise RequestError(
            _type_text(request.text, request.param, "a string"), code="invalid_type", param=request.param
        )
    if request.messages is not None and not request.messages:
        raise RequestError("messages is empty; at least one is needed", code="empty_array", param=request.param)


def _check_key(key: Any) -> None:
    if not isinstance(key, str):
        raise RequestError(_type_text(key, "key", "a string"), code="invalid_type", param="key")
    if len(key) > MAX_KEY:
        raise RequestError(
            f"key has {len(key)} characters; at most {MAX_KEY} are allowed",
            code="string_above_max_length",
            param="key",
        )


def _check_salt(salt: Any) -> None:
    if not isinstance(salt, str):
        raise RequestError(_type_text(salt, "cache_salt", "a string"), code="invalid_type", param="cache_salt")
    if len(salt) > MAX_SALT:
        raise RequestError(
            f"cache_salt has {len(salt)} characters; at most {MAX_SALT} are allowed",
            code="string_above_max_length",
            param="cache_salt",
        )
    if SALT_FORBIDDEN.intersection(salt):
        raise RequestError("cache_salt may not contain NUL, '@', '/' or '\\'", param="cache_salt")
    if any("\ud800" <= c <= "\udfff" for c in salt):
        raise RequestError("cache_salt has a lone surrogate, which is no character", param="cache_salt")
