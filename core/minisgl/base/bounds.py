"""What a request may ask for: the one place of the ranges that text workers, frontends and checks at the start share."""

from __future__ import annotations

from collections.abc import Mapping

INT31_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# SamplingParams, both ends included; integers for the fields that are integers.
SAMPLING_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, INT31_MAX),
    "min_p": (0.0, 1.0),
    "seed": (INT64_MIN, INT64_MAX),
    "max_tokens": (1, INT31_MAX),
    "min_tokens": (0, INT31_MAX),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.001, 1000.0),  # logits are multiplied and divided by it, in float32
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
# What is sampled with where neither the request nor the model says anything.
NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}

BIAS_RANGE = (-100.0, 100.0)  # of logit_bias
MAX_BIASES = 1024  # tokens with a bias
MAX_STOP_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD = 256  # characters
MAX_N = 128  # outputs of one prompt
MAX_STOPS = 16  # stop strings
MAX_SALT = 128  # characters of cache_salt
MAX_KEY = 128  # characters of a request's key
SALT_FORBIDDEN = frozenset("\0@/\\")
