"""The torch-free vocabulary that scheduler, cache policies, executors, text workers and frontends share.

Units: everything about the KV cache and its allocator is counted in *pages*; only arrays of token ids are counted in
*tokens*. ``page_size`` is tokens per page. Ranges are ``[start, end)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

NO_PAGES: I32 = np.empty(0, np.int32)
NO_PAGES.flags.writeable = False


class Finish(StrEnum):
    """Why a request ended, as the engine says it."""

    STOP = "stop"  # a stop token id was sampled
    LENGTH = "length"  # max_new tokens, or the context is full
    ABORT = "abort"  # the client left, or asked
    ERROR = "error"  # the engine gave up on this request; the detail says why


class ReqState(IntEnum):
    WAITING = 0  # admitted or preempted; owns no slot and no page
    PREFILL = 1  # has a slot; some prompt tokens are not planned yet
    DECODE = 2  # its whole prompt is planned
    DONE = 3


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How to sample one request, complete: no default of the model or the user is left to look up.

    ``temperature`` 0 or ``top_k`` 1 means greedy. ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 are off. ``stop_ids`` is the
    whole stop set (EOS ids included unless the request ignores them). ``max_new`` is in tokens, >= 1. ``grammar``: what the
    output is held to, as the grammar plugin compiled it; empty: nothing.

    What changes the logits before that: ``biases[i]`` is added to that of ``bias_ids[i]``; the penalties, of which presence
    and frequency look at the output and repetition at the prompt as well, are neutral at 0, 0 and 1; no stop id comes among
    the first ``min_new`` tokens; only ``allowed_ids`` come, if there are any; no sequence of ``bad_words`` comes; ``extra`` has
    the parameters of other logits processors by their names.

    ``logprobs``: so many alternatives are told with each output token's log probability, None: nothing is told;
    ``prompt_logprobs``: the same of the prompt, which is then computed without reading the cache.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new: int = 16
    stop_ids: tuple[int, ...] = ()
    grammar: bytes = b""
    bias_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new: int = 0
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def needs_prompt(self) -> bool:
        """The device has to know the whole prompt, also what is cached of it."""
        return self.repetition_penalty != 1 or bool(self.extra)


@dataclass(frozen=True, slots=True)
class Admit:
    """A request as it enters the engine. ``ids``: [num_tokens] int32 prompt. ``owner``: index of the text worker that gets
    the output. Requests in different namespaces share no cached page. Higher ``priority`` goes first. ``key``: whose request
    it is, for policies that share between users; empty: nobody's in particular."""

    uid: int
    ids: I32
    sampling: SamplingSpec
    owner: int = 0
    priority: int = 0
    namespace: bytes = b""
    arrived_ns: int = 0
    key: str = ""


@dataclass(frozen=True, slots=True)
class RowInit:
    """All the device needs to know of a row that is admitted or resumed; sent once.

    ``kv_len`` tokens of KV are already in ``pages`` (cached prefix); ``ids`` are the known tokens from ``kv_len`` on;
    ``emitted`` of the row's ``max_new`` output tokens were sampled before (a resumed row): ``written``, in order. ``prompt``:
    the whole prompt if ``sampling.needs_prompt``, else empty.
    """

    slot: int
    uid: int
    kv_len: int
    ids: I32
    pages: I32
    sampling: SamplingSpec
    emitted: int
    max_new: int
    written: I32 = field(default_factory=lambda: NO_PAGES)
    prompt: I32 = field(default_factory=lambda: NO_PAGES)


@dataclass(frozen=True, slots=True)
class Span:
    """One prefill chunk of a step: the next ``n_new`` >= 1 known tokens of the row; ``sample`` if it ends the prompt; ``score``
    if the log probabilities of the prompt tokens that follow its tokens are to be told."""

    slot: int
    n_new: int
    sample: bool
    score: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What changes for one step. Rows of the step: ``order[:n_decode]`` decode one token each, then ``spans`` in order.

    Apply in this order: ``retire`` (slots whose device state is dead before this step), ``init``, ``grow_*``
    (``page_table[grow_slot, grow_at] = grow_page``; also repoints to canonical pages), ``order_*``
    (``decode_order[order_pos] = order_slot``).
    """

    step: int
    retire: I32
    init: tuple[RowInit, ...]
    grow_slot: I32
    grow_at: I32
    grow_page: I32
    order_pos: I32
    order_slot: I32
    n_decode: int
    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass of this step computes."""
        return self.n_decode + sum(s.n_new for s in self.spans)


