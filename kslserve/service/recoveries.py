"""Recoveries: calls that strayed from the format, counted, and collected in a file if one is named.

The corpus is JSON lines `{"family", "tools", "text"}`: the call as the model wrote it and the names
of the tools on offer. It is written by a thread of its own, which drops records rather than fall
behind, and stops at a size.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kslserve import log
from kslserve.core.request import ToolSpec
from kslserve.errors import UsageError
from kslserve.metrics import Metrics
from kslserve.parse.stream import Recovery

CORPUS_BYTES_MAX = 64 << 20
_PENDING_MAX = 64

_log = log.get("recoveries")


class Recoveries:
    """corpus: path of the file, empty for none. Raises UsageError if it cannot be written."""

    def __init__(self, metrics: Metrics, corpus: str = "") -> None:
        self._counts = metrics.labelled(
            "toolcall_recoveries_total", "tool calls that strayed from the format", "family"
        )
        self._dropped = metrics.counter(
            "drift_corpus_dropped_total", "recoveries that the corpus file did not take"
        )
        self._path = corpus
        self._pending = threading.BoundedSemaphore(_PENDING_MAX)
        self._writer: ThreadPoolExecutor | None = None
        if corpus:
            self._append(b"")
            self._writer = ThreadPoolExecutor(1, "drift-corpus")

    @property
    def keep_text(self) -> bool:
        """Whether parsers have to keep the text of recovered calls."""
        return self._writer is not None

    def took(self, recovered: Sequence[Recovery], tools: Iterable[ToolSpec]) -> None:
        """The recoveries of one generation, at its end."""
        for recovery in recovered:
            self._counts[recovery.family].inc()
        if self._writer is None or not recovered:
            return
        if not self._pending.acquire(blocking=False):
            self._dropped.inc(len(recovered))
            return
        names = [tool.name for tool in tools]
        self._writer.submit(self._write, list(recovered), names)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.shutdown()

    def _write(self, recovered: list[Recovery], names: list[str]) -> None:
        lines = b"".join(
            json.dumps(
                {"family": recovery.family, "tools": names, "text": "".join(recovery.pieces)}
            ).encode()
            + b"\n"
            for recovery in recovered
        )
        try:
            self._append(lines)
        except UsageError as error:
            self._dropped.inc(len(recovered))
            _log.warning("the drift corpus was not written", error=str(error))
        finally:
            self._pending.release()

    def _append(self, lines: bytes) -> None:
        try:
            with open(self._path, "ab") as file:
                if os.fstat(file.fileno()).st_size + len(lines) > CORPUS_BYTES_MAX:
                    raise UsageError(f"--drift-corpus {self._path} is full.")
                file.write(lines)
        except OSError as error:
            raise UsageError(
                f"cannot write --drift-corpus {self._path}: {error.strerror}."
            ) from error
