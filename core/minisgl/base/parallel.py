"""Tensor parallelism without torch: which numbers of ranks fit a model, and what of its heads a rank has."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.base.errors import ConfigError
from minisgl.base.facts import ModelFacts

_COMMON = 16  # sizes up to this are named in an error


def check_tp(facts: ModelFacts, size: int) -> None:
    """Raises: ConfigError if ``size`` ranks cannot share the model (M14). The vocabulary is padded, so that every size fits it."""
    if _fits(facts, size):
        return
    sizes = range(1, max(_COMMON, size) + 1)
    shared = _or([n for n in sizes if facts.kv_heads % n == 0 or _doubled(facts.kv_heads, n)])
    kv = f"{facts.kv_heads} KV head{'' if facts.kv_heads == 1 else 's'} can be shared by {shared} ranks"
    uneven = [f"{n} {what} cannot be split by {size}" for what, n in _widths(facts).items() if n % size]
    raise ConfigError(
        f"parallel.tp = {size} does not fit this model: {'; '.join([kv, *uneven])}; "
        f"what fits: {_or([n for n in sizes if _fits(facts, n)])}"
    )


def local_heads(facts: ModelFacts, size: int) -> tuple[int, int]:
    """Query heads and KV heads of each of ``size`` ranks; with fewer KV heads than ranks several have the same one."""
    return facts.heads // size, max(1, facts.kv_heads // size)


def kv_copies(facts: ModelFacts, size: int) -> int:
    """How many ranks have the same KV heads."""
    return max(1, size // facts.kv_heads)


def vocab_rows(vocab: int, size: int) -> int:
    """Rows of the embedding on each rank; the last ranks pad theirs."""
    return -(-vocab // size)


def _fits(facts: ModelFacts, size: int) -> bool:
    kv_fit = facts.kv_heads % size == 0 or size % facts.kv_heads == 0
    return kv_fit and not any(n % size for n in _widths(facts).values())


def _widths(facts: ModelFacts) -> dict[str, int]:
    """What is split evenly."""
    widths = {"query heads": facts.heads}
    if facts.moe is None or len(facts.moe.layers) < facts.layers:
        widths["columns of the MLP"] = facts.intermediate
    if facts.moe is not None and facts.moe.layers:
        widths["columns of an expert"] = facts.moe.intermediate
    return widths


def _doubled(n: int, size: int) -> bool:
    """Whether ``size`` is n times a power of two, which is how devices come."""
    return size % n == 0 and (size // n).bit_count() == 1


def _or(sizes: Sequence[int]) -> str:
    names = [str(n) for n in sizes]
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
