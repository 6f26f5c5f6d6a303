"""Tool calls as Hermes, Qwen2.5 and Qwen3 write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.api import Terminal

from .calls import CallParser, CallReader
from .json_call import JsonCall
from .rules import alternatives, arguments, with_text


class HermesParser(CallParser):
    openers = ("<tool_call>",)
    tags = ("<tool_call>", "</tool_call>")
    after = ("</tool_call>",)

    @classmethod
    def fits(cls, template: str) -> int:
        return 2 if "<tool_call>" in template and '"arguments"' in template else 0

    def reader(self, opener: str) -> CallReader:
        return JsonCall(opener, known=lambda name: True)

    def call_rules(self, tools: Sequence[Mapping[str, Any]], many: bool, free: bool, terminal: Terminal) -> str:
        tag = "<tool_call>"
        rules = []
        for i, tool in enumerate(tools):
            name = json.dumps(tool["name"], ensure_ascii=False)
            before, after = terminal('\n{"name": ' + name + ', "arguments": '), terminal("}\n</tool_call>")
            rules.append((f"call_{i}", f"{before} {arguments(tool)} {after}"))
        lead = terminal(tag)
        if free:
            return with_text(lead, lead.startswith("<[")) + alternatives(rules)
        more = f"({terminal(chr(10) + tag)} call)*" if many else ""
        return f"calls: {lead} call {more}\n" + alternatives(rules)
