"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from minisgl.api import EngineInfo, Fields, GenerateRequest, Note

from .openai_constraints import token_ids
from .openai_fields import read_model
from .openai_messages import read_messages
from .openai_request import read_template
from .openai_tools import read_tools


def read_tokenize(body: dict[str, Any], info: EngineInfo, note: Note | None = None) -> tuple[GenerateRequest, bool]:
    """The ``prompt`` or the ``messages``; and whether the texts of the tokens are wanted. Raises: RequestError."""
    f = Fields(body, note=note)
    read_model(f, info)
    wants_text = f.boolean("return_token_strs") or False
    special = f.boolean("add_special_tokens")
    if f.raw("messages") is None:
        text = f.need("prompt").string()
        return GenerateRequest(text=text, add_special_tokens=special is not False), wants_text
    messages = read_messages(f)
    template = read_template(f, messages, read_tools(f, empty=True).tools)
    request = GenerateRequest(
        messages=messages, template=template, add_special_tokens=special or False, param="messages"
    )
    return request, wants_text


def read_detokenize(body: dict[str, Any], info: EngineInfo, note: Note | None = None) -> tuple[int, ...]:
    """Token ids. Raises: RequestError."""
    f = Fields(body, note=note)
    read_model(f, info)
    return token_ids(f.need("tokens"), info.vocab)
