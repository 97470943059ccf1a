"""A Hugging Face folder: config, safetensors shards, tokenizer and template.

bf16, f16, f32 and block-FP8 tensors; names with or without the `language_model.` part; the vision
tower is skipped. Tensors are handed out under their canonical names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kslserve.engine.codecs import ENC_BF16, ENC_F32, ENC_FP8, SCALE_BLOCK
from kslserve.engine.model import TensorArg
from kslserve.errors import ModelFileError
from kslserve.ksl import layout
from kslserve.ksl.files import (
    TEXT_LIMIT_BYTES,
    Bytes,
    fail,
    parse_object,
    quote,
    quote_path,
    read_file,
    read_optional,
)
from kslserve.ksl.hf_config import check_quantization, read_config
from kslserve.ksl.model import CONFIG, GENERATION, TEMPLATE, TOKENIZER, Source
from kslserve.ksl.safetensors import Entry, SafetensorsFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
ENCODING_OF = {"F32": ENC_F32, "F16": ENC_F32, "BF16": ENC_BF16, "F8_E4M3": ENC_FP8}
SKIPPED = ("model.visual.", "visual.")  # the vision tower


@dataclass(frozen=True, slots=True)
class _Located:
    """Where one tensor lies, and its FP8 scales if it has any."""

    file: SafetensorsFile
    entry: Entry
    scales: tuple[SafetensorsFile, Entry] | None


def open_folder(path: str) -> Source:
    """Open a folder. Reads headers and small text files only. ModelFileError for anything wrong."""
    where = quote_path(path)
    config = parse_object(read_file(os.path.join(path, CONFIG)), f"{where}/{CONFIG}")
    family = read_config(config, f"{where}/{CONFIG}")
    check_quantization(config, f"{where}/{CONFIG}")
    notes: list[str] = []
    files: list[SafetensorsFile] = []

    def close() -> None:
        for file in files:
            file.close()

    try:
        located = _locate(path, where, files)
        if family.tied and located.pop(layout.HEAD, None) is not None:
            notes.append("the config ties the head to the embedding: lm_head.weight is not used")
        spec = layout.settle_mtp(family.spec, located, notes)
        stored = {name: _stored(name, item, where) for name, item in located.items()}
        stored = layout.check(spec, family.tied, stored, where)
        return Source(
            name=os.path.basename(os.path.abspath(path)) or "model",
            description=f"folder {where}",
            where=path,
            spec=spec,
            tied=family.tied,
            stored=stored,
            rows=_rows(located, stored),
            kind="folder",
            stored_bytes=_bytes_of(located),
            config=config,
            config_eos=family.eos_ids,
            files=read_text_files(path),
            notes=notes,
            on_close=close,
        )
    except BaseException:
        close()
        raise


def read_text_files(path: str) -> dict[str, bytes]:
    """The model's text files in a folder. The template may also be inside tokenizer_config.json or
    chat_template.json."""
    found: dict[str, bytes] = {}
    for name in (TOKENIZER, TEMPLATE, CONFIG, GENERATION):
        data = read_optional(os.path.join(path, name))
        if data is not None:
            found[name] = data
    for name in ("chat_template.json", "tokenizer_config.json"):
        if TEMPLATE in found:
            break
        full = os.path.join(path, name)
        data = read_optional(full)
        if data is not None:
            template = _template_of(parse_object(data, quote_path(full)).get("chat_template"))
            if template is not None:
                found[TEMPLATE] = template.encode("utf-8", "surrogatepass")
    return found


def _template_of(value: object) -> str | None:
    """A chat_template value: a text, or a list of named ones of which `default` counts."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and item.get("name") == "default":
                value = item.get("template")
    return value if isinstance(value, str) else None


def _locate(path: str, where: str, files: list[SafetensorsFile]) -> dict[str, _Located]:
    """Canonical name to place. Opened files are appended to `files`, also when this fails."""
    places: dict[str, tuple[SafetensorsFile, Entry]] = {}
    for name, file in _stored_names(path, where, files):
        if name.startswith(SKIPPED):
            continue
        canonical = name
        if name.startswith("model.language_model."):
            canonical = "model." + name.removeprefix("model.language_model.")
        if canonical in places:
            fail(where, f"the tensor {quote(canonical)} is there twice, under two names.")
        places[canonical] = (file, file.entries[name])
    located: dict[str, _Located] = {}
    for name, (file, entry) in places.items():
        if name.endswith(SCALE_SUFFIX):
            owner = places.get(name.removesuffix(SCALE_SUFFIX))
            if owner is None or owner[1].dtype != "F8_E4M3":
                fail(where, f"found the scales {quote(name)} without an F8_E4M3 tensor.")
            continue
        scales = places.get(name + SCALE_SUFFIX)
        if entry.dtype == "F8_E4M3" and scales is None:
            fail(
                where,
                f"tensor {quote(name)}: expected its scales {quote(name + SCALE_SUFFIX)} beside "
                "F8_E4M3 data, found none.",
            )
        located[name] = _Located(file, entry, scales)
    return located


