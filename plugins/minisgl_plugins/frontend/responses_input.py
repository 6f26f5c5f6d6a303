"""``input`` and ``instructions`` of a response to the messages of a chat."""

from __future__ import annotations

from typing import Any

from minisgl.api import Fields

from .openai_messages import read_content
from .responses_items import uncarried

ROLES = ("user", "assistant", "system", "developer")


def read_input(f: Fields) -> list[dict[str, Any]]:
    """Raises: RequestError whose param is the path inside ``input``."""
    chat = Conversation()
    instructions = f.string("instructions")
    if instructions:
        chat.system(instructions)
    given = f.need("input")
    if isinstance(given.raw, str):
        chat.messages.append({"role": "user", "content": given.string()})
    elif not isinstance(given.raw, list):
        raise given.wrong_type("a string or an array of items")
    else:
        for item in given.items(min_len=1):
            chat.add(item.object())
    return chat.messages


class Conversation:
    """Chat messages in the making. Reasoning, text and calls that follow one another are one message of the assistant."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, item: Fields) -> None:
        kind = item.value("type")
        name = "message" if kind is None else kind.string()
        if name == "message":
            self._message(item)
        elif name == "reasoning":
            self._reasoning(item)
        elif name == "function_call":
            self._call(item)
        elif name == "function_call_output":
            tool = {"role": "tool", "tool_call_id": item.need("call_id").string()}
            self.messages.append({**tool, "content": read_content(item.need("output"))})
        else:
            assert kind is not None, name
            raise kind.refused(
                f"is {name[:100]!r}; this server, which keeps no items, takes those of type 'message', 'reasoning', "
                "'function_call' and 'function_call_output'; clients that refer to kept items send them whole with 'store': false",
                "unsupported_value",
            )

    def system(self, text: str) -> None:
        """Many templates take one message of the system, the first: those at the beginning become one."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += "\n\n" + text
        else:
            self.messages.append({"role": "system", "content": text})

    def _message(self, item: Fields) -> None:
        role = item.need("role").one_of(ROLES)
        text = read_content(item.need("content"))
        if role == "user":
            self.messages.append({"role": role, "content": text})
        elif role == "assistant":
            last = self._assistant()
            if last["content"] and not last["tool_calls"]:  # two messages
                last = self._assistant(new=True)
            last["content"] += text
        else:
            self.system(text)

    def _reasoning(self, item: Fields) -> None:
        text = _texts(item, "content") or uncarried(item.string("encrypted_content") or "") or _texts(item, "summary")
        if not text:
            return  # another server's, which nobody else can read
        last = self._assistant()
        if last["content"] or last["tool_calls"]:
            last = self._assistant(new=True)
        last["reasoning_content"] = "\n".join(t for t in (last.get("reasoning_content"), text) if t)

    def _call(self, item: Fields) -> None:
        function = {name: item.need(name).string() for name in ("name", "arguments")}
        call = {"id": item.need("call_id").string(), "type": "function", "function": function}
        self._assistant()["tool_calls"].append(call)

    def _assistant(self, new: bool = False) -> dict[str, Any]:
        """The message that the assistant is in the middle of."""
        if new or not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": "", "tool_calls": []})
        return self.messages[-1]


def _texts(item: Fields, name: str) -> str:
    return "\n".join(part.object().need("text").string() for part in item.items(name))
