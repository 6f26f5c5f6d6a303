"""Forms of outputs on the text side: checked by threads, refused in time, and never in the way of other requests (A12)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from minisgl.base.errors import RequestError
from minisgl.base.grammar import Grammar, Matcher, Outline
from minisgl.base.types import Accepted, Admit, EngineInfo, GenerateRequest, GrammarSpec, Refused
from minisgl.text.processor import TextProcessor
from minisgl.text.worker import CHECK_S, TextWorker
from minisgl.wire.messages import Cancel, Message, Submit

INFO = EngineInfo("m", ("m",), 64, 100, (1,), 16, 8, 2, 32, "cpu", "float32", 1, grammars=True)


class Slow(Grammar):
    """Checks wait until they are told to go on; "bad" is refused."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.checked = threading.Event()

    def check(self, spec: GrammarSpec) -> None:
        self.go_on.wait(20)
        self.checked.set()
        if spec.text == "bad":
            raise RequestError("it is bad", code="invalid_grammar", param=spec.param)

    def compile(self, outline: Outline) -> bytes:
        assert outline.answer is not None
        return outline.answer.text.encode()

    def matcher(self, compiled: bytes) -> Matcher:
        raise NotImplementedError


class World:
    def __init__(self, grammar: Grammar | None) -> None:
        self.now = 0.0
        self.api: list[Message] = []
        self.engine: list[Any] = []
        processor = TextProcessor(None, INFO, grammar=grammar)
        self.worker = TextWorker(processor, {0: self.api.append}, self.engine.append, clock=lambda: self.now)

    def submit(self, uid: int, form: str | None = None) -> None:
        spec = None if form is None else GrammarSpec("regex", form)
        self.worker.take([Submit((uid,), GenerateRequest(ids=(3, 4), grammar=spec, clamp_max_tokens=True))])


@pytest.fixture
def slow() -> Any:
    grammar = Slow()
    yield grammar
    grammar.go_on.set()


def until_told(w: World, grammar: Slow) -> None:
    grammar.go_on.set()
    assert grammar.checked.wait(20)
    for _ in range(10_000):
        w.worker.work()
        if w.api:
            return
        threading.Event().wait(0.001)


def test_others_go_on_while_a_form_is_checked(slow: Slow) -> None:
    w = World(slow)
    w.submit(1, "[0-9]+")
    w.submit(2)
    w.worker.work()
    assert w.api == [Accepted(2, 2)]
    w.api.clear()
    until_told(w, slow)
    assert w.api == [Accepted(1, 2)]
    first, second = w.engine
    assert isinstance(second, Admit)
    assert (first.sampling.grammar, second.sampling.grammar) == (b"", b"[0-9]+")
    assert 1 in second.sampling.stop_ids


def test_a12_a_bad_form_is_refused_and_nothing_is_admitted(slow: Slow) -> None:
    w = World(slow)
    w.submit(1, "bad")
    until_told(w, slow)
    assert w.api == [Refused(1, 400, "it is bad", "invalid_grammar", "response_format")]
    assert w.engine == []


def test_a12_a_check_has_a_time_limit(slow: Slow) -> None:
    w = World(slow)
    w.submit(1, "slow")
    w.now = CHECK_S - 0.1
    w.worker.work()
    assert w.api == []
    w.now = CHECK_S
    w.worker.work()
    (refused,) = w.api
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code) == (400, "invalid_grammar")


def test_m1_a_client_that_leaves_is_forgotten_before_its_form_is_checked(slow: Slow) -> None:
    w = World(slow)
    w.submit(1, "x")
    w.worker.take([Cancel((1,))])
    slow.go_on.set()
    assert w.worker.idle_ms > 100  # nothing is waited for
    assert w.engine == w.api == []


def test_an_engine_without_grammars_refuses_by_name() -> None:
    w = World(None)
    told, admits = TextProcessor(None, INFO).submit([1], GenerateRequest(ids=(3,), grammar=GrammarSpec("regex", "a")))
    assert admits == []
    assert isinstance(told[0], Refused)
    assert (told[0].status, told[0].code, told[0].param) == (400, "unsupported_parameter", "response_format")
    w.worker.close()
