"""The KV pool: how many pages fit, and their memory."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minisgl.base.errors import CapacityError
from minisgl.config.memory import parse_memory
from minisgl.config.schema import KVSettings
from minisgl.runtime.attention import AttentionBackend, KVSpec

log = logging.getLogger(__name__)

_AUTO = {"cpu": "2GiB"}  # else 0.9 of what is free
_AUTO_ELSE = "0.9"


@dataclass(frozen=True, slots=True)
class KVRoom:
    """``num_pages`` usable pages (the pool has one more, the dummy page) and the longest row they can hold."""

    num_pages: int
    max_len: int
    kv_bytes: int


def free_memory(device: torch.device) -> int:
    """Bytes that may still be allocated on ``device``."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_room(
    s: KVSettings, spec: KVSpec, layers: int, device: torch.device, max_slots: int, max_len: int, kept: int = 0
) -> KVRoom:
    """How many pages to allocate, rounded down (M10), and never more than all rows at full length can use. ``kept``: bytes of
    the free memory that steps need themselves.

    ``max_len`` is cut to what the pool holds. Raises: CapacityError if it holds no page.
    """
    page_bytes = spec.page_bytes * layers
    most = max_slots * -(-max_len // s.page_size)
    if s.num_pages is not None:
        pages, asked = s.num_pages, f"kv.num_pages={s.num_pages}"
    else:
        text = _AUTO.get(device.type, _AUTO_ELSE) if s.memory == "auto" else s.memory
        room = parse_memory(text, max(0, free_memory(device) - kept))
        pages, asked = room // page_bytes - 1, f"kv.memory={s.memory!r} ({room} bytes)"  # one is the dummy page
    pages = min(pages, most)
    if pages < 1:
        of_it = f" ({kept} bytes of the free memory are kept for steps and graphs)" if kept else ""
        raise CapacityError(
            f"{asked} holds no KV page{of_it}: a page of {s.page_size} tokens in {layers} layers takes {page_bytes} bytes, "
            f"and one more is kept for padding; give at least --kv.memory {-(-2 * page_bytes // (1 << 20))}MiB"
        )
    held = pages * s.page_size
    if held < max_len:
        log.warning(
            "context cut from %d to %d tokens: %s holds %d pages of %d tokens", max_len, held, asked, pages, s.page_size
        )
    return KVRoom(pages, min(max_len, held), (pages + 1) * page_bytes)


def allocate(
    backend: type[AttentionBackend], spec: KVSpec, layers: int, num_pages: int, device: torch.device
) -> list[Tensor]:
    """One pool per layer with ``num_pages`` pages and the dummy page. Zeros, since masked entries must still be finite."""
    try:
        shape = backend.kv_shape(spec, num_pages + 1)
        return [torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(layers)]
    except RuntimeError as exc:  # torch.OutOfMemoryError on a GPU, DefaultCPUAllocator on a CPU
        size = spec.page_bytes * layers * (num_pages + 1)
        raise CapacityError(
            f"the KV cache of {size} bytes cannot be allocated on {device}; give a smaller --kv.memory"
        ) from exc
