"""What the logits processors do to the logits, against transformers' processors and OpenAI's formula (P3, S8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.api import NO_PAGES, RowInit, SamplingSpec
from minisgl.api.device import BANNED, FOREVER, LogitsContext, LogitsProcessor, SampleRows
from minisgl_plugins.logits.allowed_tokens import AllowedTokensProcessor
from minisgl_plugins.logits.bad_words import BadWordsProcessor
from minisgl_plugins.logits.bias import BiasProcessor
from minisgl_plugins.logits.min_tokens import MinTokensProcessor
from minisgl_plugins.logits.penalties import PenaltiesProcessor

VOCAB, SLOTS = 50, 40
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device(request.param)


def i32(values: Any) -> Any:
    return np.array(values, np.int32)


class Bench:
    """One processor and the rows it acts on."""

    def __init__(self, cls: type[LogitsProcessor], device: torch.device) -> None:
        self.device = device
        self.processor = cls(LogitsContext(cls.Settings(), "p", device, SLOTS, VOCAB, 2))
        self.n_out: dict[int, int] = {}

    def start(self, slot: int, spec: SamplingSpec, prompt: Any = (), written: Any = ()) -> int:
        ids = i32([*prompt, *written])
        row = RowInit(slot, 7, 0, ids, NO_PAGES, spec, len(written), 99, i32(written), i32(prompt))
        self.n_out[slot] = len(written)
        return self.processor.set_row(row)

    def _rows(self, slots: Any) -> SampleRows:
        h_slot, h_out = i32(slots), i32([self.n_out[s] for s in slots])
        return SampleRows(h_slot, h_out, *(torch.from_numpy(a).long().to(self.device) for a in (h_slot, h_out)))

    def step(self, logits: torch.Tensor, tokens: dict[int, int]) -> torch.Tensor:
        """The processed logits [n, VOCAB] of the slots in ``tokens``; then these are sampled."""
        rows = self._rows(list(tokens))
        x = logits.clone().to(self.device)
        self.processor.prepare()
        self.processor.apply(x, rows)
        self.processor.sampled(torch.tensor(list(tokens.values()), device=self.device), rows)
        for slot in tokens:
            self.n_out[slot] += 1
        return x.cpu()


def some_logits(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def openai(logits: torch.Tensor, output: list[int], presence: float, frequency: float) -> torch.Tensor:
    """mu[j] - c[j] * frequency - float(c[j] > 0) * presence, as OpenAI's page on parameters has it."""
    counts = np.bincount(np.array(output, int), minlength=VOCAB)
    return logits - torch.tensor(counts * frequency + (counts > 0) * presence, dtype=torch.float32)


def repetition(logits: torch.Tensor, ids: list[int], penalty: float) -> torch.Tensor:
    from transformers import RepetitionPenaltyLogitsProcessor

    if not ids:
        return logits
    return RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits[None].clone())[0]


def test_penalties_are_those_of_transformers_and_openai(device: torch.device) -> None:
    """P3: several rows with penalties of their own; the output grows; none of it is the neighbour's."""
    bench, rng = Bench(PenaltiesProcessor, device), np.random.RandomState(0)
    rows: dict[int, tuple[list[int], list[int], tuple[float, float, float]]] = {}
    for slot in (3, 0, 7, 39):
        prompt, written = rng.randint(0, VOCAB, 6).tolist(), rng.randint(0, VOCAB, slot % 3).tolist()
        values = (1.0 + slot / 20, slot / 20 - 1, 1.5 - slot / 13)
        spec = SamplingSpec(repetition_penalty=values[0], presence_penalty=values[1], frequency_penalty=values[2])
        assert bench.start(slot, spec, prompt, written) == FOREVER
        rows[slot] = prompt, written, values
    for step in range(8):
        slots = rng.permutation(list(rows))[: 1 + step % 4].tolist()
        logits = some_logits(len(slots), step)
        tokens = {slot: int(rng.randint(0, 6)) for slot in slots}  # few tokens, so that they come again
        got = bench.step(logits, tokens)
        for at, slot in enumerate(slots):
            prompt, output, (again, presence, frequency) = rows[slot]
            want = openai(repetition(logits[at], prompt + output, again), output, presence, frequency)
            torch.testing.assert_close(got[at], want, rtol=1e-6, atol=1e-6)
            output.append(tokens[slot])