def _stored_names(
    path: str, where: str, files: list[SafetensorsFile]
) -> Iterable[tuple[str, SafetensorsFile]]:
    """(name as stored, file) of every tensor, from one file or from the shards of an index."""
    single, index = os.path.join(path, SINGLE), os.path.join(path, INDEX)
    if os.path.lexists(single):
        files.append(SafetensorsFile(single))
        return [(name, files[0]) for name in files[0].entries]
    if not os.path.lexists(index):
        fail(where, f"expected {SINGLE} or {INDEX} in the folder, found neither.")
    label = f"{where}/{INDEX}"
    weight_map = parse_object(read_file(index, TEXT_LIMIT_BYTES), label).get("weight_map")
    if not isinstance(weight_map, dict):
        fail(label, "expected weight_map to map tensor names to file names.")
    shards: dict[str, SafetensorsFile] = {}
    found: list[tuple[str, SafetensorsFile]] = []
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or shard != os.path.basename(shard):
            fail(label, f"expected a file name for {quote(name)}, found {quote(shard)}.")
        if shard not in shards:
            try:
                shards[shard] = SafetensorsFile(os.path.join(path, shard))
            except ModelFileError as error:
                raise ModelFileError(f"{error.message[:-1]} ({INDEX} names it).") from error
            files.append(shards[shard])
        if name not in shards[shard].entries:
            fail(
                label, f"it says that {quote(name)} is in {quote(shard)}, which has no such tensor."
            )
        found.append((name, shards[shard]))
    return found


def _stored(name: str, item: _Located, where: str) -> layout.Stored:
    entry = item.entry
    label = f"{where}: tensor {quote(name)}"
    encoding = ENCODING_OF.get(entry.dtype)
    if encoding is None:
        fail(label, f"expected BF16, F32, F16 or F8_E4M3, found {entry.dtype}.")
    shape = entry.shape
    if layout.is_conv(name) and len(shape) == 3 and shape[1] == 1:
        shape = (shape[0], shape[2])
    if len(shape) not in (1, 2) or 0 in shape:
        fail(label, f"expected one or two dimensions, found the shape {list(entry.shape)}.")
    rows, cols = shape if len(shape) == 2 else (shape[0], 1)
    if item.scales is not None:
        expected = (-(-rows // SCALE_BLOCK), -(-cols // SCALE_BLOCK))
        scales = item.scales[1]
        if encoding != ENC_FP8 or scales.shape != expected or scales.dtype not in ("BF16", "F32"):
            fail(
                label,
                f"expected F8_E4M3 data with BF16 or F32 scales {list(expected)}, found "
                f"{entry.dtype} with {scales.dtype} {list(scales.shape)}.",
            )
    return layout.Stored(encoding, rows, cols)


def _rows(
    located: dict[str, _Located], stored: dict[str, layout.Stored]
) -> Callable[[str, int, int], TensorArg]:
    def rows(name: str, begin: int, end: int) -> TensorArg:
        item, shape = located[name], stored[name]
        width = (item.entry.end - item.entry.start) // shape.rows
        data = item.file.part(item.entry.name, begin * width, end * width)
        if item.entry.dtype == "F16":
            data = data.view(np.float16).astype(np.float32).view(np.uint8)
        scales = None
        if item.scales is not None:
            file, entry = item.scales
            width = (entry.end - entry.start) // entry.shape[0]
            first, last = begin // SCALE_BLOCK, -(-end // SCALE_BLOCK)
            scales = floats(file.part(entry.name, first * width, last * width), entry.dtype)
        return TensorArg(name, shape.encoding, end - begin, shape.cols, data, scales)

    return rows


def _bytes_of(located: dict[str, _Located]) -> dict[str, int]:
    return {
        name: sum(
            entry.end - entry.start
            for entry in (item.entry, item.scales[1] if item.scales else None)
            if entry is not None
        )
        for name, item in located.items()
    }


def floats(data: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    """BF16 or F32 bytes as a new float32 array."""
    if dtype == "F32":
        return data.copy().view(np.float32)
    return (data.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
