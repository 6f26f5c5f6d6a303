"""Finished outputs of the Python API."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.base.types import Delta, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One finished output. ``finish``: "stop" or "length". ``ids``: sampled tokens, a final EOS included. ``logprobs``: of each of
    them, and ``prompt_logprobs`` of each token of the prompt, if they were asked for."""

    text: str
    ids: tuple[int, ...]
    finish: str
    usage: Usage
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(slots=True)
class Collected:
    """The deltas of one output so far."""

    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt: tuple[TokenLogprob, ...] | None = None

    def add(self, delta: Delta) -> RequestOutput | None:
        """Returns: the output with its last delta."""
        self.text.append(delta.text)
        self.ids += delta.ids
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.prompt = self.prompt or delta.prompt_logprobs
        if delta.finish is None:
            return None
        assert delta.usage is not None, delta
        told = None if self.logprobs is None else tuple(self.logprobs)
        return RequestOutput(
            "".join(self.text), tuple(self.ids), delta.finish, delta.usage, delta.stop_reason, told, self.prompt
        )
