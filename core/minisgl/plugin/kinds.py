"""The table of plugin kinds. Importing it imports nothing else: listing plugins stays cheap."""

from __future__ import annotations

from dataclasses import dataclass

API_MAJOR = 1
API_MINOR = 0
PREFIX = "minisgl.v"


def group(kind: str, major: int = API_MAJOR) -> str:
    """Entry-point group of a kind: ``minisgl.v1.cache``."""
    return f"{PREFIX}{major}.{kind}"


@dataclass(frozen=True, slots=True)
class Kind:
    """``base``: ``module:class`` every plugin of this kind derives from; None: objects of any class, which are enabled and
    not loaded by name. ``many``: config names a list; ``most``: else at most so many names, which ``names_mean``. ``torch``: may import torch at module level.
    ``roles``: processes that load it. ``default``: what ``auto`` and an unset ``use`` mean."""

    name: str
    base: str | None
    doc: str
    many: bool = False
    torch: bool = False
    roles: tuple[str, ...] = ("engine",)
    default: str | tuple[str, ...] = "auto"
    most: int = 1
    names_mean: str = ""
    by_config: bool = True  # a section [kind] with `use`; False: chosen by the model, a reference or a command line


KINDS: dict[str, Kind] = {
    k.name: k
    for k in (
        Kind("model", "minisgl.runtime.model:Model", "model architectures", torch=True, by_config=False),
        Kind(
            "model_source",
            "minisgl.text.source:ModelSource",
            "where models come from",
            roles=("supervisor",),
            by_config=False,
        ),
        Kind("tokenizer", "minisgl.text.tokenizer:Tokenizer", "tokenizers", roles=("text",), default="hf"),
        Kind(
            "attention",
            "minisgl.runtime.attention:AttentionBackend",
            "attention backends",
            torch=True,
            most=2,
            names_mean="two: prefill,decode",
        ),
        Kind("ops", "minisgl.runtime.kernels:Ops", "kernels under the layers", many=True, torch=True),
        Kind("sampler", "minisgl.runtime.sampling:Sampler", "samplers", torch=True),
        Kind("cache", "minisgl.sched.cache:CachePolicy", "cache policies", default="radix"),
        Kind("scheduler", "minisgl.sched.policy:SchedulerPolicy", "scheduler policies", default="chunked"),
        Kind("loop", "minisgl.engine.loop:StepLoop", "step loops", default="overlap"),
        Kind("executor", "minisgl.engine.executor:Executor", "executors", default="local"),
        Kind(
            "frontend",
            "minisgl.client.frontend:Frontend",
            "frontends",
            many=True,
            roles=("api",),
            default=("openai", "responses"),
        ),
        Kind("observer", "minisgl.observe:Observer", "observers", many=True, default=("log",)),
        Kind("command", "minisgl.plugin.command:Command", "command-line verbs", roles=("cli",), by_config=False),
        Kind("quant", "minisgl.runtime.quant:QuantMethod", "quantization methods", torch=True),
        Kind(
            "logits",
            "minisgl.runtime.logits:LogitsProcessor",
            "logits processors, beside those of requests' own fields",
            many=True,
            torch=True,
            default=(),
        ),
        Kind("parser", "minisgl.text.parser:OutputParser", "output parsers", many=True, roles=("text",)),
        Kind("grammar", "minisgl.base.grammar:Grammar", "grammars", roles=("text", "engine"), default="llguidance"),
        Kind("router", "minisgl.client.router:Router", "routers over several engines", roles=("cli",), by_config=False),
        Kind("hooks", None, "hook plugins", many=True, roles=("supervisor", "api", "text", "engine"), by_config=False),
    )
}
