"""The torch-free vocabulary that scheduler, cache policies, executors, text workers and frontends share.

Units: everything about the KV cache and its allocator is counted in *pages*; only arrays of token ids are counted in
*tokens*. ``page_size`` is tokens per page. Ranges are ``[start, end)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
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
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new: int = 16
    stop_ids: tuple[int, ...] = ()
    grammar: bytes = b""

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1


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
    ``emitted`` of the row's ``max_new`` output tokens were sampled before (a resumed row).
    """

    slot: int
    uid: int
    kv_len: int
    ids: I32
    pages: I32
    sampling: SamplingSpec
    emitted: int
    max_new: int


@dataclass(frozen=True, slots=True)
class Span:
    """One prefill chunk of a step: the next ``n_new`` >= 1 known tokens of the row; ``sample`` if it ends the prompt."""

    slot: int
    n_new: int
    sample: bool


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
class StepResult:
    """Sampled tokens of one step: [n] int32, one for each decode row in order, then one for each span with ``sample``.
    ``stop``: [n] bool, True where the token is in the row's stop set."""

    step: int
    tokens: I32
    stop: Bools


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


EngineOutput = Tokens | Ended | Refused


# ----------------------------------------------------------------------------------------------------- users' requests


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample, as a user says it. ``None`` means the model's default (its generation config), else the neutral value.

    ``temperature`` in [0, 2], 0 is greedy; ``top_k`` -1 or 0 is off; ``max_tokens`` None fills the context; ``seed`` makes
    a request repeatable whatever runs beside it; ``stop`` strings end the text before their match; ``stop_token_ids`` stop
    in addition to EOS; ``ignore_eos`` turns EOS off, not the explicit stops.
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


PartKind = Literal["content", "reasoning", "call", "arguments", "end", "broken"]
PART_KINDS: tuple[PartKind, ...] = ("content", "reasoning", "call", "arguments", "end", "broken")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an output that is parsed. ``kind``, and what ``text`` then is:

    "content": answer; "reasoning": thought; "call": a tool call begins, the tool's name; "arguments": the next piece of the
    call's arguments, which are JSON of an object when joined; "end": the call is complete, ""; "broken": the call that was
    begun is none after all, all the text that the model wrote for it.
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
class Delta:
    """What is new of one output. ``index``: which of the request's ``n`` outputs. ``text`` holds only complete characters;
    ``ids`` are the tokens that came in, which may run ahead of the text. The last delta of a uid has ``finish`` ("stop", "length", "abort" or "error") and ``usage``; after
    "error", ``error`` says why. ``stop_reason``: the stop string or stop token id that matched, None for EOS. A request with
    ``parse`` gets ``parts`` and no ``text``; ``n_reasoning`` of the ``ids``, the first ones, are reasoning."""

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
