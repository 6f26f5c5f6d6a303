"""The cost model of ``minisgl simulate``: arithmetic by hand, shapes, calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minisgl.base.errors import ConfigError
from minisgl.base.types import NO_PAGES, RowInit, SamplingSpec, Span, StepPlan
from minisgl_cli.simulate.calibrate import MeasuredStep, calibrate, fit, write_steps
from minisgl_cli.simulate.cost import HARDWARE, Fitted, Hardware, Roofline, Work
from minisgl_cli.simulate.device import Meter
from minisgl_cli.simulate.shapes import SHAPES, Shape, find_shape

# 2 layers of: qkv and o 8 * 4 * (2 * 2 + 2 * 1) = 192, MLP 3 * 8 * 16 = 384; head 8 * 100 = 800; KV 2 * 2 * 1 * 4 = 16.
TINY = Shape("tiny", layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocab=100, max_len=512)
# Powers of two, so that sums are exact: 1024 bytes/s and 4096 flop/s, 2 bytes a value.
SLOW = Hardware("slow", 1024.0, 4096.0, 10**6, layer_s=0.5, host_s=0.25, value_bytes=2, batch_tokens=64, max_running=8)


def test_sizes_of_a_shape_add_up() -> None:
    assert TINY.dense_values == 2 * (192 + 384) == 1152
    assert TINY.head_values == 800
    assert TINY.kv_values == 16
    assert TINY.values == 1952
    assert replace(TINY, tied=False).values == 1952 + 800


@pytest.mark.parametrize(
    ("name", "billions"),
    [("smollm2-135m", 0.135), ("qwen3-0.6b", 0.596), ("llama-3.2-1b", 1.236), ("llama-3.1-8b", 8.03), ("qwen3-14b", 14.77),
     ("qwen3-30b-a3b", 30.53)],
)  # fmt: skip
def test_built_in_shapes_have_as_many_weights_as_the_models(name: str, billions: float) -> None:
    """The counts that the models' publishers give."""
    assert SHAPES[name].values / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "layer_gb", "kv_bytes"), [("qwen3-0.6b", 0.88, 114688), ("qwen3-14b", 26.4, 163840), ("qwen3-30b-a3b", 59.8, 98304)]
)  # fmt: skip
def test_built_in_shapes_have_the_published_sizes(name: str, layer_gb: float, kv_bytes: int) -> None:
    """bf16 weights of the layers and KV bytes of a token, as they follow from the published configs."""
    shape = SHAPES[name]
    assert (shape.dense_values + shape.experts * shape.expert_values) * 2 / 1e9 == pytest.approx(layer_gb, rel=0.01)
    assert shape.kv_values * 2 == kv_bytes


def test_a_decode_step_reads_its_bytes() -> None:
    """One row: weights 2304 B take 2.25 s, more than 2 * 1152 flop at 4096/s; KV 32 tokens * 32 B = 1 s; head 1.5625 s."""
    work = Work(tokens=1, kv=32, pairs=32, sampled=1)
    assert Roofline(TINY, SLOW).seconds(work) == 2 * 0.5 + 2.25 + 1.0 + 1.5625


