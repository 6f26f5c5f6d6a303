"""The engine's own work around scheduler and executor: limits, observers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.base.errors import ModelError
from minisgl.base.types import Admit, Ended, EngineOutput, LocalModel, Refused, SamplingSpec
from minisgl.config.load import load_settings
from minisgl.engine.build import build_engine, model_facts, sampling_defaults
from minisgl.engine.engine import Engine
from minisgl.engine.port import Abort, Control, LocalPort
from minisgl.observe import Observer, ObserverContext
from minisgl.plugin.registry import Registry
from minisgl.testing.bytemodel import byte_ids, write_byte_model
from minisgl.text.resolve import resolve_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes") / "model")


def make(
    folder: Path, queue_limit: int | None = None, observers: tuple[Observer, ...] = ()
) -> tuple[Engine, LocalPort]:
    options = {"model": str(folder), "executor": "scripted", "observer": [], "max_running": 2}
    loaded = load_settings(overrides=options, environ={})
    port = LocalPort()
    model = resolve_model(loaded.settings, loaded.registry, weights=False)
    return build_engine(
        loaded.settings, loaded.registry, model, port, observers=observers, queue_limit=queue_limit
    ), port


def admit(uid: int) -> Admit:
    return Admit(uid, np.array(byte_ids("abc"), np.int32), SamplingSpec(temperature=0.0, max_new=4))


def drain(engine: Engine, port: LocalPort) -> list[EngineOutput]:
    while not engine.idle or port.inputs:
        engine.turn()
    outputs = list(port.outputs)
    port.outputs.clear()
    return outputs


def test_requests_that_come_together_may_fill_the_rows_and_the_queue(folder: Path) -> None:
    """Two rows and a queue of three take five requests at once; the sixth is one too many."""
    engine, port = make(folder, queue_limit=3)
    port.inputs.extend(admit(uid) for uid in range(6))
    refused = [o for o in drain(engine, port) if isinstance(o, Refused)]
    assert [(r.uid, r.status, r.code) for r in refused] == [(5, 503, "server_overloaded")]


class Preparing:
    """An executor's ``prepare`` whose end the test decides."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: dict[int, Future[None]] = {}
        monkeypatch.setattr(engine.executor, "prepare", self)

    def __call__(self, a: Admit) -> Future[None] | None:
        if not a.sampling.grammar:
            return None
        self.open[a.uid] = Future()
        return self.open[a.uid]


def held(uid: int) -> Admit:
    return replace(admit(uid), sampling=replace(admit(uid).sampling, grammar=b"g"))


def turns(engine: Engine, port: LocalPort, count: int = 20) -> list[EngineOutput]:
    for _ in range(count):
        engine.turn()
    outputs = list(port.outputs)
    port.outputs.clear()
    return outputs


def ended(outputs: Sequence[EngineOutput]) -> dict[int, str]:
    return {o.uid: str(o.finish) for o in outputs if isinstance(o, Ended)}


def test_no_request_waits_for_what_another_needs_before_its_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, port = make(folder)
    preparing = Preparing(engine, monkeypatch)
    port.inputs.extend([held(1), admit(2), held(3)])
    assert set(ended(turns(engine, port))) == {2}
    assert not engine.idle
    preparing.open[3].set_result(None)
    assert set(ended(turns(engine, port))) == {3}
    preparing.open[1].set_result(None)
    assert set(ended(drain(engine, port))) == {1}


