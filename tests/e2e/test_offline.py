"""The Python API on a small random model: batches, streaming, prefix reuse, seeds, tiny pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.base.errors import ConfigError, RequestError
from minisgl.base.types import Admit, GenerateRequest, Limits
from minisgl.sched.policy import ReqView, SchedView
from minisgl.testing.checkpoints import llama_checkpoint
from minisgl.testing.recorder import StepRecorder
from minisgl_plugins.scheduler.chunked import ChunkedScheduler

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("offline") / "llama"
    llama_checkpoint(path, seed=5, max_position_embeddings=2048)
    return path


def open_llm(checkpoint: Path, **options: Any) -> LLM:
    return LLM(checkpoint, show_progress=False, engine={"validate": "audit", "threads": 1}, **options)


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt * 31 + i * i) % 199 for i in range(n)]


def test_outputs_come_in_the_order_of_the_prompts(checkpoint: Path) -> None:
    """M15: more prompts than fit one prefill batch; results do not mix and the last token is there."""
    prompts = [prompt(5 + 9 * i, i) for i in range(20)]
    with open_llm(checkpoint, limits={"batch_tokens": 64, "max_running": 4}) as llm:
        together = llm.generate(prompts, GREEDY)
        apart = [llm.generate([p], GREEDY)[0] for p in prompts]
    assert [o.ids for o in together] == [o.ids for o in apart]
    assert {len(o.ids) for o in together} == {12}
    assert {o.finish for o in together} == {"length"}


def test_first_streamed_item_comes_before_the_third_step(checkpoint: Path) -> None:
    recorder = StepRecorder()
    with open_llm(checkpoint, observers=[recorder]) as llm:
        stream = llm.stream(prompt(10), GREEDY)
        first = next(stream)
        assert first.ids
        assert len(recorder.steps) < 3
        rest = [first, *stream]
    assert sum(len(d.ids) for d in rest) == 12
    assert rest[-1].finish == "length"


def test_closing_a_stream_frees_its_row(checkpoint: Path) -> None:
    with open_llm(checkpoint, cache="naive") as llm:
        stream = llm.stream(prompt(10), SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True))
        next(stream)
        stream.close()
        llm.pipeline.step()
        llm.pipeline.step()
        assert llm.pipeline.idle
        assert llm.pipeline.engine.scheduler.counts()["free"] == llm.info.num_pages


def test_identical_prompt_hits_while_the_first_still_runs(checkpoint: Path) -> None:
    """Sent at the first one's first token, an identical prompt of 1,000 tokens has at least 992 cached."""
    recorder = StepRecorder()
    with open_llm(checkpoint, observers=[recorder], page_size=16) as llm:
        p = llm.pipeline
        request = GenerateRequest(
            ids=tuple(prompt(1000)), sampling=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        )
        [first] = p.submit(request)
        while not any(getattr(out, "ids", ()) for out in p.step()):
            pass
        [second] = p.submit(request)
        usage: dict[int, Any] = {}
        ids: dict[int, list[int]] = {first: [], second: []}
        running_together = False
        while len(usage) < 2:
            for out in p.step():
                ids[out.uid] += getattr(out, "ids", ())
                if getattr(out, "usage", None) is not None:
                    usage[out.uid] = out.usage
            running_together |= recorder.steps[-1].n_decode == 2
    assert running_together
    assert usage[second].cached_tokens >= 992
    assert usage[first].cached_tokens == 0
    assert ids[second][1:] == ids[first]  # the first token of the first one came before


def test_four_outputs_of_a_prompt_compute_it_once(checkpoint: Path) -> None:
    recorder = StepRecorder()
    with open_llm(checkpoint, observers=[recorder], page_size=16, limits={"batch_tokens": 128}) as llm:
        outputs = llm.generate([prompt(1000)], GREEDY, n=4)
    assert len({o.ids for o in outputs}) == 1
    assert recorder.prefilled <= 1000 + 4 * 16


