"""The text side of a request, without I/O: from what a user asks to what the engine admits, and from tokens to text.

Used by the text worker process and by the in-process pipeline. One thread only.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from minisgl.base.bounds import NEUTRAL
from minisgl.base.errors import RequestError
from minisgl.base.grammar import Grammar
from minisgl.base.types import (
    I32,
    Accepted,
    Admit,
    Ended,
    EngineInfo,
    EngineOutput,
    GenerateRequest,
    Refused,
    SamplingParams,
    SamplingSpec,
    Scores,
    TextOutput,
    Tokens,
)
from minisgl.text.decode import KeepingDecoder
from minisgl.text.outline import Outlines, tool_functions
from minisgl.text.output import NoText, Output
from minisgl.text.parse import Parsers, Parsing
from minisgl.text.stops import StopHolder
from minisgl.text.tokenizer import Decoder, Tokenizer
from minisgl.text.told import PromptScores, TokenNames, Told, scores_of
from minisgl.text.validate import check_ids, check_request

logger = logging.getLogger(__name__)


class TextProcessor:
    """Tokenizes requests of one text worker and turns their tokens into text.

    ``tokenizer`` None serves requests with token ids only. ``owner``: the worker's index, for the engine's answers.
    ``parsers`` None: outputs are not parsed. ``grammar`` None: they are held to no grammar.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        info: EngineInfo,
        owner: int = 0,
        parsers: Parsers | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self._parsers = Parsers({}) if parsers is None else parsers
        self.outlines = Outlines(self._parsers, grammar, self._special)
        self._tokenizer = tokenizer
        self._info = info
        self._owner = owner
        self._eos = frozenset(info.eos) | (tokenizer.eos if tokenizer is not None else frozenset())  # fault A15
        self._running: dict[int, Output] = {}
        self._names = TokenNames(tokenizer)

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
            text, ids = self._prompt(request)
            spec = self._spec(request, len(ids))
            grammar = self.outlines.compile(request, text, continued(request))
            spec = replace(spec, grammar=grammar) if grammar else spec
            scores = PromptScores.of(self._names, spec.prompt_logprobs, ids.tolist(), text)
            admits = [self._admit(uid, i, text, ids, spec, request, scores) for i, uid in enumerate(uids)]
        except RequestError as e:
            return [Refused(uids[0], e.status, e.message, e.code, e.param)], []
        except Exception:
            logger.exception("a request could not be processed")
            for uid in uids:
                self._running.pop(uid, None)
            return [Refused(uids[0], 500, "the request could not be processed", "internal_error")], []
        thinks = request.parse is not None and self._parsers.thinks(request.parse)
        returned = tuple(ids.tolist()) if request.return_prompt_ids else None
        return [Accepted(uids[0], len(ids), thinks, returned)], admits

    def _admit(
        self,
        uid: int,
        index: int,
        text: str,
        ids: I32,
        spec: SamplingSpec,
        request: GenerateRequest,
        scores: PromptScores | None,
    ) -> Admit:
        params = request.sampling
        stops = StopHolder(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._running[uid] = Output(
            uid=uid,
            index=index,
            prompt_tokens=len(ids),
            decoder=self._decoder(request),
            stops=stops,
            parsing=self._parsing(request, text, stops, bool(spec.grammar)),
            stop_ids=frozenset(spec.stop_ids),
            eos=frozenset() if params.ignore_eos else self._eos,
            show_stop=params.include_stop_str_in_output,
            told=None
            if spec.logprobs is None and scores is None
            else Told(self._names, spec.logprobs, scores, len(ids)),
            min_tokens=params.min_tokens,
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

    def _decoder(self, request: GenerateRequest) -> Decoder:
        if self._tokenizer is None:
            return NoText()
        skip = request.sampling.skip_special_tokens
        decoder = self._tokenizer.decoder(skip)
        if request.parse is None or not skip:
            return decoder
        kept = {i: tag for tag in self._parsers.tags(request.parse) if (i := self._special(tag)) is not None}
        return KeepingDecoder(decoder, kept) if kept else decoder

    def _special(self, tag: str) -> int | None:
        """Id of a tag that is a special token, which text usually leaves out."""
        tokenizer = self._tokenizer
        token = None if tokenizer is None else tokenizer.token_to_id(tag)
        return None if token is None or tokenizer is None or tokenizer.decode((token,), True) else token

    def _parsing(self, request: GenerateRequest, text: str, stops: StopHolder | None, sure: bool) -> Parsing | None:
        if request.parse is None or not self._parsers.needed(request.parse):
            return None
        tools = tool_functions(request.template.get("tools"))
        return self._parsers.start(request.parse, stops, tools, text, continued(request), sure)

    def cancel(self, uids: Iterable[int]) -> list[int]:
        """The client is gone: nothing more is told of these. Returns: those to abort in the engine."""
        alive = [o for uid in uids if (o := self._running.get(uid)) is not None and not o.muted]
        for output in alive:
            output.muted = output.closed = True
        return [o.uid for o in alive]

    def tokenize(self, request: GenerateRequest) -> list[int]:
        """Ids of a request's prompt. Raises: RequestError."""
        check_request(request, self._info.vocab)
        return [int(i) for i in self._encode(request)[1]]

    def detokenize(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids. Raises: RequestError for ids outside the vocabulary."""
        tokenizer = self._need_tokenizer("detokenize", "tokens")
        check_ids(ids, "tokens", max(self._info.vocab, tokenizer.vocab))
        return tokenizer.decode(ids, skip_special)

    # -- prompts

    def _prompt(self, request: GenerateRequest) -> tuple[str, I32]:
        """The prompt's text ("" for ids) and its [num_tokens] int32 ids, which fit the model and its context."""
        if request.sampling.stop:
            self._need_tokenizer("stop strings", "stop")
        if request.parse is not None:
            self._check_tools(request)
        text, ids = self._encode(request)
        ids = self._last(ids, request)
        if not len(ids):
            raise RequestError("the prompt is empty; at least one token is needed", param=request.param)  # fault A10
        if (worst := int(ids.max())) >= self._info.vocab:
            raise RequestError(
                f"the prompt has token {worst}, which this model has no embedding for (it has {self._info.vocab})",
                param=request.param,
            )
        if len(ids) >= self._info.max_len:
            raise self._too_long(request, len(ids))  # fault A9
        return text, ids

    def _last(self, ids: I32, request: GenerateRequest) -> I32:
        """The tokens that ``keep_last`` leaves."""
        keep = request.keep_last
        if keep is None:
            return ids
        if keep == -1:
            keep = max(self._info.max_len - (request.sampling.max_tokens or 1), 1)
        return ids[-keep:]

    def _check_tools(self, request: GenerateRequest) -> None:
        """Refuse tools that the model would not see, or whose calls nothing here would read."""
        assert request.parse is not None
        if not request.parse.calls:
            return
        tokenizer = self._need_tokenizer("tools", "tools")
        if "tools" not in tokenizer.template:
            raise RequestError(
                "'tools' cannot be served: the chat template of this model has no place for them. Give one that has with "
                "model.chat_template, or send none.",
                code="unsupported_parameter",
                param="tools",
            )
        self._parsers.check(request.parse)

    def _encode(self, request: GenerateRequest) -> tuple[str, I32]:
        """Text, "" for a prompt that came as ids; and ids."""
        if request.ids is not None:
            return "", np.array(request.ids, np.int32)
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
            ids = np.array([tokenizer.bos], np.int32)
        return text, ids

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
        # A grammar lets EOS through only where the output may end, and nothing else where it must.
        keep_eos = not params.ignore_eos or Outlines.wanted(request) is not None
        stop_ids = (self._eos if keep_eos else frozenset()) | frozenset(params.stop_token_ids)
        max_new = self._max_new(request, prompt_tokens)
        return SamplingSpec(
            temperature=0.0 if temperature < 1e-5 else float(temperature),
            top_k=1 if top_p == 0 else max(0, int(top_k)),  # top_p 0 keeps the most likely token
            top_p=1.0 if top_p == 0 else float(top_p),
            min_p=float(self._value(params, "min_p")),
            seed=params.seed,
            max_new=max_new,
            stop_ids=tuple(sorted(i for i in stop_ids if 0 <= i < self._info.vocab)),
            bias_ids=tuple(params.logit_bias),
            biases=tuple(float(b) for b in params.logit_bias.values()),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(self._value(params, "repetition_penalty")),
            min_new=min(params.min_tokens, max_new),
            allowed_ids=tuple(sorted(set(params.allowed_token_ids))),
            bad_words=self._bad_words(params),
            extra=self._extra(params),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, at the beginning of a text and after a space."""
        if not params.bad_words:
            return ()
        tokenizer = self._need_tokenizer("bad_words", "bad_words")
        texts = [space + word.strip() for word in params.bad_words for space in ("", " ")]
        return tuple(dict.fromkeys(tuple(tokenizer.encode(text, False).tolist()) for text in texts))

    def _extra(self, params: SamplingParams) -> dict[str, Any]:
        known = self._info.logits
        if unknown := sorted(set(params.logits) - set(known)):
            raise RequestError(
                f"logits.{unknown[0]} is no logits processor of this server; it has {', '.join(known) or 'none'}: "
                "add one with logits.use",
                param=f"logits.{unknown[0]}",
            )
        return dict(params.logits)

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
        """The wording that clients look for: LiteLLM for the first sentence, LangChain for the code within the message."""
        new = 1 if request.clamp_max_tokens else request.sampling.max_tokens or 1
        about = "at least " if at_least else ""
        return RequestError(
            f"This model's maximum context length is {self._info.max_len} tokens. However, you requested {about}"
            f"{prompt_tokens + new} tokens ({about}{prompt_tokens} in the {request.param}, {new} in the completion). "
            f"Please reduce the length of the {request.param} or of the completion. (context_length_exceeded)",
            code="context_length_exceeded",
            param=request.param,
        )

    # -- tokens out

    def engine_outputs(self, outputs: Sequence[EngineOutput]) -> tuple[list[TextOutput], list[int]]:
        """What the engine said. Returns: what to tell the api processes, at most one Delta for each output and call unless
        it ends; and the uids to abort because a stop string ended them."""
        told: list[TextOutput] = []
        fresh: dict[int, Output] = {}
        aborts: list[int] = []
        for item in outputs:
            if isinstance(item, Tokens):
                self._tokens(item, fresh, aborts)
                continue
            if isinstance(item, Scores):
                self._scores(item)
                continue
            output = self._running.pop(item.uid, None)
            fresh.pop(item.uid, None)
            if output is None or output.muted:
                continue
            told.append(output.end(item) if isinstance(item, Ended) else item)
        told.extend([output.delta() for output in fresh.values() if not output.waiting])
        return told, aborts

    def _scores(self, new: Scores) -> None:
        outputs = [self._running.get(uid) for uid in new.uids.tolist()]
        for row, position, score in scores_of(new.block):
            output = outputs[row]
            if output is not None and output.told is not None:
                output.told.add(position, score)

    def _tokens(self, new: Tokens, fresh: dict[int, Output], aborts: list[int]) -> None:
        running = self._running
        for uid, token in zip(new.uids.tolist(), new.tokens.tolist(), strict=True):
            output = running.get(uid)
            if output is None or output.closed:
                continue
            fresh[uid] = output
            if output.take(token):
                aborts.append(uid)


def continued(request: GenerateRequest) -> str:
    """The text of the last message if it is to be continued, else ""."""
    if not request.messages or not request.template.get("continue_final_message"):
        return ""
    content = request.messages[-1].get("content")
    return content if isinstance(content, str) else ""


def choice_spec(spec: SamplingSpec, index: int) -> SamplingSpec:
    """The spec of output ``index``: with a seed, the first has the seed itself and each other one its own, derived from it. The
    prompt is scored for the first."""
    if index == 0:
        return spec
    spec = replace(spec, prompt_logprobs=None)
    if spec.seed is None:
        return spec
    digest = blake2b(struct.pack("<qq", spec.seed, index), digest_size=8).digest()
    return replace(spec, seed=int.from_bytes(digest, "little") >> 1)