def test_a_request_that_is_left_while_it_is_prepared_ends_then(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, port = make(folder)
    preparing = Preparing(engine, monkeypatch)
    port.inputs.extend([held(1), Abort((1,))])
    assert turns(engine, port) == []
    preparing.open[1].set_result(None)
    assert ended(drain(engine, port)) == {1: "abort"}


def test_a_request_that_cannot_be_prepared_is_refused_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, port = make(folder)
    preparing = Preparing(engine, monkeypatch)
    port.inputs.extend([held(1), admit(2)])
    turns(engine, port, 1)
    preparing.open[1].set_exception(MemoryError("too much"))
    outputs = drain(engine, port)
    assert [(o.uid, o.status, o.code) for o in outputs if isinstance(o, Refused)] == [(1, 500, "internal_error")]
    assert set(ended(outputs)) == {2}


def test_requests_that_are_prepared_count_as_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, port = make(folder, queue_limit=3)
    Preparing(engine, monkeypatch)
    port.inputs.extend(held(uid) for uid in range(6))
    refused = [o for o in turns(engine, port, 1) if isinstance(o, Refused)]
    assert [(r.uid, r.status, r.code) for r in refused] == [(5, 503, "server_overloaded")]
    assert engine.stats()["waiting"] == 5


def test_memory_does_not_grow_with_the_requests_when_nobody_observes(folder: Path) -> None:
    engine, port = make(folder)
    for uid in range(20):
        port.inputs.append(admit(uid))
    drain(engine, port)
    kept = [name for name, value in vars(engine).items() if isinstance(value, (dict, set, list)) and len(value)]
    assert kept == []


def local_model(folder: Path, **changes: Any) -> LocalModel:
    loaded = load_settings(overrides={"model": str(folder)}, environ={})
    return replace(resolve_model(loaded.settings, loaded.registry, weights=False), **changes)


def test_facts_carry_the_architecture_that_a_plugin_has_not_the_first_the_config_names(folder: Path) -> None:
    model = local_model(folder)
    both = {**model.config, "architectures": ["SomebodysLlama", "LlamaForCausalLM"]}
    assert model_facts(Registry.scan(bundled_only=True), replace(model, config=both)).arch == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "0.7"},
        {"temperature": -1},
        {"top_p": 1.5},
        {"top_k": 40.5},
        {"min_p": True},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
    ],
)
def test_sampling_default_of_a_model_that_no_request_could_have_stops_the_start(
    folder: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=rf"{next(iter(wrong))} = .*generation-defaults"):
        sampling_defaults(local_model(folder, generation=wrong))


def test_sampling_defaults_are_those_of_the_source_over_those_of_the_checkpoint(folder: Path) -> None:
    model = local_model(
        folder,
        generation={"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 1, "repetition_penalty": 1.1},
        defaults={"temperature": 0.2},
    )
    assert sampling_defaults(model) == {"temperature": 0.2, "top_k": 20, "repetition_penalty": 1.1}


def test_operation_that_fails_is_told_apart_from_one_that_is_unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, port = make(folder)

    def fails() -> None:
        raise AssertionError("page 3 has two owners")

    monkeypatch.setattr(engine.scheduler, "audit", fails)
    answers: list[Any] = []
    for op in ("dance", "audit"):
        port.inputs.append(Control(op, lambda payload: answers.append(json.loads(payload))))
        engine.turn()
    assert "unknown operation 'dance'" in answers[0]["error"]
    assert answers[1] == {"error": "audit: page 3 has two owners", "known": True}


def test_stats_show_hits_and_evictions_of_the_cache(folder: Path) -> None:
    """40 prompt tokens twice: the second time two full pages of 16 are cached. A flush gives up all that was."""
    engine, port = make(folder)
    answers: list[Any] = []

    def ask(op: str) -> Any:
        port.inputs.append(Control(op, lambda payload: answers.append(json.loads(payload))))
        engine.turn()
        return answers.pop()

    keys = ("cache_queries", "cached_tokens_total", "cache_evicted_pages", "hit_rate")
    assert [ask("stats")[key] for key in keys] == [0, 0, 0, 0]
    for uid in (1, 2):
        ids = np.arange(40, dtype=np.int32)
        port.inputs.append(Admit(uid, ids, SamplingSpec(temperature=0.0, max_new=1)))
        drain(engine, port)
    assert [ask("stats")[key] for key in keys] == [2, 32, 0, 32 / 80]
    assert ask("flush_cache") == {"freed_pages": 2}
    assert ask("stats")["evictable"] == 0


class Unspeakable(Observer):
    def snapshot(self) -> Mapping[str, Any]:
        return {"counter": np.int64(1)}


def test_observer_whose_counters_cannot_be_sent_is_off_and_the_engine_goes_on(folder: Path) -> None:
    engine, port = make(folder, observers=(Unspeakable(ObserverContext(None, "engine")),))
    answers: list[bytes] = []
    for _ in range(2):
        port.inputs.append(Control("stats", answers.append))
        engine.turn()
    assert len(answers) == 2
    assert engine.observers.active == []
