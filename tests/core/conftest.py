"""Fake outside packages: folders with a dist-info and modules, put on sys.path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

MakeDist = Callable[..., Path]


@pytest.fixture
def make_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDist]:
    """``make_dist("acme-llm", "0.3", {"cache": {"lfu": "acme:LFU"}}, {"acme": "source"})`` -> folder on sys.path.

    Groups without a dot are kinds of the present API. ``where``: name of the sys.path folder; later ones go in front.
    """
    before = set(sys.modules)

    def make(
        name: str,
        version: str = "1.0",
        points: Mapping[str, Mapping[str, str]] | None = None,
        modules: Mapping[str, str] | None = None,
        *,
        requires: Sequence[str] = (),
        where: str = "site",
        info: str = "dist-info",
    ) -> Path:
        site = tmp_path / where
        meta = site / f"{name.replace('-', '_')}-{version}.{info}"
        meta.mkdir(parents=True)
        needs = "".join(f"Requires-Dist: {r}\n" for r in requires)
        file = "METADATA" if info == "dist-info" else "PKG-INFO"
        (meta / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        groups = []
        for group, names in (points or {}).items():
            full = group if "." in group else f"minisgl.v1.{group}"
            groups.append(f"[{full}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()))
        (meta / "entry_points.txt").write_text("\n".join(groups))
        for module, source in (modules or {}).items():
            (site / f"{module}.py").write_text(dedent(source))
        (meta / "top_level.txt").write_text("\n".join(modules or {}))
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()
        return site

    yield make
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]
