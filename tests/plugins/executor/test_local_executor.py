"""The local executor: order, results, faults, stop."""

import subprocess
import sys
import threading

import pytest
from safetensors.torch import load_file

from minisgl.api import ExecContext, Fault, ModelError, ModelFacts
from minisgl.base.types import LocalModel
from minisgl.config.schema import Settings
from minisgl.plugin.registry import Registry
from minisgl.testing.checkpoints import llama_checkpoint, make_worker
from minisgl.testing.plans import PlanDriver
from minisgl_plugins.executor.local import LocalExecutor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return llama_checkpoint(tmp_path_factory.mktemp("llama"))


def executor(model: LocalModel, progress=lambda what, done, total: None) -> LocalExecutor:
    config = Settings.model_validate({"engine": {"threads": 1}, "model": {"device": "cpu"}})
    facts = ModelFacts.from_hf(model.config, model.generation)
    return LocalExecutor(
        ExecContext(LocalExecutor.Settings(), config, Registry.scan(bundled_only=True), model, facts, 2, progress)
    )


@pytest.fixture
def running(checkpoint):
    ex = executor(checkpoint)
    ex.start()
    yield ex
    ex.stop(10)


def test_start_says_what_there_is_room_for(checkpoint):
    seen = []
    ex = executor(checkpoint, lambda what, done, total: seen.append((what, done, total)))
    info = ex.start()
    ex.stop(10)
    assert (info.device, info.dtype, info.vocab, info.max_len, info.max_slots, info.batch_tokens) == (
        "cpu",
        "float32",
        199,
        256,
        32,
        256,
    )
    assert info.num_pages == 32 * 256 // 16
    assert info.kv_bytes == (info.num_pages + 1) * 2 * 16 * 2 * 8 * 4 * 2
    assert info.picks == {"attention": "torch", "ops": "torch", "sampler": "torch", "model": "LlamaForCausalLM"}
    total = sum(t.numel() * 4 for t in load_file(checkpoint.weights[0]).values())
    assert seen[-1] == ("weights", total, total)


def test_two_steps_in_flight_give_what_one_at_a_time_gives(checkpoint, running):
    """The second is submitted before the first is collected: its input token is not known to the caller yet."""
    worker = make_worker(checkpoint)
    plans = []
    alone = PlanDriver(lambda plan: (plans.append(plan), worker.run(plan))[1], 16)
    alone.start(0, [5, 6, 7])
    alone.generate([0], 12)

    tickets = [running.submit(p) for p in plans[:1]]
    tokens = []
    for plan in plans[1:]:
        tickets.append(running.submit(plan))
        tokens += running.collect(tickets.pop(0), 60).tokens.tolist()
    tokens += running.collect(tickets.pop(), 60).tokens.tolist()
    assert tokens == alone.out[0]
    assert running.health().ok
    assert running.health().step == 11


def test_a_failed_step_is_a_fault_and_stays_one(running):
    d = PlanDriver(lambda plan: running.collect(running.submit(plan), 60), 16)
    d.start(0, [10**6])  # no such token
    with pytest.raises(Fault, match="step 0 failed: IndexError"):
        d.step(prefill={0: 1})
    with pytest.raises(Fault, match="step 0 failed"):
        d.step(decode=[0])
    health = running.health()
    assert not health.ok
    assert "step 0 failed" in health.detail


def test_a_step_that_hangs_is_a_fault_after_the_timeout(running, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr("minisgl.runtime.worker.Worker.launch", lambda self, plan: released.wait(60))
    d = PlanDriver(lambda plan: running.collect(running.submit(plan), 0.05), 16)
    d.start(0, [5])
    try:
        with pytest.raises(Fault, match=r"step 0 has not finished within 0.05 s"):
            d.step(prefill={0: 1})
        assert not running.health().ok
    finally:
        released.set()


def test_what_building_raises_is_raised_by_start(checkpoint):
    broken = LocalModel(
        "x", "x", checkpoint.path, dict(checkpoint.config) | {"num_hidden_layers": 9}, {}, checkpoint.weights
    )
    ex = executor(broken)
    with pytest.raises(ModelError, match="missing"):
        ex.start()
    assert not ex.health().ok
    ex.stop(10)


def test_stop_is_idempotent_and_ends_its_threads(checkpoint):
    before = threading.active_count()
    ex = executor(checkpoint)
    ex.start()
    assert threading.active_count() > before
    ex.stop(10)
    ex.stop(10)
    assert threading.active_count() == before
    assert not ex.health().ok


def test_importing_the_executor_does_not_import_torch():
    code = "import sys, minisgl_plugins.executor.local; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )
