"""Relative error of each weight encoding on a bf16 model, and of NVFP4 made straight from bf16
against NVFP4 made from FP6.

    python -m bench.encodings --model FOLDER [--save]

`weights`: root mean square of the difference over that of the weights. `product`: the same of W x
for 64 normal vectors x. Figures are over all quantized matrices of a part, weighted by energy.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from bench.report import Report
from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_E2M3, ENC_FP8, ENC_NVFP4, GROUP
from kslserve.ksl.layout import EMBEDDING, HEAD, role
from kslserve.ksl.open import open_source

VECTORS = 64
F64 = npt.NDArray[np.float64]


def through(encoding: int, w: codecs.F32) -> codecs.F32:
    """w as it comes out of an encoding."""
    rows, cols = w.shape
    made = codecs.encode(encoding, w)
    return codecs.decode(encoding, made.codes, made.scales, made.globals, rows, cols)


def variants(w: codecs.F32) -> dict[str, codecs.F32]:
    fp6 = through(ENC_E2M3, w)
    found = {"fp8": through(ENC_FP8, w), "fp6": fp6}
    if w.shape[1] % GROUP == 0:
        found["nvfp4"] = through(ENC_NVFP4, w)
        found["nvfp4_of_fp6"] = through(ENC_NVFP4, fp6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder with a bf16 checkpoint")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    random = np.random.default_rng(1)
    # part: encoding: [energy of weights, of their error, energy of products, of their error]
    sums: dict[str, dict[str, F64]] = defaultdict(lambda: defaultdict(lambda: np.zeros(4)))
    source = open_source(args.model)
    names = [name for name in source.stored if role(name)]
    if source.tied and HEAD not in names:
        names.append(HEAD)
    for name in names:
        arg = source.read(EMBEDDING if name == HEAD and source.tied else name)
        w = codecs.decode(arg.encoding, arg.data, arg.scales, arg.globals_, arg.rows, arg.cols)
        x = random.standard_normal((arg.cols, VECTORS))
        product = w @ x
        for encoding, found in variants(w).items():
            row = np.array(
                [
                    np.square(w, dtype=np.float64).sum(),
                    np.square(found - w, dtype=np.float64).sum(),
                    np.square(product).sum(),
                    np.square(found @ x - product).sum(),
                ]
            )
            for part in (str(role(name)), "all"):
                sums[part][encoding] += row
    source.close()
    report = Report("encodings")
    for part in sorted(sums, key=lambda name: (name == "all", name)):
        for encoding, row in sums[part].items():
            report.add(
                f"{part}_{encoding}",
                weights=float(np.sqrt(row[1] / row[0])),
                product=float(np.sqrt(row[3] / row[2])),
            )
        if "nvfp4" in sums[part]:
            direct, second = sums[part]["nvfp4"], sums[part]["nvfp4_of_fp6"]
            report.add(
                f"{part}_second_rounding",
                weights=float(np.sqrt(second[1] / direct[1])),
                product=float(np.sqrt(second[3] / direct[3])),
            )
    report.write(args.save)


if __name__ == "__main__":
    main()