@pytest.mark.parametrize("length", [16, 32, 48, 15, 17, 1])
def test_whole_prompt_cached_still_answers(checkpoint: Path, length: int) -> None:
    """N1, S2: prompts of k pages exactly, and shorter than a page, sent again."""
    with open_llm(checkpoint, page_size=16) as llm:
        first = llm.generate([prompt(length)], GREEDY)[0]
        again = llm.generate([prompt(length)], GREEDY)[0]
    assert again.ids == first.ids
    assert again.usage.cached_tokens == (length - 1) // 16 * 16


@pytest.mark.parametrize("pages", [3, 4, 7])
def test_tiny_pool_serves_one_after_another(checkpoint: Path, pages: int) -> None:
    """N3: a pool of a few pages, several requests that fill it."""
    with open_llm(checkpoint, kv={"page_size": 16, "num_pages": pages}) as llm:
        outputs = llm.generate([prompt(30, i) for i in range(6)], GREEDY)
        with open_llm(checkpoint) as large:
            want = large.generate([prompt(30, i) for i in range(6)], GREEDY)
    assert [o.ids for o in outputs] == [o.ids for o in want]


def test_prompt_larger_than_the_pool_is_refused_with_numbers(checkpoint: Path) -> None:
    """S6: it can never run, so it is refused at once and the engine goes on."""
    with open_llm(checkpoint, kv={"page_size": 16, "num_pages": 3}) as llm:
        with pytest.raises(RequestError, match=r"48 tokens.*100") as caught:
            llm.generate([prompt(100)], GREEDY)
        assert caught.value.code == "context_length_exceeded"
        assert len(llm.generate([prompt(20)], GREEDY)[0].ids) == 12


def test_bad_prompt_of_a_batch_stops_the_batch_before_it_runs(checkpoint: Path) -> None:
    with open_llm(checkpoint) as llm:
        with pytest.raises(RequestError) as caught:
            llm.generate([prompt(4), [5, 100_000]], GREEDY)
        assert "100000" in str(caught.value)
        assert len(llm.generate([prompt(4)], GREEDY)) == 1


def test_one_params_object_for_each_prompt_or_one_for_all(checkpoint: Path) -> None:
    with open_llm(checkpoint) as llm, pytest.raises(ConfigError, match="2 sampling params for 3 prompts"):
        llm.generate([prompt(4)] * 3, [GREEDY] * 2)


SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=1234, max_tokens=24, ignore_eos=True)
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)


def test_answers_without_a_seed_differ_from_start_to_start_unless_the_engine_has_one(checkpoint: Path) -> None:
    def start(**engine: Any) -> list[tuple[int, ...]]:
        with LLM(checkpoint, show_progress=False, engine=engine) as llm:
            return [o.ids for o in llm.generate([prompt(9)], UNSEEDED, n=3)]

    assert start() != start()
    assert start(seed=7) == start(seed=7)
    assert len(set(start(seed=7))) == 3


class SeededIsVictim(ChunkedScheduler):
    """Admits more than the pool can hold, and preempts the seeded request, which has the longest prompt."""

    class Settings(ChunkedScheduler.Settings):
        reserve: float = 0.1

    def victim(self, v: SchedView) -> ReqView | None:
        return max(v.decoding(), key=lambda r: r.prompt_len, default=None)


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_seeded_request_depends_on_its_seed_alone(checkpoint: Path, loop: str) -> None:
    """P2: alone, among 31 unseeded ones, in chunks, and preempted."""
    mine = prompt(60, 3)
    with open_llm(checkpoint, loop=loop) as llm:
        alone = llm.generate([mine], SEEDED)[0].ids
        params = [UNSEEDED] * 20 + [SEEDED] + [UNSEEDED] * 11
        crowd = [prompt(5 + i, i) for i in range(20)] + [mine] + [prompt(9 + i, i) for i in range(11)]
        among = llm.generate(crowd, params)
        again = llm.generate(crowd, params)
        other_seed = llm.generate([mine], SamplingParams(temperature=1.0, top_p=0.95, seed=4321, max_tokens=24))[0].ids
    assert among[20].ids == alone
    assert again[20].ids == alone
    assert other_seed != alone
    assert [o.ids for o in among if o is not among[20]] != [o.ids for o in again if o is not again[20]]
    with open_llm(checkpoint, loop=loop, scheduler={"use": "chunked", "chunked": {"max_chunk": 7}}) as llm:
        assert llm.generate([mine], SEEDED)[0].ids == alone


