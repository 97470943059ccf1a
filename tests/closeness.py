"""How far arrays of logits, or of anything, are from each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]


def relative(found: Floats, expected: Floats) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """Over the last axis."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def divergence(expected: Floats, found: Floats) -> float:
    """Mean KL divergence, in nats, of the distributions of two arrays of logits [n, vocab]."""
    a, b = log_softmax(expected), log_softmax(found)
    return float((np.exp(a) * (a - b)).sum(axis=1).mean())
