"""HTTPS by the server itself."""

from __future__ import annotations

import ssl

from minisgl.base.errors import ConfigError
from minisgl.config.schema import ServerSettings


def check_tls(config: ServerSettings) -> None:
    """Raises: ConfigError for files that are not a certificate and its key."""
    cert, key = config.tls_cert, config.tls_key
    if cert is None and key is None:
        return
    if cert is None or key is None:
        given, missing = ("tls_cert", "tls_key") if key is None else ("tls_key", "tls_cert")
        raise ConfigError(f"server.{given} is set without server.{missing}; HTTPS needs both files")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except (OSError, ssl.SSLError, ValueError) as exc:
        raise ConfigError(
            f"server.tls_cert = {str(cert)!r} and server.tls_key = {str(key)!r} cannot be used: {exc}; they must be PEM "
            "files of a certificate and its key, without a password"
        ) from exc


def _refuse_password() -> str:
    raise ValueError("the key is protected by a password")
