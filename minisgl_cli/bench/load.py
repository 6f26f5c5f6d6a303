"""``minisgl bench load``: how fast weights get into memory, in turn with one sequential read of the same files."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from minisgl.base.errors import ConfigError
from minisgl_cli.bench.offline import positive
from minisgl_cli.bench.report import json_line, table
from minisgl_cli.options import parse, set_logging

if TYPE_CHECKING:
    from minisgl.base.types import LocalModel
    from minisgl.config.schema import Settings
    from minisgl.plugin.hooks import Hooks
    from minisgl.plugin.registry import Registry

BLOCK = 8 << 20  # bytes of one read of the sequential reader
GENERATED = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def gibibytes(text: str) -> float:
    size = float(text)
    if not 0 < size <= 1024:
        raise ArgumentTypeError("from 0 to 1024")
    return size


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--repeats", type=positive, default=5, metavar="N", help="measurements of each (median is shown)"
    )
    parser.add_argument(
        "--generate",
        type=gibibytes,
        metavar="GIB",
        help="a random model of about this size, written to --folder, instead",
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where --generate writes; default the system's")


def run(argv: list[str]) -> int:
    """Measure and report; returns the exit code."""
    loaded, registry, hooks, args = parse(argv, verb="bench load", extra=arguments)
    set_logging(loaded)
    if not hasattr(os, "posix_fadvise"):
        raise ConfigError("bench load drops files from the page cache, which this system has no call for; use Linux")
    if loaded.settings.weights.format == "dummy":
        raise ConfigError("bench load reads files, and --load-format dummy has none; give --generate GIB")
    with model(args.generate, args.folder, loaded.settings, registry, hooks) as local:
        rows = measure(local, loaded.settings, registry, args.repeats)
    size = sum(f.stat().st_size for f in local.weights) if args.generate is None else args.generate * 2**30
    table(f"bench load: {local.name}, {size / 1e9:.2f} GB", rows)
    json_line("load", model=local.name, bytes=int(size), cases=rows)
    return 0


@contextmanager
def model(
    size: float | None, folder: Path | None, settings: Settings, registry: Registry, hooks: Hooks
) -> Iterator[LocalModel]:
    """The configured model, or a random one of ``size`` GiB for as long as it is needed."""
    if size is None:
        from minisgl.client.progress import progress_bars
        from minisgl.text.resolve import resolve_model

        with progress_bars() as progress:
            found = resolve_model(settings, registry, hooks, progress)
        yield found
        return
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--folder {folder}: there is no such folder")
    with TemporaryDirectory(prefix="minisgl-load-", dir=folder) as new:
        yield generate(Path(new), size)


def generate(folder: Path, size: float) -> LocalModel:
    """A random llama in bfloat16 of about ``size`` GiB, at least one layer; a file for each layer."""
    import torch
    from safetensors.torch import save_file

    from minisgl.base.types import LocalModel

    hidden, inner, kv = 2048, 5632, 512
    shapes = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    layer = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    top = {
        "model.embed_tokens.weight": torch.randn(32000, hidden).to(torch.bfloat16),
        "model.norm.weight": layer["input_layernorm"],
    }
    rest = size * 2**30 - sum(t.nbytes for t in top.values())
    layers = max(1, round(rest / sum(t.nbytes for t in layer.values())))
    contents = [{f"model.layers.{i}.{n}.weight": t for n, t in layer.items()} for i in range(layers)]
    files = []
    for i, tensors in enumerate([top, *contents], 1):
        files.append(folder / f"model-{i:05}-of-{layers + 1:05}.safetensors")
        save_file(tensors, files[-1])
    return LocalModel(str(folder), "generated", folder, GENERATED | {"num_hidden_layers": layers}, weights=tuple(files))


def measure(local: LocalModel, settings: Settings, registry: Registry, repeats: int) -> list[dict[str, Any]]:
    """Sequential read, weights into memory, and the whole load with layers packed for the device; in turn, cache dropped.

    ``GB/s`` are medians; ``of sequential`` is the median of the ratios to the sequential read just before. ``cached``: the
    largest share of the files that stayed in the page cache, as what another process has mapped does.
    """
    runs: dict[str, Callable[[], float]] = {
        "sequential read": lambda: sequential(local.weights),
        "into memory": loader(local, settings, registry, pack=False),
        "ready to run": loader(local, settings, registry, pack=True),
    }
    size = sum(f.stat().st_size for f in local.weights)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cached = 0.0
    for _ in range(repeats):
        for name, go in runs.items():
            touch(size)
            cached = max(cached, drop(local.weights))
            seconds[name].append(go())
    first = seconds["sequential read"]
    return [
        {
            "what": name,
            "GB/s": size / median(took) / 1e9,
            "of sequential": median(a / b for a, b in zip(first, took, strict=True)),
            "cached": cached,
        }
        for name, took in seconds.items()
    ]


def touch(nbytes: int) -> None:
    """Have the system make as much memory as a load takes, and give it back.

    A virtual machine may have left its free memory to its host; what then comes back at 0.5 GB/s (seen on Firecracker) is the
    host's time, for all alike.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)  # as the loader has it
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1


def sequential(files: Sequence[Path]) -> float:
    """Seconds to read all files from end to end into one buffer."""
    into = bytearray(BLOCK)
    start = time.perf_counter()
    for file in files:
        with open(file, "rb", buffering=0) as f:
            while f.readinto(into):
                pass
    return time.perf_counter() - start


def loader(local: LocalModel, settings: Settings, registry: Registry, pack: bool) -> Callable[[], float]:
    """Seconds to load the model once. ``pack`` False: linear layers keep their weights as they are."""
    import torch

    from minisgl.engine.build import model_facts
    from minisgl.nn import Builder, Linear, load_weights
    from minisgl.nn.assemble import resolve_device
    from minisgl.runtime.comm import NoComm
    from minisgl.runtime.model import ModelContext, TpInfo

    facts = model_facts(registry, local)
    device = resolve_device(settings.model.device)
    dtype = getattr(torch, facts.dtype if settings.model.dtype == "auto" else settings.model.dtype)
    torch.set_num_threads(settings.engine.threads or len(os.sched_getaffinity(0)))

    def load() -> float:
        builder = Builder(facts, NoComm(), dtype, device, max_len=16)
        model = registry.load("model", facts.arch)(ModelContext(facts, TpInfo(), dtype, device, builder))
        if not pack:
            for layer in model.modules():
                if isinstance(layer, Linear):
                    layer.pack = lambda weight: None
        start = time.perf_counter()
        load_weights(model, local.weights, device)
        return time.perf_counter() - start

    return load


def drop(files: Sequence[Path]) -> float:
    """Take the files out of the page cache. Returns: the share of them that stayed."""
    pages = stayed = 0
    for file in files:
        with open(file, "rb") as f:
            os.fsync(f.fileno())  # what is not written yet would stay
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = resident(f.fileno())
        pages, stayed = pages + len(found), stayed + sum(b & 1 for b in found)
    return stayed / max(pages, 1)


def resident(fd: int) -> bytes:
    """A byte for each page of the file, the lowest bit set if the page cache has it (mincore)."""
    size = os.fstat(fd).st_size
    found = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE) as view:
        at = ctypes.c_char.from_buffer(view)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(at)), ctypes.c_size_t(size), found)
        del at
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return found.raw
