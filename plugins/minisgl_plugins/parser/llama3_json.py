"""Tool calls as Llama 3.1 to 3.3 write them: ``{"name": ..., "parameters": {...}}``, several separated by ``;``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.api import Terminal

from .calls import CallParser, CallReader
from .json_call import JsonCall
from .rules import alternatives, arguments, json_call

TAG = "<|python_tag|>"


class Llama3JsonParser(CallParser):
    """An object counts only at the start of the answer, after ``<|python_tag|>`` or after another call, and only if its name is
    one of the request's tools and it has parameters: other JSON is an answer."""

    openers = (TAG,)
    tags = (TAG,)
    after = (";",)

    @classmethod
    def fits(cls, template: str) -> int:
        return 1 if '"parameters"' in template and ("<|eot_id|>" in template or TAG in template) else 0

    def opening(self, text: str) -> tuple[int, str] | None:
        start = len(text) - len(text.lstrip())
        if not self._said and text[start : start + 1] == "{":
            return start, ""
        return super().opening(text)

    def reader(self, opener: str) -> CallReader:
        return JsonCall(opener, self._names.__contains__, required=True)

    def call_rules(self, tools: Sequence[Mapping[str, Any]], many: bool, free: bool, terminal: Terminal) -> str:
        rules = []
        for i, tool in enumerate(tools):
            before = terminal('{"name": ' + json.dumps(tool["name"], ensure_ascii=False) + ', "parameters": ')
            apart = f"{before} {arguments(tool)} {terminal('}')}"
            rules.append((f"call_{i}", json_call(tool, "parameters") or apart))
        calls = f"call ({terminal('; ')} call)*" if many else "call"
        text = " | /([^{ \\n](.|\\n)*)?/" if free else ""
        return f"calls: {calls}{text}\n" + alternatives(rules)
