"""Progress bars on stderr for downloads, conversions and loads. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from minisgl.base.progress import no_progress


@contextmanager
def progress_bars(show: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """A callback ``(what, done, total)`` in bytes that draws one bar for each ``what``; ``show`` False draws nothing.

    Without a terminal only the beginning of each piece of work is told, so that logs stay short.
    """
    if not show:
        yield no_progress
        return
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def tell(what: str, done: int, total: int) -> None:
            if what not in seen:
                seen.add(what)
                size = f" ({total / 1e6:.0f} MB)" if total else ""
                print(f"{what}{size}", file=sys.stderr, flush=True)

        yield tell
        return
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def draw(what: str, done: int, total: int) -> None:
        bar = bars.get(what)
        if bar is None:
            bar = bars[what] = tqdm(total=total or None, desc=what, unit="B", unit_scale=True, file=sys.stderr)
        bar.total = total or None
        bar.update(done - bar.n)
        if total and done >= total:
            bar.close()

    try:
        yield draw
    finally:
        for bar in bars.values():
            bar.close()
