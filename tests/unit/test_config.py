"""The settings table: precedence, conversion, and one clear sentence for all that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kslserve import config
from kslserve.cli import run, serve_parser
from kslserve.errors import UsageError
from kslserve.setting import AUTO


def load(flags: dict | None = None, environ: dict | None = None, file: Path | None = None):
    return config.load(flags or {}, config_file=str(file) if file else None, environ=environ or {})


def test_defaults_need_nothing() -> None:
    loaded = load()
    assert loaded.settings.port == 8100
    assert loaded.settings.context == AUTO
    assert set(loaded.sources.values()) == {"default"}


def test_precedence_is_defaults_file_environment_flags(tmp_path: Path) -> None:
    file = tmp_path / "ksl.toml"
    file.write_text('port = 1\nhost = "127.0.0.2"\nkv = "f32"\nmax_body_bytes = "2MiB"\n')
    loaded = load({"port": "3"}, {"KSL_PORT": "2", "KSL_HOST": "localhost"}, file)
    assert (loaded.settings.port, loaded.settings.host, loaded.settings.kv) == (
        3,
        "localhost",
        "f32",
    )
    assert loaded.settings.max_body_bytes == 2 << 20
    assert [loaded.sources[k] for k in ("port", "host", "kv", "uds")] == [
        "flag", "environment", "file", "default",
    ]  # fmt: skip


def test_config_file_can_come_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "ksl.toml"
    file.write_text("threads = 3\n")
    assert load(environ={"KSL_CONFIG": str(file)}).settings.threads == 3


def test_lists_switches_and_auto() -> None:
    loaded = load(
        {"cors_origin": ["https://a.example", "app://b"], "kv_tokens": "auto"},
        {"KSL_API_KEY": "one,two", "KSL_TEST_HOOKS": "1"},
    ).settings
    assert loaded.cors_origin == ("https://a.example", "app://b")
    assert loaded.api_key == ("one", "two")
    assert loaded.test_hooks is True
    assert loaded.kv_tokens == AUTO


@pytest.mark.parametrize(
    ("flags", "environ", "part"),
    [
        ({"port": "abc"}, {}, "--port must be a whole number, not 'abc'"),
        ({"port": "70000"}, {}, "--port must be at most 65535, not 70000"),
        ({"context": "x"}, {}, "--context must be a whole number or auto"),
        ({"kv": "q5"}, {}, "--kv must be one of auto, f32, bf16, fp8, q4,"),
        ({"max_body_bytes": "2 parsecs"}, {}, "--max-body-bytes is a size such as 64MiB"),
        ({"io_timeout_s": "nan"}, {}, "--io-timeout-s must be a number"),
        ({"io_timeout_s": "-1"}, {}, "--io-timeout-s must be at least 0"),
        ({"block_tokens": "100"}, {}, "--block-tokens must be a multiple of 16, not 100"),
        ({"kv_ring": "100"}, {}, "--kv-ring must be a multiple of 64, not 100"),
        ({}, {"KSL_TEST_HOOKS": "yes"}, "KSL_TEST_HOOKS is a switch: 0 or 1, not 'yes'"),
        ({}, {"KSL_PROT": "1"}, "unknown environment setting KSL_PROT (did you mean `port`?)"),
        ({"draft_lanes": "17"}, {}, "--draft-lanes must be at most 16, not 17"),
        ({"draft_margin": "inf"}, {}, "--draft-margin must be a number"),
        ({"engine": "scripted"}, {}, "--engine scripted needs --script"),
        ({"host": "0.0.0.0"}, {}, "--host 0.0.0.0 is reachable from other machines"),
        ({"cors_origin": ["*"]}, {}, "--cors-origin is an origin such as"),
        ({"host": ""}, {}, "--host is empty"),
        ({"model": ""}, {}, "--model is empty"),
        ({"api_key_file": "/nonexistent/keys"}, {}, "cannot read --api-key-file"),
        ({"api_key_file": "/dev/zero"}, {}, "/dev/zero: it has more than 1 MiB"),
        ({"api_key_file": "/tmp"}, {}, "/tmp: Is a directory."),
    ],
)
def test_bad_values_are_one_sentence(flags: dict, environ: dict, part: str) -> None:
    if "api_key_file" in flags:
        flags = {**flags, "host": "0.0.0.0"}
    with pytest.raises(UsageError) as caught:
        load(flags, environ)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prot = 1", "unknown setting `prot` (did you mean `port`?)"),
        ("port = true", "port must be a whole number, not True"),
        ("port = [", "is not a TOML file"),
        ("host = 3", "host is a text, not 3"),
        ("api_key = 3", "api_key is a list of texts"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "ksl.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"ksl\.toml") as caught:
        load(file=file)
    assert part in str(caught.value)


@pytest.mark.parametrize("path", ["/nonexistent/ksl.toml", "/tmp", "/dev/zero"])
def test_what_is_no_file_of_settings(path: str) -> None:
    with pytest.raises(UsageError, match=f"cannot read the settings file {path}: "):
        load(file=Path(path))


def test_a_mark_of_the_byte_order_is_no_part_of_a_file(tmp_path: Path) -> None:
    settings, keys = tmp_path / "ksl.toml", tmp_path / "keys"
    settings.write_text("port = 7\n", encoding="utf-8-sig")
    keys.write_text("one\n", encoding="utf-8-sig")
    loaded = load({"api_key_file": str(keys)}, file=settings).settings
    assert (loaded.port, config.keys_of(loaded)) == (7, ("one",))
    keys.write_bytes(b"\xff\xfeo\0n\0e\0")
    with pytest.raises(UsageError, match="it is not UTF-8 at byte 0"):
        config.keys_of(loaded)


def test_print_config_is_toml_and_hides_keys(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    import tomllib

    assert run(["--print-config", "--api-key", "s3cret", "--kv-tokens", "4096"]) == 0
    text = capsys.readouterr().out
    assert "s3cret" not in text
    values = tomllib.loads(text)
    assert values["kv_tokens"] == 4096
    # What it prints loads again as a settings file.
    file = tmp_path / "again.toml"
    file.write_text(text)
    again = load(file=file).settings
    assert again.kv_tokens == 4096


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture) -> None:
    for arguments in (["--nonsense"], ["--port", "x"], ["convert"], ["--port"]):
        assert run(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("kslserve: ")
        assert err.count("\n") == 1


def test_every_setting_has_a_flag_unless_it_says_so() -> None:
    flags = {a.dest for a in serve_parser()._actions}
    for name, (spec, _) in config.specs().items():
        assert (name in flags) == spec.flag


def test_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    settings = load({"api_key_file": str(file), "api_key": ["zero"]}).settings
    assert config.keys_of(settings) == ("zero", "one", "two")
    file.write_text("\n")
    with pytest.raises(UsageError, match="holds no key"):
        config.keys_of(settings)
