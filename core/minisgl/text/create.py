"""The configured tokenizer on a model's files, and the text side with it."""

from __future__ import annotations

from typing import cast

from minisgl.base.errors import ConfigError
from minisgl.base.grammar import Grammar, GrammarContext, load_beside
from minisgl.base.types import EngineInfo, LocalModel
from minisgl.config.schema import Settings
from minisgl.plugin.registry import Registry
from minisgl.text.parse import make_parsers
from minisgl.text.processor import TextProcessor
from minisgl.text.tokenizer import Tokenizer, TokenizerContext


def make_tokenizer(settings: Settings, registry: Registry, model: LocalModel) -> Tokenizer | None:
    """None if the model has no tokenizer. Raises: ConfigError, PluginError, ModelError."""
    path = model.tokenizer_dir
    if path is None:
        return None
    template = chat_template(settings)
    name = settings.use("tokenizer")[0]
    made = registry.create(
        "tokenizer", name, settings.options("tokenizer", name), lambda s: TokenizerContext(s, path, template)
    )
    return cast(Tokenizer, made)


def make_processor(
    settings: Settings,
    registry: Registry,
    model: LocalModel,
    tokenizer: Tokenizer | None,
    info: EngineInfo,
    owner: int = 0,
) -> TextProcessor:
    """The text side with the configured parsers and grammars. Raises: ConfigError, PluginError."""
    parsers = make_parsers(settings, registry, "" if tokenizer is None else tokenizer.template)
    eos = set(info.eos) | (set() if tokenizer is None else tokenizer.eos)
    grammar = make_grammar(settings, registry, model, info.vocab, tuple(sorted(eos))) if info.grammars else None
    if grammar is not None:
        load_beside(grammar)
    return TextProcessor(tokenizer, info, owner, parsers, grammar)


def make_grammar(
    settings: Settings, registry: Registry, model: LocalModel, vocab: int, eos: tuple[int, ...]
) -> Grammar | None:
    """The configured grammar plugin on a model's tokenizer. None if the model has no tokenizer. Raises: PluginError."""
    path = model.tokenizer_dir
    if path is None:
        return None
    (name,) = settings.use("grammar")
    made = registry.create(
        "grammar", name, settings.options("grammar", name), lambda s: GrammarContext(s, path, vocab, eos)
    )
    return cast(Grammar, made)


def chat_template(settings: Settings) -> str | None:
    """The text of ``model.chat_template``. Raises: ConfigError if the file cannot be read."""
    file = settings.model.chat_template
    if file is None:
        return None
    try:
        return file.expanduser().read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"model.chat_template = {str(file)!r} cannot be read ({exc}); give a file with a Jinja chat template"
        ) from exc
