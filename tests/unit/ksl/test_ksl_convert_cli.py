from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kslserve.cli.convert import add_arguments, run
from kslserve.ksl.open import open_model
from tests.unit.ksl.ksl_build import folder, text_config


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "m", text_config(intermediate_size=36))
    target = str(tmp_path / "m.ksl")
    assert run(parse(str(source), target, "--weights", "nvfp4", "--head", "nvfp4")) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("layer 0: 14 tensors")
    assert any(line.startswith("note: model.layers.0.mlp.down_proj.weight stays") for line in out)
    assert out[-1] == f"{target}: {Path(target).stat().st_size} bytes, weights nvfp4, head nvfp4"
    with open_model(target) as model:
        assert (model.weights, model.head) == ("nvfp4", "nvfp4")


def test_choices() -> None:
    args = parse("a", "b")
    assert (args.source, args.destination, args.weights, args.head) == ("a", "b", "auto", "auto")
    with pytest.raises(SystemExit):
        parse("a", "b", "--weights", "int4")
