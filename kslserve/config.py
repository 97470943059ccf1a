"""The one settings table: flags, environment, file keys and the documentation derive from
`Settings`.

Precedence: defaults < file of --config (TOML, keys with underscores) < environment (`KSL_` + the
flag in capitals) < flags. An unknown key or a bad value raises UsageError with one sentence. This
is the only module that reads the environment.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kslserve.errors import UsageError
from kslserve.setting import AUTO, Spec, parse, setting, toml

ENV_PREFIX = "KSL_"
FILE_BYTES = 1 << 20  # of settings, of keys


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting. Names with `_s` are seconds, `_ms` milliseconds, `_tokens` tokens, `_bytes`
    bytes. 0 means none where a bound is meant. Paths are strings, empty for none."""

    host: str = setting("127.0.0.1", "str", "address to listen on")
    port: int = setting(8100, "int", "port to listen on; 0 picks a free one", low=0, high=65535)
    uds: str = setting("", "str", "path of a Unix socket to listen on instead of host and port")
    model: str = setting(
        "ksl-nano", "str", "model file or folder, `synth:SHAPE`, or the bundled `ksl-nano`"
    )
    model_dir: str = setting(
        "", "str", "folder with tokenizer, template and configs, for KSL1 files and `synth:`"
    )
    weights: str = setting(
        "auto", "choice", "weight encoding; auto: a container's own, else fp6",
        choices=("auto", "fp6", "nvfp4", "nvfp4-mlp", "bf16"),
    )  # fmt: skip
    head: str = setting(
        "auto", "choice", "encoding of the output head", choices=("auto", "fp6", "nvfp4", "bf16")
    )
    activations: str = setting(
        "auto", "choice",
        "activations of matrix products; auto: the backend's own (CPU: int8, of bf16 weights "
        "bf16 where the machine has it; CUDA: e4m3 of FP6 prompts); float: rounded no further "
        "than to halves",
        choices=("auto", "float"),
    )  # fmt: skip
    device: str = setting(
        "auto", "choice", "backend; auto: the CUDA device where there is one",
        choices=("auto", "cpu", "cuda"),
    )  # fmt: skip
    engine: str = setting(
        "native", "choice", "engine; scripted and fake need no model",
        choices=("native", "scripted", "fake"),
    )  # fmt: skip
    script: str = setting("", "str", "script file of the scripted engine")
    cpu: str = setting(
        "auto", "choice", "instruction set of the CPU backend",
        choices=("auto", "scalar", "avx2", "avx512"),
    )  # fmt: skip
    threads: int = setting(0, "int", "engine threads; 0: one per core", low=0, high=1024)
    cpu_nice: int = setting(10, "int", "nice value of the CPU backend's threads", low=0, high=19)
    context: int = setting(
        AUTO, "int", "window of a request in tokens; auto: the model's maximum, or what fits "
        "beside 15 % of the free memory, 2 GiB at least, on CUDA 5 % and 512 MiB",
        low=16, auto=True,
    )  # fmt: skip
    kv: str = setting(
        "auto", "choice", "KV format; auto: bf16 on the CPU, q4 on CUDA",
        choices=("auto", "f32", "bf16", "fp8", "q4", "int8_g64", "int4_g32", "int8ring_int4"),
    )  # fmt: skip
    kv_ring: int = setting(
        1024, "int", "with int8ring_int4: how many of the last positions are read in int8, a "
        "multiple of 64", low=64, high=1 << 20,
    )  # fmt: skip
    kv_tokens: int = setting(
        AUTO, "int", "size of the KV pool in tokens; auto: a context for every sequence, as far as "
        "half of the memory goes, on CUDA all but that margin", low=16, auto=True,
    )  # fmt: skip
    block_tokens: int = setting(
        128, "int", "tokens of a KV block, a multiple of 16", low=16, high=4096
    )
    max_seqs: int = setting(
        AUTO, "int", "sequences that run at once; auto: 8, on CUDA 32 where their state is small "
        "beside the memory", low=1, high=1024, auto=True,
    )  # fmt: skip
    idle_return_s: float = setting(
        30.0, "float", "idle time after which the machine's memory of unused blocks and slabs goes "
        "back to the system, and, with --prefix-cache-dir, that of checkpoints after 20 times as "
        "long; 0: never", low=0,
    )  # fmt: skip
    wave_columns: int = setting(
        AUTO, "int", "prompt columns of a wave; auto: 512, on CUDA 2048", low=16, high=65536,
        auto=True,
    )  # fmt: skip
    wave_target_ms: float = setting(50.0, "float", "time a wave should take", low=1)
    decode_gap_ms: float = setting(
        250.0, "float", "longest gap of a decoding sequence beside prompts", low=1
    )
    submit_ahead: str = setting(
        "auto", "choice", "keep a second wave in the engine's ring while nothing is drafted; auto: "
        "on CUDA", choices=("auto", "on", "off"),
    )  # fmt: skip
    prefix_cache: bool = setting(
        True, "switch", "keep checkpoints of prompts and answers and adopt them"
    )
    prefix_cache_slabs: int = setting(
        AUTO, "int", "device slabs for checkpoints; auto: what memory allows", low=0, high=4096,
        auto=True,
    )  # fmt: skip
    prefix_cache_host_bytes: int = setting(
        AUTO, "bytes", "host memory for checkpoints that leave a device's; 0: none; auto: on CUDA "
        "4GiB, a quarter of what is free at most", auto=True,
    )  # fmt: skip
    prefix_cache_dir: str = setting("", "str", "folder of the prefix cache's disk tier")
    prefix_cache_disk_bytes: int = setting(20 << 30, "bytes", "budget of the disk tier")
    speculation: str = setting(
        "auto", "choice", "drafts, from the request's own text or by the MTP head; auto: both",
        choices=("off", "ngram", "mtp", "auto"),
    )  # fmt: skip
    draft_depth: int = setting(7, "int", "most MTP drafts of a sequence in a wave", low=1, high=16)
    draft_lanes: int = setting(
        15, "int", "most drafts of a sequence in a wave, of both kinds", low=1, high=16
    )
    draft_margin: float = setting(
        0.5, "float", "MTP stops before a draft that leads the second best one by less",
        low=0, high=1e6,
    )  # fmt: skip
    draft_vocab: int = setting(
        0, "int", "MTP drafts only ids below this; 0: any", low=0, high=2**31 - 1
    )
    preserve_thinking: bool = setting(
        True, "switch", "keep the reasoning of the history in the prompt"
    )
    messages_default_thinking: str = setting(
        "hidden", "choice", "Messages requests without `thinking`", choices=("off", "hidden", "on"),
    )  # fmt: skip
    recover_calls: bool = setting(
        True, "switch", "read calls that stray from the format; off: they stay text"
    )
    drift_corpus: str = setting("", "str", "file that collects tool-call recoveries")
    max_requests: int = setting(256, "int", "requests in the server at once", low=1)
    max_queue: int = setting(
        128, "int", "requests waiting for a slot; more are refused with 429", low=0
    )
    max_body_bytes: int = setting(32 << 20, "bytes", "largest request body", low=1024)
    queue_timeout_s: float = setting(300.0, "float", "longest wait for a slot (503)", low=0)
    request_timeout_s: float = setting(0.0, "float", "longest life of a request (504)", low=0)
    io_timeout_s: float = setting(
        30.0, "float", "longest time for a head, and between parts of a body", low=0
    )
    idle_timeout_s: float = setting(75.0, "float", "keep-alive of an idle connection", low=0)
    write_timeout_s: float = setting(60.0, "float", "a reader that takes nothing is closed", low=0)
    heartbeat_s: float = setting(10.0, "float", "longest silence of an open stream", low=0.05)
    watchdog_loop_s: float = setting(30.0, "float", "deadline of the event loop; 0: none", low=0)
    watchdog_wave_s: float = setting(120.0, "float", "deadline of a wave; 0: none", low=0)
    grace_s: float = setting(30.0, "float", "time that live requests get at shutdown", low=0)
    api_key: tuple[str, ...] = setting([], "list", "accepted key; repeatable")
    api_key_file: str = setting("", "str", "file of accepted keys, one per line")
    insecure: bool = setting(False, "switch", "allow a non-loopback address without a key")
    cors_origin: tuple[str, ...] = setting([], "list", "origin that gets CORS headers; repeatable")
    allow_host: tuple[str, ...] = setting([], "list", "further accepted Host name; repeatable")
    log_level: str = setting(
        "info", "choice", "log level", choices=("debug", "info", "warning", "error")
    )
    test_hooks: bool = setting(False, "switch", "forced output and fault hooks, for tests")
    test_bf16_dir: str = setting("", "str", "folder of the bf16 ksl-nano, for a test", flag=False)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Merged settings and where each came from: default, file, environment or flag."""

    settings: Settings
    sources: dict[str, str]


def specs() -> dict[str, tuple[Spec, Any]]:
    """Setting name to (spec, default), in table order."""
    return {f.name: (f.metadata["spec"], f.default) for f in dataclasses.fields(Settings)}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def load(
    flags: Mapping[str, str | bool | Sequence[str]],
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Merge all sources. flags: raw values by setting name. environ: None reads the process's.

    Raises UsageError for an unknown name, a bad value, an unreadable file, or a combination that
    cannot work.
    """
    environ = os.environ if environ is None else environ
    table = specs()
    values: dict[str, Any] = {}
    sources = dict.fromkeys(table, "default")

    config_file = config_file or environ.get(ENV_PREFIX + "CONFIG")
    if config_file:
        for key, raw in _read_file(config_file).items():
            if key not in table:
                raise UsageError(f"{config_file}: unknown setting `{key}`{_hint(key, table)}.")
            values[key] = parse(f"{config_file}: {key}", table[key][0], raw)
            sources[key] = "file"
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == ENV_PREFIX + "CONFIG":
            continue
        key = variable[len(ENV_PREFIX) :].lower()
        if key not in table:
            raise UsageError(f"unknown environment setting {variable}{_hint(key, table)}.")
        raw = [p for p in text.split(",") if p] if table[key][0].kind == "list" else text
        values[key] = parse(variable, table[key][0], raw)
        sources[key] = "environment"
    for key, raw in flags.items():
        values[key] = parse(flag_of(key), table[key][0], raw)
        sources[key] = "flag"
    settings = Settings(**values)
    _check(settings)
    return Loaded(settings, sources)


