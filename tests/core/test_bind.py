"""The listening socket: what cannot be bound is refused by the setting that is to blame."""

from __future__ import annotations

import socket

import pytest

from minisgl.base.errors import ConfigError
from minisgl.launch.start import bind


def test_a_taken_port_is_refused_as_the_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.port = {port} on 127\.0\.0\.1 cannot be used"):
            bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused_as_the_host() -> None:
    with pytest.raises(ConfigError, match=r"server\.host = '203\.0\.113\.5' is no address of this machine"):
        bind("203.0.113.5", 0)  # an address for documentation (RFC 5737), which nobody has
