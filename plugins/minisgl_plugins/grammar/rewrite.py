"""JSON schemas with keywords that the grammar engine has not, said with those that it has.

The new schema may be narrower than the old one, never wider: whatever fits it fits the old one. Narrower are: ``contains``, whose
item comes first; ``if``, ``not`` and ``oneOf``, where a failure cannot be said in full (a number that is no integer, a text that a
pattern does not match); ``unevaluatedItems`` and ``unevaluatedProperties``, where several branches fit. What cannot be said at all
stays as it is, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from .dialect import TYPES, Document, Schema, within
from .negate import DEPTH, Negation

MAX_CASES = 64  # of what may be evaluated
MAX_CONTAINED = 64  # items that are to come first
SIZES = (
    "maxItems",
    "maxLength",
    "maxProperties",
    "minItems",
    "minLength",
    "minProperties",
    "maxContains",
    "minContains",
)
Extra = list[Schema] | None  # schemas that stand for keywords; None: they stay


@dataclass(frozen=True, slots=True)
class Case:
    """``seen``: what is evaluated where the ``conditions`` hold: property names, ("pattern", p), or places of items; ``all``:
    everything."""

    conditions: tuple[Schema, ...] = ()
    seen: frozenset[Any] = frozenset()
    all: bool = False

    def and_(self, other: Case) -> Case:
        return Case(self.conditions + other.conditions, self.seen | other.seen, self.all or other.all)


def rewritten(root: Mapping[str, Any]) -> dict[str, Any] | None:
    """None if it would be too large, or is no schema."""
    try:
        new = _Rewriter(Document(root)).of(root)
    except (
        ArithmeticError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        RecursionError,
    ):  # nobody has checked its form
        return None
    return new if isinstance(new, dict) else None


class _Rewriter:
    def __init__(self, document: Document) -> None:
        self._document, self._negation = document, Negation(document)

    def of(self, schema: Schema) -> Schema:
        """Raises: ValueError when it gets too large."""
        self._document.step()
        if not isinstance(schema, Mapping):
            return schema
        new = self._tidied(schema)
        extra: list[Schema] = []
        for keys, said in RULES:
            if new.keys() & set(keys):
                found = said(self, new)
                if found is not None:
                    extra += found
                    new = {k: v for k, v in new.items() if k not in keys}
        if extra:
            new["allOf"] = [*new.get("allOf", []), *extra]
        return {key: within(key, value, self.of) for key, value in new.items()}

    def _tidied(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes as integers, references that are ordinary ones as such, and without what says nothing."""
        new = {k: int(v) if k in SIZES and isinstance(v, float) and v.is_integer() else v for k, v in schema.items()}
        name = new.get("$dynamicRef")
        if isinstance(name, str) and self._document.local and name[:1] == "#" and name[1:] in self._document.dynamic:
            new["$ref"] = new.pop("$dynamicRef")
        if new.get("$recursiveRef") == "#" and self._document.local and "$ref" not in new:
            new["$ref"] = new.pop("$recursiveRef")
        if new.get("$dynamicAnchor") in self._document.dynamic and "$anchor" not in new:
            new["$anchor"] = new.pop("$dynamicAnchor")
        for key in ("$recursiveAnchor", "$vocabulary"):
            new.pop(key, None)
        if new.get("uniqueItems") is False or new.get("maxItems", 2) <= 1:
            new.pop("uniqueItems", None)
        return new

    # -- keywords: what they say, as schemas

    def _not(self, s: Mapping[str, Any]) -> Extra:
        failing = self._negation.of(s["not"])
        return None if failing is None else [failing]

    def _if(self, s: Mapping[str, Any]) -> Extra:
        if "if" not in s or not s.keys() & {"then", "else"}:
            return []
        failing = self._negation.of(s["if"])
        if failing is None:
            return None
        return [{"anyOf": [_both(s["if"], s.get("then", True)), _both(failing, s.get("else", True))]}]

    def _one_of(self, s: Mapping[str, Any]) -> Extra:
        """Raises: ValueError where it would have to stay: of a narrower option fewer values fail."""
        options = s["oneOf"]
        failing = [self._negation.of(option) for option in options]
        if None in failing:
            raise ValueError("oneOf")
        others = [[f for j, f in enumerate(failing) if j != i] for i in range(len(options))]
        return [{"anyOf": [_both(option, *rest) for option, rest in zip(options, others, strict=True)]}]

    def _dependent(self, s: Mapping[str, Any]) -> Extra:
        every = [
            (n, d)
            for key in ("dependentRequired", "dependentSchemas", "dependencies")
            for n, d in s.get(key, {}).items()
        ]
        return [{"anyOf": [_absent(name), _both(_present(name), _needs(needed))]} for name, needed in every]

    def _property_names(self, s: Mapping[str, Any]) -> Extra:
        names = s["propertyNames"]
        if isinstance(names, bool):
            return [] if names else [{"maxProperties": 0}]
        keys = set(names) - {"$comment", "title", "description"}
        if keys > {"type"} and names.get("type") == "string":
            keys -= {"type"}
        if not keys or (keys == {"type"} and names["type"] == "string"):
            return []
        if len(keys) > 1 or (self._document.draft < 6 and "const" in keys):
            return None
        (key,) = keys
        value = names[key]
        if key in ("enum", "const"):
            known = [v for v in (value if key == "enum" else [value]) if isinstance(v, str)]
            return [{"properties": dict.fromkeys(known, True), "additionalProperties": False}]
        patterns = {"pattern": value, "maxLength": rf"^(.|\n){{0,{value}}}$", "minLength": rf"^(.|\n){{{value},}}$"}
        if key not in patterns:
            return None
        return [{"patternProperties": {patterns[key]: True}, "additionalProperties": False}]

    def _contains(self, s: Mapping[str, Any]) -> Extra:
        if "contains" not in s:
            return []
        least, most = s.get("minContains", 1), s.get("maxContains")
        if self._document.draft < 2019:
            least, most = 1, None
        rest: Schema | None = True if most is None else self._negation.of(s["contains"])
        if rest is None or least > MAX_CONTAINED:
            return None
        if most is not None and most < least:
            return [{"type": [t for t in TYPES if t != "array"]}]
        if least == 0:
            return [{"items": rest}]
        return [{"minItems": least, self._tuple: [s["contains"]] * least, self._rest: rest}]

    @property
    def _tuple(self) -> str:
        return "prefixItems" if self._document.draft >= 2020 else "items"

    @property
    def _rest(self) -> str:
        return "items" if self._document.draft >= 2020 else "additionalItems"

    # -- what is not evaluated

    def _unevaluated_properties(self, s: Mapping[str, Any]) -> Extra:
        rest, out = s["unevaluatedProperties"], []
        for case in self._cases(s, _seen_properties, "unevaluatedProperties"):
            names = dict.fromkeys(sorted(n for n in case.seen if isinstance(n, str)), True)
            patterns = {n[1]: True for n in sorted(n for n in case.seen if not isinstance(n, str))}
            closing = {"properties": names, "patternProperties": patterns, "additionalProperties": rest}
            out.append(_both(*case.conditions, *([] if case.all else [{k: v for k, v in closing.items() if v != {}}])))
        return [{"anyOf": out}]

    def _unevaluated_items(self, s: Mapping[str, Any]) -> Extra:
        rest, out = s["unevaluatedItems"], []
        for case in self._cases(s, _seen_items(self._tuple, self._rest), "unevaluatedItems"):
            first = [True] * len(case.seen)
            closing = {self._tuple: first, self._rest: rest} if first else {"items": rest}
            out.append(_both(*case.conditions, *([] if case.all else [closing])))
        return [{"anyOf": out}]

    def _cases(self, s: Schema, seen: Callable[[Mapping[str, Any]], Case], own: str, depth: int = 0) -> list[Case]:
        """What ``s`` evaluates, by which of its branches fit. Raises: ValueError for too many."""
        self._document.step()
        if not isinstance(s, Mapping) or depth > DEPTH:
            return [Case()]
        parts: list[list[Case]] = [[seen(s)]]
        if depth and own in s:
            parts.append([Case(all=True)])

        def of(branch: Schema, *conditions: Schema) -> list[Case]:
            return [replace(c, conditions=conditions + c.conditions) for c in self._cases(branch, seen, own, depth + 1)]

        parts += [of(branch) for branch in s.get("allOf", [])]
        target = self._document.target(s.get("$ref"))
        if target is not None:
            parts.append(of(target))
        for key in ("anyOf", "oneOf"):
            if key in s:
                parts.append([case for branch in s[key] for case in of(branch, branch)])
        if "if" in s:
            parts.append(self._branches(s, of))
        for name, needed in s.get("dependentSchemas", {}).items():
            parts.append([Case((_absent(name),)), *of(needed, _present(name))])
        if (n := prod(map(len, parts))) > MAX_CASES:
            raise ValueError(f"{n} cases")
        return [_joined(combination) for combination in product(*parts)]

    def _branches(self, s: Mapping[str, Any], of: Callable[..., list[Case]]) -> list[Case]:
        """Of ``if``. The branch where it fails is left out if that cannot be said."""
        first = [a.and_(b) for a in of(s["if"], s["if"]) for b in of(s.get("then", True))]
        failing = self._negation.of(s["if"])
        return first if failing is None else first + of(s.get("else", True), failing)