@dataclass(frozen=True, slots=True)
class LogprobBlock:
    """How likely some tokens were, by the model's own distribution: before any processor, temperature or filter.

    ``row``, ``position``, ``token`` [n] int32: whose they are (a slot; on the way to the text side an index into uids), where in
    prompt and output together, and which; ``logprob`` [n] float32; ``rank`` [n] int32, 1 for the likeliest; ``top_ids``,
    ``top_logprobs`` [n, k]: the likeliest tokens, falling. k is the most that a row of the block asks for.
    """

    row: I32
    position: I32
    token: I32
    logprob: F32
    rank: I32
    top_ids: I32
    top_logprobs: F32

    def take(self, at: npt.NDArray[Any]) -> LogprobBlock:
        """Those at these indices, or where this mask is True."""
        return LogprobBlock(*(getattr(self, f.name)[at] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens of one step: [n] int32, one for each decode row in order, then one for each span with ``sample``.
    ``stop``: [n] bool, True where the token is in the row's stop set. ``logprobs``: of the rows and spans that want them; its
    ``row`` are slots."""

    step: int
    tokens: I32
    stop: Bools
    logprobs: LogprobBlock | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine may use at once. ``max_len``: tokens a row may have in all. ``batch_tokens``: tokens per step.
    ``grow_pages``: pages a decoding row gets at a time when it needs one."""

    max_slots: int
    max_len: int
    num_pages: int
    page_size: int
    batch_tokens: int
    grow_pages: int = 1


# ---------------------------------------------------------------------------------------------- engine -> text workers


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens one step gave to the requests of one text worker: ``uids`` [n] int64, ``tokens`` [n] int32."""

    step: int
    uids: I64
    tokens: I32


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of prompt and output tokens, sent before the ``Tokens`` of the same step: ``block.row`` are indices
    into ``uids`` [n] int64."""

    uids: I64
    block: LogprobBlock


@dataclass(frozen=True, slots=True)
class Ended:
    """The last the engine says of a request; sent exactly once for every admitted uid.

    ``cached_tokens``: prompt tokens whose KV came from the cache at first admission. ``detail``: for ERROR, one sentence.
    """

    uid: int
    finish: Finish
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that never started, with what to answer: HTTP ``status``, and the OpenAI ``code`` and ``param``."""

    uid: int
    status: int
    message: str
    code: str | None = None
    param: str | None = None


EngineOutput = Tokens | Scores | Ended | Refused


# ----------------------------------------------------------------------------------------------------- users' requests


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample, as a user says it. ``None`` means the model's default (its generation config), else the neutral value.

    ``temperature`` in [0, 2], 0 is greedy; ``top_k`` -1 or 0 is off; ``max_tokens`` None fills the context; ``seed`` makes
    a request repeatable whatever runs beside it; ``stop`` strings end the text before their match; ``stop_token_ids`` stop
    in addition to EOS; ``ignore_eos`` turns EOS off, not the explicit stops; before ``min_tokens`` nothing stops.

    ``presence_penalty`` and ``frequency_penalty`` in [-2, 2] look at the output, ``repetition_penalty`` in [0.001, 1000] at prompt and
    output; ``logit_bias``: token id -> [-100, 100]; ``allowed_token_ids``: only these come; ``bad_words``: texts that do not;
    ``logits``: parameters of other logits processors, by name. ``logprobs``: so many alternatives are given with the log
    probability of each output token; ``prompt_logprobs``: the same of the prompt. They are the model's own: before
    penalties, temperature and all else.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logits: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer is held to. ``kind`` and its ``text``: "json_schema": the schema, as JSON; "json_object": ""; "regex": of
    all the answer; "choice": a JSON list of strings; "grammar": Lark or GBNF. ``strict``: refuse what cannot be enforced in full,
    instead of leaving it out. ``param``: the request's field, for error messages."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    text: str = ""
    strict: bool = False
    param: str = "response_format"


@dataclass(frozen=True, slots=True)
class ParseSpec:
    """What the output is taken apart into. ``reasoning``: what the model thinks before it answers; ``calls``: tool calls, of
    the tools in the request's ``template``. ``max_calls``: the output ends after so many; None: no limit. ``required``: it must
    be calls and nothing else. ``names``: of the tools that may be called then; empty: all. ``strict``: of the tools whose
    arguments must be what their schema says also where nothing is required."""

    reasoning: bool = True
    calls: bool = False
    max_calls: int | None = None
    required: bool = False
    names: tuple[str, ...] = ()
    strict: tuple[str, ...] = ()


PartKind = Literal["content", "reasoning", "call", "arguments", "end"]
PART_KINDS: tuple[PartKind, ...] = ("content", "reasoning", "call", "arguments", "end")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an output that is parsed. ``kind``, and what ``text`` then is:

    "content": answer; "reasoning": thought; "call": a tool call begins, the tool's name; "arguments": the next piece of the
    call's arguments, which are JSON of an object when joined; "end": the call is complete, or as far as it goes, "".
    """

    kind: PartKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and how to continue it ``n`` times. Exactly one of ``text``, ``ids`` and ``messages`` is given.

    ``param``: the request's field that holds the prompt, for error messages (``messages`` or ``prompt``).
    ``add_special_tokens`` None: True for text, False after a chat template. ``clamp_max_tokens``: max_tokens was a default,
    so it is cut to the context instead of refused. ``key``: the user or the API key that it is counted for. ``parse``: the
    deltas have ``parts`` instead of text. ``return_prompt_ids``: Accepted has the prompt's ids. ``keep_last``: of a longer
    prompt only so many tokens are kept, the last ones; -1: as many as leave room for the output. ``grammar``: what the answer
    is held to.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    template: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs, tools, add_generation_prompt, ...
    add_special_tokens: bool | None = None
    clamp_max_tokens: bool = False
    priority: int = 0
    cache_salt: str = ""
    key: str = ""
    param: Literal["messages", "prompt"] = "prompt"
    parse: ParseSpec | None = None
    return_prompt_ids: bool = False
    keep_last: int | None = None
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """``reasoning_tokens``: those of the completion that the model thought with, its tags included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and its ``logprob``; None for the first token of a prompt, which nothing predicts. ``text``: the token by itself,
    with U+FFFD for what is no character alone; ``data``: its bytes, None of a special token and without a tokenizer."""

    id: int
    logprob: float | None
    text: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a prompt or an output. ``rank``: 1 for the likeliest, 0 for the first of a prompt; ``top``: the likeliest, as many as were asked for,
    falling; the token itself may be among them. ``offset``: characters of the prompt's or the output's text before it."""

    token: Candidate
    rank: int
    top: tuple[Candidate, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one output. ``index``: which of the request's ``n`` outputs. ``text`` holds only complete characters;
    ``ids`` are the tokens that came in, which may run ahead of the text. The last delta of a uid has ``finish`` ("stop", "length", "abort" or "error") and ``usage``; after
    "error", ``error`` says why. ``stop_reason``: the stop string or stop token id that matched, None for EOS. A request with
    ``parse`` gets ``parts`` and no ``text``; ``n_reasoning`` of the ``ids``, the first ones, are reasoning. ``logprobs``: of each of
    the ``ids``, if the request wants them; ``prompt_logprobs``: of each prompt token, with the first delta of an output."""

    uid: int
    index: int = 0
    text: str = ""
    ids: tuple[int, ...] = ()
    finish: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    error: str = ""
    parts: tuple[Part, ...] = ()
    n_reasoning: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The text worker took the request: ``prompt_tokens`` of the prompt after template and tokenizer. ``thinks``: its output
    is looked through for reasoning. ``ids``: the prompt's, if the request asks for them."""

    uid: int
    prompt_tokens: int
    thinks: bool = False
    ids: tuple[int, ...] | None = None


TextOutput = Accepted | Refused | Delta


# ------------------------------------------------------------------------------------------------------- models, engine


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model as files on this machine, in the layout of a Hugging Face checkpoint.

    ``path``: its folder. ``config``: config.json. ``generation``: generation_config.json, {} if absent. ``weights``: the
    safetensors files, () when there are none to read (dummy weights). ``tokenizer_dir``: where tokenizer.json and the chat
    template are; None without a tokenizer. ``defaults``: sampling defaults that the source gives, over ``generation``.
    """

    ref: str
    name: str
    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[Path, ...] = ()
    tokenizer_dir: Path | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class ExecInfo:
    """What the device has room for. ``max_slots``: rows that run at once; ``max_len``: tokens a row may have;
    ``batch_tokens``: per step."""

    num_pages: int
    page_size: int
    max_slots: int
    max_len: int
    batch_tokens: int
    vocab: int
    device: str
    dtype: str
    kv_bytes: int
    picks: Mapping[str, str] = field(default_factory=dict)  # kind -> plugin chosen on the device side
    grammars: bool = False  # it holds outputs to grammars
    logits: tuple[str, ...] = ()  # logits processors, beside those that every request has fields for


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine says of itself when it is ready; every process gets it. ``max_len`` in tokens, prompt and output
    together. ``defaults``: the model's sampling defaults (temperature, top_p, top_k, min_p, ...)."""

    model: str
    served_names: tuple[str, ...]
    max_len: int
    vocab: int
    eos: tuple[int, ...]
    page_size: int
    num_pages: int
    max_running: int
    batch_tokens: int
    device: str
    dtype: str
    created: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    picks: Mapping[str, str] = field(default_factory=dict)  # kind -> chosen plugin
    grammars: bool = False  # outputs can be held to grammars
    logits: tuple[str, ...] = ()  # logits processors that requests may name
