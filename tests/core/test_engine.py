"""The engine's own work around scheduler and executor: limits, observers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.base.types import Admit, EngineOutput, Refused, SamplingSpec
from minisgl.config.load import load_settings
from minisgl.engine.build import build_engine
from minisgl.engine.engine import Engine
from minisgl.engine.port import Control, LocalPort
from minisgl.observe import Observer, ObserverContext
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


def test_memory_does_not_grow_with_the_requests_when_nobody_observes(folder: Path) -> None:
    engine, port = make(folder)
    for uid in range(20):
        port.inputs.append(admit(uid))
    drain(engine, port)
    kept = [name for name, value in vars(engine).items() if isinstance(value, (dict, set, list)) and len(value)]
    assert kept == []


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