def test_preempted_seeded_request_continues_its_random_stream(checkpoint: Path) -> None:
    mine = prompt(60, 3)
    with open_llm(checkpoint) as llm:
        alone = llm.generate([mine], SEEDED)[0].ids
    options = {"kv": {"page_size": 4, "num_pages": 40}, "cache": "naive"}
    with LLM(
        checkpoint, show_progress=False, scheduler=SeededIsVictim, engine={"validate": "audit", "threads": 1}, **options
    ) as llm:
        outputs = llm.generate([mine, *(prompt(20 + i, i) for i in range(4))], [SEEDED] + [UNSEEDED] * 4)
        assert llm.pipeline.engine.scheduler.counts()["preemptions"] >= 1
    assert outputs[0].ids == alone


def test_pieces_can_be_driven_by_hand(checkpoint: Path) -> None:
    """Token ids in, raw engine outputs out, no text side."""
    import numpy as np

    from minisgl.base.types import Ended, SamplingSpec, Tokens

    with open_llm(checkpoint) as llm:
        p = llm.pipeline
        p.admit(Admit(77, np.array(prompt(10), np.int32), SamplingSpec(temperature=0.0, max_new=5)))
        tokens: list[int] = []
        ended: Ended | None = None
        while ended is None:
            for out in p.poll_after_turn():
                if isinstance(out, Tokens):
                    tokens += out.tokens.tolist()
                elif isinstance(out, Ended):
                    ended = out
        want = llm.generate([prompt(10)], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))[0].ids
    assert (ended.uid, ended.output_tokens, ended.prompt_tokens) == (77, 5, 10)
    assert tuple(tokens) == want
    assert isinstance(p.engine.scheduler.limits, Limits)


def test_pool_full_of_cached_prefixes_gives_pages_to_new_prompts(checkpoint: Path) -> None:
    """M7: every page is evictable, then allocations of several pages each."""
    with open_llm(checkpoint, kv={"page_size": 16, "num_pages": 12}) as llm:
        for salt in range(12):
            llm.generate([prompt(40 + salt, salt)], GREEDY)
            counts = llm.pipeline.engine.scheduler.counts()
            assert counts["free"] + counts["evictable"] + counts["locked"] == 12
        assert counts["evictable"] >= 9, "the pool is not full of cached prefixes; the test proves nothing"
        fresh = llm.generate([prompt(100, 99)], GREEDY)[0]
    with open_llm(checkpoint) as large:
        assert large.generate([prompt(100, 99)], GREEDY)[0].ids == fresh.ids


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_no_later_plan_holds_a_row_whose_client_left(checkpoint: Path, loop: str) -> None:
    """M1: after the abort at most one more step computes the row; then its slot and pages are back."""
    with open_llm(checkpoint, loop=loop, cache="naive") as llm:
        p = llm.pipeline
        submit, plans = p.engine.executor.submit, []

        def record(plan: Any) -> Any:
            plans.append(plan)
            return submit(plan)

        p.engine.executor.submit = record  # type: ignore[method-assign]
        long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        [leaves] = p.submit(GenerateRequest(ids=tuple(prompt(20)), sampling=long))
        [stays] = p.submit(GenerateRequest(ids=tuple(prompt(21, 1)), sampling=long))
        while len(plans) < 10:
            p.step()
        slots = {init.uid: init.slot for plan in plans for init in plan.init}
        del plans[:]
        p.cancel([leaves])
        for _ in range(6):
            p.step()
        with_row = [plan for plan in plans if plan.n_decode == 2]
        assert len(with_row) <= 1, [plan.n_decode for plan in plans]
        assert slots[leaves] in {int(s) for plan in plans for s in plan.retire}
        p.engine.scheduler.audit()
        p.cancel([stays])
        for _ in range(3):
            p.step()
        assert p.idle
        assert p.engine.scheduler.counts()["free"] == p.info.num_pages
