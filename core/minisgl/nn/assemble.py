"""From settings and a local model to a worker: picks the device, the dtype and the kernels, loads, and allocates."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from minisgl.base.errors import ConfigError
from minisgl.base.facts import ModelFacts
from minisgl.base.grammar import Grammar, GrammarContext, load_beside
from minisgl.base.parallel import check_tp, local_heads
from minisgl.base.progress import no_progress
from minisgl.base.types import ExecInfo, LocalModel
from minisgl.base.vocabulary import tokenizer_ids
from minisgl.config.schema import LimitsSettings, Settings
from minisgl.nn.basis import change_basis
from minisgl.nn.builder import Builder
from minisgl.nn.choose import pick_attention, pick_logits, pick_ops, pick_sampler
from minisgl.nn.dummy import dummy_weights
from minisgl.nn.loader import load_weights
from minisgl.nn.quant import make_quant
from minisgl.nn.room import GRAPH_BYTES, Probe, log_memory, too_large, working_bytes
from minisgl.plugin.registry import Registry
from minisgl.runtime.attention import AttentionBackend, AttnContext, AttnFacts, GraphSupport, KVSpec
from minisgl.runtime.comm import Comm, NoComm
from minisgl.runtime.forms import Forms
from minisgl.runtime.graph import GraphRunner, graph_sizes
from minisgl.runtime.kernels import OpsContext, op_table
from minisgl.runtime.kv import KVRoom, allocate, plan_room
from minisgl.runtime.logits import LogitsContext, LogitsProcessor
from minisgl.runtime.model import Model, ModelContext, TpInfo
from minisgl.runtime.phase import PhaseSplit
from minisgl.runtime.pick import Picker
from minisgl.runtime.piecewise import PiecewiseRunner, token_sizes
from minisgl.runtime.record import CudaRecorder, Recorder
from minisgl.runtime.rows import DeviceRows, Rows
from minisgl.runtime.sampling import Sampler, SamplerContext
from minisgl.runtime.worker import Worker

log = logging.getLogger(__name__)


def build_worker(
    config: Settings,
    registry: Registry,
    local: LocalModel,
    facts: ModelFacts,
    progress: Callable[[str, int, int], None] = no_progress,
    comm: Comm | None = None,
    depth: int = 1,
) -> Worker:
    """Build the worker of one device. Sets the number of CPU threads of the calling thread, which then must run it.

    ``depth``: the most steps launched at once. ``comm``: the ranks that share the model; all build their workers at the same time. None: this device has it alone.
    Everything selected is imported and checked before weights are read.
    Raises: ConfigError, PluginError, ModelError, CapacityError.
    """
    comm = comm or NoComm()
    check_tp(facts, comm.size)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, facts.dtype, device)
    _set_threads(config.engine.threads or len(os.sched_getaffinity(0)))
    max_slots, batch_tokens = step_limits(config.limits, device.type)
    model_len = min(facts.max_len, config.limits.max_len or facts.max_len)
    heads = local_heads(facts, comm.size)
    attn_facts = _attention_facts(facts, heads, model_len, dtype, config.kv.page_size, device)
    attention = pick_attention(config, registry, attn_facts)
    log.info("attention: %s (%s)", attention.name, attention.why)
    create = partial(_create, config, registry)
    ops_names = pick_ops(config, registry, device, dtype)
    ops = op_table([create("ops", name, lambda s: OpsContext(s, device, dtype)) for name in ops_names])
    sampler_name = pick_sampler(config, registry, device)
    logits_names, own_logits = pick_logits(config, registry)
    quant_name, quant = make_quant(config, registry, local.config, device, dtype)
    cls: type[Model] = registry.load("model", facts.arch)

    spec = KVSpec(heads[1], facts.head_dim, dtype, config.kv.page_size)
    page_bytes = spec.page_bytes * facts.layers
    tp = TpInfo(comm.rank, comm.size)
    builder = Builder(facts, comm, dtype, device, model_len, quant)
    model = cls(ModelContext(facts, tp, dtype, device, builder))
    if quant is not None:
        change_basis(model, quant, facts.hidden, facts.head_dim)
    forms = make_forms(config, registry, local, facts, device) if comm.rank == 0 else None
    try:
        if config.weights.format == "dummy":
            dummy_weights(model, device, tp, config.engine.seed or 0, progress)
        else:
            load_weights(model, local.weights, device, tp, progress=progress)
    except torch.OutOfMemoryError as exc:
        raise too_large(model, device) from exc
    model.eval()
    picks = {"attention": attention.name, "ops": ",".join(ops_names), "sampler": sampler_name, "model": facts.arch}
    picks |= {"quant": quant_name} if quant is not None else {}

    def make(room: KVRoom) -> Worker:
        kv = allocate(attention.backends[0][1], spec, facts.layers, room.num_pages, device)
        rows = Rows(max_slots, room.max_len, room.num_pages, config.kv.page_size)
        state = DeviceRows(rows, device)
        backends: list[AttentionBackend] = [
            create(
                "attention",
                name,
                lambda s: AttnContext(
                    attn_facts, spec, device, max_slots, room.max_len, batch_tokens, state.table, s, depth
                ),
            )
            for name, _ in attention.backends
        ]
        backend = backends[0] if len(backends) == 1 else PhaseSplit(*backends)
        vocab = true_vocab(facts, local)
        sampler: Sampler = create(
            "sampler",
            sampler_name,
            lambda s: SamplerContext(s, device, max_slots, vocab, _seed(config.engine.seed), depth),
        )

        def processor(name: str) -> LogitsProcessor:
            made: LogitsProcessor = create(
                "logits", name, lambda s: LogitsContext(s, name, device, max_slots, vocab, depth)
            )
            return made

        processors = {name: processor(name) for name in logits_names}
        picker = Picker(sampler, processors, device, max_slots, vocab, facts.vocab, depth)
        info = _info(config, facts, room, max_slots, batch_tokens, device, dtype, picks)
        info = replace(info, grammars=local.tokenizer_dir is not None, logits=own_logits)
        return Worker(info, model, backend, ops, picker, rows, state, kv, device, dtype, comm, depth, forms=forms)

    cuda, graph_rows = device.type == "cuda", config.engine.cuda_graph_max_rows
    graph_tokens = min(config.engine.cuda_graph_max_tokens, batch_tokens)
    kept = 0
    if cuda:
        kept = working_bytes(make, Probe(batch_tokens, max_slots, config.kv.page_size, model_len), page_bytes, device)
        graphs = len(graph_sizes(graph_rows_of(max_slots, graph_rows))) + len(token_sizes(graph_tokens))
        kept += GRAPH_BYTES * graphs
    room = plan_room(config.kv, spec, facts.layers, device, max_slots, model_len, kept)
    if comm.size > 1:
        room = _common_room(room, page_bytes, config.kv.page_size, comm, device)
    worker = make(room)
    if cuda:
        worker.picker.warm()
        recorder = CudaRecorder(device)
        add_graphs(worker, graph_rows, recorder, progress)
        add_piecewise(worker, graph_tokens, recorder, progress)
        log_memory(model, worker, kept, device)
    return worker


def _set_threads(n: int) -> None:
    """Not if torch has as many already: setting them makes MKL begin a team of threads for each product of its own within a
    loop that threads share, as in attention, which then takes half as long again."""
    if torch.get_num_threads() != n:
        torch.set_num_threads(n)


def make_forms(
    config: Settings, registry: Registry, local: LocalModel, facts: ModelFacts, device: torch.device
) -> Forms | None:
    """What holds rows to grammars. None for a model without a tokenizer. Raises: PluginError."""
    path = local.tokenizer_dir
    if path is None:
        return None
    (name,) = config.use("grammar")
    vocab = true_vocab(facts, local)
    grammar: Grammar = _create(
        config, registry, "grammar", name, lambda s: GrammarContext(s, path, vocab, tuple(sorted(facts.eos)))
    )
    load_beside(grammar)
    return Forms(vocab, device, grammar.matcher)


def graph_rows_of(max_slots: int, setting: int | None) -> int:
    """Rows of the largest decode step that is captured; 0: none is."""
    return max_slots if setting is None else min(max_slots, setting)


def add_graphs(
    worker: Worker, max_rows: int | None, recorder: Recorder, progress: Callable[[str, int, int], None] = no_progress
) -> None:
    """Capture the worker's decode steps of up to ``max_rows`` rows (None: of all), if its attention backend can be captured."""
    most = graph_rows_of(worker.info.max_slots, max_rows)
    if not most or worker.attention.graph < GraphSupport.DECODE:
        return
    w = worker
    w.graphs = GraphRunner(
        w.model, w.attention, w.ops, w.picker, w.rows, w.state, w.kv, w.dtype, recorder, graph_sizes(most)
    )
    w.graphs.capture(progress)