def _hint(key: str, table: Mapping[str, Any]) -> str:
    import difflib

    near = difflib.get_close_matches(key, table, n=1)
    return f" (did you mean `{near[0]}`?)" if near else ""


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(_text_of(path, f"the settings file {path}"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not a TOML file: {error}.") from error


def _text_of(path: str, what: str) -> str:
    """All of a file, which may be a pipe, but none that is too large for settings or never ends. A
    mark of its byte order is left out. UsageError otherwise."""
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read {what}: {reason}.") from error
    if len(data) > FILE_BYTES:
        raise UsageError(f"cannot read {what}: it has more than {FILE_BYTES >> 20} MiB.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {what}: it is not UTF-8 at byte {error.start}.") from error


def _check(s: Settings) -> None:
    """Combinations that cannot work."""
    if s.block_tokens % 16:
        raise UsageError(f"--block-tokens must be a multiple of 16, not {s.block_tokens}.")
    if s.kv_ring % 64:
        raise UsageError(f"--kv-ring must be a multiple of 64, not {s.kv_ring}.")
    if not s.model:
        raise UsageError("--model is empty.")
    if not s.uds and not s.host:
        raise UsageError("--host is empty; 0.0.0.0 stands for every address of this machine.")
    if s.engine == "scripted" and not s.script:
        raise UsageError("--engine scripted needs --script.")
    if not s.uds and not is_loopback(s.host) and not s.insecure and not keys_of(s):
        raise UsageError(
            f"--host {s.host} is reachable from other machines: set --api-key, or --insecure to "
            "serve without one."
        )
    for origin in s.cors_origin:
        if origin == "*" or "://" not in origin:
            raise UsageError(
                f"--cors-origin is an origin such as https://app.example, not {origin!r}."
            )


def is_loopback(host: str) -> bool:
    """Whether an address or name can be reached from this machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def keys_of(s: Settings) -> tuple[str, ...]:
    """All accepted API keys. Raises UsageError when the key file cannot be read or is empty."""
    keys = list(s.api_key)
    if s.api_key_file:
        text = _text_of(s.api_key_file, f"--api-key-file {s.api_key_file}")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise UsageError(f"--api-key-file {s.api_key_file} holds no key.")
        keys.extend(lines)
    return tuple(keys)


def describe(loaded: Loaded) -> str:
    """The merged settings with their sources, as TOML with comments (for --print-config). Keys are
    not shown."""
    lines = []
    for name, (spec, _) in specs().items():
        value = getattr(loaded.settings, name)
        source = loaded.sources[name]
        if name == "api_key" and value:
            lines.append(f"# {name}: {len(value)} set ({source})")
            continue
        text = "auto" if spec.auto and value == AUTO else value
        lines.append(f"{name} = {toml(text)}  # {source}")
    return "\n".join(lines)
