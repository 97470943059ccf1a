"""TQF1 to KSL1: the two differ in the signature only, so a file is changed in place.

Four bytes are overwritten and made durable, then the file gets its new name, and the old name goes
away last. Whenever this stops, the data is there under at least one of the two names, and the new
name never belongs to a file with the old signature.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kslserve.errors import ModelFileError
from kslserve.ksl.files import fail, quote_path
from kslserve.ksl.ksl1_header import OLD_SIGNATURE, SIGNATURE
from kslserve.ksl.publish import link, sync_folder


@dataclass(frozen=True, slots=True)
class Migrated:
    """other_names: hard links of the file, which now lead to the new signature too."""

    path: str
    other_names: int


def migrate(old: str, new: str) -> Migrated:
    """Change the signature of `old` and give it the name `new`, on the same file system.

    ModelFileError, with nothing changed, for a file that is not TQF1, a name that is taken, a
    symbolic link, or a file that is open for writing elsewhere, as far as the system shows it.
    """
    where = quote_path(old)
    if os.path.lexists(new):
        fail(quote_path(new), "the new name is taken already; nothing is replaced.")
    try:
        handle = os.open(old, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        if os.path.islink(old):
            fail(where, "this is a symbolic link: name the file itself.")
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileError(f"cannot open {where} for writing: {reason}.") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            fail(where, "expected a regular file, found another kind of file.")
        _check_signature(handle, where)
        _check_folder(new, status.st_dev)
        _check_unused(handle, status, where)
        if os.pwrite(handle, SIGNATURE, 0) != len(SIGNATURE):
            fail(where, "the signature could not be written.")
        os.fsync(handle)
    except OSError as error:
        raise ModelFileError(f"cannot change {where}: {error.strerror}.") from error
    finally:
        os.close(handle)
    _rename(old, new)
    return Migrated(new, status.st_nlink - 1)


def _check_signature(handle: int, where: str) -> None:
    found = os.pread(handle, len(SIGNATURE), 0)
    if found == SIGNATURE:
        fail(where, "expected the signature TQF1 at byte 0, found KSL1: only rename the file.")
    if found != OLD_SIGNATURE:
        fail(where, f"expected the signature TQF1 at byte 0, found {found!r}.")


def _check_folder(new: str, device: int) -> None:
    folder = os.path.dirname(os.path.abspath(new))
    try:
        found = os.stat(folder)
    except OSError as error:
        fail(quote_path(new), f"its folder cannot be used: {error.strerror}.")
    if found.st_dev != device:
        fail(quote_path(new), "expected a name on the file system of the old one, found another.")
    if not os.access(folder, os.W_OK | os.X_OK):
        fail(quote_path(new), "its folder cannot be written to.")


def _check_unused(handle: int, status: os.stat_result, where: str) -> None:
    """Refuse a file that another process has open for writing: by the process table, which names
    the process, and by a lease, which the kernel grants only on a file without other writers."""
    process = _writer_of(status, handle)
    if process is not None:
        fail(where, f"process {process} has it open for writing: stop that first.")
    if not hasattr(fcntl, "F_SETLEASE"):
        return
    try:
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        fail(where, "another process has it open: stop every user of the file first.")
    except OSError:
        return  # another owner's file, or a file system without leases
    fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _writer_of(status: os.stat_result, own_handle: int) -> int | None:
    """A process that has the file open for writing, where /proc shows it."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        process = int(folder.parent.name)
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                if process == os.getpid() and entry.name == str(own_handle):
                    continue
                with contextlib.suppress(OSError, ValueError, IndexError):
                    found = entry.stat()
                    if (found.st_dev, found.st_ino) != (status.st_dev, status.st_ino):
                        continue
                    text = (folder.parent / "fdinfo" / entry.name).read_text()
                    flags = int(text.partition("flags:")[2].split()[0], 8)
                    if flags & os.O_ACCMODE != os.O_RDONLY:
                        return process
    return None


def _rename(old: str, new: str) -> None:
    try:
        link(old, new)
        sync_folder(new)
        if os.path.lexists(old) and os.path.samefile(old, new):
            os.unlink(old)
            sync_folder(old)
    except OSError as error:
        raise ModelFileError(
            f"{quote_path(old)} has the new signature now, but could not be renamed to "
            f"{quote_path(new)}: {error.strerror}."
        ) from error