def add_piecewise(
    worker: Worker, max_tokens: int, recorder: Recorder, progress: Callable[[str, int, int], None] = no_progress
) -> None:
    """Capture the layers between attention calls for steps of up to ``max_tokens`` tokens, where decode steps can be captured:
    the same ops run. Not if the backend writes KV."""
    if not max_tokens or worker.attention.writes_kv or worker.attention.graph < GraphSupport.DECODE:
        return
    w, dummy = worker, worker.rows.dummy_page * worker.rows.page_size
    w.piecewise = PiecewiseRunner(
        w.model, w.attention, w.ops, w.kv, w.dtype, recorder, token_sizes(max_tokens), dummy, w.state.table
    )
    w.piecewise.capture(progress)


def resolve_device(name: str) -> torch.device:
    """``auto``: cuda if there is one, else cpu. Raises: ConfigError."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        reason = str(exc).splitlines()[0]
        raise ConfigError(
            f"model.device={name!r} cannot be used here ({reason}); use auto, cpu, or cuda on a GPU machine"
        ) from exc
    return device


def resolve_dtype(setting: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """``auto``: float32 on a CPU, else the checkpoint's, of which float32 becomes bfloat16."""
    if setting == "auto":
        setting = "float32" if device.type == "cpu" else "bfloat16" if checkpoint == "float32" else checkpoint
    dtype: torch.dtype = getattr(torch, setting)
    return dtype


