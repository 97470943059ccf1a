"""What forms of activations cost in the distribution of the next token, whatever machine runs them.

    python -m bench.terms [--positions N] [--save]

The bundled model in float64 on decoded FP6 and NVFP4 weights, with the activations of every packed
product rounded to a form that some tensor core takes: halves; e4m3 with a power of two a token or
for 32 input elements (mxf8f6f4); e2m1 with an e4m3 scale for every 16 (mxf4nvf4), once, and as
the sum of two or three terms, each of what the ones before leave. Figures as in bench.activations;
`nvfp4_weights` is what these weights cost against FP6.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bench.activations import as_nvfp4, whole
from bench.report import ROOT, Report
from kslserve.engine import codecs
from kslserve.engine.model import ModelSpec, TensorArg
from kslserve.ksl.layout import HEAD
from kslserve.ksl.open import open_model
from tests.reference import Reference

F64 = npt.NDArray[np.float64]
Rounding = Callable[[F64], F64]
TINY = 1e-30
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1_ENDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])


def e2m1(x: F64) -> F64:
    return np.sign(x) * E2M1[np.searchsorted(E2M1_ENDS, np.abs(x), side="right")]


def e4m3(x: F64) -> F64:
    size = np.abs(x)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(size, TINY))), -6) - 3)
    return np.sign(x) * np.minimum(np.round(size / step) * step, 448)


def power(x: F64) -> F64:
    """The smallest power of two that is not below x."""
    return 2.0 ** np.ceil(np.log2(np.maximum(x, TINY)))


def pieces(x: F64) -> F64:
    """[tokens, k] as [tokens, pieces of 64, 64], zeros behind the end."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 64))).reshape(len(x), -1, 64)


def half(x: F64) -> F64:
    return x.astype(np.float16).astype(np.float64)


def per_token(x: F64) -> F64:
    scale = power(np.abs(x).max(1, keepdims=True) / 448)
    return e4m3(x / scale) * scale


def per_32(x: F64) -> F64:
    """The 32 that one product of gemm/lanes.cuh takes: eights of every 16."""
    blocks = pieces(x).reshape(len(x), -1, 4, 2, 8)
    scale = power(np.abs(blocks).max((2, 4), keepdims=True) / 448)
    return (e4m3(blocks / scale) * scale).reshape(len(x), -1)[:, : x.shape[1]]


def in_terms(terms: int) -> Rounding:
    def rounded(x: F64) -> F64:
        left = pieces(x).reshape(len(x), -1, 16)
        factor = power(np.abs(x).max(1) / (6 * 448))[:, None, None]
        out = np.zeros_like(left)
        for _ in range(terms):
            unit = e4m3(np.abs(left).max(2, keepdims=True) / 6 / factor) * factor
            said = np.where(unit > 0, unit * e2m1(left / np.where(unit > 0, unit, 1)), 0)
            out, left = out + said, left - said
        return out.reshape(len(x), -1)[:, : x.shape[1]]

    return rounded


FORMS: dict[str, Rounding] = {
    "half": half,
    "e4m3_token": per_token,
    "e4m3_32": per_32,
    "e2m1": in_terms(1),
    "2xe2m1": in_terms(2),
    "3xe2m1": in_terms(3),
}


class Rounded:
    """A matrix that rounds what it is multiplied with: x @ Rounded(w, f).T is f(x) @ w.T."""

    __array_ufunc__ = None

    def __init__(self, weights: F64, rounding: Rounding) -> None:
        self.weights, self.rounding = weights, rounding

    @property
    def T(self) -> Rounded:
        return self

    def __rmatmul__(self, x: F64) -> F64:
        return self.rounding(x) @ self.weights.T


def decoded(spec: ModelSpec, tensors: list[TensorArg]) -> Reference:
    """The model of these tensors' values."""
    weights = {}
    for t in tensors:
        values = codecs.decode(t.encoding, t.data, t.scales, t.globals_, t.rows, t.cols)
        weights[t.name] = values.reshape(-1) if t.cols == 1 else values
    return Reference(spec, weights)


def scores(
    plain: Reference, tensors: list[TensorArg], rounding: Rounding | None, ids: list[list[int]]
) -> F64:
    """Log-probabilities [positions, vocab] behind all positions of all sequences."""
    model = copy.copy(plain)
    model.w = dict(plain.w)
    packed = (codecs.ENC_E2M3, codecs.ENC_NVFP4)
    for t in tensors:
        if rounding is not None and t.encoding in packed and t.name != HEAD:
            model.w[t.name] = Rounded(plain.w[t.name], rounding)  # type: ignore[assignment]
    logits = np.concatenate([model.forward(np.array(s, np.int32))["logits"] for s in ids])
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=256, help="of each golden sequence")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    golden = json.loads((ROOT / "tests/data/nano_golden.json").read_text(encoding="utf-8"))
    found = [item["prompt_ids"] + item["output_ids"] for item in golden["items"]]
    ids = [s[: args.positions] for s in found if len(s) > 200]
    report = Report("terms")

    def add(row: str, base: F64, other: F64) -> None:
        divergence = (np.exp(base) * (base - other)).sum(axis=1)
        report.add(
            row,
            kl=float(divergence.mean()),
            kl_p99=float(np.percentile(divergence, 99)),
            changed=float((base.argmax(axis=1) != other.argmax(axis=1)).mean()),
            positions=len(base),
        )

    with open_model("ksl-nano", weights="fp6") as opened:
        spec = opened.spec
        fp6 = [whole(tensor) for tensor in opened.tensors]
    nvfp4 = [as_nvfp4(tensor) for tensor in fp6]
    fp6_base: F64 | None = None
    for weights, tensors in (("fp6", fp6), ("nvfp4", nvfp4)):
        model = decoded(spec, tensors)
        base = scores(model, tensors, None, ids)
        if fp6_base is None:
            fp6_base = base
        else:
            add("nvfp4_weights", fp6_base, base)
        for name, rounding in FORMS.items():
            add(f"{weights}_{name}", base, scores(model, tensors, rounding, ids))
    report.write(args.save)


if __name__ == "__main__":
    main()
