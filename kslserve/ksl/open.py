"""open_model: any of the inputs - container file, Hugging Face folder, `synth:SHAPE` - as a
ModelFile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kslserve.ksl import policy
from kslserve.ksl.container import open_container
from kslserve.ksl.files import fail, open_regular, quote_path
from kslserve.ksl.model import CONFIG, ModelFile, Source, read_texts
from kslserve.ksl.quantize import reencode
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
    progress: Callable[[str], None] | None = None,
) -> ModelFile:
    """Open a model for serving. path: a file, a folder, `synth:SHAPE`, or `ksl-nano` for the
    bundled one. Tensors that are not in their encoding yet are quantized now; `progress` then hears
    each tensor's name. model_dir: a folder whose tokenizer, template and generation config replace
    the model's own. Raises ModelFileError.
    """
    source = open_source(path, model_dir)
    try:
        texts = read_texts(source)
        plan = policy.plan(source, weights, head)
        tensors = []
        for item in plan.tensors:
            arg = source.read(item.origin)
            encoding = item.encoding
            quantize = arg.encoding != encoding and arg.fill is None
            if quantize and progress is not None:
                progress(item.name)
            tensors.append(reencode(arg, item.name, encoding, quote_path(source.where)))
            if quantize:
                source.release()
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


def open_source(path: str, model_dir: str = "") -> Source:
    """The stored model behind a name. Raises ModelFileError."""
    texts = _text_overrides(model_dir) if model_dir else {}
    if path.startswith(PREFIX):
        source = open_synth(path, lambda: open_container(str(bundled_path())))
    elif path == BUNDLED:
        source = open_container(str(bundled_path()))
    elif os.path.isdir(path):
        source = open_folder(path)
    else:
        _check_signature(path)
        source = open_container(path)
    source.files |= texts
    return source


def _text_overrides(model_dir: str) -> dict[str, bytes]:
    if not os.path.isdir(model_dir):
        fail(quote_path(model_dir), "expected a folder as --model-dir, found none.")
    found = read_text_files(model_dir)
    found.pop(CONFIG, None)
    return found


def _check_signature(path: str) -> None:
    """Refuse by name the files whose first bytes say that they are another kind of model file."""
    handle, _ = open_regular(path)
    try:
        start = os.read(handle, 4)
    finally:
        os.close(handle)
    kinds = {b"KSL1": "a KSL1", b"TQF1": "a TQF1", b"GGUF": "a GGUF"}
    if start in kinds:
        fail(
            quote_path(path),
            f"this is {kinds[start]} file, which this version does not read; give a container file "
            "or a Hugging Face folder.",
        )
