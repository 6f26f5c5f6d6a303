"""Entry of every child process: ``python -m minisgl.launch.child ROLE`` with its Spec as JSON on standard input.

It scans its own environment for plugins and says what it found (HELLO); only after the supervisor's GO does it work.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from types import ModuleType
from typing import NoReturn

from minisgl.base.errors import EXIT_FAULT, Fault, MiniSGLError, PluginError
from minisgl.config.load import settings_from_json
from minisgl.observe.logs import set_logging
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.lock import PluginLock
from minisgl.plugin.registry import Registry
from minisgl.wire import codec
from minisgl.wire.process import Process, Spec, Stopped, fault_report, report

ROLES = {"engine": "minisgl.engine.main", "text": "minisgl.text.worker", "api": "minisgl.client.main"}
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the supervisor is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the line above
        os._exit(EXIT_FAULT)


def ignore_signals() -> None:
    """The supervisor gets Ctrl+C and SIGTERM, also those sent to the whole process group, and says what is to happen."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


def make_process(spec: Spec) -> Process:
    """The process with the plugins of its own environment. Raises: PluginError, ConfigError."""
    settings = settings_from_json(spec.settings)
    set_logging(spec.role, settings.log)
    plugins = settings.plugins
    registry = Registry.scan(plugins.prefer, plugins.disable, plugins.scan == "bundled")
    hooks = Hooks(registry, plugins.enable)
    return Process(spec, settings, registry, hooks, PluginLock.from_json(spec.lock).observed(registry))


def run(spec: Spec) -> None:
    """Handshake, then the role until it is told to stop."""
    process = make_process(spec)
    try:
        process.hello()
        if process.lock.fingerprint != spec.fingerprint:
            process.wait_go()  # the supervisor says what differs, and ends this process
            raise PluginError(f"{spec.role} was started although its plugins differ")
        role: ModuleType = importlib.import_module(ROLES[spec.kind])
        process.hooks.call("process_started", role=spec.kind, rank=spec.index)
        try:
            role.run(process)
        finally:
            process.hooks.call("process_stopping", role=spec.kind, rank=spec.index)
    finally:
        process.close()


def guarded(spec: Spec) -> int:
    """Run the role; an exception goes to the supervisor as a FaultReport. Returns: the exit code."""
    try:
        run(spec)
    except Stopped:
        return 0
    except BaseException as exc:
        fault = fault_report(spec.role, exc, PluginLock.from_json(spec.lock))
        if not isinstance(exc, MiniSGLError) or (isinstance(exc, Fault) and exc.__cause__ is not None):
            traceback.print_exc()
        report(spec.folder, fault)
        return fault.exit_code
    return 0


def main() -> NoReturn:
    ignore_signals()
    faulthandler.enable()
    spec = codec.loads(Spec, sys.stdin.buffer.read())
    die_with_parent(spec.parent)
    code = guarded(spec)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of plugins and libraries do not hold the process


if __name__ == "__main__":
    main()
