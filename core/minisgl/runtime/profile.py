"""What profilers see of steps: named ranges, and a trace of some steps in a file."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from minisgl.base.errors import ConfigError
from minisgl.base.types import StepPlan


class StepRanges:
    """Ranges around what a worker's thread does: NVTX ones with ``nvtx``, and others while torch's profiler records.

    Without either a range costs a comparison. Raises: ConfigError for ``nvtx`` without CUDA.
    """

    def __init__(self, nvtx: bool = False) -> None:
        if nvtx and not torch.cuda.is_available():
            raise ConfigError(
                "NVTX ranges need a CUDA device, and torch finds none here; leave nvtx off, or use --profile"
            )
        self._nvtx = nvtx

    @property
    def on(self) -> bool:
        """Whether anybody looks. The profiler's flag is of all threads: the one that starts it is not the worker's."""
        return self._nvtx or torch.autograd.profiler._is_profiler_enabled

    def step(self, plan: StepPlan) -> AbstractContextManager[object]:
        """``step 12: 256 decode + 0 prefill``, in tokens."""
        if not self.on:
            return nullcontext()
        return self.part(f"step {plan.step}: {plan.n_decode} decode + {plan.num_tokens - plan.n_decode} prefill")

    def part(self, name: str) -> AbstractContextManager[object]:
        """A range of this name until the context ends."""
        if not self.on:
            return nullcontext()
        made: AbstractContextManager[object] = torch.cuda.nvtx.range(name) if self._nvtx else record_function(name)
        return made


class StepTrace:
    """Writes steps ``[skip, skip + steps)`` to ``path`` in Chrome's trace format, which https://ui.perfetto.dev shows.

    ``step`` is called after each step, in the thread that made this; what all threads and the GPU do is recorded. ``close``
    writes what there is.
    """

    def __init__(self, path: Path, steps: int, skip: int = 0) -> None:
        self._path, self._first, self._end = path, skip, skip + steps
        self._seen = 0
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        everyone = _ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=activities, experimental_config=everyone)
        self._profile.prepare_trace()
        self._recording = False
        self._advance()

    def step(self) -> None:
        self._seen += 1
        self._advance()

    def close(self) -> None:
        """Raises: ConfigError if no step was recorded."""
        if self._seen <= self._first:
            if not self._recording:
                self._profile.start_trace()  # what is prepared ends in no other way
            self._profile.stop_trace()
            raise ConfigError(f"no step was traced: {self._seen} ran, and the first {self._first} were to be left out")
        if self._recording:
            self._finish()

    def _advance(self) -> None:
        if self._seen == self._first:
            self._profile.start_trace()
            self._recording = True
        elif self._seen == self._end:
            self._finish()

    def _finish(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels of the last step that still run would be missing
        self._recording = False
        self._profile.stop_trace()
        self._profile.export_chrome_trace(str(self._path))