def test_more_rows_with_penalties_than_are_computed_at_once(device: torch.device) -> None:
    bench = Bench(PenaltiesProcessor, device)
    for slot in range(SLOTS):
        bench.start(slot, SamplingSpec(frequency_penalty=1.0), (), [slot] * (slot + 1))
    logits = some_logits(SLOTS)
    got = bench.step(logits, dict.fromkeys(range(SLOTS), 0))
    want = logits.clone()
    for slot in range(SLOTS):
        want[slot, slot] -= slot + 1
    torch.testing.assert_close(got, want)


def test_a_recycled_slot_has_nothing_of_the_row_before(device: torch.device) -> None:
    """P3: neither its output nor its prompt nor its penalties, whether or not a row without penalties was in between."""
    bench, logits = Bench(PenaltiesProcessor, device), some_logits(1)
    for between in (False, True):
        bench.start(5, SamplingSpec(presence_penalty=2.0, repetition_penalty=1.7), [1, 2], [3])
        bench.step(logits, {5: 4})
        if between:
            assert bench.start(5, SamplingSpec()) == 0
            bench.start(6, SamplingSpec(presence_penalty=1.0), [8], [9])  # takes the seat that is free
            bench.step(logits, {6: 1})
        bench.start(5, SamplingSpec(presence_penalty=0.5), [1], [2, 2])
        torch.testing.assert_close(bench.step(logits, {5: 0}), openai(logits[0], [2, 2], 0.5, 0)[None])
        torch.testing.assert_close(bench.step(logits, {5: 0}), openai(logits[0], [2, 2, 0], 0.5, 0)[None])


def test_prompt_tokens_beyond_the_vocabulary_touch_nobody(device: torch.device) -> None:
    """A11, W4: an embedding may be padded; its last tokens are valid in a prompt."""
    bench, logits = Bench(PenaltiesProcessor, device), some_logits(2)
    bench.start(0, SamplingSpec(repetition_penalty=2.0), [VOCAB, VOCAB + 3])
    bench.start(1, SamplingSpec(repetition_penalty=2.0), [4])
    got = bench.step(logits, {0: 0, 1: 0})
    assert torch.equal(got[0], logits[0])
    torch.testing.assert_close(got[1], repetition(logits[1], [4], 2.0))


def test_bias_is_added_to_the_named_tokens_alone(device: torch.device) -> None:
    bench, logits = Bench(BiasProcessor, device), some_logits(3)
    assert bench.start(2, SamplingSpec(bias_ids=(4, 0), biases=(-100.0, 2.5))) == FOREVER
    assert bench.start(9, SamplingSpec(bias_ids=tuple(range(20)), biases=(1.0,) * 20)) == FOREVER
    assert bench.start(0, SamplingSpec(bias_ids=(VOCAB,), biases=(1.0,))) == 0
    assert bench.start(1, SamplingSpec()) == 0
    assert bench.start(30, SamplingSpec(bias_ids=(49,), biases=(7.0,))) == FOREVER
    want = logits.clone()
    want[0, 4] -= 100
    want[0, 0] += 2.5
    want[1, :20] += 1
    want[2, 49] += 7
    for _ in range(2):
        assert torch.equal(bench.step(logits, {2: 0, 9: 0, 30: 0}), want)


def test_stop_tokens_are_banned_before_min_tokens(device: torch.device) -> None:
    """Lists of other lengths come and go; those of a row stay its own. A resumed row has some of its tokens already."""
    from transformers import MinNewTokensLengthLogitsProcessor

    bench, logits = Bench(MinTokensProcessor, device), some_logits(2)
    assert bench.start(0, SamplingSpec(stop_ids=(3,), min_new=4)) == 4
    assert bench.start(1, SamplingSpec(stop_ids=(2, 5, 7, 9), min_new=2), [1], [8]) == 2
    assert bench.start(2, SamplingSpec(stop_ids=(3,), min_new=2), (), [1, 1]) == 0
    assert bench.start(3, SamplingSpec(stop_ids=(3,))) == 0
    assert bench.start(4, SamplingSpec(min_new=9)) == 0
    got = bench.step(logits, {0: 0, 1: 0})
    for at, stops in enumerate([[3], [2, 5, 7, 9]]):
        theirs = MinNewTokensLengthLogitsProcessor(0, 4, stops)(torch.tensor([[1]]), logits[at : at + 1].clone())[0]
        assert torch.equal(got[at] == BANNED, theirs == -torch.inf)
        assert torch.equal(got[at][got[at] != BANNED], logits[at][theirs != -torch.inf])


