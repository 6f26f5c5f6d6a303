"""Tokenizers in the Hugging Face layout: tokenizer.json, tokenizer_config.json and a chat template. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from minisgl.api import I32, ByteDecoder, Decoder, ModelError, RequestError, Tokenizer, TokenizerContext, WindowDecoder

from .template import ChatTemplate, compile_template
from .vocabulary import byte_table, longest_chars

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HFTokenizer(Tokenizer):
    def __init__(self, ctx: TokenizerContext) -> None:
        path = ctx.path / "tokenizer.json"
        spec = _read_json(path, needed=True)
        try:
            self._tokenizer = RustTokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain Exception
            raise ModelError(f"{path} is not a tokenizer that the tokenizers library reads: {e}") from e
        self._tokenizer.no_truncation()  # a training setting that some files keep
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        config = {**_read_json(ctx.path / "special_tokens_map.json"), **_read_json(ctx.path / "tokenizer_config.json")}
        names = {k: t for k in SPECIAL if (t := _token(config.get(k))) is not None}
        self.vocab = max(vocab.values(), default=-1) + 1
        self.bos = vocab.get(names.get("bos_token", ""))
        self.eos = frozenset({vocab[t]} if (t := names.get("eos_token")) in vocab else ())
        self._add_bos: bool | None = config.get("add_bos_token")
        self._table = byte_table(spec, vocab)
        self.max_chars = longest_chars(spec, self._table)
        self._template = self._find_template(ctx, config, names)
        self.template = "" if self._template is None else self._template.text

    @staticmethod
    def _find_template(
        ctx: TokenizerContext, config: Mapping[str, Any], names: Mapping[str, str]
    ) -> ChatTemplate | None:
        try:
            own = ctx.chat_template
            return compile_template({"default": own} if own is not None else model_templates(ctx.path, config), names)
        except ValueError as e:
            raise ModelError(
                f"the chat template of {ctx.path} is not valid Jinja, {e}. Give another with model.chat_template"
            ) from e

    # -- text to ids

    def encode(self, text: str, special: bool) -> I32:
        ids = self._tokenizer.encode(text, add_special_tokens=special).ids
        if special and self.bos is not None:
            ids = self._one_bos(ids, text, self.bos)
        return np.array(ids, np.int32)

    def _one_bos(self, ids: list[int], text: str, bos: int) -> list[int]:
        """BOS exactly once where tokenizer_config.json or the post-processor want it (fault A14)."""
        has = ids[:1] == [bos]
        if self._add_bos and not has:
            return [bos, *ids]
        if ids[:2] == [bos, bos]:  # the text began with it
            return ids[1:]
        if self._add_bos is False and has and self._tokenizer.encode(text, add_special_tokens=False).ids[:1] != [bos]:
            return ids[1:]
        return ids

    def render(self, messages: Sequence[Mapping[str, Any]], **kw: Any) -> str:
        if self._template is None:
            raise RequestError(
                "this model has no chat template; send a prompt to the completions route, or start with model.chat_template",
                code="unsupported_value",
                param="messages",
            )
        return self._template.render(messages, **kw)

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    # -- ids to text

    def piece(self, token: int) -> tuple[bytes, bool]:
        if self._table is None:
            return super().piece(token)
        if not 0 <= token < len(self._table.every):
            return b"", False
        data = self._table.every[token]
        return data, bool(data) and not self._table.plain[token]

    def decoder(self, skip_special: bool) -> Decoder:
        if self._table is not None:
            return ByteDecoder(self._table.plain if skip_special else self._table.every)
        return WindowDecoder(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=skip_special))

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        if self._table is not None and self._table.whole:
            decoder = self.decoder(skip_special)
            return decoder.push(ids) + decoder.finish()
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)


def model_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The model's own chat templates by name. Files of their own win over tokenizer_config.json (fault M18).

    Raises: ValueError for files that are no text, and for a list that is none of templates.
    """
    named = {f.stem: f.read_text() for f in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (file := path / "chat_template.jinja").is_file():
        return {**named, "default": file.read_text()}
    found = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, str):
        return {**named, "default": found}
    if isinstance(found, list):
        if not all(isinstance(t, dict) and {"name", "template"} <= t.keys() for t in found):
            raise ValueError("chat_template is a list whose items are not objects with name and template")
        return {**named, **{t["name"]: t["template"] for t in found}}
    return named


def _token(value: Any) -> str | None:
    """A special token as tokenizer_config.json writes it: its text, or an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path, needed: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if needed:
            raise ModelError(f"there is no {path.name} in {path.parent}; the 'hf' tokenizer needs it")
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as e:
        raise ModelError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds a {type(found).__name__}, expected an object")
    return found
