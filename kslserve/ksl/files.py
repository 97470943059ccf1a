"""Reading files that may be anything: every failure is a ModelFileError of one sentence.

Only regular files are read (a pipe or a device would block or never end), and JSON is read
strictly: UTF-8, one object, no repeated key.

A file may be cut by others while it is in use. Reading it by position notices that and says so;
reading a memory map of it would end the process. So everything is read by position.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kslserve.errors import ModelFileError

TEXT_LIMIT_BYTES = 256 << 20  # of a tokenizer, template or configuration file

Bytes = npt.NDArray[np.uint8]


def fail(where: str, problem: str) -> NoReturn:
    """Raise ModelFileError `WHERE: PROBLEM`."""
    raise ModelFileError(f"{where}: {problem}")


def quote(value: object) -> str:
    """`value` for an error text: ASCII, at most about a line long."""
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."


def open_regular(path: str) -> tuple[int, int]:
    """An open read-only descriptor of a regular file, and the file's size in bytes."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileError(f"cannot open {quote_path(path)}: {reason}.") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            fail(quote_path(path), "expected a regular file, found another kind of file.")
    except BaseException:
        os.close(handle)
        raise
    return handle, status.st_size


class RegularFile:
    """An open regular file. where: its path for error texts. size: bytes at opening."""

    __slots__ = ("_handle", "size", "where")

    def __init__(self, path: str) -> None:
        """ModelFileError for what cannot be opened or is no regular file."""
        self.where = quote_path(path)
        self._handle, self.size = open_regular(path)

    def read(self, start: int, size: int) -> Bytes:
        """A copy of bytes [start, start + size), for any thread. ModelFileError when the file has
        become shorter."""
        try:
            found = np.empty(size, np.uint8)
            view = found.data
            done = 0
            while done < size:
                count = os.preadv(self._handle, [view[done:]], start + done)
                if count == 0:
                    self._fail_cut(start, size)
                done += count
        except OSError as error:
            fail(self.where, f"cannot be read at byte {start}: {error.strerror}.")
        except MemoryError:
            fail(self.where, f"there is no memory for the {size} bytes at byte {start}.")
        return found

    def _fail_cut(self, start: int, size: int) -> NoReturn:
        end = os.fstat(self._handle).st_size
        fail(
            self.where,
            f"expected {size} bytes at byte {start}, but the file now ends at byte {end}: it was "
            "cut while it was read.",
        )

    def close(self) -> None:
        """Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def read_file(path: str, limit: int = TEXT_LIMIT_BYTES) -> bytes:
    """All bytes of a regular file of at most `limit` bytes."""
    handle, size = open_regular(path)
    with os.fdopen(handle, "rb") as file:
        if size > limit:
            fail(quote_path(path), f"expected at most {limit} bytes, found {size}.")
        try:
            return file.read(size)
        except OSError as error:
            raise ModelFileError(f"cannot read {quote_path(path)}: {error.strerror}.") from error


def read_optional(path: str) -> bytes | None:
    """Like read_file; None where nothing has that name."""
    return read_file(path) if os.path.lexists(path) else None


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object that `data` holds; `where` starts the error text."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    fail(where, f"the key {quote(key)} appears twice in one JSON object.")
                seen.add(key)
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise ModelFileError(
            f"{where}: expected JSON in UTF-8, found the byte 0x{data[error.start]:02x} at byte "
            f"{error.start} of the text."
        ) from error
    except json.JSONDecodeError as error:
        raise ModelFileError(
            f"{where}: expected JSON, but at character {error.pos}: {error.msg}."
        ) from error
    except RecursionError as error:
        raise ModelFileError(f"{where}: the JSON text is nested too deeply.") from error
    except ModelFileError:
        raise
    except ValueError as error:  # a number too long to convert
        raise ModelFileError(f"{where}: expected JSON: {error}.") from error
    if not isinstance(value, dict):
        fail(where, f"expected a JSON object, found {quote(value)}.")
    return value


def quote_path(path: str) -> str:
    """A path for an error text: as it is when printable, else quoted."""
    return path if path.isprintable() else quote(path)
