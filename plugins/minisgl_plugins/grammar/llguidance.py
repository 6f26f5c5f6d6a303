"""Grammars by llguidance: it compiles in about a millisecond, needs nothing but the tokenizer, and refuses what it does not know.

How the JSON of a schema is spaced is fixed (", " and ": "), for models that could otherwise write whitespace for ever.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

import numpy as np
from pydantic import Field

from minisgl.api import Grammar, GrammarContext, GrammarSpec, Matcher, Outline, PluginSettings, RequestError

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LENIENT = {"lenient": True, "coerce_one_of": True}
MAX_MESSAGE = 400


class LLGuidanceSettings(PluginSettings):
    max_chars: int = Field(1 << 18, gt=0, description="longest schema, expression or grammar in characters")
    flexible_whitespace: bool = Field(False, description="JSON may have any whitespace between its parts")
    cache: int = Field(256, ge=1, description="grammars that are kept compiled")
    max_grammar_size: int = Field(500_000, gt=0, description="most symbols of a compiled grammar")


class LLGuidanceGrammar(Grammar):
    Settings = LLGuidanceSettings

    def __init__(self, ctx: GrammarContext) -> None:
        import llguidance

        self._ll = llguidance
        self._ctx = ctx
        self.settings: LLGuidanceSettings = ctx.settings
        self._limits = llguidance.LLParserLimits(max_grammar_size=self.settings.max_grammar_size, verbose_errors=False)
        self._lock = Lock()  # of the tokenizer and the caches
        self._tokenizer: Any = None
        self._checked: OrderedDict[GrammarSpec, RequestError | None] = OrderedDict()
        self._matchers: OrderedDict[bytes, Any] = OrderedDict()  # never advanced, to be copied

    # -- what is asked for

    def check(self, spec: GrammarSpec) -> None:
        with self._lock:
            known = spec in self._checked
            error = self._checked.get(spec)
        if not known:
            error = self._fault(spec)
            with self._lock:
                self._checked[spec] = error
                _trim(self._checked, self.settings.cache)
        if error is not None:
            raise error

    def compile(self, outline: Outline) -> bytes:
        if outline.answer is not None:
            self.check(outline.answer)
        grammars = [{"name": "output", "lark_grammar": _rules(outline)}]
        if outline.answer is not None:
            grammars.append({**self._grammar(outline.answer), "name": "answer"})
        compiled = json.dumps({"grammars": grammars}).encode()
        if outline.calls:
            self._prototype(compiled)  # its schemas were checked one by one, but not their sum
        return compiled

    def _fault(self, spec: GrammarSpec) -> RequestError | None:
        """Why ``spec`` cannot be enforced, if so."""
        if len(spec.text) > self.settings.max_chars:
            return _refused(spec, f"has {len(spec.text)} characters; at most {self.settings.max_chars} are allowed")
        try:
            grammar = self._grammar(spec)
        except RequestError as error:
            return error
        except (ValueError, RecursionError) as exc:
            return _refused(spec, f"is not valid: {exc}")
        text = json.dumps({"grammars": [grammar]})
        failed, messages = self._ll.LLMatcher.validate_grammar_with_warnings(
            text, self._vocabulary(), limits=self._limits
        )
        if failed or (spec.strict and messages):
            return _refused(spec, f"cannot be enforced: {'; '.join(messages)}")
        return None

    def _grammar(self, spec: GrammarSpec) -> dict[str, Any]:
        """As one of llguidance's grammars. Raises: ValueError, RequestError."""
        if spec.kind == "json_object":
            return {"json_schema": {"type": "object", "x-guidance": self._options(False)}}
        if spec.kind == "json_schema":
            schema = json.loads(spec.text)
            if schema is True:
                schema = {}
            if not isinstance(schema, dict):
                raise _refused(spec, "must be an object")
            return {"json_schema": {**schema, "x-guidance": self._options(spec.strict)}}
        if spec.kind == "regex":
            found: dict[str, Any] = json.loads(self._ll.LLMatcher.grammar_from_regex(spec.text))["grammars"][0]
            return {"lark_grammar": found["lark_grammar"]}
        if spec.kind == "choice":
            return {"lark_grammar": "start: " + " | ".join(json.dumps(c) for c in json.loads(spec.text))}
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return {"lark_grammar": any_to_lark(spec.text)}
        except Exception as exc:  # the converter raises what it likes
            raise _refused(spec, f"is neither Lark nor GBNF: {exc}") from exc

    def _options(self, strict: bool) -> dict[str, Any]:
        spacing: Mapping[str, Any] = {} if self.settings.flexible_whitespace else SPACING
        return {**spacing, **({} if strict else LENIENT)}

    # -- tokens

    def matcher(self, compiled: bytes) -> Matcher:
        return LLGuidanceMatcher(self._prototype(compiled).deep_copy())

    def _prototype(self, compiled: bytes) -> Any:
        """A matcher at the start. Raises: RequestError."""
        with self._lock:
            made = self._matchers.get(compiled)
            if made is not None:
                self._matchers.move_to_end(compiled)
                return made
        made = self._ll.LLMatcher(self._vocabulary(), compiled.decode(), log_level=0, limits=self._limits)
        if made.is_error():
            raise RequestError(
                f"the output cannot be held to its grammar: {_short(made.get_error())}", code="invalid_grammar"
            )
        with self._lock:
            self._matchers[compiled] = made
            _trim(self._matchers, self.settings.cache)
        return made

    def _vocabulary(self) -> Any:
        """Made when it is needed first: it takes half a second and some tens of MB."""
        with self._lock:
            if self._tokenizer is None:
                path = self._ctx.tokenizer_dir / "tokenizer.json"
                self._tokenizer = self._ll.LLTokenizer(str(path), eos_token=list(self._ctx.eos) or None)
            return self._tokenizer


class LLGuidanceMatcher(Matcher):
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, mask: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        n = min(len(bits), len(mask))
        mask[:n] = bits[:n]
        mask[n:] = 0  # rows of a padded vocabulary stand for no text (fault W4)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    def rollback(self, count: int) -> None:
        assert self._matcher.rollback(count), f"cannot take back {count} tokens"

    @property
    def done(self) -> bool:
        return bool(self._matcher.is_stopped())


def _rules(outline: Outline) -> str:
    body = {(True, True): "@answer | calls", (True, False): "@answer", (False, True): "calls"}
    rules = f"body: {body[outline.answer is not None, bool(outline.calls)]}\n{outline.calls}\n"
    if outline.think is None:
        return f"start: body\n{rules}"
    first, last = outline.think
    token = last.startswith("<[")  # a special token ends any text by itself
    thought = f"/(.|\\n)*/ {last}"
    rules += f"thought: {thought}\n" if token else f"thought[lazy]: {thought}\n"
    think = f"{first} thought /\\n{{0,2}}/" if first else "thought /\\n{0,2}/"
    return f"start: think{'?' if first else ''} body\nthink: {think}\n{rules}"


def _refused(spec: GrammarSpec, why: str) -> RequestError:
    schema = spec.kind in ("json_schema", "json_object")
    code = "invalid_json_schema" if schema else "invalid_grammar"
    if spec.param.startswith("tools["):
        code = "invalid_function_parameters"
    return RequestError(f"'{spec.param}' {_short(why)}", code=code, param=spec.param)


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def _trim(cache: OrderedDict[Any, Any], size: int) -> None:
    while len(cache) > size:
        cache.popitem(last=False)
