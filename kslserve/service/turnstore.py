"""TurnStore: the exact ids of generated turns in a file, so that a conversation goes on from its
checkpoints also after a restart.

One file per fingerprint beside the checkpoints, for its owner only (0600): a header, then one
record per turn with a checksum. A record is appended by one write; what is cut short at the end is
dropped at the next start. A file that has grown over its budget is published anew, whole, with its
newer half. Everything here blocks and is called in the disk thread, or before the server is ready.

    magic, fingerprint | bytes of JSON, ids, checksum of both | JSON | ids int32 | ...
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from pathlib import Path

import numpy as np

from kslserve import log
from kslserve.core.request import ToolCall
from kslserve.sched.cache.diskstore import TEMPORARY
from kslserve.service.echo import TABLE_BYTES, Turn

MAGIC = b"KSLTURN1"
SUFFIX = ".kslturns"
HEADER = struct.Struct("<8s32s")
RECORD = struct.Struct("<III")
SHARE = 16  # one part in so many of the disk tier's budget, for the files of all models

_log = log.get("cache")
Kept = tuple[Turn, bytes]


class TurnStore:
    """folder: the disk tier's, which exists. fingerprint: 32 bytes. disk_bytes: the budget of the
    tier, of which `max_bytes` are for this file."""

    def __init__(self, folder: Path, fingerprint: bytes, disk_bytes: int) -> None:
        self.max_bytes = min(TABLE_BYTES, disk_bytes // (2 * SHARE))
        self._folder = folder
        self._head = HEADER.pack(MAGIC, fingerprint)
        self._path = folder / (fingerprint.hex()[:40] + SUFFIX)

    def load(self) -> list[Kept]:
        """The turns of the file with the contexts of their conversations, oldest first. Files of
        other models or builds that take more than `max_bytes` go, the oldest first."""
        kept: list[Kept] = []
        try:
            data = self._read()
            kept, whole = _decode(data, len(self._head))
            if whole < len(data):
                _log.warning("generated turns: the end of the file is damaged", kept=len(kept))
                self._publish([_encode(*entry) for entry in kept])
        except (OSError, ValueError) as error:
            _log.warning("generated turns: the file is ignored", error=str(error))
            self._path.unlink(missing_ok=True)
        self._trim_foreign()
        return kept

    def append(self, turn: Turn, context: bytes) -> None:
        """Add a turn. Raises OSError."""
        record = _encode(turn, context)
        if len(self._head) + len(record) > self.max_bytes:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        try:
            new = not os.fstat(descriptor).st_size
            os.write(descriptor, self._head + record if new else record)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > self.max_bytes:
            self._halve()

    def _halve(self) -> None:
        """Publish the newer half of the turns."""
        records = [_encode(*entry) for entry in _decode(self._read(), len(self._head))[0]]
        room, first = self.max_bytes // 2, len(records)
        while first and len(records[first - 1]) <= room:
            first -= 1
            room -= len(records[first])
        self._publish(records[first:])

    def _publish(self, records: list[bytes]) -> None:
        temporary = self._path.with_name(f"{self._path.stem}.{os.getpid()}{TEMPORARY}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(b"".join([self._head, *records]))
            os.replace(temporary, self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _read(self) -> bytes:
        """The file, empty where there is none. Raises OSError, or ValueError for one that is not
        ours."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return b""
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is not a file")
            data = file.read()
        if data[: len(self._head)] != self._head:
            raise ValueError("its header is not that of this model and build")
        return data

    def _trim_foreign(self) -> None:
        room, files = self.max_bytes, []
        for path in self._folder.glob("*" + SUFFIX):
            if path != self._path:
                entry = path.lstat()
                files.append((entry.st_mtime, entry.st_size, path))
        for _, size, path in sorted(files, reverse=True):
            room -= size
            if room < 0:
                path.unlink(missing_ok=True)


def _encode(turn: Turn, context: bytes) -> bytes:
    fields = {
        "context": context.hex(),
        "text": turn.text,
        "reasoning": turn.reasoning,
        "calls": [[call.call_id, call.name, call.arguments] for call in turn.calls],
    }
    body = json.dumps(fields, separators=(",", ":")).encode()
    ids = np.ascontiguousarray(turn.ids, dtype="<i4").tobytes()
    return RECORD.pack(len(body), len(turn.ids), zlib.crc32(ids, zlib.crc32(body))) + body + ids


def _decode(data: bytes, at: int) -> tuple[list[Kept], int]:
    """The records from `at` on, up to one that is not whole; where that is."""
    kept: list[Kept] = []
    while at + RECORD.size <= len(data):
        size, count, check = RECORD.unpack_from(data, at)
        middle = at + RECORD.size + size
        end = middle + 4 * count
        body, ids = data[at + RECORD.size : middle], data[middle:end]
        if end > len(data) or zlib.crc32(ids, zlib.crc32(body)) != check:
            break
        fields = json.loads(body)
        turn = Turn(
            np.frombuffer(ids, dtype="<i4").astype(np.int32),
            fields["text"],
            fields["reasoning"],
            tuple(ToolCall(*call) for call in fields["calls"]),
        )
        kept.append((turn, bytes.fromhex(fields["context"])))
        at = end
    return kept, at
