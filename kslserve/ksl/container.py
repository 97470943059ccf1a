"""The single-file container: a safetensors file that is a whole model.

Metadata: `format` is `ksl2`; `ksl` is one JSON text

    {"version": 1, "weights": "fp6", "head": "fp6",
     "tensors": {NAME: {"encoding", "shape", "block", "sha256"}}, "files": {FILE: {"sha256"}}}

with canonical tensor names and logical shapes ([n] for vectors). f32 and bf16 tensors are F32 and
BF16 entries of that name and shape. Packed tensors are the entries NAME.codes (U8 [rows, bytes of a
row]), NAME.scales (fp8: F32, e2m3: U8, both [ceil(rows/128), ceil(cols/128)]; nvfp4: U8 [rows,
cols/16]) and, for nvfp4, NAME.global (F32 [ceil(rows/128)]). sha256 is over codes, scales and
global in this order. Text files are U8 entries `file/FILE`. Data starts at multiples of 64 bytes:
U8 entries `pad/N` fill the gaps, which the format does not allow to be empty. The reader relies on
neither.

lm_head.weight in a model with a tied head is a quantized copy of the embedding for the head alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kslserve.engine.codecs import (
    ENC_BF16,
    ENC_E2M3,
    ENC_F32,
    ENC_FP8,
    ENC_NVFP4,
    ENCODING_NAMES,
    GROUP,
    SCALE_BLOCK,
    encoding_sizes,
)
from kslserve.engine.model import TensorArg
from kslserve.errors import EngineError
from kslserve.ksl import layout
from kslserve.ksl.files import TEXT_LIMIT_BYTES, fail, parse_object, quote, quote_path
from kslserve.ksl.hf_config import read_config
from kslserve.ksl.model import CONFIG, TEXT_FILES, Source
from kslserve.ksl.policy import HEADS, WEIGHTS
from kslserve.ksl.safetensors import SafetensorsFile

FORMAT = "ksl2"
VERSION = 1
ALIGN_BYTES = 64
CHUNK_BYTES = 16 << 20  # read at once by `verify`
ENCODINGS = {name: encoding for encoding, name in ENCODING_NAMES.items()}
BLOCKS: dict[int, list[int] | None] = {
    ENC_F32: None,
    ENC_BF16: None,
    ENC_FP8: [SCALE_BLOCK, SCALE_BLOCK],
    ENC_E2M3: [SCALE_BLOCK, SCALE_BLOCK],
    ENC_NVFP4: [1, GROUP],
}


@dataclass(frozen=True, slots=True)
class Part:
    """One safetensors entry of a tensor. size: bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


