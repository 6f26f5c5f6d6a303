"""The configured tokenizer on a model's files."""

from __future__ import annotations

from typing import cast

from minisgl.base.errors import ConfigError
from minisgl.base.types import LocalModel
from minisgl.config.schema import Settings
from minisgl.plugin.registry import Registry
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
