"""The text worker between the api and the engine, and how a child process waits, with the others played by the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.base.errors import Fault, PluginError
from minisgl.base.types import (
    Accepted,
    Admit,
    Delta,
    Ended,
    EngineInfo,
    Finish,
    GenerateRequest,
    Refused,
    SamplingParams,
    Tokens,
)
from minisgl.config.load import settings_to_json
from minisgl.config.schema import Settings
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.lock import PluginLock
from minisgl.plugin.registry import Registry
from minisgl.text.processor import TextProcessor
from minisgl.text.worker import TextWorker
from minisgl.wire.messages import (
    Abort,
    Cancel,
    Deltas,
    Detokenize,
    Go,
    Message,
    Ready,
    Stop,
    Submit,
    Tokenize,
    Tokenized,
)
from minisgl.wire.process import Process, Spec, Stopped, fault_report
from minisgl.wire.sockets import Outbox, address

INFO = EngineInfo("m", ("m",), 64, 100, (1,), 16, 8, 2, 32, "cpu", "float32", 1)


class World:
    def __init__(self) -> None:
        self.api: list[Message] = []
        self.other_api: list[Message] = []
        self.engine: list[Message] = []
        self.worker = TextWorker(
            TextProcessor(None, INFO), {0: self.api.append, 5: self.other_api.append}, self.engine.append
        )

    def submit(self, *uids: int, ids: tuple[int, ...] = (3, 4), **params: Any) -> None:
        request = GenerateRequest(ids=ids, n=len(uids), sampling=SamplingParams(max_tokens=9, **params))
        self.worker.take([Submit(uids, request)])

    def tokens(self, *pairs: tuple[int, int]) -> None:
        uids, tokens = zip(*pairs, strict=True)
        self.worker.take([Tokens(0, np.array(uids, np.int64), np.array(tokens, np.int32))])


def test_a_request_is_accepted_admitted_and_its_tokens_come_out_as_one_batch_for_each_api() -> None:
    w = World()
    far = 5 << 48 | 1
    w.submit(1, 2)
    w.submit(far)
    w.worker.work()
    w.worker.work()
    assert w.api == [Accepted(1, 2)]
    assert w.other_api == [Accepted(far, 2)]
    assert [(a.uid, a.ids.tolist()) for a in w.engine if isinstance(a, Admit)] == [
        (1, [3, 4]),
        (2, [3, 4]),
        (far, [3, 4]),
    ]
    w.tokens((1, 7), (2, 8), (far, 9))
    assert w.api[1:] == [Deltas((Delta(1, 0, ids=(7,)), Delta(2, 1, ids=(8,))))]
    assert w.other_api[1:] == [Deltas((Delta(far, 0, ids=(9,)),))]


def test_tokens_of_running_requests_go_before_prompts_that_wait_for_tokenization() -> None:
    w = World()
    w.submit(1)
    w.worker.work()
    w.submit(2)
    w.submit(3)
    assert w.worker.waiting == 2
    w.tokens((1, 7))
    assert w.api[-1] == Deltas((Delta(1, 0, ids=(7,)),))
    w.worker.work()
    assert w.worker.waiting == 1
    assert [m.uid for m in w.engine if isinstance(m, Admit)] == [1, 2]


def test_m1_a_prompt_cancelled_before_its_tokenization_never_reaches_the_engine() -> None:
    """M1"""
    w = World()
    w.submit(1, 2)
    w.worker.take([Cancel((1, 2))])
    w.worker.work()
    assert w.worker.waiting == 0
    assert w.engine == []
    assert w.api == []


def test_m1_a_cancelled_request_is_aborted_and_its_output_dropped() -> None:
    """M1"""
    w = World()
    w.submit(1)
    w.worker.work()
    w.worker.take([Cancel((1, 77))])
    assert w.engine[1:] == [Abort((1,))]
    w.tokens((1, 7))
    w.worker.take([Ended(1, Finish.ABORT, 2, 1, 0)])
    assert w.api == [Accepted(1, 2)]


def test_a_wrong_request_is_refused_and_the_worker_goes_on() -> None:
    w = World()
    w.submit(1, ids=(1000,))
    w.worker.take([Detokenize(8, (1,)), Tokenize(9, GenerateRequest(ids=(3, 4)))])
    for _ in range(3):
        w.worker.work()
    refused, no_tokenizer, tokenized = w.api
    assert isinstance(refused, Refused)
    assert (refused.uid, refused.status) == (1, 400)
    assert isinstance(no_tokenizer, Refused)
    assert (no_tokenizer.uid, no_tokenizer.status) == (8, 400)
    assert tokenized == Tokenized(9, (3, 4))
    assert w.engine == []


# ---------------------------------------------------------------------------------------------------------------- waiting


@pytest.fixture
def child(tmp_path: Path) -> Any:
    registry = Registry.scan(bundled_only=True)
    spec = Spec("text-3", "{}", "", settings_to_json(Settings()), tmp_path, 1)
    process = Process(spec, Settings(), registry, Hooks(registry), PluginLock.of("1", ()))
    supervisor = Outbox(process.context, address(tmp_path, "text-3"))
    yield process, supervisor
    supervisor.close()
    process.close()


def test_messages_that_come_in_one_piece_are_each_waited_for_in_turn(child: Any) -> None:
    process, supervisor = child
    assert (process.spec.kind, process.spec.index) == ("text", 3)
    for message in (Go(), Ready("engine", INFO), Cancel((1,))):
        supervisor.send(message)
    assert process.wait_for(Go, 5) == Go()
    assert process.wait_for(Ready, 5).info == INFO
    assert process.early == [Cancel((1,))] or process.inbox.receive(5000) == [Cancel((1,))]


def test_stop_ends_every_wait_and_so_does_the_time(child: Any) -> None:
    process, supervisor = child
    with pytest.raises(Fault, match=r"text-3 got no Go from the supervisor within 0\.01 s"):
        process.wait_for(Go, 0.01)
    supervisor.send(Stop(1.0))
    with pytest.raises(Stopped):
        process.wait_for(Go, 5)


def test_go_with_a_plugin_that_this_environment_has_otherwise_is_refused_with_the_difference(child: Any) -> None:
    """What a model selects is known after HELLO, so it is compared when GO comes, before anything is imported."""
    process, supervisor = child
    here = process.registry.lock([("model", "LlamaForCausalLM")])
    supervisor.send(Go(lock=here.to_json()))
    assert process.wait_go().lock == here.to_json()
    supervisor.send(Go(lock=here.to_json().replace('"minisgl_plugins.models.llama:', '"elsewhere:')))
    with pytest.raises(PluginError, match=r"(?s)text-3 .*different plugin set.*model 'LlamaForCausalLM': target"):
        process.wait_go()


def test_a_report_of_a_wrapped_exception_names_whose_code_raised_it_first() -> None:
    """A worker's thread hands its exception over as the cause of a fault."""
    lock = PluginLock.from_json(
        PluginLock.of("1", ())
        .to_json()
        .replace('"entries":[]', f'"entries":[["sampler","mine","{__name__}:Sampler","acme","2.0"]]')
    )
    try:
        _evict()
    except KeyError as exc:
        wrapped = Fault("step 3 failed")
        wrapped.__cause__ = exc
    report = fault_report("engine", wrapped, lock)
    assert report.text == "step 3 failed\nin sampler 'mine' (acme 2.0), _evict()"


def test_a_report_names_the_plugin_whose_code_raised() -> None:
    lock = PluginLock.of("1", ())
    entry = ("cache", "mine", f"{__name__}:Cache", "acme", "2.0")
    lock = PluginLock.from_json(lock.to_json().replace('"entries":[]', '"entries":[["' + '","'.join(entry) + '"]]'))
    try:
        _evict()
    except KeyError as exc:
        report = fault_report("engine", exc, lock)
    assert report.exit_code == 70
    assert "engine failed: KeyError: 'page 7'" in report.text
    assert "in cache 'mine' (acme 2.0), _evict()" in report.text
    assert "test_text_worker.py:" in report.text


def _evict() -> None:
    raise KeyError("page 7")
