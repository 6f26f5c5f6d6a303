"""One set of metrics of several api processes: each keeps its own numbers, and the one that is scraped asks the others."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from minisgl.base.errors import RequestError
from minisgl.client.client import EngineClient
from minisgl.client.exposition import add_engine, exposition
from minisgl.observe.meter import Labels, Meter
from minisgl.wire.messages import API_SHIFT, Control, Message, Reply

ASK_S = 0.5  # from a question to what is known from before
QUESTION = 1 << (API_SHIFT - 1)  # uids of questions to other api processes


class MetricsHub:
    """``ways``: to all api processes, by index, this one's included, which is never used."""

    def __init__(
        self, client: EngineClient, index: int = 0, ways: Sequence[Callable[[Message], None]] = (), vllm: bool = False
    ) -> None:
        self._client, self._index, self._ways, self._vllm = client, index, ways, vllm
        self._uids = itertools.count(index << API_SHIFT | QUESTION)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._last: dict[int, Any] = {}  # api index -> its last snapshot
        self._stats: dict[str, Any] = {}  # the engine's last

    def take(self, message: Message) -> bool:
        """Whether the message was a question or an answer between api processes."""
        if isinstance(message, Control):
            payload = json.dumps(self._client.meter.snapshot()).encode()
            self._ways[message.uid >> API_SHIFT](Reply(message.uid, payload))
            return True
        if isinstance(message, Reply) and message.uid & QUESTION:
            asked = self._asked.get(message.uid)
            if asked is not None and not asked.done():
                asked.set_result(json.loads(message.payload))
            return True
        return False

    async def render(self, version: str) -> bytes:
        """The text of /metrics; whoever does not answer soon is counted as it was before."""
        others = [i for i in range(len(self._ways)) if i != self._index]
        await asyncio.gather(self._ask_engine(), *map(self._ask, others))
        meter = Meter()
        for snapshot in (self._client.meter.snapshot(), *self._last.values()):
            meter.add(snapshot)
        gauges: dict[str, dict[Labels, float]] = {"build_info": {(version,): 1}}
        info = self._client.info
        if info is not None:
            add_engine(meter, gauges, self._stats, info)
        return exposition(meter, gauges, info.served_names[0] if info is not None else "", self._vllm)

    async def _ask_engine(self) -> None:
        if self._client.healthy() in (None, "server_draining") and self._client.info is not None:
            try:
                async with asyncio.timeout(ASK_S):
                    self._stats = await self._client.control("stats")
            except (TimeoutError, RequestError):
                pass  # a long step; the last numbers stand

    async def _ask(self, peer: int) -> None:
        uid = next(self._uids)
        answer = self._asked[uid] = asyncio.get_running_loop().create_future()
        self._ways[peer](Control(uid, "metrics"))
        try:
            async with asyncio.timeout(ASK_S):
                self._last[peer] = await answer
        except TimeoutError:
            pass
        finally:
            del self._asked[uid]