def true_vocab(facts: ModelFacts, local: LocalModel) -> int:
    """How many tokens may be sampled: rows that only pad the embedding stand for no text (W4)."""
    known = tokenizer_ids(local.tokenizer_dir)
    return facts.vocab if known is None else min(facts.vocab, max({known} | {i + 1 for i in facts.eos}))


def step_limits(limits: LimitsSettings, device: str) -> tuple[int, int]:
    """(max_running, batch_tokens). A default gives way to what is set: a step holds one token of each running request (S6)."""
    running, tokens = (32, 256) if device == "cpu" else (256, 8192)
    max_running = limits.max_running or min(running, limits.batch_tokens or tokens)
    return max_running, limits.batch_tokens or max(tokens, max_running)


def _common_room(room: KVRoom, page_bytes: int, page_size: int, comm: Comm, device: torch.device) -> KVRoom:
    """The room of the rank with the least: pages are numbered alike on all ranks."""
    counts = comm.all_gather(torch.tensor([room.num_pages], device=device), 0)
    pages = int(counts.min())
    return KVRoom(pages, min(room.max_len, pages * page_size), (pages + 1) * page_bytes)


def _attention_facts(
    facts: ModelFacts,
    heads: tuple[int, int],
    model_len: int,
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
) -> AttnFacts:
    """``heads``: query heads and KV heads of this rank. A window that no row of ``model_len`` tokens outgrows is none."""
    sm = 0
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        sm = major * 10 + minor
    name = str(dtype).removeprefix("torch.")
    plain = AttnFacts(*heads, facts.head_dim, name, page_size, device.type, sm)
    if facts.window is None or facts.window.size >= model_len:
        return plain
    return replace(plain, window=facts.window.size, window_layers=facts.window.layers)


def _seed(configured: int | None) -> int:
    """Without one, answers to requests without a seed differ from one start to the next."""
    return secrets.randbits(63) if configured is None else configured


def _create(config: Settings, registry: Registry, kind: str, name: str, make_ctx: Callable[[Any], Any]) -> Any:
    """The component ``name``, with the options configured for it."""
    return registry.create(kind, name, config.options(kind, name), make_ctx)


def _info(
    config: Settings,
    facts: ModelFacts,
    room: KVRoom,
    max_slots: int,
    batch_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    picks: Mapping[str, str],
) -> ExecInfo:
    return ExecInfo(
        num_pages=room.num_pages,
        page_size=config.kv.page_size,
        max_slots=max_slots,
        max_len=room.max_len,
        batch_tokens=batch_tokens,
        vocab=facts.vocab,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        kv_bytes=room.kv_bytes,
        picks=picks,
    )
