"""Every architecture shared by several ranks: logits and tokens are those of one rank, which test_families.py compares with
transformers. The ranks are threads, and in one test processes that talk over gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from minisgl.base.errors import ConfigError
from minisgl.base.types import SamplingSpec
from minisgl.nn import Builder
from minisgl.plugin.registry import Registry
from minisgl.testing.checkpoints import llama_config, local_model, make_worker, random_checkpoint
from minisgl.testing.models import random_prompt
from minisgl.testing.plans import GREEDY, PlanDriver
from minisgl.testing.ranks import run_ranks

TOLERANCE = 1e-4  # of the range of the logits, in float32
PROMPTS = (5, 23, 1, 12)  # lengths of different prompts in one batch (M11)
NEW_TOKENS = 12
SHAPE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
FAMILIES = {  # 199 tokens, which neither 2 nor 4 divides
    "llama": ("Llama", {}),
    "llama-untied-with-biases-n7": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                               "mlp_only_layers": [1]}),
    "mistral": ("Mistral", {"sliding_window": 9, "tie_word_embeddings": False}),
}  # fmt: skip


def checkpoint(path, family, **changes):
    import transformers

    config = llama_config(**{"sliding_window": None} | SHAPE | changes)
    if family in ("Qwen2", "Mistral"):
        config.pop("attention_bias", None)
    return random_checkpoint(path, getattr(transformers, f"{family}Config")(**config), seed=4)


def generate(local, comm=None, sampling=GREEDY, settings=None):
    """Returns: logits [steps * prompts, vocab] and the tokens of each prompt, as this rank sees them."""
    worker = make_worker(local, settings, comm=comm)
    seen, logits = [], worker.model.logits

    def recorded(h, b):
        out = logits(h, b)
        seen.append(out.clone())
        return out

    worker.model.logits = recorded
    driver = PlanDriver(worker.run, worker.info.page_size)
    slots = range(len(PROMPTS))
    for slot, length in zip(slots, PROMPTS):
        driver.start(slot, random_prompt(local.config["vocab_size"], length, seed=slot), sampling, room=NEW_TOKENS)
    driver.generate(slots, NEW_TOKENS)
    return torch.cat(seen), [driver.out[s] for s in slots]


def assert_same(got, expected):
    (logits, tokens), (known, known_tokens) = got, expected
    assert logits.shape == known.shape
    error = float((logits - known).abs().max() / (known.max() - known.min()))
    assert error < TOLERANCE, f"logits are off by {error:.1e} of their range"
    assert tokens == known_tokens


def check(local, size):
    expected = generate(local)
    for got in run_ranks(size, lambda comm: generate(local, comm)):
        assert_same(got, expected)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_give_the_logits_and_tokens_of_one_m11(name, size, tmp_path):
    family, changes = FAMILIES[name]
    check(checkpoint(tmp_path, family, **changes), size)


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 8), (2, 8), (1, 2), (1, 4)])
def test_ranks_share_kv_heads_when_there_are_more_ranks_m14(kv_heads, size, tmp_path):
    check(checkpoint(tmp_path, "Qwen2", num_key_value_heads=kv_heads), size)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [12, 10, 9])  # rows of the last of 4 ranks: 3, 1 and none
def test_a_vocabulary_that_ranks_cannot_split_evenly_is_cut_at_its_size_w4(vocab, tied, tmp_path):
    check(checkpoint(tmp_path, "Llama", vocab_size=vocab, tie_word_embeddings=tied), 4)


def test_stacked_experts_are_split_too(tmp_path):
    family, changes = FAMILIES["qwen3-moe"]
    local = checkpoint(tmp_path / "one-by-one", family, **changes)
    expected = generate(local)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(local.path)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    for got in run_ranks(2, lambda comm: generate(local_model(tmp_path / "stacked"), comm)):
        assert_same(got, expected)


def test_all_ranks_take_the_tokens_that_the_first_one_samples(tmp_path):
    local = checkpoint(tmp_path, "Llama")
    warm = SamplingSpec(temperature=2.0, max_new=NEW_TOKENS)

    def tokens(comm):
        return generate(local, comm, warm, {"engine": {"threads": 1, "seed": comm.rank}})[1]

    first, second = run_ranks(2, tokens)
    alone = generate(local, None, warm, {"engine": {"threads": 1, "seed": 0}})[1]
    assert first == second == alone


def test_quantized_ranks_agree_and_are_near_the_plain_model(tmp_path):
    """Scales are those of a rank's share, so that the results are not those of one quantized rank to the bit."""
    if reason := Registry.scan(bundled_only=True).load("quant", "int8").supports("cpu", "float32"):
        pytest.skip(reason)
    local = checkpoint(tmp_path, "Llama", attention_bias=True, mlp_bias=True)
    plain = generate(local)[0][: len(PROMPTS)]  # of the prompts: later contexts may differ
    settings = {"kinds": {"quant": {"use": "int8"}}}
    (first, tokens), (second, same) = run_ranks(2, lambda comm: generate(local, comm, settings=settings))
    assert torch.equal(first, second)
    assert tokens == same
    assert float((first[: len(PROMPTS)] - plain).abs().max() / (plain.max() - plain.min())) < 0.05