def test_a_long_prefill_step_computes_its_products() -> None:
    """64 tokens: 2 * 1152 * 64 flop = 36 s; attention 4 * 2 * 2 * 4 * 2080 flop = 32.5 s over 2 s of bytes; no row samples."""
    work = Work(tokens=64, kv=64, pairs=64 * 65 // 2, sampled=0)
    assert Roofline(TINY, SLOW).seconds(work) == 2 * 0.5 + 36.0 + 32.5


def test_a_step_reads_only_the_experts_that_its_tokens_use() -> None:
    """4 experts, 1 used by a token: one token reads 1 of them, two read 4 * (1 - (3/4)^2) = 1.75 on average."""
    moe = Shape("moe", 1, 8, 0, 2, 1, 4, 100, 512, experts=4, top_k=1, expert_width=16, moe_layers=1)
    assert (moe.dense_values, moe.expert_values) == (192 + 8 * 4, 384)
    fast = Hardware("x", 1.0, 1e12, 1, 0.0, 0.0, 1, 1, 1)
    assert Roofline(moe, fast).seconds(Work(1, 0, 0, 0)) == 224 + 384
    assert Roofline(moe, fast).seconds(Work(2, 0, 0, 0)) == 224 + 1.75 * 384


@pytest.mark.parametrize(("name", "measured_ms"), [("qwen3-0.6b", 1.746), ("qwen3-14b", 8.44)])
def test_the_h200_preset_is_near_the_measured_time_of_a_token(name: str, measured_ms: float) -> None:
    """One sequence with 512 tokens of context, measured on an H200 with CUDA graphs and overlapped scheduling."""
    seconds = Roofline(SHAPES[name], HARDWARE["h200"]).seconds(Work(1, 512, 512, 1))
    assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.05)


def test_a_shape_is_read_from_a_config(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = Shape(tmp_path.name, 2, 8, 16, 2, 1, 4, 100, 512, tied=False)
    assert find_shape(str(tmp_path)) == find_shape(str(tmp_path / "config.json")) == expected


def test_experts_are_read_from_a_config(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    }  # fmt: skip
    path = tmp_path / "qwen3-30b-a3b" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    assert find_shape(str(path)) == SHAPES["qwen3-30b-a3b"]


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--shape 'gpt-5' is neither .* qwen3-0\.6b"):
        find_shape("gpt-5")


# ------------------------------------------------------------------------------------------------------- calibration


def test_a_fit_finds_the_line_that_made_the_steps() -> None:
    sizes = ((1, 100), (8, 4000), (256, 256), (512, 9000), (1, 90000))
    found = fit([MeasuredStep(t, kv, 0.002 + 3e-5 * t + 4e-8 * kv) for t, kv in sizes])
    assert (found.step_s, found.token_s, found.kv_s) == pytest.approx((0.002, 3e-5, 4e-8), rel=1e-6)
    assert found.seconds(Work(10, 1000, 0, 10)) == pytest.approx(0.002 + 3e-4 + 4e-5)


def test_a_fit_has_no_negative_part() -> None:
    """Times that fall with kv: the best line has a negative slope, the best one allowed is their mean."""
    found = fit([MeasuredStep(1, 0, 3.0), MeasuredStep(1, 10, 2.0), MeasuredStep(1, 20, 1.0)])
    assert found.kv_s == 0
    assert found.seconds(Work(1, 5, 5, 1)) == pytest.approx(2.0)


def test_least_squares_averages_noise() -> None:
    """By hand: at 1 token 1 and 3 seconds, at 3 tokens 5 and 7: the line through the means (1, 2) and (3, 6) is 2 * tokens."""
    found = fit([MeasuredStep(tokens, 0, seconds) for tokens, seconds in ((1, 1.0), (1, 3.0), (3, 5.0), (3, 7.0))])
    assert found.step_s == pytest.approx(0, abs=1e-9)
    assert found.token_s == pytest.approx(2.0)


def test_decoded_rows_and_pairs_have_parts_of_their_own_if_every_step_says_them() -> None:
    """By hand: 2 s a step, 0.1 a prompt token, 0.5 a decoded row, 0.001 a KV token, 0.01 a pair of a prompt."""
    works = [
        Work(tokens, kv, 0, 1, decode, pairs)
        for tokens, kv, decode, pairs in (
            (1, 9, 1, 0),
            (4, 80, 4, 0),
            (30, 30, 0, 465),
            (33, 90, 3, 465),
            (8, 64, 0, 484),
        )
    ]
    seconds = [2 + 0.1 * (w.tokens - w.decode) + 0.5 * w.decode + 0.001 * w.kv + 0.01 * w.prompt_pairs for w in works]
    steps = [MeasuredStep.of(w, s) for w, s in zip(works, seconds, strict=True)]
    found = fit(steps)
    parts = (found.step_s, found.token_s, found.decode_s, found.kv_s, found.pair_s)
    assert parts == pytest.approx((2, 0.1, 0.5, 0.001, 0.01))
    assert [found.seconds(w) for w in works] == pytest.approx(seconds)
    assert fit([*steps, MeasuredStep(1, 9, 2.509)]).decode_s is None


def test_measured_steps_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [{"tokens": t, "kv": kv, "seconds": 1 + t + 2 * kv} for t, kv in ((1, 1), (2, 1), (1, 3), (5, 4))]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = calibrate(path)
    assert (found.step_s, found.token_s, found.kv_s, found.host_s) == pytest.approx((1, 1, 2, 0))


def test_steps_that_are_written_are_read_again(tmp_path: Path) -> None:
    steps = [MeasuredStep.of(Work(n, 10 * n, 5, 1, n % 3, n * n), 0.01 * n) for n in range(1, 9)]
    write_steps(tmp_path / "steps.jsonl", steps)
    assert calibrate(tmp_path / "steps.jsonl") == fit(steps)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not JSON"),
        ("[]", ":2: tokens = None; a number >= 0"),
        ('{"tokens": 1, "kv": 2}', ":2: seconds = None"),
        ('{"tokens": 1, "kv": 2, "seconds": -1}', ":2: seconds = -1"),
        ('{"tokens": true, "kv": 2, "seconds": 1}', ":2: tokens = True"),
        ('{"tokens": 1, "kv": NaN, "seconds": 1}', ":2: kv = nan"),
        ('{"tokens": 1, "kv": 2, "seconds": 1, "decode": -1}', ":2: decode = -1"),
        ("", "has 1 measured steps; at least 3"),
    ],
)
def test_a_wrong_measurement_is_refused_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"tokens": 1, "kv": 2, "seconds": 0.5}\n' + line + "\n")
    with pytest.raises(ConfigError, match="--calibrate") as refused:
        calibrate(path)
    assert message in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        calibrate(tmp_path / "gone.jsonl")


