"""From logits to tokens: processors in their order, each on its own rows for as long as it says, then grammars' masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.base.errors import RequestError
from minisgl.base.types import NO_PAGES, RowInit, SamplingSpec, Span, StepPlan
from minisgl.runtime.logits import FOREVER, LogitsContext, LogitsProcessor
from minisgl.runtime.pick import Picker
from minisgl.runtime.rows import Rows
from minisgl.runtime.sampling import SamplerContext, SampleRows
from minisgl.runtime.scores import unpack
from minisgl.testing.checkpoints import llama_checkpoint
from minisgl_plugins.logits.min_tokens import MinTokensProcessor
from minisgl_plugins.sampler.torch import TorchSampler

VOCAB, WIDTH, SLOTS = 6, 8, 8
CPU = torch.device("cpu")


class Note(LogitsProcessor):
    """Sets the logit of token ``order % 10`` to one more than all and notes whom it was called for."""

    def __init__(self, ctx: LogitsContext) -> None:
        self.name, self.calls, self.got = ctx.name, [], []  # type: ignore[var-annotated]

    def set_row(self, row: RowInit) -> int:
        return int(row.sampling.extra.get(self.name, 0))

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        assert len(logits) == len(rows.h_slot)
        self.calls.append(rows.h_slot.tolist())
        logits[:, self.order % 10] = logits.max() + 1

    def sampled(self, tokens: torch.Tensor, rows: SampleRows) -> None:
        assert rows.slot.tolist() == rows.h_slot.tolist()
        self.got.append(dict(zip(rows.h_slot.tolist(), tokens.tolist(), strict=True)))


class Early(Note):
    order: ClassVar[int] = 1


class Late(Note):
    order: ClassVar[int] = 72


def picker(**classes: type[LogitsProcessor]) -> tuple[Picker, dict[str, Any]]:
    made = {name: cls(LogitsContext(None, name, CPU, SLOTS, VOCAB)) for name, cls in classes.items()}
    sampler = TorchSampler(SamplerContext(TorchSampler.Settings(), CPU, SLOTS, VOCAB))
    return Picker(sampler, made, CPU, SLOTS, VOCAB, WIDTH), made


def start(p: Picker, slot: int, **spec: Any) -> None:
    ids = np.array([1, 2], np.int32)
    p.set_row(RowInit(slot, slot, 0, ids, NO_PAGES, SamplingSpec(temperature=0, **spec), 0, 9))


def pick(p: Picker, slots: Sequence[int], outs: Sequence[int], mask: Any = None, logits: Any = None) -> list[int]:
    h_slot, h_out = np.array(slots, np.int32), np.array(outs, np.int32)
    rows = SampleRows(h_slot, h_out, torch.from_numpy(h_slot).long(), torch.from_numpy(h_out).long())
    if logits is None:
        logits = torch.zeros(len(slots), WIDTH)
        logits[:, 5] = 1
        logits[:, VOCAB:] = 9  # padding of the head
    p.prepare()
    return p.pick(logits, rows, mask).tolist()


def test_a_processor_sees_its_own_rows_in_order_and_is_told_their_tokens() -> None:
    """P3: whatever rows are beside them, and whatever order they come in."""
    p, made = picker(late=Late, early=Early)
    start(p, 0)
    start(p, 1, extra={"early": FOREVER})
    start(p, 2, extra={"early": FOREVER, "late": FOREVER})
    start(p, 3, extra={"late": FOREVER})
    assert pick(p, [3, 0, 2, 1], [0] * 4) == [2, 5, 2, 1]
    assert (made["early"].calls, made["late"].calls) == ([[2, 1]], [[3, 2]])
    assert (made["early"].got, made["late"].got) == ([{2: 2, 1: 1}], [{3: 2, 2: 2}])
    assert pick(p, [2], [1]) == [2]
    assert made["early"].calls[-1] == made["late"].calls[-1] == [2]
    start(p, 2)
    assert pick(p, [2], [0]) == [5], "a recycled slot has no processor"


def test_a_processor_is_called_for_as_many_tokens_as_it_said_and_graphs_serve_the_rest() -> None:
    p, made = picker(early=Early)
    p.sampler.plain = lambda h_slot: True  # type: ignore[method-assign]
    start(p, 0)
    start(p, 1, extra={"early": 2})

    def plain(slots: list[int], outs: list[int]) -> bool:
        return p.plain(np.array(slots, np.int32), np.array(outs, np.int32))

    assert [plain([0, 1], [9, out]) for out in range(4)] == [False, False, True, True]
    assert plain([0], [0])
    assert [pick(p, [0, 1], [9, out]) for out in range(4)] == [[5, 1], [5, 1], [5, 5], [5, 5]]
    assert made["early"].calls == [[1], [1]]
    start(p, 0, logprobs=0)
    assert not plain([0], [0])


def test_a_mask_comes_last_and_a_ban_gives_way_to_it() -> None:
    """A grammar that allows nothing but EOS ends the output, also before min_tokens."""

    def only(token: int) -> Any:
        def mask(logits: torch.Tensor, slots: Any) -> torch.Tensor:
            logits[:, [i for i in range(WIDTH) if i != token]] = -torch.inf
            return logits

        return mask

    p, _ = picker(late=Late, min_tokens=MinTokensProcessor)
    start(p, 0, extra={"late": FOREVER}, stop_ids=(5,), min_new=9)
    assert pick(p, [0], [0]) == [2]
    assert pick(p, [0], [1], only(4)) == [4]
    assert pick(p, [0], [2], only(5)) == [5]
    start(p, 1)
    assert pick(p, [1], [0], only(3)) == [3]


def test_warming_up_is_seen_by_no_row() -> None:
    p, made = picker(early=Early)
    start(p, 1, extra={"early": FOREVER})
    p.warm()
    assert (made["early"].calls, p.scored) == ([], [])
    assert pick(p, [1], [0]) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_of_the_models_own_distribution(dtype: torch.dtype) -> None:
    """Before processors, over all that the model gives a logit, alternatives only of what may be sampled; a token among the
    alternatives has the same number, bit by bit."""
    p, _ = picker(early=Early)
    start(p, 0, logprobs=2, extra={"early": FOREVER})
    start(p, 1)
    start(p, 2, logprobs=0)
    logits = torch.randn(3, WIDTH + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = torch.log_softmax(logits[:, :WIDTH].float(), -1)
    tokens = pick(p, [0, 1, 2], [4, 0, 1], logits=logits.clone())
    (packed,) = p.scored
    block = unpack(packed.row, packed.position, packed.data.numpy())
    assert (block.row.tolist(), block.position.tolist()) == ([0, 2], [6, 3])
    assert block.token.tolist() == [tokens[0], tokens[2]] == [1, int(logits[2, :VOCAB].argmax())]
    for i, row in enumerate((0, 2)):
        top, ids = want[row, :VOCAB].topk(2)
        assert block.top_ids[i].tolist() == ids.tolist()
        assert block.top_logprobs[i] == pytest.approx(top.numpy(), abs=1e-5)
        assert block.logprob[i] == pytest.approx(float(want[row, tokens[row]]), abs=1e-5)
        assert block.rank[i] == 1 + int((want[row, :VOCAB] > want[row, tokens[row]]).sum())
    assert block.logprob[1] == block.top_logprobs[1][0]


def test_prompt_tokens_that_spans_predict_by_hand() -> None:
    """The last token of a prompt predicts none of it, and a chunk's last predicts the next chunk's first."""
    rows = Rows(4, 32, 99, 4)
    spec = SamplingSpec(prompt_logprobs=0)
    ids = np.array([10, 11, 12, 13, 14, 15, 16], np.int32)
    init = RowInit(2, 0, 0, ids, NO_PAGES, spec, 2, 9, ids[5:])  # 5 tokens of prompt, 2 written before
    none = NO_PAGES

    def plan(step: int, n: int, inits: tuple[RowInit, ...] = (), score: bool = True) -> StepPlan:
        return StepPlan(step, none, inits, none, none, none, none, none, 0, (Span(2, n, False, score),))

    first = plan(0, 3, (init,))
    rows.apply(first)
    ask = rows.asks(first)
    assert ask is not None
    assert [x.tolist() for x in (ask.at, ask.row, ask.position, ask.token)] == [
        [0, 1, 2],
        [2, 2, 2],
        [1, 2, 3],
        [11, 12, 13],
    ]
    rows.kv_len[2] = 3
    ask = rows.asks(plan(1, 4))
    assert ask is not None
    assert [x.tolist() for x in (ask.at, ask.position, ask.token)] == [[0], [4], [14]]
    assert rows.asks(plan(1, 4, score=False)) is None
    rows.kv_len[2] = 4
    assert rows.asks(plan(1, 3)) is None


class OnlyTrue(Early):
    def check(self, params: Any) -> None:
        if params is not True:
            raise ValueError(f"{params!r} is not true")

    def set_row(self, row: RowInit) -> int:
        return FOREVER if self.name in row.sampling.extra else 0


def test_parameters_that_a_processor_refuses_are_a_400(tmp_path: Any) -> None:
    """And the engine goes on; rows that name no processor are left alone."""
    llama_checkpoint(tmp_path / "m")
    with LLM(tmp_path / "m", logits=OnlyTrue, show_progress=False, kv={"num_pages": 50}, device="cpu") as llm:
        assert llm.info.logits == ("OnlyTrue",)
        with pytest.raises(RequestError, match=r"logits\.OnlyTrue: 5 is not true") as refused:
            llm.generate((5, 6), SamplingParams(max_tokens=2, logits={"OnlyTrue": 5}))
        assert (refused.value.status, refused.value.param) == (400, "logits.OnlyTrue")
        plain, changed = (
            SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logits=x) for x in ({}, {"OnlyTrue": True})
        )
        outputs = llm.generate([(5, 6), (5, 6)], [plain, changed])
        assert outputs[1].ids == (1, 1, 1) != outputs[0].ids