def parts_of(name: str, item: layout.Stored) -> list[Part]:
    """The entries of a tensor: the data, then scales and global if its encoding has them.
    EngineError when the columns do not fit the encoding."""
    encoding, rows, cols = item.encoding, item.rows, item.cols
    code_bytes, scale_bytes, global_bytes = encoding_sizes(encoding, rows, cols)
    if encoding in (ENC_F32, ENC_BF16):
        dtype = "F32" if encoding == ENC_F32 else "BF16"
        return [Part(name, dtype, logical_shape(item), code_bytes)]
    parts = [Part(f"{name}.codes", "U8", (rows, code_bytes // rows), code_bytes)]
    blocks = (-(-rows // SCALE_BLOCK), -(-cols // SCALE_BLOCK))
    if encoding == ENC_NVFP4:
        parts.append(Part(f"{name}.scales", "U8", (rows, cols // GROUP), scale_bytes))
        parts.append(Part(f"{name}.global", "F32", (blocks[0],), global_bytes))
    else:
        dtype = "F32" if encoding == ENC_FP8 else "U8"
        parts.append(Part(f"{name}.scales", dtype, blocks, scale_bytes))
    return parts


def logical_shape(item: layout.Stored) -> tuple[int, ...]:
    return (item.rows,) if item.cols == 1 else (item.rows, item.cols)


def open_container(path: str, *, whole: bool = True) -> Source:
    """Open a container. Reads the header and the small text files. whole: its data must be there to
    the last byte. ModelFileError for anything that is not a valid container."""
    where = quote_path(path)
    file = SafetensorsFile(path, whole=whole)
    try:
        return _open(file, path, where)
    except BaseException:
        file.close()
        raise


def _open(file: SafetensorsFile, path: str, where: str) -> Source:
    if file.metadata.get("format") != FORMAT:
        fail(
            where,
            f"expected the metadata format {FORMAT}, found {quote(file.metadata.get('format'))}: a "
            "plain safetensors file is served by naming its folder.",
        )
    table = _read_table(file, where)
    used = {f"file/{name}" for name in TEXT_FILES}
    stored: dict[str, layout.Stored] = {}
    parts: dict[str, list[Part]] = {}
    for name, item in table["tensors"].items():
        stored[name] = _read_item(name, item, where)
        parts[name] = _check_parts(name, stored[name], file, where)
        used.update(part.name for part in parts[name])
    for name in file.entries:
        if name not in used and not name.startswith("pad/"):
            fail(
                where, f"found the entry {quote(name)}, which the `ksl` metadata does not explain."
            )
    files = _read_files(file, where)
    if CONFIG not in files:
        fail(where, f"expected the entry file/{CONFIG}, found none.")
    config = parse_object(files[CONFIG], f"{where}: {CONFIG}")
    family = read_config(config, f"{where}: {CONFIG}")
    notes: list[str] = []
    spec = layout.settle_mtp(family.spec, stored, notes)
    return Source(
        name=os.path.splitext(os.path.basename(path))[0],
        description=f"container {where}",
        where=path,
        spec=spec,
        tied=family.tied,
        stored=layout.check(spec, family.tied, stored, where),
        rows=_rows(file, stored, parts),
        kind="container",
        stored_bytes={name: sum(p.size for p in found) for name, found in parts.items()},
        config=config,
        config_eos=family.eos_ids,
        files=files,
        weights=table["weights"],
        head=table["head"],
        payload=(file.expected_size - file.origin, file.actual_size - file.origin),
        facts={"format": FORMAT, "version": VERSION},
        notes=notes,
        on_close=file.close,
    )


def _read_table(file: SafetensorsFile, where: str) -> dict[str, Any]:
    text = file.metadata.get("ksl")
    if text is None:
        fail(where, "expected the metadata `ksl`, found none.")
    table = parse_object(text.encode("utf-8", "surrogatepass"), f"{where}: metadata `ksl`")
    if table.get("version") != VERSION:
        fail(where, f"expected container version {VERSION}, found {quote(table.get('version'))}.")
    if table.get("weights") not in WEIGHTS or table.get("head") not in HEADS:
        fail(where, "the metadata `ksl` names unknown encodings as weights or head.")
    if not isinstance(table.get("tensors"), dict):
        fail(where, "expected `tensors` in the metadata `ksl`, found none.")
    return table


def _read_item(name: str, item: Any, where: str) -> layout.Stored:
    label = f"{where}: tensor {quote(name)}"
    if not isinstance(item, dict) or item.get("encoding") not in ENCODINGS:
        fail(label, f"expected a known encoding in the metadata, found {quote(item)}.")
    shape = item.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) not in (1, 2)
        or not all(type(n) is int and 0 < n < 1 << 31 for n in shape)
    ):
        fail(label, f"expected one or two sizes as shape, found {quote(shape)}.")
    encoding = ENCODINGS[item["encoding"]]
    if item.get("block") != BLOCKS[encoding]:
        fail(label, f"expected the block {BLOCKS[encoding]}, found {quote(item.get('block'))}.")
    return layout.Stored(encoding, shape[0], shape[1] if len(shape) == 2 else 1)


def _check_parts(name: str, item: layout.Stored, file: SafetensorsFile, where: str) -> list[Part]:
    label = f"{where}: tensor {quote(name)}"
    try:
        parts = parts_of(name, item)
    except EngineError as error:
        fail(label, f"{error.message[:1].lower()}{error.message[1:]}")
    for part in parts:
        entry = file.entries.get(part.name)
        if entry is None:
            fail(label, f"expected the entry {quote(part.name)}, found none.")
        if entry.dtype != part.dtype or entry.shape != part.shape:
            fail(
                label,
                f"expected {part.dtype} {list(part.shape)} as {quote(part.name)} at byte "
                f"{entry.start}, found {entry.dtype} {list(entry.shape)}.",
            )
    return parts


def _read_files(file: SafetensorsFile, where: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in TEXT_FILES:
        entry = file.entries.get(f"file/{name}")
        if entry is not None:
            if entry.dtype != "U8":
                fail(where, f"expected the entry file/{name} to be U8, found {entry.dtype}.")
            if entry.end - entry.start > TEXT_LIMIT_BYTES:
                fail(
                    where,
                    f"expected at most {TEXT_LIMIT_BYTES} bytes as file/{name} at byte "
                    f"{entry.start}, found {entry.end - entry.start}.",
                )
            found[name] = file.data(entry.name).tobytes()
    return found


def _rows(
    file: SafetensorsFile, stored: dict[str, layout.Stored], parts: dict[str, list[Part]]
) -> Callable[[str, int, int], TensorArg]:
    def rows(name: str, begin: int, end: int) -> TensorArg:
        item = stored[name]
        buffers: list[Any] = [None, None, None]
        lows = encoding_sizes(item.encoding, begin, item.cols) if begin else (0, 0, 0)
        highs = encoding_sizes(item.encoding, end, item.cols)
        for index, part in enumerate(parts[name]):
            buffers[index] = file.part(part.name, lows[index], highs[index])
        return TensorArg(name, item.encoding, end - begin, item.cols, *buffers)

    return rows


def verify(path: str, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """Names of the tensors and text files whose bytes do not match their SHA-256; empty when all
    do. Reads the whole file; progress hears bytes done and in all. ModelFileError as for
    open_container."""
    source = open_container(path)
    source.close()
    file = SafetensorsFile(path)
    try:
        where = quote_path(path)
        table = _read_table(file, where)
        wrong: list[str] = []
        done = 0
        for name, item in table["tensors"].items():
            digest = hashlib.sha256()
            for part in parts_of(name, _read_item(name, item, where)):
                for begin in range(0, part.size, CHUNK_BYTES):
                    data = file.part(part.name, begin, min(begin + CHUNK_BYTES, part.size))
                    digest.update(data.data)
                    done += data.nbytes
                    progress(done, file.actual_size)
            if digest.hexdigest() != item.get("sha256"):
                wrong.append(name)
        digests = table.get("files")
        for name, text in _read_files(file, where).items():
            item = digests.get(name) if isinstance(digests, dict) else None
            known = item.get("sha256") if isinstance(item, dict) else None
            if hashlib.sha256(text).hexdigest() != known:
                wrong.append(f"file/{name}")
        progress(file.actual_size, file.actual_size)
        return wrong
    finally:
        file.close()
