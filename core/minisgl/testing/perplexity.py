"""How well a model predicts a text: what a change of its numbers, such as quantization, costs in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import TYPE_CHECKING, Any

from minisgl.testing.plans import PlanDriver

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.runtime.worker import Worker


def perplexity(worker: Worker, ids: Sequence[int], chunk: int = 256) -> float:
    """exp of the mean of -log p over all tokens but the first, each given all before it.

    The text runs through the worker as a prompt whose prefill takes ``chunk`` tokens a step; with 1, layers see as many rows as
    when one request decodes. The worker must be fresh.
    """
    return exp(-float(token_logprobs(worker, ids, chunk).mean()))


def token_logprobs(worker: Worker, ids: Sequence[int], chunk: int = 256) -> Tensor:
    """Returns: [len(ids) - 1] float32 natural logarithms of each token's probability after those before it."""
    import torch

    found: list[Tensor] = []

    def after_step(model: Any, args: tuple[Any, ...], hidden: Tensor) -> None:
        logits = model.logits(hidden, args[0])
        first = sum(map(len, found)) + 1
        following = torch.tensor(ids[first : first + len(hidden)])  # one less than hidden, after the last step
        found.append(logits[: len(following)].log_softmax(-1).gather(1, following[:, None])[:, 0])

    hook = worker.model.register_forward_hook(after_step)
    driver = PlanDriver(worker.run, worker.info.page_size)
    driver.start(0, list(ids))
    for at in range(0, len(ids), chunk):
        driver.step(prefill={0: min(chunk, len(ids) - at)})
    hook.remove()
    return torch.cat(found)
