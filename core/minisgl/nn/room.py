"""How much of a GPU's memory is left for KV pages: what is free once the weights are there, less what steps need themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.base.errors import CapacityError
from minisgl.base.types import NO_PAGES, RowInit, SamplingSpec, Span, StepPlan
from minisgl.runtime.kv import KVRoom
from minisgl.runtime.model import Model
from minisgl.runtime.worker import Worker

log = logging.getLogger(__name__)

GRAPH_BYTES = 16 << 20  # of one captured size, beside the tensors in it
_SAMPLING = SamplingSpec(temperature=1.0, top_p=0.9, max_new=1 << 20)  # the costliest kind


@dataclass(frozen=True, slots=True)
class Probe:
    """What a step of ``batch_tokens`` tokens in ``max_slots`` rows takes."""

    batch_tokens: int
    max_slots: int
    page_size: int
    max_len: int

    def room(self, page_bytes: int) -> KVRoom:
        """KV pages for the probe step. ``page_bytes``: of all layers."""
        pages = len(self._lengths()) * -(-max(self._lengths()) // self.page_size)
        return KVRoom(pages, self.max_len, (pages + 1) * page_bytes)

    def plan(self) -> StepPlan:
        lengths = self._lengths()
        each = -(-max(lengths) // self.page_size)
        init = tuple(
            RowInit(
                slot=i,
                uid=i,
                kv_len=0,
                ids=np.zeros(n, np.int32),
                pages=np.arange(i * each, (i + 1) * each, dtype=np.int32),
                sampling=_SAMPLING,
                emitted=0,
                max_new=1 << 20,
            )
            for i, n in enumerate(lengths)
        )
        spans = tuple(Span(i, n, True) for i, n in enumerate(lengths))
        none = NO_PAGES
        return StepPlan(0, none, init, none, none, none, none, none, 0, spans)

    def _lengths(self) -> list[int]:
        n = min(self.max_slots, self.batch_tokens)
        whole, more = divmod(min(self.batch_tokens, n * (self.max_len - 1)), n)
        return [whole + (i < more) for i in range(n)]


def working_bytes(make: Callable[[KVRoom], Worker], probe: Probe, page_bytes: int, device: torch.device) -> int:
    """Runs the costliest step once on a small pool, which also compiles and loads the kernels.

    Args: make: a worker for such a pool. page_bytes: of a page in all layers. Returns: bytes it took beside weights and pool:
    activations, logits, workspaces.
    """
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    room = probe.room(page_bytes)
    worker = make(room)
    worker.run(probe.plan())
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_allocated(device) - before - room.kv_bytes
    worker.close()
    del worker
    torch.cuda.empty_cache()
    return max(0, taken)


def too_large(model: Model, device: torch.device) -> CapacityError:
    """The error to raise when loading ran out of memory."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    _, total = torch.cuda.mem_get_info(device)
    return CapacityError(
        f"the model's weights of {_gib(size)} do not fit {device}, which has {_gib(total)} of which other programs may hold "
        f"some; use a smaller model, another dtype, or a device with more memory"
    )


def log_memory(model: Model, worker: Worker, kept: int, device: torch.device) -> None:
    """Say what the memory is used for. ``kept``: bytes that were left out of the KV pool."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    free, total = torch.cuda.mem_get_info(device)
    info = worker.info
    log.info(
        "memory of %s: %s in all; weights %s, KV %s (%d tokens), kept for steps and graphs %s, now free %s",
        device, _gib(total), _gib(weights), _gib(info.kv_bytes), info.num_pages * info.page_size, _gib(kept), _gib(free),
    )  # fmt: skip


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
