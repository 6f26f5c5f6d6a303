"""Tool calls as Llama 3.1 to 3.3 write them: ``{"name": ..., "parameters": {...}}``, several separated by ``;``."""

from __future__ import annotations

from .calls import CallParser, CallReader
from .json_call import JsonCall

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
