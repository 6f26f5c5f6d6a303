"""How processes write their log: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from minisgl.config.schema import LogSettings

FIELDS = "fields"  # of a record: a dict that a JSON line takes over; ``extra={FIELDS: {...}}``


class JsonFormatter(logging.Formatter):
    """``{"time": ..., "role": ..., "level": ..., "logger": ..., "message": ..., ...}`` with the record's own fields."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "role": self._role,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def set_logging(role: str, config: LogSettings) -> None:
    """Of this process, to its standard error."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter(role) if config.format == "json" else text)
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
