"""Writing a file that appears under its name complete, or not at all.

The bytes go to a temporary file beside the destination. Until the last step it begins with
UNFINISHED, which no reader takes, so what a killed process leaves says what it is. Nothing is
overwritten: the name is given by a hard link, which fails where the name is taken.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NoReturn

from kslserve.errors import ModelFileError
from kslserve.ksl.files import fail, quote_path

SYNC_BYTES = 16 << 20  # so much is written before the disk is asked to take it
UNFINISHED = b"UNFINISHED CONVERSION, DELETE ME"


class NewFile:
    """A context manager. `put` writes at any position, from any thread; `publish` gives the file
    its name. Leaving without `publish` removes it. OSErrors inside become ModelFileErrors that name
    the destination. What was put goes to the disk meanwhile, so that `publish` has little to wait
    for."""

    def __init__(self, destination: str) -> None:
        self.destination = destination
        self.temporary = ""
        self._handle = -1
        self._lock = threading.Lock()
        self._unsynced = 0  # bytes
        self._syncing: Future[None] | None = None
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="ksl-sync")

    def __enter__(self) -> NewFile:
        if os.path.lexists(self.destination):
            fail(
                quote_path(self.destination),
                "the destination exists already; it is not overwritten.",
            )
        folder, name = os.path.split(os.path.abspath(self.destination))
        try:
            self._handle, self.temporary = tempfile.mkstemp(
                prefix=f"{name}.", suffix=".part", dir=folder
            )
            self.put(0, UNFINISHED)
        except OSError as error:
            self._discard()
            self._fail(error)
        return self

    def reserve(self, size: int) -> None:
        """Take the room for `size` bytes where the system can; OSError when there is too little:
        better known before the work than after most of it."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._handle, 0, size)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise

    def put(self, position: int, data: Any) -> None:
        """Write all of `data` at `position`. OSError when it cannot be written."""
        view = memoryview(data).cast("B")
        done = 0
        while done < view.nbytes:
            done += os.pwrite(self._handle, view[done:], position + done)
        with self._lock:
            self._unsynced += done
            if self._unsynced < SYNC_BYTES or not (self._syncing is None or self._syncing.done()):
                return
            finished, self._unsynced = self._syncing, 0
            self._syncing = self._syncer.submit(os.fsync, self._handle)
        if finished is not None:
            finished.result()

    def publish(self, start: bytes, size: int) -> None:
        """Make all bytes durable, write `start` over the first ones, and give the file its name.
        size: what the file must have by then. OSError when something took the name meanwhile."""
        assert len(start) >= len(UNFINISHED), "the start replaces the mark"
        os.ftruncate(self._handle, size)
        if self._syncing is not None:
            self._syncing.result()  # the system reports an error once: here it may be
        os.fsync(self._handle)
        self.put(0, start)
        os.fsync(self._handle)
        os.fchmod(self._handle, 0o644)

    def link(self) -> None:
        """Give the published bytes their name."""
        link(self.temporary, self.destination)
        sync_folder(self.destination)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._discard()
        if isinstance(error, OSError):
            self._fail(error)

    def _discard(self) -> None:
        self._syncer.shutdown()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if self.temporary:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)

    def _fail(self, error: OSError) -> NoReturn:
        raise ModelFileError(
            f"cannot write {quote_path(self.destination)}: {error.strerror}."
        ) from error


def link(old: str, new: str) -> None:
    """Give a file a second name, or, on a file system without hard links, another one;
    FileExistsError when that name is taken."""
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(new):
            raise FileExistsError(17, "File exists", new) from None
        os.rename(old, new)


def sync_folder(path: str) -> None:
    """Make the names in the folder of `path` durable where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
