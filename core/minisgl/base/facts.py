"""Facts of a model, read from its config without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl.base.errors import ModelError

DTYPES = ("float32", "float16", "bfloat16")

# The parameters each kind of rope may have; any other is refused, for what it asks would not be done.
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"}
        | {"mscale_all_dim", "truncate", "finetuned"}
    ),
}
_ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary embedding. ``kind``: default, linear, dynamic, llama3 or yarn. ``params``: the numbers of that kind as the
    config names them (factor, low_freq_factor, original_max_position_embeddings, ...)."""

    theta: float = 10000.0
    kind: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WindowFacts:
    """Sliding-window attention: a token of these ``layers`` sees the last ``size`` tokens, itself included."""

    size: int
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class MoEFacts:
    """Mixture of experts. ``intermediate``: width of one expert. ``top_k``: experts of a token. ``renormalize``: the
    weights of these add up to 1. ``layers``: those with experts; the others have one MLP."""

    experts: int
    top_k: int
    intermediate: int
    renormalize: bool
    layers: frozenset[int]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MoEFacts:
        """Read the keys of Qwen's MoE configs; ``num_local_experts`` is transformers 5's name for ``num_experts``.

        Raises: ModelError naming the key that is missing or wrong.
        """
        key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
        experts, top_k = _positive(config, key), _positive(config, "num_experts_per_tok")
        if top_k > experts:
            raise ModelError(f"config: num_experts_per_tok={top_k} is more than {key}={experts}")
        step = _positive(config, "decoder_sparse_step", 1)
        dense = config.get("mlp_only_layers") or ()
        if not isinstance(dense, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
            raise ModelError(f"config: mlp_only_layers={dense!r} is not a list of layer numbers")
        layers = range(_positive(config, "num_hidden_layers"))
        sparse = frozenset(i for i in layers if (i + 1) % step == 0 and i not in dense)
        renormalize = bool(config.get("norm_topk_prob") or False)
        return cls(experts, top_k, _positive(config, "moe_intermediate_size"), renormalize, sparse)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine must know of a model before it is built.

    ``max_len``: context length in tokens, scaled ropes included. ``vocab``: rows of the embedding. ``eos``: union of config
    and generation config (the tokenizer's are added by the text side). ``dtype``: of the checkpoint, "float32",
    "float16" or "bfloat16". ``window``: None if every layer sees the whole context. ``extra``: the raw config, for a model's
    own keys.
    """

    arch: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_len: int
    dtype: str
    tied: bool
    rope: RopeFacts
    norm_eps: float
    eos: frozenset[int]
    act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    window: WindowFacts | None = None
    moe: MoEFacts | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any], *, windows: bool = False) -> ModelFacts:
        """Read a Hugging Face config.json; tolerant of the variants people have on disk (faults M18, W3, A15).

        Args: windows: the architecture honours ``sliding_window``; otherwise one shorter than the context is refused.
        Raises: ModelError naming the key that is missing or wrong, or that asks for something this version does not do.
        """
        heads = _positive(config, "num_attention_heads")
        hidden = _positive(config, "hidden_size")
        kv_heads = _positive(config, "num_key_value_heads", heads)
        head_dim = _positive(config, "head_dim", hidden // heads)
        if heads % kv_heads:
            raise ModelError(f"config: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        rope, max_len = _rope(config)
        _refuse_unsupported(config)
        layers = _positive(config, "num_hidden_layers")
        window = _window(config, layers, max_len)
        if window is not None and not windows:
            raise ModelError(
                f"config: sliding_window={window.size!r} is not supported by {_arch(config)}; only attention to the whole context is"
            )
        return cls(
            arch=_arch(config),
            layers=layers,
            hidden=hidden,
            intermediate=_positive(config, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=_positive(config, "vocab_size"),
            max_len=max_len,
            dtype=_dtype(config),
            tied=bool(config.get("tie_word_embeddings") or False),
            rope=rope,
            norm_eps=_number(config, "rms_norm_eps", 1e-6),
            eos=_eos(config, "config.json") | _eos(generation, "generation_config.json"),
            act=str(config.get("hidden_act") or config.get("hidden_activation") or "silu"),
            attention_bias=bool(config.get("attention_bias") or False),
            mlp_bias=bool(config.get("mlp_bias") or False),
            window=window,
            extra=dict(config),
        )


def _arch(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list | tuple) and names and isinstance(names[0], str):
        return names[0]
    raise ModelError(
        f"config: architectures={names!r} names no model class; a list such as ['LlamaForCausalLM'] is needed"
    )


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The integer >= 1 at ``key``; ``default`` where it is absent or null."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config: {key} is missing; config.json of a decoder-only transformer has it")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config: {key}={value!r} is not a positive integer")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The number > 0 at ``key``; ``default`` where it is absent or null."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config: {key}={value!r} is not a positive number")
    return float(value)


def _dtype(config: Mapping[str, Any]) -> str:
    """``dtype`` of transformers 5, ``torch_dtype`` before; absent means float32, as in transformers."""
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"config: dtype={value!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def _eos(config: Mapping[str, Any], where: str) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ModelError(f"{where}: eos_token_id={value!r} is neither a token id nor a list of token ids")
    return frozenset(ids)


def _check_old_table(given: Mapping[str, Any], old: Any) -> None:
    """``rope_scaling`` added to a config that has ``rope_parameters`` would be ignored (W3)."""
    if not isinstance(old, Mapping):
        return
    asked = {"rope_type" if k == "type" else k: v for k, v in old.items() if v is not None}
    here = {"rope_type": given.get("type", "default"), **given}
    if any(here.get(k) != v for k, v in asked.items()):
        raise ModelError(
            f"config: rope_scaling={dict(old)!r} and rope_parameters={dict(given)!r} contradict one another; "
            "put what is meant into rope_parameters, and take rope_scaling out"
        )


def _rope(config: Mapping[str, Any]) -> tuple[RopeFacts, int]:
    """Rotary facts, and the context length that they give.

    The parameters stand in ``rope_parameters`` (transformers 5) or ``rope_scaling`` (before), the kind under ``rope_type``
    or ``type``, theta beside or inside them.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise ModelError(
            f"config: rope parameters {given!r} are not one flat table; a rope for each layer type is not supported"
        )
    _check_old_table(given, config.get("rope_scaling"))
    params = {k: v for k, v in given.items() if v is not None}
    kind, other = params.pop("rope_type", None), params.pop("type", None)
    if kind is not None and other is not None and kind != other:
        raise ModelError(f"config: rope_type={kind!r} and type={other!r} contradict one another")
    kind = kind or other or "default"
    theta = _number({"rope_theta": params.pop("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0)
    partial = params.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"config: partial_rotary_factor={partial!r} is not supported; only 1.0 is")
    if kind not in _ROPE_KEYS:
        raise ModelError(f"config: rope type {kind!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    base = _positive(config, "max_position_embeddings")
    return _scaled(kind, theta, params, base, config.get("original_max_position_embeddings"))


def _scaled(kind: str, theta: float, params: dict[str, Any], base: int, outer: Any) -> tuple[RopeFacts, int]:
    """``base``: max_position_embeddings. ``outer``: original_max_position_embeddings beside the rope parameters, which
    goes before the one inside, as in transformers."""
    if outer is not None and kind != "default":
        params["original_max_position_embeddings"] = outer
    if kind in ("yarn", "llama3"):
        params.setdefault("original_max_position_embeddings", base)
    if kind == "yarn" and "factor" not in params:
        params["factor"] = base / _number(params, "original_max_position_embeddings")
    unknown = sorted(set(params) - _ROPE_KEYS[kind])
    if unknown:
        raise ModelError(
            f"config: rope type {kind!r} does not take {', '.join(f'{k}={params[k]!r}' for k in unknown)}; "
            f"it takes: {', '.join(sorted(_ROPE_KEYS[kind])) or 'no parameter'}"
        )
    for key in _ROPE_REQUIRED[kind]:
        _number(params, key)
    if kind == "llama3" and not params["low_freq_factor"] < params["high_freq_factor"]:
        raise ModelError(f"config: rope low_freq_factor={params['low_freq_factor']!r} is not below high_freq_factor")
    rope = RopeFacts(theta, kind, params)
    if kind in ("linear", "yarn"):  # llama3 configs state the extended length themselves
        return rope, int(_number(params, "original_max_position_embeddings", base) * params["factor"])
    return rope, base


def _window(config: Mapping[str, Any], layers: int, max_len: int) -> WindowFacts | None:
    """The window that is on (``use_sliding_window``) and shorter than the context. Its layers are those of ``layer_types``,
    else those from ``max_window_layers`` on, else all."""
    on = config.get("use_sliding_window", True) and config.get("sliding_window") is not None
    types = config.get("layer_types") or ()
    unknown = set(types) - {"full_attention", *(["sliding_attention"] if on else [])}
    if unknown:
        raise ModelError(
            f"config: layer_types has {sorted(map(str, unknown))!r}; supported: 'full_attention', and 'sliding_attention' "
            "with a sliding_window that is on"
        )
    if not on:
        return None
    if types and len(types) < layers:
        raise ModelError(f"config: layer_types has {len(types)} entries for num_hidden_layers={layers}")
    size, first = _positive(config, "sliding_window"), config.get("max_window_layers") or 0
    sliding = [i for i in range(layers) if (types[i] == "sliding_attention" if types else i >= first)]
    return WindowFacts(size, frozenset(sliding)) if sliding and size < max_len else None


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """What would change the output if it were ignored."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            method = config[key].get("quant_method", config[key]) if isinstance(config[key], Mapping) else config[key]
            raise ModelError(
                f"config: {key} asks for {method!r}; quantized checkpoints are not supported in this version"
            )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            raise ModelError(f"config: {key}={config[key]!r} is not supported")
