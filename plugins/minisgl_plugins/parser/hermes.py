"""Tool calls as Hermes, Qwen2.5 and Qwen3 write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

from .calls import CallParser, CallReader
from .json_call import JsonCall


class HermesParser(CallParser):
    openers = ("<tool_call>",)
    tags = ("<tool_call>", "</tool_call>")
    after = ("</tool_call>",)

    @classmethod
    def fits(cls, template: str) -> int:
        return 2 if "<tool_call>" in template and '"arguments"' in template else 0

    def reader(self, opener: str) -> CallReader:
        return JsonCall(opener, known=lambda name: True)
