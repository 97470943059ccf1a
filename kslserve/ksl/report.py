"""What a model file holds, as plain values: for `inspect`.

A KSL1 file whose size is wrong, or that this version does not read, is still described from its
header.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kslserve.engine.codecs import ENC_E2M3, ENCODING_NAMES
from kslserve.errors import ModelFileError
from kslserve.ksl import container, layout
from kslserve.ksl import ksl1_header as ksl1
from kslserve.ksl.files import RegularFile, fail, quote_path
from kslserve.ksl.ksl1 import facts_of, family_of, payload_sizes, read_header
from kslserve.ksl.ksl1_records import records
from kslserve.ksl.model import CONFIG, TEXT_FILES, Source
from kslserve.ksl.open import BUNDLED, bundled_path, open_source, signature_of
from kslserve.ksl.synth import PREFIX

CHUNK_BYTES = 16 << 20
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Tensor:
    """encoding: its name. size: bytes in the file."""

    name: str
    encoding: str
    elements: int
    size: int


def describe(path: str, model_dir: str = "") -> dict[str, Any]:
    """Everything about a model: JSON values only. ModelFileError for what is no model file."""
    if is_ksl1(path):
        found = _of_header(path)
        if found is not None:
            return found
    source = open_for_report(path, model_dir)
    try:
        return _of_source(path, source)
    finally:
        source.close()


def is_ksl1(path: str) -> bool:
    if path == BUNDLED or path.startswith(PREFIX) or os.path.isdir(path):
        return False
    return signature_of(path) == ksl1.SIGNATURE


def open_for_report(path: str, model_dir: str = "") -> Source:
    """Like open_source, but a container may end too early or too late."""
    if path.startswith(PREFIX) or os.path.isdir(path) or is_ksl1(path):
        return open_source(path, model_dir)
    return container.open_container(str(bundled_path()) if path == BUNDLED else path, whole=False)


def _of_source(path: str, source: Source) -> dict[str, Any]:
    tensors = [
        Tensor(
            name, ENCODING_NAMES[item.encoding], item.rows * item.cols, source.stored_bytes[name]
        )
        for name, item in source.stored.items()
    ]
    expected, actual = source.payload or (None, None)
    e2m3 = any(item.encoding == ENC_E2M3 for item in source.stored.values())
    return _report(
        path=path,
        kind=source.kind,
        config=source.config,
        layer_kinds=source.spec.layer_kinds,
        tensors=tensors,
        tied=source.tied,
        expected=expected,
        actual=actual,
        facts={
            "flags": None,
            "block_scaled_e2m3": e2m3,
            "has_mtp_section": source.spec.mtp_layers > 0,
            "weights": source.weights or None,
            "head": source.head or None,
            **source.facts,
        },
        texts=[
            name
            for name in TEXT_FILES
            if name in source.files and (name, source.kind) != (CONFIG, "ksl1")
        ],
        notes=source.notes,
    )


def _of_header(path: str) -> dict[str, Any] | None:
    """The report of a KSL1 file of the wrong size or of a kind that is not read, from its header;
    None for one that can be opened. ModelFileError for any other fault."""
    file = RegularFile(path)
    try:
        header = read_header(file)
        family = family_of(header, file.where)
        expected, actual = payload_sizes(header, family, file.size)
        try:
            open_source(path).close()
        except ModelFileError as error:
            if expected == actual and not (
                header.flags & ksl1.FLAG_SPARSE or header.non_quant_dtype != ksl1.BF16
            ):
                raise
            problem = error.message
        else:
            return None
    finally:
        file.close()
    quantized = "e2m3" if header.flags & ksl1.FLAG_E2M3 else "fp8"
    names = {"nq": "bf16" if header.non_quant_dtype == ksl1.BF16 else "f16", "f32": "f32"}
    tensors = [
        Tensor(
            record.name,
            names.get(record.kind, quantized),
            record.rows * record.cols,
            record.size(header.flags),
        )
        for record in records(family.spec, family.tied, header.has_mtp_section)
    ]
    return _report(
        path=path,
        kind="ksl1",
        config=ksl1.config_of(header),
        layer_kinds=family.spec.layer_kinds,
        tensors=tensors,
        tied=family.tied,
        expected=expected,
        actual=actual,
        facts={**facts_of(header), "sparse": bool(header.flags & ksl1.FLAG_SPARSE)},
        texts=[],
        notes=[f"it cannot be served: {problem}"],
    )


def _report(
    *,
    path: str,
    kind: str,
    config: dict[str, Any],
    layer_kinds: Iterable[str],
    tensors: list[Tensor],
    tied: bool,
    expected: int | None,
    actual: int | None,
    facts: dict[str, Any],
    texts: list[str],
    notes: list[str],
) -> dict[str, Any]:
    # A quantized copy of a tied head is no parameter of the model.
    parameters = sum(t.elements for t in tensors if not (tied and t.name == layout.HEAD))
    size = sum(t.size for t in tensors)
    components: Counter[str] = Counter()
    for tensor in tensors:
        components[component_of(tensor.name)] += tensor.size
    return {
        "path": path,
        "kind": kind,
        **facts,
        "config": config,
        "layer_type_counts": {f"{k}_attention": n for k, n in Counter(layer_kinds).items()},
        "tensor_kind_counts": dict(Counter(t.encoding for t in tensors)),
        "component_bytes": dict(components),
        "tensor_bytes": size,
        "parameters": parameters,
        "bits_per_weight": round(8 * size / parameters, 4) if parameters and size else None,
        "expected_payload_bytes": expected,
        "actual_payload_bytes": actual,
        "payload_match": None if expected is None else expected == actual,
        "text_files": texts,
        "notes": notes,
    }


def component_of(name: str) -> str:
    """The part of the model that a tensor belongs to."""
    if name == layout.EMBEDDING:
        return "embedding"
    if name == layout.HEAD:
        return "head"
    if name.startswith("mtp."):
        return "mtp"
    if ".mlp." in name:
        return "mlp"
    if ".linear_attn." in name:
        return "linear_attention"
    return "full_attention" if ".self_attn." in name else "norms"


def verify(path: str, progress: Progress) -> dict[str, Any]:
    """Recompute digests. `wrong`: names of what does not match. A KSL1 file has none: its own
    `sha256` is given, to be compared with a published one. ModelFileError for a folder or shapes,
    which have none either."""
    if path.startswith(PREFIX) or os.path.isdir(path):
        fail(quote_path(path), "expected a file for --verify; only files have digests.")
    if not is_ksl1(path):
        path = str(bundled_path()) if path == BUNDLED else path
        return {"wrong": container.verify(path, progress)}
    file = RegularFile(path)
    try:
        digest = hashlib.sha256()
        for begin in range(0, file.size, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, file.size)
            digest.update(file.read(begin, end - begin).data)
            progress(end, file.size)
        return {"wrong": [], "sha256": digest.hexdigest()}
    finally:
        file.close()
