"""NativeEngine: the engine protocol over the C ABI of `_kslserve`.

The engine thread writes done records into a ring and makes a descriptor readable; the event loop
then drains the ring with one call into one buffer. Native code calls back into Python only while
an engine opens, to read the weights that are not in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from _kslserve import ffi, lib

from kslserve.engine.budget import kv_layers
from kslserve.engine.equality import PROPERTIES, Closeness, Equality
from kslserve.engine.marshal import Pending, WavePacker, check_sizes
from kslserve.engine.model import LAYER_KINDS, ModelSpec, PoolSizes, TensorArg
from kslserve.engine.records import DoneReader
from kslserve.engine.tensors import TensorTable
from kslserve.engine.types import Done, EngineInfo, Progress, Wave
from kslserve.errors import EngineError, EnginePoisoned, ModelFileError

check_sizes(ffi, lib)

KV_FORMATS = {
    "f32": lib.KSL_KV_F32,
    "bf16": lib.KSL_KV_BF16,
    "fp8": lib.KSL_KV_FP8,
    "q4": lib.KSL_KV_Q4,
    "int8_g64": lib.KSL_KV_INT8_G64,
    "int4_g32": lib.KSL_KV_INT4_G32,
    "int8ring_int4": lib.KSL_KV_INT8RING_INT4,
}
ACTIVATIONS = {"auto": lib.KSL_ACT_AUTO, "float": lib.KSL_ACT_FLOAT}
ISAS = {
    "auto": lib.KSL_ISA_AUTO,
    "scalar": lib.KSL_ISA_SCALAR,
    "avx2": lib.KSL_ISA_AVX2,
    "avx512": lib.KSL_ISA_AVX512,
}
CPU_LIBRARY = lib
PHASES = ("idle", "running", "closed", "poisoned")


def isa_names() -> tuple[str, ...]:
    """The instruction set paths that this build has and this machine runs."""
    return tuple(_text(lib.ksl_isa_list()).split())


def kv_code_bytes(
    spec: ModelSpec, kv_format: str, activations: str = "auto", isa: str = "auto"
) -> int:
    """Bytes of codes that the CPU backend holds beside a token's keys and values on this machine;
    0 where it reads the rows themselves."""
    of_head = lib.ksl_kv_code_bytes(
        KV_FORMATS[kv_format], ACTIVATIONS[activations], ISAS[isa], spec.head_dim
    )
    return kv_layers(spec) * spec.kv_heads * int(of_head)


class NativeEngine:
    """Made by `open`. Methods are for one thread, except `progress`."""

    def __init__(
        self,
        handle: Any,
        spec: ModelSpec,
        pools: PoolSizes,
        kv_format: str,
        library: Any = lib,
    ) -> None:
        self._handle = handle
        self._lib = library
        self._handle_lock = threading.Lock()  # progress is for any thread, close frees the handle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_done: Callable[[Done], None] | None = None
        self._pending: dict[int, Pending] = {}  # by wave id, in order of submission
        self._info = _info(library, handle, pools, kv_format)
        self._final: Progress | None = None
        self._error = ffi.new("ksl_error *")
        self._reader = DoneReader(lib, pools.ring_depth * (pools.slots + 1))
        self._records = ffi.from_buffer("ksl_done *", self._reader.memory)
        self._packer = WavePacker(
            ffi, spec.vocab, _tap_width(spec), pools.slots, pools.wave_columns
        )

    @classmethod
    def open(
        cls,
        spec: ModelSpec,
        tensors: Sequence[TensorArg],
        pools: PoolSizes,
        *,
        kv_format: str,
        activations: str = "auto",
        isa: str = "auto",
        threads: int = 0,
        nice: int = 0,
        draft_margin: float = 0.0,
        draft_vocab: int = 0,
        test_hooks: bool = False,
        portable: bool = False,
        fail_alloc_at: int = 0,
        library: Any = lib,
    ) -> NativeEngine:
        """Repack all weights and allocate all pools; may take long and is safe in a worker thread.

        draft_margin, draft_vocab: when MTP stops drafting and what it may draft, see ksl.h.
        portable: a device takes kernels made for other devices, to try them.
        library: the one with the backend, `_kslserve.lib` (CPU) or a `CudaLibrary`.
        Raises ModelFileError for tensors, dimensions or sizes that the engine refuses and
        EngineError when memory is out, with the native text; and what a tensor's `read` raises.
        """
        keep: list[Any] = []
        config = _config(spec, pools, keep)
        config.kv_format = _choice("KV format", KV_FORMATS, kv_format)
        config.activations = _choice("activation arithmetic", ACTIVATIONS, activations)
        config.isa = _choice("instruction set", ISAS, isa)
        config.threads = threads
        config.nice = nice
        config.draft_margin = draft_margin
        config.draft_vocab = draft_vocab
        config.test_hooks = test_hooks * lib.KSL_HOOK_OPS | portable * lib.KSL_HOOK_PORTABLE
        config.fail_alloc_at = fail_alloc_at
        table = TensorTable(tensors)
        handle, error = ffi.new("ksl_engine **"), ffi.new("ksl_error *")
        code = library.ksl_open(config, table.structs, len(tensors), handle, error)
        table.raise_read_error()
        if code == lib.KSL_INVALID:
            raise ModelFileError(_sentence(error))
        if code != lib.KSL_OK:
            raise EngineError(_sentence(error))
        return cls(handle[0], spec, pools, kv_format, library)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def start(self, on_done: Callable[[Done], None]) -> None:
        if self._on_done is not None or self._handle is None:
            raise EngineError("The engine was started before, or is closed.")
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._lib.ksl_event_fd(self._handle), self._drain)

    def submit(self, wave: Wave) -> bool:
        if self._handle is None:
            raise EngineError("The engine is closed.")
        pointer, pending, keep = self._packer.pack(wave)
        code = self._lib.ksl_submit(self._handle, pointer, self._error)
        del keep
        if code == lib.KSL_OK:
            self._pending[wave.id] = pending
            return True
        if code == lib.KSL_AGAIN:
            return False
        text = _sentence(self._error)
        raise EnginePoisoned(text) if code == lib.KSL_FATAL else EngineError(text)

    def progress(self) -> Progress:
        with self._handle_lock:
            if self._handle is None:
                assert self._final is not None
                return self._final
            progress = ffi.new("ksl_progress *")
            self._lib.ksl_get_progress(self._handle, progress)
        return Progress(
            progress.submitted, progress.started, progress.completed, PHASES[progress.phase],
            progress.graphs, progress.graph_kernels, progress.graphs_made,
        )  # fmt: skip

    def close(self, deadline_s: float = 5.0) -> None:
        if self._handle is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._lib.ksl_event_fd(self._handle))
        last = self.progress()
        self._final = dataclasses.replace(last, phase="closed")
        with self._handle_lock:
            handle, self._handle = self._handle, None
        self._lib.ksl_close(handle, int(deadline_s * 1000))
        self._pending.clear()

    def _drain(self) -> None:
        """The descriptor is readable: read what waits and report the waves that ended."""
        n = self._lib.ksl_poll(self._handle, self._records, self._reader.capacity)
        on_done = self._on_done
        assert on_done is not None
        # Everything is read before anything is reported: a callback may submit, or close.
        ended = self._reader.read(n, self._pending)
        for done in ended:
            if done.error is not None:
                done.error = self._fatal_text()
        for done in ended:
            on_done(done)

    def _fatal_text(self) -> str:
        error = ffi.new("ksl_error *")
        self._lib.ksl_last_error(self._handle, error)
        return _sentence(error)


def _text(pointer: Any) -> str:
    text: str = ffi.string(pointer).decode("utf-8", "replace")
    return text


def _sentence(error: Any) -> str:
    text = _text(error.text)
    return text if text.endswith(".") else text + "."


def _choice(what: str, table: dict[str, int], name: str) -> int:
    if name not in table:
        raise EngineError(f"The {what} {name} is unknown; known are {', '.join(table)}.")
    return table[name]


def _config(spec: ModelSpec, pools: PoolSizes, keep: list[Any]) -> Any:
    """A ksl_config with dimensions and pools."""
    kinds = ffi.new("uint8_t[]", [LAYER_KINDS.index(kind) for kind in spec.layer_kinds] or [0])
    keep.append(kinds)
    config = ffi.new("ksl_config *")
    for name in (
        "vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim",
        "rotary_dims", "lin_key_heads", "lin_value_heads", "lin_key_dim", "lin_value_dim",
        "conv_taps", "mtp_layers", "token_limit", "rope_theta", "norm_eps",
    ):  # fmt: skip
        setattr(config, name, getattr(spec, name))
    for name in (
        "slots",
        "slabs",
        "blocks",
        "block_tokens",
        "wave_columns",
        "ring_depth",
        "kv_ring",
    ):
        setattr(config, name, getattr(pools, name))
    config.max_blocks_per_slot = pools.blocks_per_slot
    config.layer_kinds = kinds
    return config


def _info(library: Any, handle: Any, pools: PoolSizes, kv_format: str) -> EngineInfo:
    raw = ffi.new("ksl_info *")
    library.ksl_get_info(handle, raw)
    names = (
        "vocab", "hidden", "layers", "slots", "slabs", "blocks", "block_tokens", "threads",
        "weight_bytes", "token_bytes", "slab_bytes", "block_bytes", "kv_token_bytes",
        "kv_code_bytes", "pool_bytes", "scratch_bytes",
    )  # fmt: skip
    return EngineInfo(
        name="native",
        blocks_per_slot=pools.blocks_per_slot,
        wave_columns=pools.wave_columns,
        ring_depth=pools.ring_depth,
        has_mtp=bool(raw.has_mtp),
        isa=_text(raw.isa),
        activation=_text(raw.activation),
        note=_text(raw.note),
        equality=_equality(raw),
        numerics=_text(raw.numerics),
        kv_format=kv_format,
        **{name: getattr(raw, name) for name in names},
    )


def _equality(raw: Any) -> Equality:
    said = (Closeness(far.distance, far.divergence) for far in raw.equality)
    found = dict(zip(PROPERTIES, said, strict=True))
    return Equality(**found, columns=raw.equal_columns, row=raw.equal_row)


def _tap_width(spec: ModelSpec) -> int:
    """At least the floats of the widest tap in one column."""
    conv = 2 * spec.lin_key_heads * spec.lin_key_dim + spec.lin_value_heads * spec.lin_value_dim
    heads = 2 * spec.heads * spec.head_dim
    return max(spec.vocab, 2 * spec.hidden, spec.intermediate, conv, heads)
