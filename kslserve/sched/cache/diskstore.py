"""Checkpoints as files: one file per checkpoint, published whole or not at all.

A file belongs to one fingerprint of computed state. It starts with the token ids, which are
compared with the wanted ones before anything else of it is used, and carries a checksum of the
tokens and one of the checksums of all images, so that two threads can read it. The keys and values
of an MTP head are the last of a block, so an engine without one reads the files of one with it: the
beginnings of their blocks. Files hold the text of conversations: the folder is for its owner only
(0700), files are 0600. All functions here block and are called in the disk thread, or before the
server is ready.

    header | tokens int32 [position] | slab | blocks
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kslserve.engine.types import Ids
from kslserve.errors import UsageError
from kslserve.sched.cache.checkpoint import Kind
from kslserve.sched.cache.images import Image

MAGIC = b"KSLCKPT3"
HEADER = struct.Struct("<8s32s32s12sQQQQII")  # the fields of Header
HEADER_CHECK = struct.Struct("<I")
HEAD_BYTES = HEADER.size + HEADER_CHECK.size
SUFFIX = ".kslckpt"
TEMPORARY = ".part"
BATCH_BYTES, BATCH_IMAGES = 8 << 20, 256  # read together: about as much, not more
HELP_BYTES = 8 << 20  # from here on a second thread reads half of a file
NO_HEAD = bytes(32)  # the fingerprint of the MTP head of an engine that has none


class Header(NamedTuple):
    """How a file begins. fingerprint, head: of the trunk and of the MTP head. The checks are
    checksums: of the tokens, and of those of all images."""

    magic: bytes
    fingerprint: bytes
    head: bytes
    kind: bytes
    position: int
    blocks: int
    slab_bytes: int
    block_bytes: int
    tokens_check: int
    state_check: int


Take = Callable[[int, int], list[Image]]  # room for images: bytes of each, how many
Item = tuple[Image, int]  # an image, and bytes behind it in the file that are not for us


class BadFile(Exception):
    """The file is not a whole checkpoint of this fingerprint and these sizes."""


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes of images, and what they are images of. fingerprint, head: of the trunk and of the MTP
    head, 32 bytes each."""

    fingerprint: bytes
    slab_bytes: int
    block_bytes: int
    block_tokens: int
    head: bytes = NO_HEAD


@dataclass(slots=True)
class DiskCopy:
    """A published file. used: when it was written or read last, in seconds of the file system."""

    path: Path
    nbytes: int
    used: float


@dataclass(frozen=True, slots=True)
class Found:
    """A file that belongs to us."""

    copy: DiskCopy
    kind: Kind
    tokens: Ids


@dataclass(frozen=True, slots=True)
class Scan:
    """What a folder holds. foreign: whole files of other models or builds, which only count for the
    budget. bad: how many files are not checkpoints at all."""

    found: list[Found]
    foreign: list[DiskCopy]
    bad: int


def own_folder(folder: str) -> Path:
    """The folder, made where it is missing. UsageError where it cannot be made, written to, or made
    its owner's alone."""
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o700)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(
            f"--prefix-cache-dir {folder} cannot be used: {error.strerror}."
        ) from error
    return path


