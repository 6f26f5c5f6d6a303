"""The sources of settings, each read into one layer of (path, value, where it stands)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.base.errors import ConfigError
from minisgl.config.names import ALIASES, ENV_PREFIX, KIND_SECTIONS, KeyPath, Style, is_flag, snake

USER_FILE = Path("minisgl", "minisgl.toml")  # under $XDG_CONFIG_HOME or ~/.config


class Entry(NamedTuple):
    """``where``: what a message or ``config show`` calls the place, such as ``--port`` or ``m.toml:5``."""

    path: tuple[str, ...]  # as the source wrote it
    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One source. In a layer, a later entry of the same path wins."""

    style: Style
    entries: list[Entry] = field(default_factory=list)


def flatten(values: Mapping[str, Any], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Leaves of nested tables; an empty table is a leaf."""
    for key, value in values.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from flatten(value, path)
        else:
            yield path, value


# ------------------------------------------------------------------------------------------------------- Python, hooks
def from_python(values: Mapping[str, Any], where: str = "Python", style: Style = "python") -> Layer:
    """Nested tables; in Python also short names, ``page_size=16``, and dotted ones, ``{"kv.page_size": 16}``."""
    entries = []
    for path, value in flatten(values):
        first = tuple(path[0].split(".")) if style == "python" else path[:1]
        if style == "python" and len(path) == 1 and snake(path[0]) in ALIASES:
            first = ALIASES[snake(path[0])]
        entries.append(Entry((*first, *path[1:]), value, where))
    return Layer(style, entries)


# ------------------------------------------------------------------------------------------------------- command line
def split_options(argv: Sequence[str]) -> tuple[Layer, list[str]]:
    """Take the settings out of a command line: ``--kv.page-size 16``, ``--page-size=16``, ``--cache radix``.

    A yes-or-no setting may stand without a value. After ``--`` nothing is a setting.
    Returns: the settings, and what is left. Raises: ConfigError for a setting without a value.
    """
    entries: list[Entry] = []
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if token == "--":
            rest += [token, *tokens]
            break
        name, given, value = token.removeprefix("--").partition("=")
        path = _option_path(name) if token.startswith("--") else None
        if path is None:
            rest.append(token)
            continue
        if not given:
            follows = bool(tokens) and not tokens[0].startswith("--")
            if is_flag(path):
                value = tokens.pop(0) if follows and tokens[0].lower() in _BOOLEANS else "true"
            elif follows:
                value = tokens.pop(0)
            else:
                raise ConfigError(f"config: option --{name} needs a value: --{name}=VALUE")
        entries.append(Entry(path, value, f"--{name}"))
    return Layer("option", entries), rest


_BOOLEANS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})


def _option_path(name: str) -> KeyPath | None:
    """The path of an option, if it is a setting and not an option of the verb."""
    if "." in name:
        return tuple(name.split("."))
    if snake(name) in ALIASES:
        return ALIASES[snake(name)]
    return (snake(name), "use") if snake(name) in KIND_SECTIONS else None


# ------------------------------------------------------------------------------------------------------- environment
def from_env(environ: Mapping[str, str]) -> Layer:
    """``MINISGL_KV__PAGE_SIZE``, ``MINISGL_CACHE``; names are matched without case, ``__`` separates."""
    found = sorted(k for k in environ if k.upper().startswith(ENV_PREFIX))
    return Layer("env", [Entry(tuple(k[len(ENV_PREFIX) :].lower().split("__")), environ[k], k) for k in found])


# ------------------------------------------------------------------------------------------------------- files
def default_files(environ: Mapping[str, str]) -> list[Path]:
    """./minisgl.toml, then the user's file; those that exist, the stronger first."""
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else "")
    candidates = [Path("minisgl.toml"), *([Path(home) / USER_FILE] if home else [])]
    return [p for p in candidates if p.is_file()]


def from_file(path: Path) -> Layer:
    """Raises: ConfigError if the file cannot be read or is no TOML."""
    from pydantic_settings import BaseSettings, TomlConfigSettingsSource

    if not path.is_file():  # pydantic-settings takes a missing file for an empty one
        raise ConfigError(f"config: there is no file {str(path)!r}; --config takes a TOML file")
    try:
        values = TomlConfigSettingsSource(BaseSettings, path)()
        lines = _lines(path.read_text().splitlines())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"config: {path} cannot be read as TOML: {exc}") from exc
    return Layer("file", [Entry(p, v, _where(path, p, lines)) for p, v in flatten(values)])


def _lines(text: Iterable[str]) -> dict[KeyPath, int]:
    """Line of each table and key. A rough scan of a file that tomllib has accepted; only messages depend on it."""
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text, 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            table = _keys(header[1])
            found.setdefault(table, number)
        elif key := re.match(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""", line):
            found.setdefault((*table, *_keys(key[1])), number)
    return found


def _keys(dotted: str) -> KeyPath:
    parts = re.findall(r"""[\w-]+|"[^"]*"|'[^']*'""", dotted)
    return tuple(p.strip("\"'") for p in parts)


def _where(file: Path, path: KeyPath, lines: Mapping[KeyPath, int]) -> str:
    for n in range(len(path), 0, -1):
        if path[:n] in lines:
            return f"{file}:{lines[path[:n]]}"
    return str(file)
