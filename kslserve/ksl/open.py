"""open_model: any of the inputs - container or KSL1 file, Hugging Face folder, `synth:SHAPE` - as a
ModelFile."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kslserve.engine.model import TensorArg
from kslserve.ksl import policy
from kslserve.ksl.container import open_container
from kslserve.ksl.files import fail, open_regular, quote_path
from kslserve.ksl.ksl1 import open_ksl1
from kslserve.ksl.ksl1_header import MIGRATION_HINT, OLD_SIGNATURE, SIGNATURE
from kslserve.ksl.model import CONFIG, ModelFile, Source, read_texts
from kslserve.ksl.publish import UNFINISHED
from kslserve.ksl.quantize import Rows
from kslserve.ksl.source import open_folder, read_text_files
from kslserve.ksl.synth import PREFIX, open_synth

BUNDLED = "ksl-nano"


def bundled_path() -> Path:
    """The model that comes with the package."""
    return Path(__file__).resolve().parent.parent / "data" / f"{BUNDLED}.ksl"


def open_model(
    path: str,
    *,
    weights: str = "auto",
    head: str = "auto",
    model_dir: str = "",
    progress: Callable[[str], None] = lambda name: None,
) -> ModelFile:
    """Open a model for serving. path: a file, a folder, `synth:SHAPE`, or `ksl-nano` for the
    bundled one. Tensors are read when an engine asks for them; those that are not in their encoding
    yet are quantized then, and `progress` hears their names. model_dir: a folder whose tokenizer,
    template and generation config replace the model's own. Raises ModelFileError.
    """
    source = open_source(path, model_dir)
    try:
        texts = read_texts(source)
        plan = policy.plan(source, weights, head)
        tensors = _tensors(source, plan, progress)
    except BaseException:
        source.close()
        raise
    return ModelFile(
        name=source.name,
        source=source.description,
        spec=texts.spec,
        tensors=tensors,
        weights=plan.weights,
        head=plan.head,
        tokenizer_json=texts.tokenizer_json,
        chat_template=texts.chat_template,
        config=source.config,
        generation=texts.generation,
        notes=(*source.notes, *plan.notes),
        on_close=source.close,
    )


def _tensors(source: Source, plan: policy.Plan, progress: Callable[[str], None]) -> list[TensorArg]:
    """The planned tensors, none of them read yet."""
    found = []
    for item in plan.tensors:
        fill = source.fills.get(item.origin)
        read = None
        if fill is None:
            made = item.encoding != source.stored[item.origin].encoding
            started = partial(progress, item.name) if made else lambda: None
            read = Rows(source, item, started)
        shape = (item.name, item.encoding, item.rows, item.cols)
        found.append(TensorArg(*shape, fill=fill, read=read))
    return found


def open_source(path: str, model_dir: str = "") -> Source:
    """The stored model behind a name. Raises ModelFileError."""
    texts = _text_overrides(model_dir) if model_dir else {}
    config = texts.pop(CONFIG, None)
    if path.startswith(PREFIX):
        source = open_synth(path, lambda: open_container(str(bundled_path())))
    elif path == BUNDLED:
        source = open_container(str(bundled_path()))
    elif os.path.isdir(path):
        source = open_folder(path)
    elif signature_of(path) == SIGNATURE:
        source = open_ksl1(path, config=config, config_where=f"{quote_path(model_dir)}/{CONFIG}")
    else:
        source = open_container(path)
    source.files |= texts
    return source


def _text_overrides(model_dir: str) -> dict[str, bytes]:
    if not os.path.isdir(model_dir):
        fail(quote_path(model_dir), "expected a folder as --model-dir, found none.")
    return read_text_files(model_dir)


def signature_of(path: str) -> bytes:
    """The first four bytes. Refuses by name the files whose first bytes say that they are no model
    file of ours."""
    handle, _ = open_regular(path)
    try:
        start = os.read(handle, len(UNFINISHED))
    finally:
        os.close(handle)
    where = quote_path(path)
    if start[:4] == OLD_SIGNATURE:
        fail(where, MIGRATION_HINT)
    if start[:4] == b"GGUF":
        fail(
            where,
            "this is a GGUF file, which this version does not read; give a KSL1 or container file "
            "or a Hugging Face folder.",
        )
    if start == UNFINISHED:
        fail(where, "this is what an interrupted conversion left: delete it and convert again.")
    return start[:4]
