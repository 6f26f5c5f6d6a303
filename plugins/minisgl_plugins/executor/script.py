"""The script of the scripted executor: which tokens answer which prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from minisgl.api import ConfigError


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Reply(_Part):
    """``tokens`` in order, and after them the end token. ``fail_after``: the device fails instead of giving token number
    ``fail_after`` (0 is the first)."""

    tokens: tuple[int, ...] = ()
    fail_after: int | None = Field(None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        return {"tokens": value} if isinstance(value, list) else value


class Rule(_Part):
    """Answers to one prompt; the k-th request with it gets reply ``k % len(replies)``."""

    prompt: tuple[int, ...]
    replies: tuple[Reply, ...] = Field(min_length=1)


class Script(_Part):
    """``rules`` are looked at first. A request that none of them fits takes the next of ``in_order``, in order of admission.
    When those are used up, the answer is the prompt itself. ``step_delay_s``: how long each step takes."""

    rules: tuple[Rule, ...] = ()
    in_order: tuple[Reply, ...] = ()
    step_delay_s: float = Field(0.0, ge=0)


class ScriptBook:
    """Gives out replies. The file is read again when it changes, and counting then starts anew."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.script = Script()
        self._stamp: tuple[int, int] | None = None
        self._used: dict[int, int] = {}
        self._next = 0
        self.refresh()

    def refresh(self) -> None:
        """Raises: ConfigError if the file is not a script."""
        if self.path is None:
            return
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                self.use(Script.model_validate(json.loads(self.path.read_text())))
                self._stamp = stamp
        except (OSError, ValueError, ValidationError) as exc:
            raise ConfigError(
                f"executor.scripted.script = '{self.path}' is not a script: {exc}. It is a JSON object with any of "
                "rules, in_order and step_delay_s."
            ) from exc

    def use(self, script: Script) -> None:
        self.script, self._used, self._next = script, {}, 0

    def reply(self, prompt: tuple[int, ...]) -> Reply:
        """For one more request with this prompt."""
        self.refresh()
        for i, rule in enumerate(self.script.rules):
            if rule.prompt == prompt:
                k = self._used[i] = self._used.get(i, -1) + 1
                return rule.replies[k % len(rule.replies)]
        if self._next < len(self.script.in_order):
            self._next += 1
            return self.script.in_order[self._next - 1]
        return Reply(tokens=prompt)
