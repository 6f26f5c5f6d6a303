"""Grammars by llguidance: it compiles in about a millisecond, needs nothing but the tokenizer, and refuses what it does not know.

How the JSON of a schema is spaced is fixed (", " and ": "), for models that could otherwise write whitespace for ever.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from copy import copy
from threading import Lock
from typing import Any

import numpy as np
from pydantic import Field

from minisgl.api import Grammar, GrammarContext, GrammarSpec, Matcher, Outline, PluginSettings, RequestError

from .dialect import draft_of
from .limits import tightened
from .rewrite import rewritten

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LENIENT = {"lenient": True, "coerce_one_of": True}
MAX_MESSAGE = 400
JSON = "%json "  # before a schema in rules
OLDEST = 4  # draft whose keywords are known
log = logging.getLogger(__name__)
_Rules = dict[str, Any]  # one of llguidance's grammars


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
        self._checked: OrderedDict[GrammarSpec, _Rules | RequestError] = OrderedDict()
        self._matchers: OrderedDict[bytes, Any] = OrderedDict()  # never advanced, to be copied; or why there is none

    def load(self) -> None:
        self._vocabulary()

    # -- what is asked for

    def check(self, spec: GrammarSpec) -> None:
        self._enforced(spec)

    def compile(self, outline: Outline) -> bytes:
        grammars = [{"name": "output", "lark_grammar": _rules(outline)}]
        if outline.answer is not None:
            grammars.append({**self._enforced(outline.answer), "name": "answer"})
        return json.dumps({"grammars": grammars}).encode()

    def _enforced(self, spec: GrammarSpec) -> _Rules:
        """What holds an output to ``spec``. Raises: RequestError if nothing does."""
        with self._lock:
            found = self._checked.get(spec)
        if found is None:
            try:
                found = self._tried(spec)
            except RequestError as error:
                found = copy(error)  # without its traceback, whose frames hold the request
            with self._lock:
                self._checked[spec] = found
                _trim(self._checked, self.settings.cache)
        if isinstance(found, RequestError):
            raise copy(found)  # each time it is raised it would keep more frames
        return found

    def _tried(self, spec: GrammarSpec) -> _Rules:
        """The first of the ways to say it that llguidance enforces. Raises: RequestError."""
        if len(spec.text) > self.settings.max_chars:
            raise _refused(spec, f"has {len(spec.text)} characters; at most {self.settings.max_chars} are allowed")
        why: str | None = None
        try:
            for strict, rules in self._ways(spec):
                failed, messages = self._ll.LLMatcher.validate_grammar_with_warnings(
                    json.dumps({"grammars": [rules]}), self._vocabulary(), limits=self._limits
                )
                if not failed and not (strict and messages):
                    if messages:
                        log.info("'%s' is not enforced in full: %s", spec.param, _short("; ".join(messages)))
                    return rules
                why = why or "; ".join(messages)
        except (ValueError, RecursionError) as exc:
            raise _refused(spec, f"is not valid: {exc}") from exc
        raise _refused(spec, f"cannot be enforced: {why}")

    def _ways(self, spec: GrammarSpec) -> Iterator[tuple[bool, _Rules]]:
        """(whether all of it has to be enforced, how to say it), the best first. Raises: ValueError, RequestError."""
        if spec.kind != "json_schema":
            yield spec.strict, self._plain(spec)
            return
        schema = json.loads(spec.text)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise _refused(spec, "must be an object")
        if draft_of(schema) < OLDEST:
            if spec.strict:
                raise _refused(
                    spec, f"is of draft {draft_of(schema)}, whose keywords are others; write it in draft 7 or later"
                )
            yield False, self._schema(schema, False)
            return
        said = [schema]
        yield True, self._schema(schema, True)
        # The rules of tool calls have the schemas of their arguments as they are.
        if not spec.param.startswith("tools[") and (other := rewritten(schema)) is not None:
            said.insert(0, other)
            yield True, self._schema(other, True)
        if not spec.strict:
            for each in said:
                yield False, self._schema(each, False)

    def _schema(self, schema: Mapping[str, Any], strict: bool) -> _Rules:
        spacing: Mapping[str, Any] = {} if self.settings.flexible_whitespace else SPACING
        return {"json_schema": {**tightened(schema), "x-guidance": {**spacing, **({} if strict else LENIENT)}}}

    def _plain(self, spec: GrammarSpec) -> _Rules:
        """Of what is no schema. Raises: ValueError, RequestError."""
        if spec.kind == "json_object":
            return self._schema({"type": "object"}, True)
        if spec.kind == "regex":
            found: _Rules = json.loads(self._ll.LLMatcher.grammar_from_regex(spec.text))["grammars"][0]
            return {"lark_grammar": found["lark_grammar"]}
        if spec.kind == "choice":
            return {"lark_grammar": "start: " + " | ".join(json.dumps(c) for c in json.loads(spec.text))}
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return {"lark_grammar": any_to_lark(spec.text)}
        except Exception as exc:  # the converter raises what it likes
            raise _refused(spec, f"is neither Lark nor GBNF: {exc}") from exc

    # -- tokens

    def matcher(self, compiled: bytes) -> Matcher:
        return LLGuidanceMatcher(self._prototype(compiled).deep_copy())

    def _prototype(self, compiled: bytes) -> Any:
        """A matcher at the start. Raises: RequestError."""
        with self._lock:
            found = self._matchers.get(compiled)
            if found is not None:
                self._matchers.move_to_end(compiled)
        if found is None:
            found = self._made(compiled)
            with self._lock:
                self._matchers[compiled] = found
                _trim(self._matchers, self.settings.cache)
        if isinstance(found, str):
            raise RequestError(f"the output cannot be held to its grammar: {found}", code="invalid_grammar")
        return found

    def _made(self, compiled: bytes) -> Any:
        """A matcher, or why there is none."""
        made = self._ll.LLMatcher(self._vocabulary(), compiled.decode(), log_level=0, limits=self._limits)
        return _short(made.get_error()) if made.is_error() else made

    def _vocabulary(self) -> Any:
        """Made once: it takes a quarter of a second, in which no other thread of the process runs, and some tens of MB."""
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


def _tight(rules: str) -> str:
    """The schemas in rules of calls without what llguidance would let through. What is no JSON there stands in some text."""
    first, *pieces = rules.split(JSON)
    out = [first]
    for piece in pieces:
        try:
            schema, end = json.JSONDecoder().raw_decode(piece)
        except ValueError:
            schema, end = None, 0
        tight = tightened(schema) if isinstance(schema, dict) else schema
        out += [JSON, piece if tight is schema else json.dumps(tight) + piece[end:]]
    return "".join(out)


def _rules(outline: Outline) -> str:
    body = {(True, True): "@answer | calls", (True, False): "@answer", (False, True): "calls"}
    rules = f"body: {body[outline.answer is not None, bool(outline.calls)]}\n{_tight(outline.calls)}\n"
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
