"""A model folder whose tokens are bytes: with ``executor=scripted`` a whole server in a second, and with random weights a tiny
real model."""

from __future__ import annotations

import json
from pathlib import Path

BYTE = 3  # the token of byte b is BYTE + b
EOS = 1
SPECIAL = ("<|unused|>", "<|im_end|>", "<|im_start|>")
VOCAB = BYTE + 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_ids(text: str) -> list[int]:
    return [BYTE + b for b in text.encode()]


def write_byte_model(path: Path, max_len: int = 4096, weights: bool = False) -> Path:
    """Write config.json, tokenizer.json and tokenizer_config.json; returns ``path``. ``weights``: and a random Llama."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from minisgl.text.decode import gpt2_alphabet

    path.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate(SPECIAL)} | {c: BYTE + b for c, b in gpt2_alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"eos_token": SPECIAL[EOS], "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    if weights:
        _write_weights(path)
    return path


def _write_weights(path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    shapes = {"embed_tokens": (VOCAB, 64), "norm": (64,)}
    for layer in ("layers.0", "layers.1"):
        shapes |= {f"{layer}.self_attn.{n}_proj": (64, 64) for n in "qo"}
        shapes |= {f"{layer}.self_attn.{n}_proj": (32, 64) for n in "kv"}
        shapes |= {f"{layer}.mlp.{n}_proj": (128, 64) for n in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (64, 128)}
        shapes |= {f"{layer}.{n}_layernorm": (64,) for n in ("input", "post_attention")}
    tensors = {f"model.{name}.weight": rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
