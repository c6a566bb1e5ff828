# SPDX-License-Identifier: Apache-2.0
"""What is written to stderr: lines for people on a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor


def set_up(level: str, style: str, stream: TextIO) -> None:
    """Routes structlog and the standard library's logging (gRPC, asyncio, aiohttp) to `stream`.

    `style` is "human", "json", or "auto": human if the stream is a terminal. Called once, by the process.
    """
    human = style == "human" or (style == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[Processor]
    if human:
        last = [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    else:
        # Without the frames' variables, which may be tokens and transfer ids.
        traces = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
        last = [traces, structlog.processors.JSONRenderer(default=str)]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # A traceback for each message that is none, whoever sends it. Whoever reads it says so, sparingly.
    logging.getLogger("grpc._common").addFilter(lambda record: "deserializing" not in str(record.msg))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


class Sparing:
    """Says the first of equal warnings, then at most one per interval, with the number left out."""

    def __init__(
        self,
        log: Any,
        *,
        interval: float = 30.0,
        most_keys: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._interval = interval
        self._most_keys = most_keys
        self._clock = clock
        # Key to when it was said last, and how often it was not since; the one said longest ago first.
        self._said: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def warning(self, key: str, event: str, **fields: object) -> None:
        """Warns, or counts. Whoever chooses `key` chooses what counts as equal."""
        now = self._clock()
        when, left_out = self._said.get(key, (-self._interval, 0))
        if key in self._said and now - when < self._interval:
            self._said[key] = (when, left_out + 1)
            return
        self._said[key] = (now, 0)
        self._said.move_to_end(key)
        while len(self._said) > self._most_keys:
            self._said.popitem(last=False)
        more: dict[str, object] = {"left_out": left_out} if left_out else {}
        self._log.warning(event, **fields, **more)
