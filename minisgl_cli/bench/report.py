"""How every benchmark reports: one JSON line, a table, a plot."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minisgl.base.errors import ConfigError

# Optional packages that decide how fast a GPU is: distribution -> module.
KERNELS = {"flashinfer-python": "flashinfer", "sglang-kernel": "sgl_kernel", "triton": "triton"}


def environment() -> dict[str, Any]:
    """What a figure depends on: versions, the machine, the date."""
    packages = {name: version(name) for name in ("minisgl", "torch", "transformers", "numpy")}
    kernels = {name: found for name, module in KERNELS.items() if (found := installed(name, module)) is not None}
    machine = {"python": platform.python_version(), "cpus": len(os.sched_getaffinity(0))}
    return {**packages, **kernels, **machine, **gpu(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def installed(package: str, module: str) -> str | None:
    """Its version, also of one that was copied without its metadata and is in use; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return getattr(sys.modules.get(module), "__version__", None)


def gpu() -> dict[str, Any]:
    """The GPU and CUDA's version, where a benchmark has used torch with one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal keys."""
    from rich.console import Console
    from rich.table import Table

    shown = Table()
    for key in rows[0]:
        shown.add_column(key, justify="right")
    for row in rows:
        shown.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    print(title)
    Console(width=110).print(shown)


def json_line(name: str, **values: Any) -> None:
    """The machine-readable result, on a line of its own."""
    print(json.dumps({"bench": name, **values, "environment": environment()}), flush=True)


def check_plot(path: Path) -> None:
    """Before anything is measured. Raises: ConfigError for a plot that could not be written."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs package 'matplotlib': pip install 'minisgl[dev]'")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {str(path.parent)!r}")


def bar_plot(path: Path, title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], unit: str) -> None:
    """Grouped bars with their values, written to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(6.0, 2.2 * len(labels)), 4.5))
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        at = [x + i * width for x in range(len(labels))]
        axes.bar_label(axes.bar(at, values, width, label=name), fmt="%.0f", padding=2)
    middle = width * (len(series) - 1) / 2
    axes.set_xticks([x + middle for x in range(len(labels))], labels)
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.margins(y=0.15)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over (x, y) points, both axes logarithmic; ``limits`` are points that the lines of medians, all but
    the ``dashed`` ones, should stay below."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    limits: Sequence[tuple[float, float]] = ()
    dashed: Collection[str] = ()


def line_plot(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Panels side by side, written to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, grid = pyplot.subplots(1, len(panels), figsize=(6.0 * len(panels), 4.8), squeeze=False)
    for axes, panel in zip(grid[0], panels, strict=True):
        for name, points in panel.series.items():
            style = "--" if name in panel.dashed else "-"
            axes.plot(*zip(*points), style, marker="o", markersize=4, label=name)
        if panel.limits:
            axes.plot(*zip(*panel.limits), "k_", markersize=18, markeredgewidth=2, label="at most (solid lines)")
        axes.set(xscale="log", yscale="log", xlabel=panel.x, ylabel=panel.y, title=panel.title)
        ticks = sorted({x for points in panel.series.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(True, alpha=0.25)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
