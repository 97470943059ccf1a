"""Reading KSL1 files: FP6 E2M3 and FP8 matrices in tiles, bf16 for the rest.

Opening reads the header and the scale grids and checks every offset. Matrices are handed out with
row-major codes, exactly: E2M3 with powers of two as scales as E2M3; E2M3 with other scales as FP8,
which holds every E2M3 value and float32 scales; a scale per 32 columns as bf16 where that is exact,
else float32. A file without block scales has one multiplier per matrix, whose reciprocal, rounded
to float32, becomes the scale of every block.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kslserve.engine.codecs import (
    ENC_BF16,
    ENC_E2M3,
    ENC_F32,
    ENC_FP8,
    F32,
    SCALE_BLOCK,
)
from kslserve.engine.model import TensorArg
from kslserve.ksl import ksl1_header as ksl1
from kslserve.ksl import ksl1_records, layout
from kslserve.ksl.files import RegularFile, fail, parse_object
from kslserve.ksl.hf_config import FamilyConfig, read_config
from kslserve.ksl.ksl1_header import Header
from kslserve.ksl.ksl1_records import Record
from kslserve.ksl.ksl1_scales import (
    FINE,
    coarser,
    e4m3_of_e2m3,
    exponents,
    multiply,
    unpack,
    wide_encoding,
)
from kslserve.ksl.ksl1_tiles import from_tiles
from kslserve.ksl.model import Source

_VECTOR_ENCODINGS = {"nq": ENC_BF16, "f32": ENC_F32}


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a tensor's data starts, and how it is handed out. scales: uint8 (E2M3) or float32
    [scale rows, scale columns], None for what is not quantized. fine: a scale per 32 columns."""

    record: Record
    start: int
    size: int
    encoding: int
    scales: npt.NDArray[Any] | None = None
    fine: bool = False


def open_ksl1(path: str, *, config: bytes | None = None, config_where: str = "") -> Source:
    """Open a file. config: a config.json that must describe the same model, used in place of the
    one made from the header. ModelFileError for anything that is not a whole, valid file."""
    file = RegularFile(path)
    try:
        return _open(file, path, config, config_where)
    except BaseException:
        file.close()
        raise


def read_header(file: RegularFile) -> Header:
    """The checked header. ModelFileError."""
    data = file.read(0, min(file.size, ksl1.HEADER_BYTES_MAX)).tobytes()
    return ksl1.parse(data, file.where)


def family_of(header: Header, where: str) -> FamilyConfig:
    return read_config(ksl1.config_of(header), f"{where}: header")


def payload_sizes(header: Header, family: FamilyConfig, size: int) -> tuple[int, int]:
    """Bytes after the header that the header promises (with a scale per 128 columns), and that a
    file of `size` bytes has."""
    items = ksl1_records.records(family.spec, family.tied, header.has_mtp_section)
    return sum(item.size(header.flags) for item in items), size - header.header_bytes


def _open(file: RegularFile, path: str, config: bytes | None, config_where: str) -> Source:
    header = read_header(file)
    ksl1.check_readable(header, file.where)
    family = family_of(header, file.where)
    values = ksl1.config_of(header)
    config_eos: tuple[int, ...] = ()
    if config is not None:
        values = parse_object(config, config_where)
        config_eos = _check_config(values, family, config_where, file.where)
    places = _walk(file, header, family)
    fp6 = header.block_scaled_e2m3
    sealed = {
        name
        for name, place in places.items()
        if fp6 and place.record.kind == "q" and place.encoding != ENC_E2M3
    }
    notes = []
    if sealed:
        notes.append(
            f"{len(sealed)} matrices have scales that FP6 cannot hold here; they are kept exactly, "
            "in wider encodings"
        )
    stored = {
        name: layout.Stored(place.encoding, place.record.rows, place.record.cols)
        for name, place in places.items()
    }
    head = stored.get(layout.HEAD)
    return Source(
        name=os.path.splitext(os.path.basename(path))[0],
        description=f"KSL1 file {file.where}",
        where=path,
        spec=family.spec,
        tied=family.tied,
        stored=layout.check(family.spec, family.tied, stored, file.where),
        rows=_rows(file, header, places),
        config=values,
        config_eos=config_eos,
        files={"config.json": config or _json(values)},
        kind="ksl1",
        stored_bytes={name: place.size for name, place in places.items()},
        weights="fp6" if fp6 else "",
        head="fp6" if fp6 and head is not None else "",
        foreign=True,
        sealed=frozenset(sealed),
        payload=(file.size - header.header_bytes,) * 2,
        facts=facts_of(header),
        notes=notes,
        on_close=file.close,
    )


def facts_of(header: Header) -> dict[str, Any]:
    """What an inspector shows of a header."""
    values = header._asdict()
    values["layer_types"] = list(header.layer_types)
    return {
        "header": values,
        "flags": f"0x{header.flags:03x}",
        "block_scaled_e2m3": header.block_scaled_e2m3,
        "has_mtp_section": header.has_mtp_section,
    }


def _json(values: dict[str, Any]) -> bytes:
    import json

    return json.dumps(values, indent=1).encode()


