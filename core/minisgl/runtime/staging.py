"""Small arrays on their way between host and device: one packed copy for each step, and never a wait for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.base.types import I32


class Ring:
    """Pinned int32 buffers used in turn. A buffer is handed out again only when the copy that used it last is done (M3)."""

    def __init__(self, device: torch.device, turns: int) -> None:
        self._device, self._turn = device, 0
        self._slots: list[tuple[Tensor, torch.cuda.Event | None]] = [(torch.empty(0, dtype=torch.int32), None)] * turns

    def take(self, size: int) -> Tensor:
        """A host buffer of ``size`` numbers; to be used before the next ``take``, and then ``mark``ed."""
        self._turn = (self._turn + 1) % len(self._slots)
        buffer, event = self._slots[self._turn]
        if event is not None:
            event.synchronize()
        if buffer.shape[0] < size:
            buffer = torch.empty(
                max(size, 2 * buffer.shape[0]), dtype=torch.int32, pin_memory=self._device.type == "cuda"
            )
            self._slots[self._turn] = buffer, None
        return buffer[:size]

    def mark(self) -> torch.cuda.Event | None:
        """The copy from or to the buffer of the last ``take`` is enqueued. Returns: an event that follows it; None on a CPU."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._slots[self._turn] = self._slots[self._turn][0], event
        return event


class Uploads:
    """Host arrays to the device, all those of a step in one copy."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        self._ring = Ring(device, depth + 1)

    def send(self, *arrays: I32) -> tuple[Tensor, ...]:
        """Returns: each as a new int64 tensor on the device."""
        sizes = [len(a) for a in arrays]
        if self._device.type == "cpu":
            flat = torch.from_numpy(np.concatenate(arrays))
        else:
            host = self._ring.take(sum(sizes))
            np.concatenate(arrays, out=host.numpy())
            flat = host.to(self._device, non_blocking=True)
            self._ring.mark()
        return torch.split(flat.long(), sizes)
