"""``--profile FILE``: a trace of some steps, of verbs that run an engine in this process."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.base.errors import ConfigError
from minisgl.observe import Observer, StepStats

if TYPE_CHECKING:
    from minisgl.runtime.profile import StepTrace

STEPS = 20  # some MB of trace


def whole(text: str) -> int:
    if (value := int(text)) < 0:
        raise ArgumentTypeError(f"{text!r} is below 0")
    return value


def profile_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("profile")
    group.add_argument("--profile", type=Path, metavar="FILE", help="write a trace of some steps, for ui.perfetto.dev")
    group.add_argument("--profile-steps", type=whole, metavar="N", help=f"how many steps; default {STEPS}")
    group.add_argument("--profile-skip", type=whole, metavar="N", help="steps to leave out before; default 0")


class Tracer(Observer):
    """Counts the steps of the engine for a trace; only what runs inside ``tracing`` is looked at."""

    def __init__(self, path: Path, steps: int, skip: int) -> None:
        self._path, self._steps, self._skip = path, steps, skip
        self._trace: StepTrace | None = None

    def step(self, s: StepStats) -> None:
        if self._trace is not None:
            self._trace.step()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Raises: ConfigError, at the end, if fewer steps ran than were to be left out."""
        from minisgl.runtime.profile import StepTrace

        self._trace = StepTrace(self._path, self._steps, self._skip)
        yield
        trace, self._trace = self._trace, None
        trace.close()
        print(f"trace written to {self._path}", file=sys.stderr)


def tracer_of(args: Namespace) -> Tracer | None:
    """None without --profile. Raises: ConfigError for a file that could not be written, and for options without effect."""
    given = {"--profile-steps": args.profile_steps, "--profile-skip": args.profile_skip}
    if args.profile is None:
        for option, value in given.items():
            if value is not None:
                raise ConfigError(f"{option} has no effect without --profile FILE")
        return None
    path: Path = args.profile
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"--profile {str(path)!r} cannot be written; name a file in a folder that exists")
    if args.profile_steps == 0:
        raise ConfigError("--profile-steps 0 leaves nothing to trace; give at least 1")
    return Tracer(path, args.profile_steps or STEPS, args.profile_skip or 0)
