"""Parts of the loader that no tensor-parallel size 1 model shows: slices of a rank."""

import torch
from safetensors.torch import save_file

from minisgl.nn.checkpoint import Checkpoint, Reader
from minisgl.nn.layers import Linear, ParamSpec
from minisgl.nn.loader import _joined, pieces_of
from minisgl.runtime.model import TpInfo

CPU = torch.device("cpu")


def _fill(ckpt, spec, dtype, device, tp):
    """The parameter that the rank ``tp`` gets, after checking that it reads no byte more than that needs (M13)."""
    with Reader(ckpt) as reader:
        (parts,) = reader.read([pieces_of(spec, tp)])
        got = _joined(parts, spec, dtype, device, tp)
        padding = 0 if not spec.pad else int((got == 0).all(1).sum()) * got[0].nbytes
        assert reader.bytes_read == got.nbytes - padding
    return got


def test_a_rank_reads_its_slice_of_each_merged_part_m13(tmp_path):
    """Rank 1 of 2 of a merged q, k, v: the second half of each, not of the whole."""
    q, k = torch.arange(32.0).view(8, 4), 100 + torch.arange(16.0).view(4, 4)
    save_file({"q": q, "k": k}, tmp_path / "m.safetensors")
    spec = ParamSpec("qk", (("q", (8, 4)), ("k", (4, 4))), 0)
    got = _fill(Checkpoint([tmp_path / "m.safetensors"]), spec, torch.float32, CPU, TpInfo(1, 2))
    assert torch.equal(got, torch.cat((q[4:], k[2:])))


def test_a_row_layer_splits_its_inputs_and_keeps_its_bias_whole_n7(tmp_path):
    layer = Linear(6, 4, torch.float32, bias=True, shard=1)
    weight, bias = layer.specs("o")
    save_file({"o.weight": torch.arange(24.0).view(4, 6), "o.bias": torch.arange(4.0)}, tmp_path / "m.safetensors")
    ckpt = Checkpoint([tmp_path / "m.safetensors"])
    got = _fill(ckpt, weight, torch.float32, CPU, TpInfo(1, 2))
    assert torch.equal(got, torch.arange(24.0).view(4, 6)[:, 3:])
    assert torch.equal(_fill(ckpt, bias, torch.float32, CPU, TpInfo(1, 2)), torch.arange(4.0))


def test_packed_and_plain_linear_agree():
    torch.manual_seed(0)
    for rows in (1, 3, 16, 100):
        layer = Linear(48, 80, torch.float32, bias=True, shard=0)
        layer.weight, layer.bias = (torch.nn.Parameter(torch.randn(*s), False) for s in ((80, 48), (80,)))
        x = torch.randn(rows, 48)
        expected = x.double() @ layer.weight.double().T + layer.bias.double()
        with torch.inference_mode():
            layer.finish()
            assert torch.allclose(layer(x).double(), expected, atol=1e-4)


def test_a_rank_reads_its_slice_of_each_stacked_expert_m13(tmp_path):
    """Rank 1 of 2 of a stack of 3 experts, each 4 gate rows, then 4 up rows: the second half of each of the six."""
    whole = torch.arange(3 * 8 * 5.0).view(3, 8, 5)
    save_file({"gate_up_proj": whole}, tmp_path / "m.safetensors")
    parts = tuple((f"{e}.{p}", (4, 5)) for e in range(3) for p in ("gate", "up"))
    ckpt = Checkpoint([tmp_path / "m.safetensors"])
    spec = ParamSpec("gate_up", parts, 0, ("gate_up_proj", (3, 8, 5)))
    got = _fill(ckpt, spec, torch.float32, CPU, TpInfo(1, 2))
    assert torch.equal(got, torch.cat([whole[e, a : a + 2] for e in range(3) for a in (2, 6)]))
    by_inputs = ParamSpec("down", tuple((str(e), (8, 5)) for e in range(3)), 1, ("gate_up_proj", (3, 8, 5)))
    assert torch.equal(_fill(ckpt, by_inputs, torch.float32, CPU, TpInfo(0, 5)), whole[:, :, :1].reshape(24, 1))


def test_ranks_that_share_kv_heads_read_the_same_ones_m14(tmp_path):
    """4 ranks, 2 KV heads of size 3: each rank has a quarter of q, and the first two ranks the first KV head."""
    q, k = torch.arange(16.0).view(8, 2), 100 + torch.arange(12.0).view(6, 2)
    save_file({"q": q, "k": k}, tmp_path / "m.safetensors")
    spec = ParamSpec("qk", (("q", (8, 2)), ("k", (6, 2))), 0, copies=(1, 2))
    ckpt = Checkpoint([tmp_path / "m.safetensors"])
    for rank, first in enumerate((0, 0, 3, 3)):
        got = _fill(ckpt, spec, torch.float32, CPU, TpInfo(rank, 4))
        assert torch.equal(got, torch.cat((q[2 * rank : 2 * rank + 2], k[first : first + 3])))


def test_a_vocabulary_that_does_not_split_evenly_ends_in_rows_of_zeros_w4(tmp_path):
    """5 rows for 4 ranks: 2, 2, 1 and none."""
    whole = 1 + torch.arange(10.0).view(5, 2)
    save_file({"e": whole}, tmp_path / "m.safetensors")
    ckpt, spec = Checkpoint([tmp_path / "m.safetensors"]), ParamSpec("e", (("e", (5, 2)),), 0, pad=True)
    shares = [_fill(ckpt, spec, torch.float32, CPU, TpInfo(rank, 4)) for rank in range(4)]
    assert torch.equal(torch.cat(shares), torch.cat((whole, torch.zeros(3, 2))))
    assert torch.equal(_fill(ckpt, spec, torch.float32, CPU, TpInfo()), whole)