# Keywords that are taken away together -> what stands for them. The "unevaluated" ones look at the others, and go first.
RULES: Sequence[tuple[tuple[str, ...], Callable[[_Rewriter, Mapping[str, Any]], Extra]]] = (
    (("unevaluatedProperties",), _Rewriter._unevaluated_properties),
    (("unevaluatedItems",), _Rewriter._unevaluated_items),
    (("not",), _Rewriter._not),
    (("if", "then", "else"), _Rewriter._if),
    (("oneOf",), _Rewriter._one_of),
    (("dependentRequired", "dependentSchemas", "dependencies"), _Rewriter._dependent),
    (("propertyNames",), _Rewriter._property_names),
    (("contains", "minContains", "maxContains"), _Rewriter._contains),
)


def _seen_properties(s: Mapping[str, Any]) -> Case:
    names = {*s.get("properties", {}), *(("pattern", p) for p in s.get("patternProperties", {}))}
    return Case(seen=frozenset(names), all="additionalProperties" in s)


def _seen_items(first: str, rest: str) -> Callable[[Mapping[str, Any]], Case]:
    def seen(s: Mapping[str, Any]) -> Case:
        prefix = s.get(first)
        if isinstance(prefix, list):
            return Case(seen=frozenset(range(len(prefix))), all=rest in s)
        return Case(all="items" in s)

    return seen


def _both(*schemas: Schema) -> Schema:
    real = [s for s in schemas if s is not True and s != {}]
    return True if not real else real[0] if len(real) == 1 else {"allOf": real}


def _absent(name: str) -> Schema:
    return {"properties": {name: False}}


def _present(name: str) -> Schema:
    return {"type": "object", "required": [name]}


def _needs(needed: Any) -> Schema:
    return {"required": needed} if isinstance(needed, list) else needed


def _joined(cases: Iterable[Case]) -> Case:
    whole = Case()
    for case in cases:
        whole = whole.and_(case)
    return whole
