"""What a model file is to the rest of the program: ModelFile; and to the readers: Source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kslserve.engine.model import Fill, ModelSpec, TensorArg
from kslserve.ksl.files import fail, parse_object, quote_path
from kslserve.ksl.generation import (
    GenerationDefaults,
    TokenizerFacts,
    read_generation,
    read_tokenizer,
)
from kslserve.ksl.layout import Stored

# Text files that belong to a model, by the names that they have in a container.
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
CONFIG = "config.json"
GENERATION = "generation_config.json"
TEXT_FILES = (TOKENIZER, TEMPLATE, CONFIG, GENERATION)


@dataclass(slots=True, eq=False)
class ModelFile:
    """An open model: all that serving needs. Owns the files that `tensors` are read from.

    name: for clients. source: a description for people. weights, head: the encodings that are
    served (`fp6`, `nvfp4`, `nvfp4-mlp`, `bf16`). tokenizer_json and chat_template: None when the
    model has none. notes: sentences for the start message.
    """

    name: str
    source: str
    spec: ModelSpec
    tensors: list[TensorArg]
    weights: str
    head: str
    tokenizer_json: bytes | None
    chat_template: str | None
    config: dict[str, Any]
    generation: GenerationDefaults
    notes: tuple[str, ...] = ()
    on_close: Callable[[], None] | None = field(default=None, repr=False)

    def close(self) -> None:
        """Forget the tensors and close the files. Idempotent."""
        self.tensors = []
        if self.on_close is not None:
            self.on_close()
            self.on_close = None

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class Source:
    """A model as it is stored, tensor by tensor: what `policy` plans over and `convert` streams.

    kind: `container`, `ksl1`, `folder` or `synth`. where: its path, which starts error texts. spec:
    token_limit is the vocabulary until `texts` is read. stored: every tensor in file order.
    stored_bytes: what each takes in the file, scales included. rows: a copy of rows [begin, end) of
    one tensor as a matrix of its own, begin a multiple of 128; for any thread. fills: how the
    tensors of a model without data are made; it has no rows. files: the bytes of TEXT_FILES that
    exist. weights, head: the encodings of a quantized file; else empty. foreign:
    the encodings are not those of our policy, which settles what they leave open. sealed: tensors
    whose stored encoding has no exact equal here, handed out in a wider one and never quantized
    again. payload: bytes that header or metadata promise, and that there are. facts: what only an
    inspector asks for.
    """

    name: str
    description: str
    where: str
    spec: ModelSpec
    tied: bool
    stored: dict[str, Stored]
    rows: Callable[[str, int, int], TensorArg]
    config: dict[str, Any]
    config_eos: tuple[int, ...]
    files: dict[str, bytes]
    kind: str
    stored_bytes: dict[str, int]
    weights: str = ""
    head: str = ""
    foreign: bool = False
    sealed: frozenset[str] = frozenset()
    payload: tuple[int, int] | None = None
    fills: dict[str, Fill] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    on_close: Callable[[], None] = lambda: None

    def read(self, name: str) -> TensorArg:
        """A copy of a whole tensor."""
        return self.rows(name, 0, self.stored[name].rows)

    def close(self) -> None:
        self.on_close()


@dataclass(frozen=True, slots=True)
class Texts:
    """The checked contents of a source's text files, and the spec with its token limit."""

    spec: ModelSpec
    tokenizer_json: bytes | None
    chat_template: str | None
    generation: GenerationDefaults


def read_texts(source: Source) -> Texts:
    """ModelFileError when a text file is not what its name says."""
    where = quote_path(source.where)
    tokenizer: TokenizerFacts | None = None
    spec = source.spec
    if TOKENIZER in source.files:
        tokenizer = read_tokenizer(source.files[TOKENIZER], f"{where}: {TOKENIZER}")
        if tokenizer.size > spec.vocab:
            fail(
                where,
                f"the tokenizer has ids up to {tokenizer.size - 1}, but the embedding has "
                f"{spec.vocab} rows.",
            )
        spec = dataclasses.replace(spec, token_limit=tokenizer.size)
    template = None
    if TEMPLATE in source.files:
        try:
            template = source.files[TEMPLATE].decode("utf-8")
        except UnicodeDecodeError as error:
            fail(where, f"{TEMPLATE}: expected UTF-8, found another byte at byte {error.start}.")
    values = None
    label = f"{where}: {GENERATION}"
    if GENERATION in source.files:
        values = parse_object(source.files[GENERATION], label)
    generation = read_generation(values, source.config_eos, tokenizer, spec.vocab, label)
    return Texts(spec, source.files.get(TOKENIZER), template, generation)
