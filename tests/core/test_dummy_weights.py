"""Random weights from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.base.errors import ConfigError, ModelError
from minisgl.base.facts import MoEFacts
from minisgl.config.load import load_settings
from minisgl.nn.dummy import dummy_weights
from minisgl.nn.layers import Experts, Linear, Norm
from minisgl.runtime.model import TpInfo
from minisgl.testing.checkpoints import llama_config
from minisgl_cli.main import main

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def config_only(folder: Path, **changes: Any) -> Path:
    """A folder with a config.json and nothing else."""
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | llama_config(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answers(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    with LLM(folder, load_format="dummy", device="cpu", observer=[], show_progress=False, **options) as llm:
        assert llm.tokenizer is None
        return [out.ids for out in llm.generate([[5, 6, 7], [90, 8]], GREEDY)]


def test_a_config_alone_is_enough_and_the_seed_decides(tmp_path: Path) -> None:
    folder = config_only(tmp_path / "m")
    first = answers(folder)
    assert [len(ids) for ids in first] == [8, 8]
    assert first == answers(folder)
    assert first != answers(folder, engine={"seed": 1})


def test_without_dummy_the_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        LLM(config_only(tmp_path / "m"), device="cpu", show_progress=False)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_published_architectures_are_filled_and_stay_finite(family: str, tmp_path: Path) -> None:
    """Logits of a random prompt have a spread near 1: neither flat nor overflowing."""
    import transformers

    from minisgl.testing.checkpoints import local_model
    from minisgl.testing.models import greedy_rows

    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if family == "Qwen3Moe" else {}
    config = getattr(transformers, f"{family}Config")(**llama_config(num_hidden_layers=6, **moe))
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    settings = {"weights": {"format": "dummy"}}
    (logits, _), _ = greedy_rows(local_model(tmp_path), list(range(3, 53)), 2, settings=settings)
    assert torch.isfinite(logits).all()
    assert 0.2 < float(logits.std()) < 5


class Two(torch.nn.Module):
    """A merged layer, one split by its inputs, experts and a norm, without a model around them."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = Linear(64, 96, torch.bfloat16, bias=True, shard=0, parts=(("q", 64), ("k", 32)))
        self.o = Linear(64, 48, torch.float32, bias=False, shard=1)
        self.experts = Experts(32, MoEFacts(4, 2, 16, True, frozenset({0})), torch.float32)
        self.norm = Norm(64, 1e-6, torch.float32)
        self.qk.pack = self.o.pack = lambda weight: None


def filled(tp: TpInfo, seed: int = 0) -> dict[str, torch.Tensor]:
    model = Two()
    dummy_weights(model, CPU, tp, seed)  # type: ignore[arg-type]
    return dict(model.named_parameters())


def test_scale_follows_the_inputs_and_norms_are_one() -> None:
    p = filled(TpInfo())
    assert {n: t.shape for n, t in p.items()}["experts.gate_up"] == (4, 32, 32)
    for name, inputs in (("qk.weight", 64), ("o.weight", 64), ("experts.gate_up", 32), ("experts.down", 16)):
        assert float(p[name].float().std()) == pytest.approx(inputs**-0.5, rel=0.1), name
    assert torch.equal(p["norm.weight"], torch.ones(64))
    assert float(p["qk.bias"].float().std()) == pytest.approx(0.02, rel=0.3)
    assert (p["qk.weight"].dtype, p["o.weight"].dtype) == (torch.bfloat16, torch.float32)


def test_a_rank_gets_its_share_and_what_all_have_is_equal() -> None:
    ranks = [filled(TpInfo(r, 2)) for r in range(2)]
    assert {n: tuple(t.shape) for n, t in ranks[0].items()} == {
        "qk.weight": (48, 64), "qk.bias": (48,), "o.weight": (48, 32), "experts.gate_up": (4, 16, 32),
        "experts.down": (4, 32, 8), "norm.weight": (64,),
    }  # fmt: skip
    assert not torch.equal(ranks[0]["qk.weight"], ranks[1]["qk.weight"])
    assert torch.equal(ranks[0]["norm.weight"], ranks[1]["norm.weight"])


def test_progress_is_in_bytes() -> None:
    seen: list[tuple[int, int]] = []
    model = Two()
    dummy_weights(model, CPU, progress=lambda what, done, total: seen.append((done, total)))  # type: ignore[arg-type]
    total = sum(p.nbytes for p in model.parameters())
    assert seen[-1] == (total, total)


def test_bench_runs_on_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config_only(tmp_path / "m")
    argv = ["bench", "offline", "--model", str(folder), "--device", "cpu", "--load-format", "dummy", "--case", "2:4:3"]
    assert main([*argv, "--repeats", "1", "--compare", "none"]) == 0
    assert '"bench": "offline"' in capsys.readouterr().out
    assert main(argv) == 78
    assert "give --compare none" in capsys.readouterr().err


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="dummy"):
        load_settings(argv=["--load-format=pickle"], environ={})