def test_fitted_steps_have_the_hosts_time_in_them() -> None:
    assert Fitted(1.0, 0.0, 0.0).host_s == 0


# ------------------------------------------------------------------------------------------------------------- meter


def plan(step: int, init: tuple[RowInit, ...], order: list[int], n_decode: int, spans: tuple[Span, ...]) -> StepPlan:
    slots = np.array(order, np.int32)
    return StepPlan(
        step,
        NO_PAGES,
        init,
        NO_PAGES,
        NO_PAGES,
        NO_PAGES,
        np.arange(len(order), dtype=np.int32),
        slots,
        n_decode,
        spans,
    )


def test_the_meter_counts_what_a_plan_computes() -> None:
    """A row with 16 tokens cached prefills 4: each attends to 16 and to those up to itself, 4 * 16 + 1 + 2 + 3 + 4 = 74."""
    meter = Meter(4)
    init = RowInit(2, 7, 16, np.arange(4, dtype=np.int32), NO_PAGES, SamplingSpec(), 0, 8)
    work, slots = meter.run(plan(0, (init,), [], 0, (Span(2, 4, True),)))
    assert work == Work(tokens=4, kv=20, pairs=74, sampled=1, decode=0, prompt_pairs=74)
    assert slots.tolist() == [2]
    other = RowInit(0, 8, 0, np.arange(3, dtype=np.int32), NO_PAGES, SamplingSpec(), 0, 8)
    work, slots = meter.run(plan(1, (other,), [2], 1, (Span(0, 2, False),)))
    assert work == Work(
        tokens=3, kv=21 + 2, pairs=21 + 3, sampled=1, decode=1, prompt_pairs=3
    )  # the chunk does not end its prompt
    assert slots.tolist() == [2]
