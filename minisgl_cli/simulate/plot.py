"""Load against latency, one colour for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (("ttft_s", "time to first token, ms"), ("itl_s", "time between tokens, ms"), ("e2e_s", "end to end, ms"))
CURVES = (("p50", "-"), ("p99", "--"))


def load_plot(path: Path, title: str, series: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write curves over the request rate: medians solid, 99th percentiles dashed. ``series``: policy -> results by rate.
    Later policies are drawn thinner, so that a curve below an equal one is seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(5.0 * len(PANELS), 5.0))
    for axes, (key, label) in zip(panels, PANELS, strict=True):
        for i, (name, results) in enumerate(series.items()):
            _curves(axes, key, name, results, f"C{i}", 1.4 + 1.3 * (len(series) - 1 - i))
        axes.set_xlabel("requests / s offered")
        axes.set_ylabel(label)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(True, which="both", alpha=0.25)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=min(8, len(labels)), fontsize=9)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(axes: Any, key: str, name: str, results: Sequence[Mapping[str, Any]], color: str, width: float) -> None:
    shown = sorted((r for r in results if r[key] is not None), key=lambda r: r["rate"])
    rates = [r["rate"] for r in shown]
    for percentile, style in CURVES:
        values = [r[key][percentile] * 1e3 for r in shown]
        axes.plot(
            rates, values, style, color=color, linewidth=width, marker="o", ms=width + 2, label=f"{name} {percentile}"
        )
