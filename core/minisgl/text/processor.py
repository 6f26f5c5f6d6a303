"""The text side of a request, without I/O: from what a user asks to what the engine admits, and from tokens to text.

Used by the text worker process and by the in-process pipeline. One thread only.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from minisgl.base.bounds import NEUTRAL
from minisgl.base.errors import RequestError
from minisgl.base.types import (
    I32,
    Accepted,
    Admit,
    Delta,
    Ended,
    EngineInfo,
    EngineOutput,
    Finish,
    GenerateRequest,
    Refused,
    SamplingParams,
    SamplingSpec,
    TextOutput,
    Tokens,
    Usage,
)
from minisgl.text.stops import StopHolder
from minisgl.text.tokenizer import Decoder, Tokenizer
from minisgl.text.validate import check_ids, check_request

logger = logging.getLogger(__name__)


class _NoText(Decoder):
    """Of a model without a tokenizer: ids go out, text does not."""

    def push(self, ids: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


@dataclass(slots=True)
class _Output:
    """One running output. ``closed``: later tokens are dropped; ``muted``: nothing more is told to the client."""

    uid: int
    index: int
    prompt_tokens: int
    decoder: Decoder
    stops: StopHolder | None
    stop_ids: frozenset[int]
    eos: frozenset[int]
    show_stop: bool
    completion_tokens: int = 0
    stop_token: int | None = None
    closed: bool = False
    muted: bool = False
    text: list[str] = field(default_factory=list)  # not yet sent
    ids: list[int] = field(default_factory=list)  # not yet sent

    def take(self, token: int) -> bool:
        """Add one token. Returns: whether it completed a stop string."""
        self.completion_tokens += 1
        self.ids.append(token)
        if token in self.stop_ids:
            self.stop_token, self.closed = token, True
            if not self.show_stop:
                return False
        return self._add(self.decoder.push((token,)))

    def _add(self, text: str) -> bool:
        if self.stops is None:
            self.text.append(text)
            return False
        self.text.append(self.stops.push(text))
        self.closed |= self.stops.matched is not None
        return self.stops.matched is not None

    def end(self, ended: Ended) -> Delta:
        """The last delta: what was held back, why it ended, and the counts."""
        if not self._add(self.decoder.finish()) and self.stops is not None:
            self.text.append(self.stops.flush())
        finish, reason = self._why(ended.finish)
        return self.delta(
            finish=finish,
            stop_reason=reason,
            usage=Usage(self.prompt_tokens, self.completion_tokens, ended.cached_tokens),
            error=ended.detail if finish == Finish.ERROR else "",
        )

    def _why(self, finish: Finish) -> tuple[str, str | int | None]:
        if self.stops is not None and self.stops.matched is not None:
            return Finish.STOP.value, self.stops.matched
        if self.stop_token is not None:
            return Finish.STOP.value, None if self.stop_token in self.eos else self.stop_token
        return finish.value, None

    def delta(self, **end: Any) -> Delta:
        """What is new since the last one."""
        new = Delta(uid=self.uid, index=self.index, text="".join(self.text), ids=tuple(self.ids), **end)
        self.text, self.ids = [], []
        return new


class TextProcessor:
    """Tokenizes requests of one text worker and turns their tokens into text.

    ``tokenizer`` None serves requests with token ids only. ``owner``: the worker's index, for the engine's answers.
    """

    def __init__(self, tokenizer: Tokenizer | None, info: EngineInfo, owner: int = 0) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._owner = owner
        self._eos = frozenset(info.eos) | (tokenizer.eos if tokenizer is not None else frozenset())  # fault A15
        self._running: dict[int, _Output] = {}

    # -- requests in

    def submit(self, uids: Sequence[int], request: GenerateRequest) -> tuple[list[TextOutput], list[Admit]]:
        """Take a request whose ``n`` outputs have these uids.

        Returns: an Accepted with the first uid, and one Admit for each uid; or, for a request that cannot be served, one
        Refused with the first uid, and nothing to admit; without a uid there is nobody to answer. Never raises.
        """
        if not uids:
            return [], []
        try:
            check_request(request, self._info.vocab)
            if len(uids) != request.n:
                raise ValueError(f"{len(uids)} uids for n = {request.n}")
            ids = self._prompt(request)
            spec = self._spec(request, len(ids))
            admits = [self._admit(uid, i, ids, spec, request) for i, uid in enumerate(uids)]
        except RequestError as e:
            return [Refused(uids[0], e.status, e.message, e.code, e.param)], []
        except Exception:
            logger.exception("a request could not be processed")
            for uid in uids:
                self._running.pop(uid, None)
            return [Refused(uids[0], 500, "the request could not be processed", "internal_error")], []
        return [Accepted(uids[0], len(ids))], admits

    def _admit(self, uid: int, index: int, ids: I32, spec: SamplingSpec, request: GenerateRequest) -> Admit:
        params = request.sampling
        self._running[uid] = _Output(
            uid=uid,
            index=index,
            prompt_tokens=len(ids),
            decoder=_NoText() if self._tokenizer is None else self._tokenizer.decoder(params.skip_special_tokens),
            stops=StopHolder(params.stop, params.include_stop_str_in_output) if params.stop else None,
            stop_ids=frozenset(spec.stop_ids),
            eos=frozenset() if params.ignore_eos else self._eos,
            show_stop=params.include_stop_str_in_output,
        )
        return Admit(
            uid=uid,
            ids=ids,
            sampling=choice_spec(spec, index),
            owner=self._owner,
            priority=request.priority,
            namespace=request.cache_salt.encode(),
            arrived_ns=time.monotonic_ns(),
            key=request.key,
        )

    def cancel(self, uids: Iterable[int]) -> list[int]:
        """The client is gone: nothing more is told of these. Returns: those to abort in the engine."""
        alive = [o for uid in uids if (o := self._running.get(uid)) is not None and not o.muted]
        for output in alive:
            output.muted = output.closed = True
        return [o.uid for o in alive]

    def tokenize(self, request: GenerateRequest) -> list[int]:
        """Ids of a request's prompt. Raises: RequestError."""
        check_request(request, self._info.vocab)
        return [int(i) for i in self._encode(request)]

    def detokenize(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids. Raises: RequestError for ids outside the vocabulary."""
        tokenizer = self._need_tokenizer("detokenize", "tokens")
        check_ids(ids, "tokens", max(self._info.vocab, tokenizer.vocab))
        return tokenizer.decode(ids, skip_special)

    # -- prompts

    def _prompt(self, request: GenerateRequest) -> I32:
        """[num_tokens] int32 ids that fit the model and its context."""
        if request.sampling.stop:
            self._need_tokenizer("stop strings", "stop")
        ids = self._encode(request)
        if not len(ids):
            raise RequestError("the prompt is empty; at least one token is needed", param=request.param)  # fault A10
        if (worst := int(ids.max())) >= self._info.vocab:
            raise RequestError(
                f"the prompt has token {worst}, which this model has no embedding for (it has {self._info.vocab})",
                param=request.param,
            )
        if len(ids) >= self._info.max_len:
            raise self._too_long(request, len(ids))  # fault A9
        return ids

    def _encode(self, request: GenerateRequest) -> I32:
        if request.ids is not None:
            return np.array(request.ids, np.int32)
        tokenizer = self._need_tokenizer(f"{request.param} as text", request.param)
        special = request.add_special_tokens
        if request.messages is not None:
            text = tokenizer.render(request.messages, **request.template)
            special = bool(special)  # fault A14: the template writes BOS itself
        else:
            text = request.text or ""
            special = special is not False
        self._check_text(text, request)
        ids = tokenizer.encode(text, special)
        if not len(ids) and special and tokenizer.bos is not None:
            return np.array([tokenizer.bos], np.int32)
        return ids

    def _check_text(self, text: str, request: GenerateRequest) -> None:
        """Refuse text that no tokenizer takes, and text so long that tokenizing it is wasted time."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RequestError(f"the text has a lone surrogate at character {e.start}", param=request.param) from e
        longest = self._tokenizer.max_chars if self._tokenizer is not None else None
        if longest is not None and len(text) > longest * self._info.max_len:
            raise self._too_long(request, -(-len(text) // longest), at_least=True)

    def _need_tokenizer(self, what: str, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"{what}: this model has no tokenizer; send the prompt as token ids",
                code="unsupported_value",
                param=param,
            )
        return self._tokenizer

    # -- sampling

    def _spec(self, request: GenerateRequest, prompt_tokens: int) -> SamplingSpec:
        """What the engine samples with: the request's values, else the model's defaults, else neutral ones."""
        params = request.sampling
        temperature, top_p, top_k = (self._value(params, k) for k in ("temperature", "top_p", "top_k"))
        stop_ids = (frozenset() if params.ignore_eos else self._eos) | frozenset(params.stop_token_ids)
        return SamplingSpec(
            temperature=0.0 if temperature < 1e-5 else float(temperature),
            top_k=1 if top_p == 0 else max(0, int(top_k)),  # top_p 0 keeps the most likely token
            top_p=1.0 if top_p == 0 else float(top_p),
            min_p=float(self._value(params, "min_p")),
            seed=params.seed,
            max_new=self._max_new(request, prompt_tokens),
            stop_ids=tuple(sorted(i for i in stop_ids if 0 <= i < self._info.vocab)),
        )

    def _value(self, params: SamplingParams, name: str) -> float:
        given = getattr(params, name)
        if given is None:
            given = self._info.defaults.get(name)
        return NEUTRAL[name] if given is None else given

    def _max_new(self, request: GenerateRequest, prompt_tokens: int) -> int:
        room = self._info.max_len - prompt_tokens
        asked = request.sampling.max_tokens
        if asked is None:
            return room
        if asked > room and not request.clamp_max_tokens:
            raise self._too_long(request, prompt_tokens)
        return min(asked, room)

    def _too_long(self, request: GenerateRequest, prompt_tokens: int, at_least: bool = False) -> RequestError:
        """The wording that clients look for; openai_api.md 4.2."""
        new = 1 if request.clamp_max_tokens else request.sampling.max_tokens or 1
        about = "at least " if at_least else ""
        return RequestError(
            f"This model's maximum context length is {self._info.max_len} tokens. However, you requested {about}"
            f"{prompt_tokens + new} tokens ({about}{prompt_tokens} in the {request.param}, {new} in the completion). "
            f"Please reduce the length of the {request.param} or of the completion.",
            code="context_length_exceeded",
            param=request.param,
        )

    # -- tokens out

    def engine_outputs(self, outputs: Sequence[EngineOutput]) -> tuple[list[TextOutput], list[int]]:
        """What the engine said. Returns: what to tell the api processes, at most one Delta for each output and call unless
        it ends; and the uids to abort because a stop string ended them."""
        told: list[TextOutput] = []
        fresh: dict[int, _Output] = {}
        aborts: list[int] = []
        for item in outputs:
            if isinstance(item, Tokens):
                self._tokens(item, fresh, aborts)
                continue
            output = self._running.pop(item.uid, None)
            fresh.pop(item.uid, None)
            if output is None or output.muted:
                continue
            told.append(output.end(item) if isinstance(item, Ended) else item)
        told.extend([output.delta() for output in fresh.values()])
        return told, aborts

    def _tokens(self, new: Tokens, fresh: dict[int, _Output], aborts: list[int]) -> None:
        running = self._running
        for uid, token in zip(new.uids.tolist(), new.tokens.tolist(), strict=True):
            output = running.get(uid)
            if output is None or output.closed:
                continue
            fresh[uid] = output
            if output.take(token):
                aborts.append(uid)


def choice_spec(spec: SamplingSpec, index: int) -> SamplingSpec:
    """The spec of output ``index``: with a seed, the first has the seed itself and each other one its own, derived from it."""
    if spec.seed is None or index == 0:
        return spec
    digest = blake2b(struct.pack("<qq", spec.seed, index), digest_size=8).digest()
    return replace(spec, seed=int.from_bytes(digest, "little") >> 1)
