"""What the supervisor needs besides its processes: the plugin lock, the listening socket, how it says that it is ready."""

from __future__ import annotations

import errno
import socket

from minisgl.base.errors import ConfigError
from minisgl.base.types import EngineInfo
from minisgl.config.schema import ServerSettings, Settings
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.kinds import KINDS
from minisgl.plugin.lock import PluginLock
from minisgl.plugin.registry import API_DIST, Registry


def picks(settings: Settings, registry: Registry, hooks: Hooks) -> list[tuple[str, str]]:
    """(kind, name) of every selected plugin; for ``auto`` all that may be chosen. What the program itself added is always
    among them, for the other processes learn of it by the lock."""
    chosen: list[tuple[str, str]] = list(hooks.picks())
    for kind in KINDS.values():
        if not kind.by_config or kind.base is None:
            continue
        for name in settings.use(kind.name):
            chosen += [(kind.name, n) for n in (registry.names(kind.name) if name == "auto" else [name])]
    chosen += [(r.kind, r.name) for r in registry.refs() if r.dist == API_DIST]
    return list(dict.fromkeys(chosen))


def make_lock(settings: Settings, registry: Registry, hooks: Hooks) -> PluginLock:
    """The lock that every process must agree with. Raises: PluginError for a name that is not known, is offered twice, or
    is of this process only."""
    lock = registry.lock(picks(settings, registry, hooks))
    lock.require_importable("the server's processes")
    return lock


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises: ConfigError."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as exc:
        raise ConfigError(f"server.host = {host!r} is no address of this machine ({exc}); 0.0.0.0 means all") from exc
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"server.host = {host!r} is no address of this machine; 0.0.0.0 means all") from exc
        raise ConfigError(
            f"server.port = {port} on {host} cannot be used ({exc.strerror}); stop what uses it, or choose another --port "
            "(0 picks a free one)"
        ) from exc
    return sock


def bind_all(host: str, port: int, count: int) -> list[socket.socket]:
    """``count`` sockets bound to one port, among which the kernel spreads connections. Raises: ConfigError.

    The first is bound alone, so that a port that is in use is refused and two servers never share one by mistake.
    """
    first = bind(host, port)
    if count == 1:
        return [first]
    socks = [first]
    try:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for _ in range(count - 1):
            sock = socket.socket(first.family, first.type, first.proto)
            socks.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(first.getsockname())
    except OSError as exc:
        for sock in socks:
            sock.close()
        raise ConfigError(
            f"server.api_workers = {count}: the port cannot be shared ({exc.strerror}); use 1, or another port"
        ) from exc
    return socks


def url(server: ServerSettings, sock: socket.socket) -> str:
    """Where to reach the server; a wildcard address is shown as it is."""
    shown = f"[{server.host}]" if ":" in server.host else server.host
    return f"{'https' if server.tls_cert else 'http'}://{shown}:{sock.getsockname()[1]}"


def ready_line(where: str, info: EngineInfo, seconds: float) -> str:
    """``ready: http://127.0.0.1:30000  model=... device=cpu dtype=float32 pages=2048x16 cache=radix ...``"""
    named = {"arch" if kind == "model" else kind: name for kind, name in info.picks.items()}
    picks = " ".join(f"{kind}={name}" for kind, name in sorted(named.items()))
    return (
        f"ready: {where}  model={info.served_names[0]} device={info.device} dtype={info.dtype} max_len={info.max_len} "
        f"pages={info.num_pages}x{info.page_size} {picks}  ({seconds:.1f} s)"
    )
