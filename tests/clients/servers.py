"""The two servers that the clients talk to. They are started where minisgl is installed; clients in other environments get
their addresses by the variable ``MINISGL_CLIENTS``. So this module needs the standard library alone until a server is started.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "MINISGL_CLIENTS"
TEMPLATES = Path(__file__).parent / "templates"
FRONTENDS = ("--frontend", "openai,anthropic,responses")
MAX_LEN = 200_000  # of the scripted model, whose tokens are bytes: a coding agent begins with tens of thousands


@dataclass(frozen=True, slots=True)
class Real:
    """The default model on the CPU. ``folder``: its checkpoint."""

    url: str
    model: str
    folder: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Scripted:
    """A server whose engine replays ``replies``; without any, a prompt is its own answer. It wants ``key``."""

    url: str
    model: str
    key: str
    script: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def replies(self, *texts: str) -> None:
        """The next requests, in order, are answered with these texts."""
        new = Path(f"{self.script}.new")
        new.write_text(json.dumps({"in_order": [self._ids(text) for text in texts]}))
        new.replace(self.script)  # at once: the engine may read at any time

    @staticmethod
    def call(name: str, **arguments: Any) -> str:
        """What a model writes to call a tool, as the server's parser expects it."""
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    def _ids(self, text: str) -> list[int]:
        body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/tokenize", body, headers), timeout=20
        ) as answer:
            return list(json.load(answer)["tokens"])


@contextmanager
def start_real() -> Iterator[Real]:
    from minisgl.config.schema import Settings
    from minisgl.plugin.registry import Registry
    from minisgl.testing.server import Server
    from minisgl.text.resolve import resolve_model

    model = resolve_model(Settings(), Registry.scan())
    with Server(*FRONTENDS, "--model.chat-template", str(TEMPLATES / "smollm2_tools.jinja"), ready_s=120) as server:
        yield Real(server.url, model.name, str(model.path))


@contextmanager
def start_scripted(folder: Path) -> Iterator[Scripted]:
    from minisgl.testing.bytemodel import write_byte_model
    from minisgl.testing.server import Server

    script = folder / "script.json"
    script.write_text("{}")
    options = ["--model", str(write_byte_model(folder / "model", MAX_LEN)), "--served-name", "scripted"]
    options += ["--executor", "scripted", "--executor.scripted.script", str(script), "--api-key", "secret"]
    options += [
        "--executor.scripted.check",
        "false",
        "--limits.batch-tokens",
        "16384",
        "--kv.num-pages",
        str(4 * MAX_LEN // 16),
    ]
    options += ["--model.chat-template", str(TEMPLATES / "plain.jinja")]
    with Server(*options, *FRONTENDS) as server:
        yield Scripted(server.url, "scripted", "secret", str(script))


def to_environment(real: Real, scripted: Scripted) -> dict[str, str]:
    return {VARIABLE: json.dumps({"real": asdict(real), "scripted": asdict(scripted)})}


def from_environment() -> tuple[Real, Scripted] | None:
    told = json.loads(os.environ.get(VARIABLE, "null"))
    return told and (Real(**told["real"]), Scripted(**told["scripted"]))
