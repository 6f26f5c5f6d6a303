"""The thread that says that a process lives and ends it when it hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from minisgl.client.main import watched
from minisgl.wire.messages import Beat, FaultReport, Message
from minisgl.wire.process import SUPERVISOR, Spec
from minisgl.wire.pulse import Pulse
from minisgl.wire.sockets import Inbox, address


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Inbox]:
    context = zmq.Context()
    inbox = Inbox(context, address(tmp_path, SUPERVISOR))
    yield inbox
    inbox.close()
    context.term()


def spec(folder: Path) -> Spec:
    return Spec("text-0", "{}", "", "{}", folder, 1)


def test_pass_over_its_limit_is_reported_with_the_stacks_and_ends_the_process(
    tmp_path: Path, supervisor: Inbox, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    over = threading.Event()
    began = time.monotonic_ns()
    pulse = Pulse(spec(tmp_path), every_s=0.01, end=lambda code: (ended.append(code), over.set()))
    pulse.watch(lambda: (-1, began), 0.05)
    pulse.start()
    assert over.wait(10)
    pulse.stop()
    [fault] = supervisor.receive(5000)
    assert isinstance(fault, FaultReport)
    assert (fault.role, fault.kind, fault.exit_code, ended) == ("text-0", "stall", 70, [70])
    assert fault.text.startswith("text-0 has been in one pass for 0.")
    assert "more than the limit = 0.05" in fault.text
    assert "test_pulse.py" in capfd.readouterr().err  # where the main thread stood


def test_beats_tell_the_step_and_the_age_and_idle_time_is_no_stall(tmp_path: Path) -> None:
    beats: list[Message] = []
    enough = threading.Event()

    def hear(beat: Message) -> None:
        beats.append(beat)
        if len(beats) >= 5:
            enough.set()

    pulse = Pulse(spec(tmp_path), [hear], every_s=0.01, end=lambda code: pytest.fail("it ended the process"))
    pulse.watch(lambda: (7, 0), 0.001)
    pulse.start()
    assert enough.wait(10)
    pulse.stop()
    assert set(beats) == {Beat(7, 0.0)}


def test_event_loop_that_is_blocked_no_longer_turns_for_the_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the api process tells its pulse: when its event loop last had a turn."""
    looks: list[Callable[[], tuple[int, int]]] = []
    lags: list[float] = []
    meter = SimpleNamespace(histogram=lambda name: SimpleNamespace(observe=lags.append))
    stub = SimpleNamespace(watch=looks.append, start=lambda: None, stop=lambda: None)
    monkeypatch.setattr("minisgl.client.main.Pulse", lambda spec: stub)
    monkeypatch.setattr("minisgl.client.main.TURN_S", 0.001)

    async def test() -> None:
        with watched(SimpleNamespace(spec=None), SimpleNamespace(meter=meter)):  # type: ignore[arg-type]
            await asyncio.sleep(0)
            before = looks[0]()[1]
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                pass
            assert looks[0]()[1] == before
            while looks[0]()[1] == before:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(test(), 10))
    assert max(lags) > 0.03