def test_only_allowed_tokens_are_left(device: torch.device) -> None:
    bench, logits = Bench(AllowedTokensProcessor, device), some_logits(2)
    assert bench.start(0, SamplingSpec(allowed_ids=(1, 2))) == FOREVER
    assert bench.start(1, SamplingSpec(allowed_ids=(49, VOCAB + 1))) == FOREVER
    assert bench.start(0, SamplingSpec()) == 0
    assert bench.start(2, SamplingSpec(allowed_ids=(7,))) == FOREVER
    got = bench.step(logits, {1: 49, 2: 7})
    assert [(row != BANNED).nonzero().flatten().tolist() for row in got] == [[49], [7]]
    assert [float(got[0, 49]), float(got[1, 7])] == [float(logits[0, 49]), float(logits[1, 7])]


def test_bad_words_are_banned_where_they_would_be_complete(device: torch.device) -> None:
    """As transformers' processor on the output alone, for words of several lengths in rows of their own."""
    from transformers import NoBadWordsLogitsProcessor

    bench, rng = Bench(BadWordsProcessor, device), np.random.RandomState(1)
    words = {0: ((1,), (2, 3)), 1: ((3, 3, 1), (0, 2), (1, 3)), 2: ((2,),)}
    said: dict[int, list[int]] = {0: [], 1: [3, 3], 2: [1]}
    for slot, own in words.items():
        assert bench.start(slot, SamplingSpec(bad_words=own), [2], said[slot]) == FOREVER
    assert bench.start(3, SamplingSpec()) == 0
    for step in range(30):
        slots = rng.permutation(3)[: 1 + step % 3].tolist()
        logits, tokens = some_logits(len(slots), step), {s: int(rng.randint(0, 4)) for s in slots}
        got = bench.step(logits, tokens)
        for at, slot in enumerate(slots):
            theirs = NoBadWordsLogitsProcessor([list(w) for w in words[slot]])
            past = torch.tensor([[VOCAB - 1, *said[slot]]])  # it asks for one token at least
            banned = theirs(past, logits[at : at + 1].clone())[0] == -torch.inf
            assert torch.equal(got[at] < BANNED / 2, banned), (slot, said[slot])
            assert torch.equal(got[at][~banned], logits[at][~banned])
            said[slot].append(tokens[slot])


def test_a_recycled_slot_forgets_words_and_output(device: torch.device) -> None:
    bench, logits = Bench(BadWordsProcessor, device), some_logits(1)
    bench.start(0, SamplingSpec(bad_words=((1, 2), (5,), (6,), (7, 8, 9))))
    bench.step(logits, {0: 1})
    bench.start(0, SamplingSpec(bad_words=((1, 2),)))
    assert torch.equal(bench.step(logits, {0: 0}), logits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_no_processor_waits_for_the_device() -> None:
    """After the first steps, in which memory is taken."""
    spec = SamplingSpec(
        bias_ids=(1,), biases=(2.0,), frequency_penalty=1.0, repetition_penalty=1.2, min_new=50, stop_ids=(3,),
        allowed_ids=tuple(range(40)), bad_words=((1, 2),),
    )  # fmt: skip
    device = torch.device("cuda")
    classes = (BiasProcessor, PenaltiesProcessor, MinTokensProcessor, AllowedTokensProcessor, BadWordsProcessor)
    benches = [Bench(cls, device) for cls in classes]
    logits = some_logits(2).to(device)

    def steps(n: int, waits: str) -> None:
        for bench in benches:
            for slot in (0, 1):
                bench.start(slot, replace(spec, seed=n), [1, 2], [3])
            rows = bench._rows([0, 1])
            tokens = torch.zeros(2, dtype=torch.int64, device=device)
            torch.cuda.set_sync_debug_mode(waits)
            try:
                for _ in range(n):
                    bench.processor.prepare()
                    bench.processor.apply(logits, rows)
                    bench.processor.sampled(tokens, rows)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    steps(4, "default")
    torch.cuda.synchronize()
    steps(3, "error")
