"""The model that comes with the package."""

from __future__ import annotations

import numpy as np

from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_BF16, ENC_E2M3, ENCODING_NAMES
from kslserve.ksl.container import verify
from kslserve.ksl.layout import EMBEDDING, HEAD, role
from kslserve.ksl.open import bundled_path, open_model
from tests.unit.ksl import ksl_reference as reference
from tests.unit.ksl.ksl_build import loaded


def test_it_is_whole_and_small() -> None:
    assert verify(str(bundled_path())) == []
    assert bundled_path().stat().st_size < 20 << 20


def test_what_it_holds() -> None:
    with open_model("ksl-nano") as model:
        assert (model.name, model.weights, model.head) == ("ksl-nano", "fp6", "fp6")
        assert (model.spec.layers, model.spec.hidden, model.spec.vocab) == (12, 256, 8192)
        assert (model.spec.mtp_layers, model.spec.token_limit) == (1, 8192)
        assert (model.generation.temperature, model.generation.eos_ids) == (0.0, (8168, 8166))
        assert model.chat_template is not None
        assert "tool_call" in model.chat_template
        assert model.notes == ()
        for arg in loaded(model):
            assert arg.encoding == (ENC_E2M3 if role(arg.name) else ENC_BF16), arg.name


def test_dequantization_is_bit_exact() -> None:
    with open_model("ksl-nano") as model:
        by_name = {arg.name: arg for arg in loaded(model)}
        for arg in loaded(model):
            if arg.encoding == ENC_E2M3:
                found = codecs.decode(
                    arg.encoding, arg.data, arg.scales, arg.globals_, arg.rows, arg.cols
                )
                name = ENCODING_NAMES[arg.encoding]
                expected = reference.decode(name, arg.data, arg.scales, None, arg.rows, arg.cols)
                assert found.tobytes() == expected.tobytes(), arg.name
        # the head is the embedding, quantized
        values = np.frombuffer(by_name[EMBEDDING].data, np.uint16).astype(np.uint32) << 16
        codes, scales, _ = reference.encode("e2m3", values.view(np.float32).reshape(8192, 256))
        assert bytes(by_name[HEAD].data) == codes.tobytes()
        assert bytes(by_name[HEAD].scales) == scales.tobytes()
