"""Load against latency, one colour for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (("ttft_s", "time to first token, s"), ("itl_s", "time between tokens, s"), ("e2e_s", "end to end, s"))


def load_plot(path: Path, title: str, series: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write curves over the request rate: medians solid, 99th percentiles dashed. ``series``: policy -> results by rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(5.0 * len(PANELS), 4.5))
    for axes, (key, label) in zip(panels, PANELS, strict=True):
        for i, (name, results) in enumerate(series.items()):
            shown = [r for r in results if r[key] is not None]
            for percentile, style in (("p50", "-o"), ("p99", "--s")):
                rates, values = [r["rate"] for r in shown], [r[key][percentile] for r in shown]
                axes.plot(rates, values, style, color=f"C{i}", markersize=4, label=f"{name} {percentile}")
        axes.set_xlabel("requests / s offered")
        axes.set_ylabel(label)
        axes.set_yscale("log")
        axes.grid(True, which="both", alpha=0.25)
    panels[0].legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
