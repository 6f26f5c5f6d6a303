"""Several output streams of one HTTP request as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeVar, cast

T = TypeVar("T")


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """(position of the stream, item) in order of arrival. The first exception of any stream is raised; closing this closes
    all of them."""
    if len(streams) == 1:
        async with _closing(streams[0]) as only:
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


def _closing(stream: AsyncIterator[T]) -> aclosing[AsyncGenerator[T, None]]:
    """What the engine client gives out is an async generator: closing it aborts the request."""
    return aclosing(cast("AsyncGenerator[T, None]", stream))


async def _pump(i: int, stream: AsyncIterator[T], arrived: asyncio.Queue[tuple[int, T] | Exception | None]) -> None:
    try:
        async with _closing(stream):
            async for item in stream:
                arrived.put_nowait((i, item))
    except Exception as exc:
        arrived.put_nowait(exc)
    else:
        arrived.put_nowait(None)
