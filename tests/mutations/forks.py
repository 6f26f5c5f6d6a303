"""Runs tests against mutants: the tests are collected once, and each mutant gets a fork of that process.

In the fork the code of one function is replaced, in memory, by its mutated code; nothing is written. The tests that
reached the function without a mutation run in their order up to the first that fails.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"core": "minisgl", "plugins": "minisgl_plugins"}
MEMORY_BYTES = 6 << 30  # a mutant that never stops appending
WALL_SECONDS = 300  # for one mutant; what limits is the CPU time of a test
SLOWER, EXTRA_SECONDS = 5.0, 2.0  # a test may take SLOWER times as long as without a mutation, and EXTRA_SECONDS


@dataclass(frozen=True)
class Mutant:
    """``make`` gives the text of ``file``, a path from the root of the repository, with ``function`` mutated; ``original``
    is the text without."""

    name: str
    file: str
    function: str
    original: str
    make: Callable[[], str]

    @cached_property
    def code(self) -> str:
        return self.make()

    @cached_property
    def change(self) -> str:
        """The lines that differ: ``was  ->  is``."""
        diff = list(difflib.unified_diff(self.original.splitlines(), self.code.splitlines(), n=0, lineterm=""))[2:]
        sides = (" ".join(line[1:].strip() for line in diff if line.startswith(sign)) for sign in "-+")
        return "  ->  ".join(sides)

    @property
    def module(self) -> str:
        folder, *rest = Path(self.file).with_suffix("").parts
        assert rest[0] == PACKAGES[folder], self.file
        return ".".join(rest)

    def live(self) -> types.FunctionType:
        """The function as the tests call it."""
        return function_of(vars(importlib.import_module(self.module)), self.function)

    def apply(self) -> None:
        """Let the imported function do what the mutated one does.

        Raises: SyntaxError, or whatever else the mutated module raises when it is imported.
        """
        live = self.live()
        module = types.ModuleType(self.module)
        module.__package__ = self.module.rpartition(".")[0]
        exec(compile(self.code, self.file, "exec"), vars(module))
        mutated = function_of(vars(module), self.function)
        live.__code__, live.__defaults__, live.__kwdefaults__ = (
            mutated.__code__,
            mutated.__defaults__,
            mutated.__kwdefaults__,
        )


def function_of(names: dict[str, Any], qualified: str) -> types.FunctionType:
    *owner, name = qualified.split(".")
    found = vars(names[owner[0]])[name] if owner else names[name]
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    assert isinstance(found, types.FunctionType), f"{qualified} is {found!r}"
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """``outcome``: killed, timeout or survived. ``test``: in which. ``tests``: how many ran. ``seconds``: it took."""

    mutant: Mutant
    outcome: str
    test: str = ""
    tests: int = 0
    seconds: float = 0.0


@dataclass(eq=False)  # pluggy hashes it
class Forks:
    """A pytest plugin that runs, instead of the tests once, the tests against each of ``mutants``. ``reach``: function
    -> index of each test that calls it. ``cost``: CPU seconds of each test."""

    mutants: Sequence[Mutant]
    jobs: int
    each: Callable[[Verdict], None]
    verdicts: list[Verdict] = field(default_factory=list)
    reach: dict[types.CodeType, set[int]] = field(default_factory=dict)
    cost: list[float] = field(default_factory=list)
    failed: bool = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("the tests could not be collected")
        self._measure(session)
        for verdict in self._run_all(session):
            self.verdicts.append(verdict)
            self.each(verdict)
        return True

    # ------------------------------------------------------------------------------------------------- without mutation

    def _measure(self, session: pytest.Session) -> None:
        """What each test costs and which functions it calls. In a fork too, so that every mutant finds tests that never
        ran."""
        functions = {m.live().__code__: (m.file, m.function) for m in self.mutants}
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reading)
            with _exits():
                session.config.pluginmanager.unregister(name="terminalreporter")
                answer = pickle.dumps(self._measured(session, functions))
                with os.fdopen(writing, "wb") as out:
                    out.write(answer)
        os.close(writing)
        with os.fdopen(reading, "rb") as answers:
            answer = answers.read()
        os.waitpid(pid, 0)
        if not answer:
            raise session.Interrupted("the tests could not be run without a mutation")
        failed, reach, self.cost = pickle.loads(answer)
        if failed:
            raise session.Interrupted(f"{failed} fails without any mutation")
        self.reach = {code: reach[key] for code, key in functions.items()}

    def _measured(self, session: pytest.Session, functions: dict[types.CodeType, tuple[str, str]]) -> Any:
        reach: dict[tuple[str, str], set[int]] = {key: set() for key in functions.values()}
        cost, index = [], 0

        def watch(frame: types.FrameType, event: str, arg: object) -> None:
            if event == "call" and (key := functions.get(frame.f_code)) is not None:
                reach[key].add(index)

        for index, item in enumerate(session.items):
            began = time.process_time()
            sys.setprofile(watch)
            self._run(session, index)
            sys.setprofile(None)
            cost.append(time.process_time() - began)
            if self.failed:
                return item.nodeid, reach, cost
        return None, reach, cost

    def _run(self, session: pytest.Session, index: int, following: int | None = None) -> None:
        item = session.items[index]
        after = None if following is None else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)

    # ---------------------------------------------------------------------------------------------------- with mutations

    def _run_all(self, session: pytest.Session) -> Iterator[Verdict]:
        waiting, running = list(reversed(self.mutants)), dict[int, Child]()
        gc.collect()
        gc.freeze()
        while waiting or running:
            while waiting and len(running) < self.jobs:
                child = self._start(session, waiting.pop())
                running[child.pipe] = child
            ready, _, _ = select.select(list(running), [], [], 1.0)
            for child in list(running.values()):
                if child.pipe in ready and child.read():
                    continue
                if child.pipe in ready or time.monotonic() - child.began > WALL_SECONDS:
                    yield self._judge(session, running.pop(child.pipe))

    def _start(self, session: pytest.Session, mutant: Mutant) -> Child:
        tests = sorted(self.reach[mutant.live().__code__])
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reading)
            with _exits():
                self._try(session, mutant, tests, writing)
        os.close(writing)
        return Child(pid, reading, mutant, time.monotonic())

    def _try(self, session: pytest.Session, mutant: Mutant, tests: list[int], writing: int) -> None:
        """In the fork: say each test before it runs, and F or P when all is known."""
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        session.config.pluginmanager.unregister(name="terminalreporter")  # it has a copy of stdout
        mutant.apply()
        for index, following in zip(tests, [*tests[1:], None]):
            os.write(writing, f"{index} ".encode())
            signal.setitimer(signal.ITIMER_PROF, self.cost[index] * SLOWER + EXTRA_SECONDS)
            self._run(session, index, following)
            if self.failed:
                os.write(writing, b"F")
                return
        os.write(writing, b"P")

    def _judge(self, session: pytest.Session, child: Child) -> Verdict:
        """The fork closed its pipe or took too long. One that ended without a word was ended by its mutation."""
        if not child.closed:
            os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        os.close(child.pipe)
        *ran, end = child.said.decode().split(" ")
        test = session.items[int(ran[-1])].nodeid.rpartition("/")[2] if ran else "import"
        seconds = time.monotonic() - child.began
        if end == "P":
            return Verdict(child.mutant, "survived", "", len(ran), seconds)
        late = not child.closed or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF)
        return Verdict(child.mutant, "timeout" if late else "killed", test, len(ran), seconds)


@dataclass
class Child:
    """A fork and what it has said."""

    pid: int
    pipe: int
    mutant: Mutant
    began: float
    said: bytes = b""
    closed: bool = False

    def read(self) -> bool:
        """Whether there may be more."""
        more = os.read(self.pipe, 1 << 16)
        self.said += more
        self.closed = not more
        return bool(more)


class _exits:
    """The fork never returns into pytest."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(0 if error is None else 1)


def run(
    mutants: Sequence[Mutant], suites: Sequence[str], jobs: int = 1, each: Callable[[Verdict], None] = lambda _: None
) -> list[Verdict]:
    """Judge each mutant by ``suites``, pytest arguments; ``each`` is told every verdict as it comes.

    Raises: RuntimeError if the tests fail without a mutation.
    """
    os.chdir(ROOT)
    hypothesis.settings.register_profile(
        "mutants", derandomize=True, database=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
    )
    hypothesis.settings.load_profile("mutants")
    forks = Forks(mutants, jobs, each)
    options = [
        "-qq",
        "--tb=no",
        "--disable-warnings",
        "-p",
        "no:cacheprovider",
        "--timeout=0",
        "--hypothesis-profile=mutants",
    ]
    code = pytest.main([*options, *suites], plugins=[forks])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with {code!r}")
    return forks.verdicts
