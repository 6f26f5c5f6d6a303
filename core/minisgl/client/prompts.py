"""What the Python API takes for prompts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

from minisgl.base.errors import RequestError
from minisgl.base.types import Admit, GenerateRequest, Refused

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list; token ids may be an array. Raises: RequestError for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if not hasattr(prompts, "__iter__"):
        raise RequestError(
            f"prompts must be a text, token ids, or a list of those, not {type(prompts).__name__}", param="prompts"
        )
    many = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    one = bool(many) and hasattr(many[0], "__index__") and not hasattr(many[0], "__len__")
    return [cast(Sequence[int], many)] if one else cast(list[Prompt], many)


def prompt_request(prompt: Prompt) -> GenerateRequest:
    """Raises: RequestError for what is neither text nor token ids."""
    if isinstance(prompt, str):
        return GenerateRequest(text=prompt)
    try:
        return GenerateRequest(ids=tuple(operator.index(i) for i in prompt))
    except TypeError as exc:
        raise RequestError(f"a prompt must be a text or token ids, not {prompt!r:.80}", param="prompt") from exc


def longest_first(requests: Sequence[GenerateRequest], admits: Sequence[Admit]) -> Sequence[Admit]:
    """The order in which a batch is queued. If all of it ignores EOS, its lengths are known, and a long one that came last would
    run alone at the end."""
    if not all(r.sampling.ignore_eos for r in requests):
        return admits
    return sorted(admits, key=lambda a: -a.sampling.max_new)


def refusal(out: Refused) -> RequestError:
    return RequestError(out.message, status=out.status, code=out.code, param=out.param)
