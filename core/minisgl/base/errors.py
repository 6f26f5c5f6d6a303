"""The exception tree.

    MiniSGLError
    |-- ConfigError              a setting is wrong; exit code 78
    |-- PluginError              a plugin cannot be used; exit code 78
    |   |-- UnknownPlugin        no plugin has this name
    |   |-- PluginConflict       two packages offer this name
    |   `-- BrokenPlugin         it does not import, or is not what its kind requires
    |-- ModelError               a checkpoint or tokenizer cannot be used; exit code 78
    |-- CapacityError            it does not fit in memory or pages; exit code 78
    |-- CacheError               a cache policy was used against its contract
    |-- Fault                    a process or device failed; exit code 70
    `-- RequestError             one request is wrong or cannot be served (HTTP status, OpenAI code and param)

A message has four parts: what was refused, its value, what is accepted, the next step.
"""

from __future__ import annotations

EXIT_CONFIG = 78
EXIT_FAULT = 70


class MiniSGLError(Exception):
    exit_code = 1


class ConfigError(MiniSGLError):
    exit_code = EXIT_CONFIG


class PluginError(MiniSGLError):
    exit_code = EXIT_CONFIG


class UnknownPlugin(PluginError):
    pass


class PluginConflict(PluginError):
    pass


class BrokenPlugin(PluginError):
    pass


class ModelError(MiniSGLError):
    exit_code = EXIT_CONFIG


class CapacityError(MiniSGLError):
    exit_code = EXIT_CONFIG


class CacheError(MiniSGLError):
    pass


class Fault(MiniSGLError):
    """A process or device failed. ``role``: who ("engine", "text-0", ...); ``exit``: its exit code, negative for a signal."""

    exit_code = EXIT_FAULT

    def __init__(self, message: str, *, role: str = "engine", exit: int | None = None) -> None:
        super().__init__(message)
        self.role = role
        self.exit = exit


class RequestError(MiniSGLError):
    """One request is refused; nothing else is affected. ``status``: HTTP status; ``code``: OpenAI error code or None;
    ``param``: path of the field, such as ``messages[2].content[0].type``; ``retry_after``: seconds, for 429 and 503."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = "invalid_value",
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after
