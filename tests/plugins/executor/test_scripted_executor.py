"""The scripted executor applies plans as a device does, and gives the tokens of its script."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.api import ConfigError, ExecContext, Fault, ModelFacts, RowInit, SamplingSpec, Span, StepPlan
from minisgl.config.schema import Settings
from minisgl_plugins.executor.scripted import ScriptedExecutor, ScriptedSettings

EOS = 1
PAGE = 4
STOP = SamplingSpec(stop_ids=(EOS,), max_new=99)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": EOS,
}


def device(**options: Any) -> ScriptedExecutor:
    config = Settings.model_validate({"kv": {"page_size": PAGE}})
    facts = ModelFacts.from_hf(CONFIG, {})
    ctx = ExecContext(ScriptedSettings(**options), config, None, None, facts, loop_depth=1)  # type: ignore[arg-type]
    made = ScriptedExecutor(ctx)
    made.start()
    return made


def scripted(tmp_path: Path, script: Any, **options: Any) -> ScriptedExecutor:
    (tmp_path / "script.json").write_text(json.dumps(script))
    return device(script=tmp_path / "script.json", **options)


def i32(values: Any = ()) -> Any:
    return np.array(values, np.int32)


def row(
    slot: int, ids: list[int], pages: list[int], kv_len: int = 0, emitted: int = 0, uid: int | None = None
) -> RowInit:
    return RowInit(slot, slot if uid is None else uid, kv_len, i32(ids), i32(pages), STOP, emitted, 99)


class Plans:
    """Numbers the steps."""

    def __init__(self, executor: ScriptedExecutor) -> None:
        self.executor = executor
        self.step = 0

    def run(
        self,
        init: tuple[RowInit, ...] = (),
        spans: tuple[Span, ...] = (),
        n_decode: int = 0,
        order: dict[int, int] | None = None,
        grow: tuple[tuple[int, int, int], ...] = (),
        retire: tuple[int, ...] = (),
        timeout: float = 5,
    ) -> tuple[list[int], list[bool]]:
        slots, ats, pages = (i32([g[k] for g in grow]) for k in range(3))
        order = order or {}
        plan = StepPlan(
            self.step,
            i32(retire),
            init,
            slots,
            ats,
            pages,
            i32(list(order)),
            i32(list(order.values())),
            n_decode,
            spans,
        )
        self.step += 1
        result = self.executor.collect(self.executor.submit(plan), timeout)
        assert result.step == plan.step
        return result.tokens.tolist(), result.stop.tolist()


def test_without_a_script_a_prompt_answers_itself_and_then_ends():
    plans = Plans(device())
    assert plans.run((row(0, [5, 6], [0]),), (Span(0, 2, True),)) == ([5], [False])
    assert plans.run(n_decode=1, order={0: 0}) == ([6], [False])
    assert plans.run(n_decode=1, grow=((0, 1, 7),)) == ([EOS], [True])


def test_a_chunk_that_does_not_end_the_prompt_gives_nothing():
    plans = Plans(device())
    assert plans.run((row(0, [5, 6, 7], [0]),), (Span(0, 2, False),)) == ([], [])
    assert plans.run(spans=(Span(0, 1, True),)) == ([5], [False])


def test_results_are_in_the_order_of_the_plan():
    plans = Plans(device())
    rows = tuple(row(slot, [10 + slot, 20 + slot], [slot]) for slot in range(3))
    spans = (Span(2, 2, True), Span(0, 2, True), Span(1, 2, True))
    assert plans.run(rows, spans)[0] == [12, 10, 11]
    assert plans.run(n_decode=3, order={0: 1, 1: 2, 2: 0})[0] == [21, 22, 20]
    assert plans.run(n_decode=1, order={0: 2}, grow=((2, 1, 5),))[0] == [EOS]


def test_rules_go_by_prompt_also_when_its_prefix_is_cached(tmp_path):
    prompt = [5, 6, 7, 8, 9]
    script = {"rules": [{"prompt": prompt, "replies": [[40, 41], [50]]}], "in_order": [[60], [70]]}
    plans = Plans(scripted(tmp_path, script))
    assert plans.run((row(0, prompt, [0, 1]),), (Span(0, 5, True),))[0] == [40]
    assert plans.run((row(1, [9], [0, 2], kv_len=4),), (Span(1, 1, True),))[0] == [50]  # page 0 holds [5, 6, 7, 8]
    assert plans.run((row(2, [9], [0, 3], kv_len=4),), (Span(2, 1, True),))[0] == [40]
    others = (row(3, [5], [4]), row(4, [6], [5]), row(5, [7], [6]))
    assert plans.run(others, tuple(Span(s, 1, True) for s in (3, 4, 5)))[0] == [60, 70, 7]


def test_a_resumed_row_goes_on_with_its_reply(tmp_path):
    plans = Plans(scripted(tmp_path, {"in_order": [[40, 41, 42]]}))
    assert plans.run((row(0, [5], [0], uid=9),), (Span(0, 1, True),))[0] == [40]
    resumed = row(1, [5, 40], [1], emitted=1, uid=9)
    assert plans.run((resumed,), (Span(1, 2, True),), retire=(0,))[0] == [41]


def test_a_row_that_reads_anothers_pages_is_caught():
    plans = Plans(device())
    plans.run((row(0, [5, 6], [0]),), (Span(0, 2, True),))
    plans.run((row(1, [8, 9], [0]),), (Span(1, 2, True),), n_decode=1, order={0: 0})
    with pytest.raises(AssertionError, match="other tokens"):
        plans.run(n_decode=1)


def test_pages_without_kv_cannot_be_a_cached_prefix():
    with pytest.raises(AssertionError, match="no KV"):
        Plans(device()).run((row(0, [9], [0, 1], kv_len=4),), (Span(0, 1, True),))


@pytest.mark.parametrize("after", [0, 1])
def test_a_scripted_failure_is_a_fault_of_the_device(tmp_path, after):
    executor = scripted(tmp_path, {"in_order": [{"tokens": [40, 41], "fail_after": after}]})
    plans = Plans(executor)
    if after:
        assert plans.run((row(0, [5], [0]),), (Span(0, 1, True),))[0] == [40]
        assert executor.health().ok
    with pytest.raises(Fault, match=f"after {after} tokens"):
        plans.run(n_decode=1, order={0: 0}) if after else plans.run((row(0, [5], [0]),), (Span(0, 1, True),))
    assert not executor.health().ok


def test_a_step_is_held_while_the_file_exists(tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    plans = Plans(device(hold=hold))
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(plans.run((row(0, [5], [0]),), (Span(0, 1, True),))))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    hold.unlink()
    thread.join(5)
    assert done == [([5], [False])]
    hold.touch()
    with pytest.raises(Fault, match="was held for more than"):
        plans.run(n_decode=1, order={0: 0}, timeout=0.01)


def test_a_changed_script_is_read_again(tmp_path):
    plans = Plans(scripted(tmp_path, {"in_order": [[40]]}))
    assert plans.run((row(0, [5], [0]),), (Span(0, 1, True),))[0] == [40]
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"in_order": [[77], [78]]}))
    os.utime(path, ns=(1, 1))
    assert plans.run((row(1, [5], [1]),), (Span(1, 1, True),))[0] == [77]
    assert plans.run((row(2, [5], [2]),), (Span(2, 1, True),))[0] == [78]


@pytest.mark.parametrize("text", ["{", "[]", '{"rulez": []}', '{"rules": [{"prompt": [1], "replies": []}]}'])
def test_what_is_no_script_is_refused_with_its_path(tmp_path, text):
    (tmp_path / "script.json").write_text(text)
    with pytest.raises(ConfigError, match=r"script\.json' is not a script"):
        device(script=tmp_path / "script.json")


def test_room_comes_from_the_settings():
    info = device(num_pages=10).start()
    assert (info.num_pages, info.page_size, info.max_len) == (10, PAGE, 40)  # the pool is smaller than the context
    assert device().start().max_len == 64
