"""transformers as the peer of ``bench offline``, in a process of its own: two models in one process would share one pool of
OpenMP threads between two callers, which slows both."""

from __future__ import annotations

import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minisgl.base.errors import Fault

START_S = 300.0  # loading the model
RUN_S = 3600.0  # one measurement


class TransformersPeer:
    """One left-padded greedy ``generate`` of all prompts, as long as the longest output. Create it before this process sets
    anything for its own threads; it then loads the model with ``load``."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child,), daemon=True)
        self._process.start()
        child.close()

    def load(self, path: Path, dtype: str, device: str) -> None:
        self._ask(("load", str(path), dtype, device), START_S)

    def generate(self, prompts: list[list[int]], max_new: int) -> float:
        """Seconds for one batch."""
        return float(self._ask(("generate", prompts, max_new), RUN_S))

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()

    def _ask(self, message: tuple[Any, ...], timeout_s: float) -> Any:
        try:
            self._pipe.send(message)
            if not self._pipe.poll(timeout_s):
                raise Fault(f"transformers did not {message[0]} within {timeout_s:g} s", role="peer")
            ok, value = self._pipe.recv()
        except (EOFError, BrokenPipeError) as exc:
            raise Fault("the process that runs transformers has ended", role="peer") from exc
        if not ok:
            raise Fault(f"transformers could not {message[0]}: {value}", role="peer")
        return value


def _serve(pipe: Connection) -> None:
    """The peer's process: answers until the pipe is closed."""
    model: Any = None
    while True:
        try:
            op, *args = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if op == "load":
                model, answer = _load(*args), None
            else:
                answer = _generate(model, *args)
            pipe.send((True, answer))
        except Exception as exc:
            pipe.send((False, f"{type(exc).__name__}: {exc}"))


def _load(path: str, dtype: str, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()


def _generate(model: Any, prompts: list[list[int]], max_new: int) -> float:
    import torch

    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new,
            min_new_tokens=max_new,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=0,
        )
    assert out.shape[1] == width + max_new, (out.shape, width, max_new)
    out.cpu()
    return time.perf_counter() - start