class DiskStore:
    """One folder: `own_folder`."""

    def __init__(self, folder: str, sizes: StateSizes) -> None:
        self.folder = own_folder(folder)
        self.sizes = sizes

    def scan(self) -> Scan:
        """Read the heads of all files. Leftovers of writes that were cut short are removed."""
        found: dict[bytes, Found] = {}
        foreign, bad = [], 0
        for path in sorted(self.folder.iterdir()):
            try:
                if path.name.endswith(TEMPORARY):
                    path.unlink()
                elif path.name.endswith(SUFFIX):
                    entry = self._scan_one(path)
                    if isinstance(entry, DiskCopy):
                        foreign.append(entry)
                    elif found.setdefault(entry.tokens.tobytes(), entry) is not entry:
                        foreign.append(entry.copy)  # the same with or without a head
            except (OSError, BadFile):
                bad += 1
        return Scan(list(found.values()), foreign, bad)

    def write(self, tokens: Ids, kind: Kind, slab: Image, blocks: Sequence[Image]) -> DiskCopy:
        """Publish a checkpoint under a name that follows from its tokens."""
        path = self.folder / (self._name(tokens) + SUFFIX)
        temporary = path.with_name(f"{path.stem}.{os.getpid()}{TEMPORARY}")
        sizes = self.sizes
        tokens = np.ascontiguousarray(tokens, dtype="<i4")
        check = _checksum([slab, *blocks])
        header = HEADER.pack(*Header(
            MAGIC, sizes.fingerprint, sizes.head, kind.value.encode(), len(tokens), len(blocks),
            sizes.slab_bytes, sizes.block_bytes, zlib.crc32(tokens.data), check,
        ))  # fmt: skip
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(header + HEADER_CHECK.pack(zlib.crc32(header)))
                for part in (tokens.view(np.uint8), slab, *blocks):
                    file.write(part.data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        entry = path.stat()
        return DiskCopy(path, entry.st_size, entry.st_mtime)

    def read(self, copy: DiskCopy, tokens: Ids, take: Take) -> tuple[Image, list[Image]]:
        """The images of a checkpoint of exactly these tokens. Raises BadFile or OSError."""
        with self._open(copy.path) as file:
            header = self._header(file)
            if not np.array_equal(self._tokens(file, header), tokens):
                raise BadFile("it is of other tokens")
            (slab,) = take(header.slab_bytes, 1)
            own = self.sizes.block_bytes
            blocks = take(own, header.blocks)
            items = [(slab, 0)] + [(block, header.block_bytes - own) for block in blocks]
            check = _fill(file.fileno(), file.tell(), items)
        if check != header.state_check:
            raise BadFile("its checksum is wrong")
        os.utime(copy.path)
        return slab, blocks

    def remove(self, copy: DiskCopy) -> None:
        copy.path.unlink(missing_ok=True)

    def _name(self, tokens: Ids) -> str:
        digest = hashlib.sha256(self.sizes.fingerprint + self.sizes.head)
        digest.update(np.ascontiguousarray(tokens, dtype="<i4").data)
        return digest.hexdigest()[:40]

    def _open(self, path: Path) -> BufferedReader:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise BadFile("it is not a file")
        return file

    def _header(self, file: BufferedReader) -> Header:
        """That of a whole file, of any fingerprint."""
        raw = file.read(HEAD_BYTES)
        if len(raw) < HEAD_BYTES or raw[: len(MAGIC)] != MAGIC:
            raise BadFile("it is not a checkpoint")
        if HEADER_CHECK.unpack(raw[HEADER.size :])[0] != zlib.crc32(raw[: HEADER.size]):
            raise BadFile("its header is damaged")
        header = Header(*HEADER.unpack(raw[: HEADER.size]))
        images = header.slab_bytes + header.blocks * header.block_bytes
        if os.fstat(file.fileno()).st_size != HEAD_BYTES + 4 * header.position + images:
            raise BadFile("its size is wrong")
        return header

    def _tokens(self, file: BufferedReader, header: Header) -> Ids:
        """The tokens of a file of our own. BadFile where sizes or checksum say that it is not."""
        sizes = self.sizes
        ours = self._ours(header) and header.slab_bytes == sizes.slab_bytes
        if header.head == sizes.head:
            ours &= header.block_bytes == sizes.block_bytes
        else:
            ours &= header.block_bytes > sizes.block_bytes
        if not ours or header.blocks != -(-header.position // sizes.block_tokens):
            raise BadFile("it is of another model or build")
        raw = _image(file, 4 * header.position)
        if zlib.crc32(raw.data) != header.tokens_check:
            raise BadFile("its tokens are damaged")
        return raw.view("<i4").astype(np.int32, copy=False)

    def _ours(self, header: Header) -> bool:
        """Whether it is of our trunk, and of our MTP head where we have one."""
        sizes = self.sizes
        return header.fingerprint == sizes.fingerprint and sizes.head in (NO_HEAD, header.head)

    def _scan_one(self, path: Path) -> Found | DiskCopy:
        with self._open(path) as file:
            header = self._header(file)
            entry = os.fstat(file.fileno())
            copy = DiskCopy(path, entry.st_size, entry.st_mtime)
            if not self._ours(header):
                return copy
            tokens = self._tokens(file, header)
            name = header.kind.rstrip(b"\0").decode("ascii", "replace")
            if name not in {kind.value for kind in Kind} or not len(tokens):
                raise BadFile("its header makes no sense")
            return Found(copy, Kind(name), tokens)


def _checksum(images: Sequence[Image]) -> int:
    return _joined([zlib.crc32(image.data) for image in images])


def _joined(checks: Sequence[int]) -> int:
    return zlib.crc32(np.array(checks, "<u4").data)


def _fill(fd: int, at: int, items: Sequence[Item]) -> int:
    """Read images from a position of a file on; their checksum."""
    ends = np.cumsum([image.nbytes + rest for image, rest in items]).tolist()
    if ends[-1] < HELP_BYTES:
        return _joined(_part(fd, at, items))
    middle = next(i for i, end in enumerate(ends, 1) if 2 * end >= ends[-1])
    with ThreadPoolExecutor(1, thread_name_prefix="disk-half") as helper:
        later = helper.submit(_part, fd, at + ends[middle - 1], items[middle:])
        checks = _part(fd, at, items[:middle])
        return _joined(checks + later.result())


def _part(fd: int, at: int, items: Sequence[Item]) -> list[int]:
    """Read consecutive images; the checksum of each, with what is behind it."""
    checks: list[int] = []
    while len(checks) < len(items):
        batch: list[tuple[Image, Image]] = []
        nbytes = 0
        for image, rest in items[len(checks) : len(checks) + BATCH_IMAGES]:
            if nbytes >= BATCH_BYTES:
                break
            batch.append((image, np.empty(rest, np.uint8)))
            nbytes += image.nbytes + rest
        _read_into(fd, at, [part.data for both in batch for part in both if part.nbytes])
        at += nbytes
        checks += [zlib.crc32(rest.data, zlib.crc32(image.data)) for image, rest in batch]
    return checks


def _read_into(fd: int, at: int, buffers: list[memoryview]) -> None:
    while buffers:
        n = os.preadv(fd, buffers, at)
        if not n:
            raise BadFile("it is too short")
        at += n
        while buffers and n >= len(buffers[0]):
            n -= len(buffers.pop(0))
        if n:
            buffers[0] = buffers[0][n:]


def _image(file: BufferedReader, nbytes: int) -> Image:
    """The next bytes of a file."""
    image = np.empty(nbytes, np.uint8)
    if file.readinto(image.data) != nbytes:
        raise BadFile("it is too short")
    return image