def _check_config(
    values: dict[str, Any], family: FamilyConfig, where: str, file: str
) -> tuple[int, ...]:
    """End ids of a config.json that goes with the file; ModelFileError where they disagree."""
    found = read_config(values, where)
    for name in family.spec.__slots__:
        if name in ("mtp_layers", "max_positions", "token_limit"):
            continue
        mine, other = getattr(family.spec, name), getattr(found.spec, name)
        if isinstance(mine, float):
            mine, other = np.float32(mine), np.float32(other)
        if mine != other:
            fail(where, f"expected {name} as in {file}, found another: {mine} and {other}.")
    if found.tied != family.tied:
        fail(where, f"expected tie_word_embeddings as in {file}, found the other value.")
    return found.eos_ids


def _walk(file: RegularFile, header: Header, family: FamilyConfig) -> dict[str, _Place]:
    """Every tensor's place; ModelFileError when one does not lie in the file or does not end it."""
    places: dict[str, _Place] = {}
    position = header.header_bytes
    for record in ksl1_records.records(family.spec, family.tied, header.has_mtp_section):
        ksl1_records.check_tiles(record, file.where)
        if record.kind == "q":
            place = _matrix(file, header.flags, record, position)
        else:
            size = record.size(header.flags)
            place = _Place(record, position, size, _VECTOR_ENCODINGS[record.kind])
        end = position + place.size
        if end > file.size:
            fail(
                file.where,
                f"tensor {record.name} at byte {position} should end at byte {end}, but the file "
                f"has {file.size} bytes.",
            )
        places[record.name] = place
        position = end
    if position != file.size:
        fail(
            file.where,
            f"expected the file to end at byte {position}, after {record.name}, found {file.size} "
            "bytes.",
        )
    return places


def _matrix(file: RegularFile, flags: int, record: Record, position: int) -> _Place:
    """The place of a quantized record, its scales read and checked. _Place.start is that of the
    payload."""
    label = f"tensor {record.name}"
    head = 8 if flags & ksl1.FLAG_BLOCK_SCALED else 4
    if position + head > file.size:
        fail(
            file.where,
            f"{label} should start at byte {position}, but the file has {file.size} bytes.",
        )
    if not flags & ksl1.FLAG_BLOCK_SCALED:
        scale = file.read(position, 4).view("<f4")
        _check_scales(scale, file.where, label, position)
        blocks = (record.scale_rows, -(-record.cols // SCALE_BLOCK))
        with np.errstate(over="ignore"):
            inverse = np.divide(np.float32(1), scale, dtype=np.float32)
        _check_scales(inverse, file.where, f"{label}: the reciprocal of its scale", position)
        grid = np.full(blocks, inverse[0], np.float32)
        return _Place(record, position + 4, record.size(flags), ENC_FP8, grid)
    found = tuple(int(n) for n in file.read(position, 8).view("<u4"))
    coarse = (record.scale_rows, -(-record.cols // SCALE_BLOCK))
    finer = (record.scale_rows, -(-record.cols // FINE))
    if found not in (coarse, finer):
        fail(
            file.where,
            f"{label}: expected a scale grid of {coarse[0]} x {coarse[1]} or {finer[0]} x "
            f"{finer[1]} at byte {position}, found {found[0]} x {found[1]}.",
        )
    start = position + record.head_bytes(flags, found[1])
    if start > file.size:
        fail(
            file.where,
            f"{label}: its scales should end at byte {start}, but the file has {file.size} bytes.",
        )
    flat = file.read(position + 8, start - position - 8).view("<f4")
    _check_scales(flat, file.where, label, position + 8)
    grid = flat.reshape(found).astype(np.float32)
    size = record.size(flags, found[1])
    if found != coarse:
        joined = coarser(grid, coarse)
        if joined is None:
            return _Place(record, start, size, wide_encoding(grid), grid, fine=True)
        grid = joined
    if not flags & ksl1.FLAG_E2M3:
        return _Place(record, start, size, ENC_FP8, grid)
    powers = exponents(grid)
    if powers is None:
        return _Place(record, start, size, ENC_FP8, grid)
    return _Place(record, start, size, ENC_E2M3, powers)


def _check_scales(scales: F32, where: str, label: str, start: int) -> None:
    good = np.isfinite(scales) & (scales > 0)
    if not good.all():
        index = int(np.argmin(good))
        fail(
            where,
            f"{label}: expected a positive finite scale at byte {start + 4 * index}, found "
            f"{scales[index]}.",
        )


def _rows(file: RegularFile, header: Header, places: dict[str, _Place]) -> Any:
    flags = header.flags
    wider = e4m3_of_e2m3()

    def rows(name: str, begin: int, end: int) -> TensorArg:
        place = places[name]
        record = place.record
        if place.scales is None:
            width = record.cols * (2 if record.kind == "nq" else 4)
            data = file.read(place.start + begin * width, (end - begin) * width)
            return TensorArg(name, place.encoding, end - begin, record.cols, data)
        width = record.cols * (6 if flags & ksl1.FLAG_E2M3 else 8) // 8
        payload = file.read(place.start + begin * width, (end - begin) * width)
        codes = from_tiles(payload, flags, end - begin, record.cols)
        scales = place.scales[begin // SCALE_BLOCK : -(-end // SCALE_BLOCK)]
        if place.encoding != ENC_E2M3 and flags & ksl1.FLAG_E2M3:
            codes = wider[unpack(codes)]
        if place.fine:
            codes = multiply(codes, scales, end - begin, record.cols, place.encoding)
            return TensorArg(name, place.encoding, end - begin, record.cols, codes)
        return TensorArg(name, place.encoding, end - begin, record.cols, codes, scales)

    return rows
