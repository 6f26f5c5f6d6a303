"""One JSON value, read character by character: where it ends, and whether it is one."""

from __future__ import annotations

import re
from typing import Literal

Verdict = Literal["more", "last", "past", "bad"]  # "last": this character ends the value; "past": the one before did
SPACE = " \t\n\r"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_START = re.compile(r"-?(0|[1-9][0-9]*)?((?<=[0-9])\.[0-9]*)?((?<=[0-9])[eE][+-]?[0-9]*)?")
WORDS = ("true", "false", "null")
ESCAPES = '"\\/bfnrt'
HEX = "0123456789abcdefABCDEF"


class JsonScanner:
    """A strict reader of RFC 8259 values that keeps no tree: only which brackets are open."""

    __slots__ = ("_atom", "_hex", "_in", "_open", "_want")

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets
        self._want = "value"  # value, key, colon, comma; "value?" and "key?": or the closing bracket
        self._in = ""  # "string", "escape", "number", "word": inside of what
        self._atom = ""  # of a number or word
        self._hex = 0  # digits that \u still needs

    def push(self, c: str) -> Verdict:
        if self._in == "string" or self._in == "escape":
            return self._string(c)
        if self._in:
            return self._number_or_word(c)
        if c in SPACE:
            return "more"
        return self._token(c)

    def _string(self, c: str) -> Verdict:
        if self._hex:
            self._hex -= 1
            return "more" if c in HEX else "bad"
        if self._in == "escape":
            self._in = "string"
            self._hex = 4 if c == "u" else 0
            return "more" if c == "u" or c in ESCAPES else "bad"
        if c == "\\":
            self._in = "escape"
        elif c == '"':
            self._in = ""
            if self._want == "colon":
                return "more"
            return self._closed()
        elif c < " ":
            return "bad"
        return "more"

    def _number_or_word(self, c: str) -> Verdict:
        atom = self._atom + c
        if self._in == "word":
            if atom in WORDS:
                self._in = ""
                return self._closed()
            self._atom = atom
            return "more" if any(w.startswith(atom) for w in WORDS) else "bad"
        if NUMBER_START.fullmatch(atom):
            self._atom = atom
            return "more"
        if not NUMBER.fullmatch(self._atom):
            return "bad"
        self._in = ""
        if self._closed() == "last":
            return "past"
        return "more" if c in SPACE else self._token(c)

    def _token(self, c: str) -> Verdict:
        want = self._want
        if want == "comma":
            return self._comma_or_close(c)
        if want == "colon":
            self._want = "value"
            return "more" if c == ":" else "bad"
        if want in ("key", "key?"):
            if c == '"':
                self._in, self._want = "string", "colon"
                return "more"
            return self._close(c) if want == "key?" else "bad"
        if c == "]" and want == "value?":
            return self._close(c)
        return self._value(c)

    def _value(self, c: str) -> Verdict:
        self._want = "comma"
        if c in "{[":
            self._open.append(c)
            self._want = "key?" if c == "{" else "value?"
        elif c == '"':
            self._in = "string"
        elif c in "-0123456789":
            self._in, self._atom = "number", c
        elif c in "tfn":
            self._in, self._atom = "word", c
        else:
            return "bad"
        return "more"

    def _comma_or_close(self, c: str) -> Verdict:
        if c == ",":
            self._want = "key" if self._open[-1] == "{" else "value"
            return "more"
        return self._close(c)

    def _close(self, c: str) -> Verdict:
        if c not in "}]" or self._open[-1] + c not in ("{}", "[]"):
            return "bad"
        self._open.pop()
        return self._closed()

    def _closed(self) -> Verdict:
        """A value is complete."""
        self._want = "comma"
        return "more" if self._open else "last"
