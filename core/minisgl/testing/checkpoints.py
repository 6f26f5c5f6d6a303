"""Small random checkpoints, made with transformers, for tests that compare with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.base.types import LocalModel

if TYPE_CHECKING:
    from minisgl.plugin.registry import Registry
    from minisgl.runtime.comm import Comm
    from minisgl.runtime.worker import Worker


def llama_config(**changes: Any) -> dict[str, Any]:
    """Keyword arguments of a ``LlamaConfig`` of two tiny layers; ``changes`` go over them."""
    config: dict[str, Any] = {
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        # With the usual 0.02 a model this small repeats one token for ever, and a test would see nothing.
        "initializer_range": 0.2,
    }
    return config | changes


def llama_checkpoint(
    path: Path, *, dtype: str = "float32", shard_size: str = "5GB", seed: int = 0, **changes: Any
) -> LocalModel:
    """A random Llama in the folder ``path``; the other arguments as of ``random_checkpoint``, ``changes`` over
    ``llama_config``."""
    from transformers import LlamaConfig

    return random_checkpoint(
        path, LlamaConfig(**llama_config(**changes)), dtype=dtype, shard_size=shard_size, seed=seed
    )


def random_checkpoint(
    path: Path, config: Any, *, dtype: str = "float32", shard_size: str = "5GB", seed: int = 0, **saving: Any
) -> LocalModel:
    """Write a random causal language model to the folder ``path``.

    Args: config: of transformers; any causal language model of it. dtype: of the stored tensors. shard_size: largest file, as
        transformers writes it; "20KB" gives several. saving: more arguments of ``save_pretrained``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases are constant at first: an error in them must show
            with torch.no_grad():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    torch.random.set_rng_state(state)
    model.save_pretrained(path, max_shard_size=shard_size, **saving)
    return local_model(path)


def local_model(path: Path, config: Mapping[str, Any] | None = None) -> LocalModel:
    """The checkpoint in the folder ``path``; ``config`` in place of its config.json."""
    generation = path / "generation_config.json"
    return LocalModel(
        ref=str(path),
        name=path.name,
        path=path,
        config=config if config is not None else json.loads((path / "config.json").read_text()),
        generation=json.loads(generation.read_text()) if generation.exists() else {},
        weights=tuple(sorted(path.glob("*.safetensors"))),
    )


def make_worker(
    local: LocalModel,
    settings: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
    comm: Comm | None = None,
) -> Worker:
    """A CPU worker with one thread for the checkpoint. ``settings``: sections of Settings, such as ``{"kv": {...}}``.
    ``registry``: with the plugins it may use; without one, those that are bundled. ``comm``: the ranks that share the model."""
    from minisgl.config.schema import Settings
    from minisgl.engine.build import model_facts
    from minisgl.nn import build_worker
    from minisgl.plugin.registry import Registry

    config = Settings.model_validate({"model": {"device": "cpu"}, "engine": {"threads": 1}} | dict(settings or {}))
    registry = registry or Registry.scan(bundled_only=True)
    return build_worker(config, registry, local, model_facts(registry, local), comm=comm)
