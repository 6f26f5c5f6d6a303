"""A device without a model: it replays given tokens, for tests of everything around the model.

It applies step plans as a real device does, down to the KV pages (which hold the token ids they were computed from), so a
scheduler or cache that mixes up pages is caught here. An executor cannot end one request alone: ``fail_after`` in a script is
a fault of the whole engine.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from minisgl.api import (
    ExecContext,
    ExecHealth,
    ExecInfo,
    Executor,
    Fault,
    LogprobBlock,
    PluginSettings,
    RowInit,
    SamplingSpec,
    Span,
    StepPlan,
    StepResult,
    Ticket,
)

from .script import Reply, ScriptBook

REMEMBERED = 65536  # requests whose reply is kept for a resumption
POLL_S = 0.001
Scored = tuple[int, int, int]  # slot, position and token


class ScriptedSettings(PluginSettings):
    script: Path | None = Field(None, description="JSON file with the answers; without one a prompt is its own answer")
    hold: Path | None = Field(None, description="while this file exists, no step is completed")
    check: bool = Field(True, description="read the KV of a row back at every token; off to measure what is around it")
    num_pages: int = Field(4096, gt=0, description="KV pages when kv.num_pages is not set")
    max_slots: int = Field(64, gt=0, description="rows when limits.max_running is not set")
    batch_tokens: int = Field(1024, gt=0, description="tokens of a step when limits.batch_tokens is not set")


class ScriptedTicket(Ticket):
    __slots__ = ("failed", "result")

    def __init__(self, result: StepResult, failed: str) -> None:
        super().__init__(result.step)
        self.result = result
        self.failed = failed


class _Row:
    """``history``: every known token of the row; KV of the first ``kv_len`` is in ``pages``."""

    __slots__ = ("emitted", "history", "kv_len", "pages", "prompt_len", "reply", "sampling", "uid")

    def __init__(self, init: RowInit, cached: list[int], reply: Reply) -> None:
        self.uid = init.uid
        self.kv_len = init.kv_len
        self.history = cached + init.ids.tolist()
        self.pages: list[int] = init.pages.tolist()
        self.sampling: SamplingSpec = init.sampling
        self.emitted = init.emitted
        self.prompt_len = len(self.history) - init.emitted
        self.reply = reply


class ScriptedExecutor(Executor):
    Settings = ScriptedSettings
    needs_weights: ClassVar[bool] = False

    def __init__(self, ctx: ExecContext) -> None:
        self.ctx = ctx
        self.settings: ScriptedSettings = ctx.settings
        self.book = ScriptBook(self.settings.script)
        self._rows: dict[int, _Row] = {}
        self._order: dict[int, int] = {}  # position -> slot
        self._replies: OrderedDict[int, Reply] = OrderedDict()  # by uid
        self._flying: deque[ScriptedTicket] = deque()
        self._next_step = 0
        self._done_step = -1
        self._failed = ""

    def start(self) -> ExecInfo:
        config, facts = self.ctx.config, self.ctx.facts
        num_pages = config.kv.num_pages or self.settings.num_pages
        page_size = config.kv.page_size
        self._kv = np.full((num_pages, page_size), -1, np.int32)  # [num_pages, page_size] token ids
        self._end = min(facts.eos) if facts.eos else None
        return ExecInfo(
            num_pages=num_pages,
            page_size=page_size,
            max_slots=config.limits.max_running or self.settings.max_slots,
            max_len=min(config.limits.max_len or facts.max_len, facts.max_len, num_pages * page_size),
            batch_tokens=config.limits.batch_tokens or self.settings.batch_tokens,
            vocab=facts.vocab,
            device="cpu (scripted)",
            dtype="none",
            kv_bytes=0,
            grammars=True,  # the script is what a model held to them would write
        )

    def submit(self, plan: StepPlan) -> Ticket:
        assert plan.step == self._next_step, f"plan {plan.step} came where {self._next_step} was due"
        self._next_step += 1
        self._apply(plan)
        tokens: list[int] = []
        stops: list[bool] = []
        scored: list[Scored] = []
        failed = ""
        for span in self._work(plan):
            row = self._rows[span.slot]
            if span.score:
                last = min(row.kv_len + span.n_new, row.prompt_len - 1)
                scored += [(span.slot, at, row.history[at]) for at in range(row.kv_len + 1, last + 1)]
            self._compute(row, span.n_new)
            if span.sample:
                if row.emitted == row.reply.fail_after:
                    failed = failed or f"the script fails request {row.uid} after {row.emitted} tokens"
                token = self._sample(row)
                if row.sampling.logprobs is not None:
                    scored.append((span.slot, len(row.history) - 1, token))
                tokens.append(token)
                stops.append(token in row.sampling.stop_ids)
        result = StepResult(plan.step, np.array(tokens, np.int32), np.array(stops, np.bool_), self._scores(scored))
        ticket = ScriptedTicket(result, failed)
        self._flying.append(ticket)
        return ticket

    def collect(self, ticket: Ticket, timeout: float) -> StepResult:
        due = self._flying.popleft()
        assert due is ticket, f"step {ticket.step} collected where {due.step} was due"
        deadline = time.monotonic() + timeout
        if self.book.script.step_delay_s:
            time.sleep(self.book.script.step_delay_s)
        while self.settings.hold is not None and self.settings.hold.exists():
            if time.monotonic() > deadline:
                due.failed = f"step {due.step} was held for more than {timeout} s by '{self.settings.hold}'"
                break
            time.sleep(POLL_S)
        if due.failed:
            self._failed = due.failed
            raise Fault(due.failed)
        self._done_step = due.step
        return due.result

    def health(self) -> ExecHealth:
        return ExecHealth(not self._failed, self._done_step, self._failed)

    def stop(self, grace: float) -> None:
        self._rows.clear()
        self._flying.clear()

    # -- one step

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.retire.tolist():
            self._rows.pop(slot, None)
        for init in plan.init:
            self._admit(init)
        for slot, at, page in zip(plan.grow_slot.tolist(), plan.grow_at.tolist(), plan.grow_page.tolist(), strict=True):
            pages = self._rows[slot].pages
            assert at <= len(pages), f"slot {slot}: page {at} set with {len(pages)} known"
            pages[at : at + 1] = [page]
        self._order.update(zip(plan.order_pos.tolist(), plan.order_slot.tolist(), strict=True))

    def _admit(self, init: RowInit) -> None:
        assert init.slot not in self._rows, f"slot {init.slot} is in use"
        cached = [int(self._kv[p, i]) for p, i in self._places(init.pages.tolist(), 0, init.kv_len)]
        assert -1 not in cached, f"slot {init.slot}: cached pages hold no KV"
        reply = self._replies.get(init.uid)
        if reply is None:
            prompt = tuple(cached + init.ids.tolist())
            reply = self._replies[init.uid] = self.book.reply(prompt)
            if len(self._replies) > REMEMBERED:
                self._replies.popitem(last=False)
        self._rows[init.slot] = _Row(init, cached, reply)

    def _work(self, plan: StepPlan) -> list[Span]:
        """The rows of the step: decode rows in order, then prefill chunks."""
        return [Span(self._order[i], 1, True) for i in range(plan.n_decode)] + list(plan.spans)

    def _compute(self, row: _Row, n_new: int) -> None:
        """Write the KV of the next ``n_new`` known tokens."""
        end = row.kv_len + n_new
        assert end <= len(row.history), f"request {row.uid}: {end} tokens to compute, {len(row.history)} known"
        for at, (page, offset) in enumerate(self._places(row.pages, row.kv_len, end), row.kv_len):
            self._kv[page, offset] = row.history[at]
        row.kv_len = end

    def _scores(self, scored: list[Scored]) -> LogprobBlock | None:
        """Made up, of the token alone: it is the likeliest, and the ids that follow it come next."""
        if not scored:
            return None
        row, position, token = (np.array(x, np.int32) for x in zip(*scored))
        asked = [s for slot in set(row.tolist()) for s in self._asked(slot)]
        k = min(max(asked), self.ctx.facts.vocab)
        top_ids = (token[:, None] + np.arange(k, dtype=np.int32)) % self.ctx.facts.vocab
        own = (-0.1 - (token % 7) / 64).astype(np.float32)
        top = (own[:, None] - np.arange(k) / 2).astype(np.float32)
        return LogprobBlock(row, position, token, own, np.ones(len(row), np.int32), top_ids.astype(np.int32), top)

    def _asked(self, slot: int) -> list[int]:
        sampling = self._rows[slot].sampling
        return [k for k in (sampling.logprobs, sampling.prompt_logprobs) if k is not None]

    def _sample(self, row: _Row) -> int:
        """The next token of the row's reply; reads its KV back, as attention would."""
        assert row.kv_len == len(row.history), (
            f"request {row.uid} samples with {row.kv_len} of {len(row.history)} computed"
        )
        if self.settings.check:
            read = [int(self._kv[p, i]) for p, i in self._places(row.pages, 0, row.kv_len)]
            assert read == row.history, f"request {row.uid}: its KV pages hold other tokens than its own"
        tokens = row.reply.tokens
        token = tokens[row.emitted] if row.emitted < len(tokens) else self._end_token(row)
        row.emitted += 1
        row.history.append(token)
        return token

    def _end_token(self, row: _Row) -> int:
        """What comes after the reply: EOS, also where the request ignores it; else any stop token; else the reply again."""
        if self._end is not None:
            return self._end
        if row.sampling.stop_ids:
            return row.sampling.stop_ids[0]
        tokens = row.reply.tokens
        return tokens[row.emitted % len(tokens)] if tokens else 0

    def _places(self, pages: list[int], start: int, end: int) -> list[tuple[int, int]]:
        """(page, offset) of the tokens [start, end)."""
        size = self._kv.shape[1]
        assert end <= len(pages) * size, f"{end} tokens do not fit in {len(pages)} pages of {size}"
        return [(pages[i // size], i % size) for i in range(start, end)]