def test_ranks_agree_on_the_least_number_of_pages(tmp_path):
    local = checkpoint(tmp_path, "Llama")

    def pages(comm):
        info = make_worker(local, {"kv": {"num_pages": 7 - comm.rank, "page_size": 16}}, comm=comm).info
        return info.num_pages, info.max_len, info.kv_bytes

    a_page = 2 * 16 * (4 // 2) * 8 * 4 * 2  # K and V, tokens, KV heads of a rank, head size, bytes, layers
    assert run_ranks(2, pages) == [(6, 96, 7 * a_page)] * 2


def test_a_rank_reads_and_keeps_its_share_alone_m13(tmp_path, monkeypatch):
    local = checkpoint(tmp_path, "Llama", tie_word_embeddings=False)
    read, preadv = [], os.preadv

    def counted(*args):
        read.append(preadv(*args))
        return read[-1]

    monkeypatch.setattr("minisgl.nn.checkpoint.os.preadv", counted)
    monkeypatch.setattr(
        "minisgl.nn.layers.pack", lambda weight: None
    )  # keep the parameters, so that they can be counted
    workers = run_ranks(4, lambda comm: make_worker(local, comm=comm))
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        shapes = {n: f.get_slice(n).get_shape() for n in f.keys()}  # noqa: SIM118
    norms = sum(s[0] for n, s in shapes.items() if "norm" in n)
    matrices = sum(s[0] * s[1] for n, s in shapes.items() if len(s) == 2)
    assert sum(read) == 4 * (matrices + 4 * norms)  # bytes of float32: a matrix by one rank or another, a norm by each
    padding = 2 * 64  # one row in the embedding and one in the head, as 4 * 50 = 199 + 1
    for w in workers:
        assert sum(p.numel() for p in w.model.parameters()) == norms + (matrices + padding) // 4


@pytest.mark.parametrize("kv_heads", [4, 8])
def test_ranks_that_do_not_fit_are_refused_before_weights_are_read_m14(kv_heads, tmp_path):
    local = checkpoint(tmp_path, "Llama", num_key_value_heads=kv_heads)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"parallel.tp = 3 does not fit this model: . KV heads can be shared by 1, 2, 4"
    ):
        run_ranks(3, lambda comm: make_worker(local, comm=comm))


def test_a_layer_that_cannot_be_split_is_refused(tmp_path):
    from minisgl.base.facts import ModelFacts

    facts = ModelFacts.from_hf(checkpoint(tmp_path, "Llama").config, {})

    def refusals(comm):
        builder, said = Builder(facts, comm, torch.float32, torch.device("cpu"), 8), []
        for make in (builder.col, builder.row):
            with pytest.raises(ConfigError) as refused:
                make(7, 7)
            said.append(str(refused.value))
        return said

    assert run_ranks(2, refusals)[0] == [
        f"parallel.tp = 2 does not fit this model: 7 {what} of a layer cannot be split by 2; use a size that divides 7"
        for what in ("outputs", "inputs")
    ]


# ----------------------------------------------------------------------------------------------------------------- processes
def test_two_processes_over_gloo_give_the_logits_and_tokens_of_one(tmp_path):
    local = checkpoint(tmp_path / "model", "Qwen2", num_key_value_heads=1)
    args = [sys.executable, __file__, str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*args, str(r)], stderr=subprocess.PIPE, text=True, env=env) for r in range(2)]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    expected = generate(local)
    for r in range(2):
        assert_same(torch.load(tmp_path / f"rank{r}.pt"), expected)


def gloo_rank(folder, rank):
    import torch.distributed as dist

    from minisgl.runtime.comm import TorchComm

    comm = TorchComm(dist.ProcessGroupGloo(dist.FileStore(str(folder / "store"), 2), rank, 2))
    assert comm.all_gather(torch.tensor([[rank], [10 + rank]]), 1).tolist() == [[0, 1], [10, 11]]
    assert comm.all_gather(torch.tensor([[rank], [10 + rank]]), 0).tolist() == [[0], [10], [1], [11]]
    assert comm.all_reduce(torch.tensor([1.5, rank])).tolist() == [3.0, 1.0]
    assert comm.broadcast(torch.tensor([rank + 7])).tolist() == [7]
    torch.save(generate(local_model(folder / "model"), comm), folder / f"rank{rank}.pt")
    comm.close()


if __name__ == "__main__":
    gloo_rank(Path(sys.argv[1]), int(sys.argv[2]))
