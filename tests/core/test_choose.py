"""Which attention backend is used, by exact architecture and by what is installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minisgl.base.errors import ConfigError
from minisgl.config.schema import Settings
from minisgl.nn.choose import pick_attention
from minisgl.plugin.registry import Registry
from minisgl.runtime.attention import AttentionBackend, AttnFacts, KVSpec

FACTS = AttnFacts(16, 8, 128, "bfloat16", 16, "cuda", 90)
MODULES = {"fa": "sgl_kernel", "flashinfer": "flashinfer"}


class Transposed(AttentionBackend):
    """Its pool has another shape."""

    def __init__(self, ctx: Any) -> None: ...
    @classmethod
    def kv_shape(cls, s: KVSpec, num_pages: int) -> tuple[int, ...]:
        return (2, num_pages, s.kv_heads, s.page_size, s.head_dim)

    def plan(self, b: Any) -> Any: ...
    def forward(self, *args: Any) -> Any: ...


class Writing(AttentionBackend):
    writes_kv = True

    def __init__(self, ctx: Any) -> None: ...
    def plan(self, b: Any) -> Any: ...
    def forward(self, *args: Any) -> Any: ...


@pytest.fixture
def pick(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(use: Any = "auto", installed: tuple[str, ...] = ("fa", "flashinfer"), **facts: Any) -> Any:
        there = {MODULES[name] for name in installed}
        for module in ("limits", "fa"):
            monkeypatch.setattr(f"minisgl_plugins.attention.{module}.installed", lambda name, part="": name in there)
        registry = Registry.scan(bundled_only=True)
        registry.add("attention", "transposed", Transposed)
        registry.add("attention", "writing", Writing)
        settings = Settings.model_validate({"kinds": {"attention": {"use": use}}})
        return pick_attention(settings, registry, replace(FACTS, **facts))

    return choose


@pytest.mark.parametrize(
    ("sm", "installed", "expected"),
    [
        (90, ("fa", "flashinfer"), "fa,flashinfer"),
        (90, ("flashinfer",), "flashinfer"),
        (90, ("fa",), "fa"),
        (90, (), "torch"),
        *((sm, ("fa", "flashinfer"), "flashinfer") for sm in (80, 86, 89, 100, 103, 120)),
        *((sm, ("fa",), "torch") for sm in (80, 86, 89, 100, 103, 120)),
        *((sm, ("fa", "flashinfer"), "torch") for sm in (70, 75, 95, 101, 119, 130)),
    ],
)
def test_auto_by_architecture_and_packages(pick: Any, sm: int, installed: tuple[str, ...], expected: str) -> None:
    """M17: an architecture gets what was built for it; one that is not known gets the portable backend."""
    chosen = pick(sm=sm, installed=installed)
    assert chosen.name == expected
    assert ",".join(name for name, _ in chosen.backends) == expected


def test_auto_on_a_cpu_is_torch(pick: Any) -> None:
    chosen = pick(device="cpu", sm=0, dtype="float32")
    assert (chosen.name, chosen.why) == ("torch", "auto on device cpu")


def test_auto_says_why(pick: Any) -> None:
    chosen = pick(installed=("flashinfer",))
    missing = "fa: sglang-kernel is not installed: pip install 'minisgl[cuda]'"
    assert chosen.why == f"auto on compute capability 9.0; not {missing}"
    assert pick(head_dim=80).why.count("head_dim 80 is not one of") == 2


def test_a_head_size_that_only_one_has(pick: Any) -> None:
    assert pick(head_dim=96).name == "fa"
    assert pick(head_dim=80).name == "torch"


def test_two_names_are_prefill_and_decode(pick: Any) -> None:
    chosen = pick(("flashinfer", "fa"))
    assert chosen.name == "flashinfer,fa"
    assert [cls.__name__ for _, cls in chosen.backends] == ["FlashInferAttention", "FlashAttention"]
    assert chosen.why == "configured"


def test_three_names_are_refused(pick: Any) -> None:
    with pytest.raises(ConfigError, match=r"name one backend, two \(prefill,decode\), or auto"):
        pick(("fa", "flashinfer", "torch"))


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        (
            ("transposed", "torch"),
            r"their KV pools differ: \(2, 2, 8, 16, 128\) and \(2, 2, 16, 8, 128\) for two pages",
        ),
        (("torch", "writing"), "writes_kv is False and True"),
    ],
)
def test_two_that_cannot_share_a_pool_are_refused(pick: Any, pair: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=f"attention='{','.join(pair)}' cannot be combined: {why}; use one of them"):
        pick(pair)


def test_a_pair_is_refused_for_the_reason_of_either(pick: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"attention='fa,flashinfer' cannot serve .*flashinfer: flashinfer-python is not"
    ):
        pick(("fa", "flashinfer"), installed=("fa",))
    with pytest.raises(ConfigError, match=r"attention='fa' cannot serve .*only for 9\.0"):
        pick("fa", sm=100)
