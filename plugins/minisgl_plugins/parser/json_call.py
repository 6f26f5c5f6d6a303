"""One call written as a JSON object with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable

from minisgl.api import Part

from .calls import CallReader
from .json_scan import SPACE, JsonScanner

ARGUMENTS = ("arguments", "parameters")


class JsonCall(CallReader):
    """``{"name": ..., "arguments": {...}}`` after ``opener``; ``parameters`` is the same as ``arguments``, other keys are passed
    over. The arguments go out as the model wrote them, as soon as the name is known. Arguments that are a JSON string of an
    object are that object; null or missing ones are none, unless they are ``required``.

    Args: known: whether a name is one that can be called.
    """

    def __init__(self, opener: str, known: Callable[[str], bool], required: bool = False) -> None:
        super().__init__()
        self._skip = len(opener)
        self._known = known
        self._required = required
        self._phase = "object"  # then key? inkey colon value comma key inkey ...
        self._scanner = JsonScanner()
        self._key = ""
        self._piece: list[str] = []  # characters of the key or value that is read now
        self._name: str | None = None
        self._arguments: list[str] | None = None
        self._sent = 0  # characters of the arguments

    def push(self, text: str, out: list[Part]) -> str:
        at = 0
        while at < len(text) and self.status == "more":
            at += self._take(text[at])
        self.read(text[:at])
        self._send(out)
        return text[at:]

    def _take(self, c: str) -> int:
        """Returns: characters used, 0 or 1; one that makes it bad is not used."""
        used = 1
        if self._skip:
            self._skip -= 1
        elif self._phase == "value":
            used = self._value(c)
        elif self._phase == "inkey":
            self._in_key(c)
        elif c not in SPACE:
            self._mark(c)
        return 0 if self.status == "bad" else used

    def _mark(self, c: str) -> None:
        """A character between keys and values."""
        phase = self._phase
        if phase == "object" and c == "{":
            self._phase = "key?"
        elif phase in ("key", "key?") and c == '"':
            self._phase, self._piece, self._scanner = "inkey", [c], JsonScanner()
            self._scanner.push(c)
        elif phase == "colon" and c == ":":
            self._phase, self._piece, self._scanner = "value", [], JsonScanner()
        elif phase == "comma" and c == ",":
            self._phase = "key"
        elif phase in ("comma", "key?") and c == "}":
            self._complete()
        else:
            self.status = "bad"

    def _in_key(self, c: str) -> None:
        self._piece.append(c)
        verdict = self._scanner.push(c)
        if verdict == "bad":
            self.status = "bad"
        elif verdict == "last":
            self._key, self._phase = json.loads("".join(self._piece)), "colon"
            twice = self._arguments if self._key in ARGUMENTS else self._name if self._key == "name" else None
            if twice is not None:
                self.status = "bad"

    def _value(self, c: str) -> int:
        verdict = self._scanner.push(c)
        if verdict == "bad":
            self.status = "bad"
            return 0
        if verdict != "past" and (self._piece or c not in SPACE):
            self._piece.append(c)
            if len(self._piece) == 1 and c == "{" and self._key in ARGUMENTS:
                self._arguments = self._piece  # grows with it
        if verdict in ("last", "past"):
            self._phase = "comma"
            self._take_value("".join(self._piece))
        return 0 if verdict == "past" else 1

    def _take_value(self, text: str) -> None:
        if self._key == "name":
            name = json.loads(text)
            if isinstance(name, str) and _encodable(name) and self._known(name):
                self._name = name
            else:
                self.status = "bad"
        elif self._key in ARGUMENTS and self._arguments is None:
            inner = _object_text(text)
            if inner is None:
                self.status = "bad"
            else:
                self._arguments = [inner]

    def _send(self, out: list[Part]) -> None:
        """What is new of the arguments, once it is certain whose they are."""
        if self._name is None or self._arguments is None:
            return
        if not self.opened:
            self.opened = True
            out.append(Part("call", self._name))
        if self._sent < len(self._arguments):
            out.append(Part("arguments", "".join(self._arguments[self._sent :])))
            self._sent = len(self._arguments)

    def _complete(self) -> None:
        if self._name is None or (self._arguments is None and self._required):
            self.status = "bad"
            return
        self._arguments = ["{}"] if self._arguments is None else self._arguments
        self.status = "done"


def _object_text(piece: str) -> str | None:
    """Arguments that are not an object themselves: null, or a JSON string of one. None if they are neither."""
    value = json.loads(piece)
    if value is None:
        return "{}"
    if not isinstance(value, str) or not _encodable(value):
        return None
    try:
        return value if isinstance(json.loads(value), dict) else None
    except (ValueError, RecursionError):
        return None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return bool(text)
