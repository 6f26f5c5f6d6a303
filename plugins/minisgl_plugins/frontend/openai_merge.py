"""Several output streams of one HTTP request as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(position of the stream, item) in order of arrival. The first exception of any stream is raised; closing this closes
    all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    pumps = [asyncio.ensure_future(_pump(i, s, arrived)) for i, s in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            got = await arrived.get()
            if got is None:
                left -= 1
            elif isinstance(got, Exception):
                raise got
            else:
                yield got
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    i: int, stream: AsyncGenerator[T, None], arrived: asyncio.Queue[tuple[int, T] | Exception | None]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                arrived.put_nowait((i, item))
    except Exception as exc:
        arrived.put_nowait(exc)
    else:
        arrived.put_nowait(None)
