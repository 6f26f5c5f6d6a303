"""Request fields that name tokens or change their logits, and the log probabilities that are asked for."""

from __future__ import annotations

import re
from typing import Any

from minisgl.api import EngineInfo, Fields, RequestError, Value, bounds

RANGES = bounds.SAMPLING_RANGES


def _token_id(value: Value, vocab: int) -> int:
    """A client's token id, inside the vocabulary (fault A11)."""
    token = value.integer()
    if not 0 <= token < vocab:
        raise value.refused(f"= {token} is not a token of this model; ids are 0 to {vocab - 1}")
    return token


def token_ids(value: Value | None, vocab: int, min_len: int = 0, max_len: int | None = None) -> tuple[int, ...]:
    """A client's token ids. There may be millions: the usual case is one pass."""
    if value is None:
        return ()
    if value.note is not None:
        value.note.item().integer(0, vocab - 1)
    items = value.array(min_len, max_len)
    if all(type(item) is int and 0 <= item < vocab for item in items):
        return tuple(items)
    return tuple(_token_id(item, vocab) for item in value.items())


def read_constraints(f: Fields, info: EngineInfo, stream: bool) -> dict[str, Any]:
    """Fields of SamplingParams. Raises: RequestError."""
    extra = f.object("logits")
    return {
        "presence_penalty": f.number("presence_penalty", *RANGES["presence_penalty"]) or 0.0,
        "frequency_penalty": f.number("frequency_penalty", *RANGES["frequency_penalty"]) or 0.0,
        "repetition_penalty": f.number("repetition_penalty", *RANGES["repetition_penalty"]),
        "min_tokens": f.integer("min_tokens", *RANGES["min_tokens"]) or 0,
        "logit_bias": _logit_bias(f, info.vocab),
        "stop_token_ids": token_ids(f.value("stop_token_ids"), info.vocab, max_len=bounds.MAX_STOP_IDS),
        "allowed_token_ids": _allowed(f, info.vocab),
        "bad_words": _bad_words(f),
        "logits": {} if extra is None else dict(extra.body),
        "prompt_logprobs": _prompt_logprobs(f, stream),
    }


def _logit_bias(f: Fields, vocab: int) -> dict[int, float]:
    """Ids and values are checked (fault A11)."""
    bias = f.object("logit_bias")
    if bias is None:
        return {}
    if len(bias.body) > bounds.MAX_BIASES:
        raise RequestError(
            f"'logit_bias' has {len(bias.body)} tokens; at most {bounds.MAX_BIASES} are allowed.",
            code="invalid_value",
            param="logit_bias",
        )
    read: dict[int, float] = {}
    for key, value in bias.members():
        if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) >= vocab:
            raise RequestError(
                f"'logit_bias' has the key {key[:40]!r}; keys are token ids, 0 to {vocab - 1}.",
                code="invalid_value",
                param="logit_bias",
            )
        read[int(key)] = value.number(*bounds.BIAS_RANGE)
    return read


def _allowed(f: Fields, vocab: int) -> tuple[int, ...]:
    value = f.value("allowed_token_ids")
    if value is not None and value.raw == []:
        raise value.refused("is empty: no token could come")
    return token_ids(value, vocab, max_len=vocab)


def _bad_words(f: Fields) -> tuple[str, ...]:
    read = []
    for word in f.items("bad_words", max_len=bounds.MAX_BAD_WORDS):
        read.append(word.string(1, bounds.MAX_BAD_WORD))
        if not read[-1].strip():
            raise word.refused("is only spaces")
    return tuple(read)


def _prompt_logprobs(f: Fields, stream: bool) -> int | None:
    count = f.integer("prompt_logprobs", *RANGES["prompt_logprobs"])
    if stream and count:
        raise RequestError("'prompt_logprobs' needs 'stream': false.", code="invalid_value", param="prompt_logprobs")
    return None if stream else count


def chat_logprobs(f: Fields) -> int | None:
    """Alternatives of each output token; None: no log probabilities are asked for."""
    wanted = f.boolean("logprobs") or False
    top = f.integer("top_logprobs", *RANGES["logprobs"])
    if top and not wanted:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", code="invalid_value", param="top_logprobs")
    return top or 0 if wanted else None
