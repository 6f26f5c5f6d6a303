"""The other side of ``bench stream``: a bare Starlette endpoint on the same uvicorn that sends the same bytes, as fast as it
can: ``python -m minisgl_cli.bench.stream_peer JSON``. It says ``ready PORT``."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request


def main() -> None:
    import uvicorn
    import uvloop
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    frames = [frame.encode() for frame in json.loads(sys.argv[1])]

    async def answer(request: Request) -> StreamingResponse:
        await request.json()

        async def body() -> AsyncIterator[bytes]:
            for frame in frames:
                yield frame

        return StreamingResponse(body(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(app, loop="none", http="httptools", log_config=None, access_log=False, lifespan="off")
    print(f"ready {sock.getsockname()[1]}", flush=True)
    uvloop.run(uvicorn.Server(config).serve(sockets=[sock]))


if __name__ == "__main__":
    main()
