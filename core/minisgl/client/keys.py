"""The API keys that are accepted."""

from __future__ import annotations

import hmac

from minisgl.base.errors import ConfigError
from minisgl.config.schema import ServerSettings


def api_keys(config: ServerSettings) -> tuple[bytes, ...]:
    """Of the setting and of the file; () if none is needed. Raises: ConfigError for a file that cannot be read or has none."""
    keys = [k.strip() for k in config.api_key.get_secret_value().split(",")]
    if config.api_keys_file is not None:
        try:
            lines = config.api_keys_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"server.api_keys_file = {str(config.api_keys_file)!r} cannot be read: {exc}") from exc
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:  # an empty file would open the server to everybody
            raise ConfigError(
                f"server.api_keys_file = {str(config.api_keys_file)!r} has no key; write one a line, or leave it out"
            )
        keys += found
    return tuple(dict.fromkeys(k.encode() for k in keys if k))


def matches(given: bytes, keys: tuple[bytes, ...]) -> bool:
    """Compares with every key in full, so that the time says nothing about which are near."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(given, key)
    return found
