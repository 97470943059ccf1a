"""The model's equations in numpy, float64, token by token: the yardstick for logits and states.

Independent of the engine: written from the equations, no state is shared between calls.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kslserve.engine.model import ModelSpec

Array = npt.NDArray[np.float64]


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


class Reference:
    """weights: arrays by canonical name (vectors [n], conv1d [channels, taps])."""

    def __init__(self, spec: ModelSpec, weights: dict[str, npt.NDArray[np.float32]]) -> None:
        self.spec = spec
        self.w = {name: array.astype(np.float64) for name, array in weights.items()}
        self.head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])

    def forward(self, ids: npt.NDArray[np.int32]) -> dict[str, Array]:
        """`logits` [T, vocab], `final_norm` [T, hidden], `layers.N.out`, and per linear layer
        `layers.N.S` [value heads, key dim, value dim] and `layers.N.conv` [3, channels]."""
        found: dict[str, Array] = {}
        x = self.w["model.embed_tokens.weight"][ids]
        positions = np.arange(len(ids))
        for i, kind in enumerate(self.spec.layer_kinds):
            prefix = f"model.layers.{i}."
            u = self._rms(x, prefix + "input_layernorm.weight")
            if kind == "full":
                x = x + self._attention(prefix, u, positions)
            else:
                mixed, state, history = self._delta(prefix, u)
                found[f"layers.{i}.S"], found[f"layers.{i}.conv"] = state, history
                x = x + mixed
            x = x + self._mlp(prefix, self._rms(x, prefix + "post_attention_layernorm.weight"))
            found[f"layers.{i}.out"] = x
        found["final_norm"] = self._rms(x, "model.norm.weight")
        found["logits"] = found["final_norm"] @ self.head.T
        return found

    def mtp(self, ids: npt.NDArray[np.int32], hidden: Array) -> tuple[Array, Array]:
        """Teacher-forced MTP head for positions 1..T-1: (logits, hidden), row p - 1 made from token
        p and the trunk hidden (after the final norm) of position p - 1."""
        e = self._rms(
            self.w["model.embed_tokens.weight"][ids[1:]], "mtp.pre_fc_norm_embedding.weight"
        )
        h = self._rms(hidden[:-1], "mtp.pre_fc_norm_hidden.weight")
        x = np.concatenate([e, h], axis=1) @ self.w["mtp.fc.weight"].T
        prefix = "mtp.layers.0."
        u = self._rms(x, prefix + "input_layernorm.weight")
        x = x + self._attention(prefix, u, np.arange(1, len(ids)))
        x = x + self._mlp(prefix, self._rms(x, prefix + "post_attention_layernorm.weight"))
        x = self._rms(x, "mtp.norm.weight")
        return x @ self.head.T, x

    def _rms(self, x: Array, gain: str) -> Array:
        scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.spec.norm_eps)
        return x * scale * (1.0 + self.w[gain])

    def _mlp(self, prefix: str, u: Array) -> Array:
        gate = _silu(u @ self.w[prefix + "mlp.gate_proj.weight"].T)
        return (gate * (u @ self.w[prefix + "mlp.up_proj.weight"].T)) @ self.w[
            prefix + "mlp.down_proj.weight"
        ].T

    def _rope(self, x: Array, positions: npt.NDArray[np.int64]) -> Array:
        rotary = self.spec.rotary_dims
        half = rotary // 2
        frequency = self.spec.rope_theta ** (-2.0 * np.arange(half) / rotary)
        angle = positions[:, None, None] * frequency
        a, b, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def _attention(self, prefix: str, u: Array, positions: npt.NDArray[np.int64]) -> Array:
        s, n = self.spec, len(u)
        p = prefix + "self_attn."
        both = (u @ self.w[p + "q_proj.weight"].T).reshape(n, s.heads, 2, s.head_dim)
        q, gate = both[:, :, 0], both[:, :, 1]
        k = (u @ self.w[p + "k_proj.weight"].T).reshape(n, s.kv_heads, s.head_dim)
        v = (u @ self.w[p + "v_proj.weight"].T).reshape(n, s.kv_heads, s.head_dim)
        q = self._rope(self._rms(q, p + "q_norm.weight"), positions)
        k = self._rope(self._rms(k, p + "k_norm.weight"), positions)
        out = np.empty_like(q)
        group = s.heads // s.kv_heads
        for h in range(s.heads):
            scores = q[:, h] @ k[:, h // group].T / np.sqrt(s.head_dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, h] = weights @ v[:, h // group] / weights.sum(axis=1, keepdims=True)
        return (out * _sigmoid(gate)).reshape(n, -1) @ self.w[p + "o_proj.weight"].T

    def _delta(self, prefix: str, u: Array) -> tuple[Array, Array, Array]:
        s, n = self.spec, len(u)
        p = prefix + "linear_attn."
        qkv = u @ self.w[p + "in_proj_qkv.weight"].T
        z = (u @ self.w[p + "in_proj_z.weight"].T).reshape(n, s.lin_value_heads, s.lin_value_dim)
        beta = _sigmoid(u @ self.w[p + "in_proj_b.weight"].T)
        step = np.logaddexp(0.0, u @ self.w[p + "in_proj_a.weight"].T + self.w[p + "dt_bias"])
        decay = np.exp(-np.exp(self.w[p + "A_log"]) * step)
        padded = np.concatenate([np.zeros((3, qkv.shape[1])), qkv])
        taps = self.w[p + "conv1d.weight"]
        y = _silu(sum(padded[j : j + n] * taps[:, j] for j in range(4)))
        keys = s.lin_key_heads * s.lin_key_dim
        q = self._unit(y[:, :keys]) / np.sqrt(s.lin_key_dim)
        k = self._unit(y[:, keys : 2 * keys])
        v = y[:, 2 * keys :].reshape(n, s.lin_value_heads, s.lin_value_dim)
        ratio = s.lin_value_heads // s.lin_key_heads
        q, k = np.repeat(q, ratio, axis=1), np.repeat(k, ratio, axis=1)
        state = np.zeros((s.lin_value_heads, s.lin_key_dim, s.lin_value_dim))
        out = np.empty_like(v)
        for t in range(n):
            state = state * decay[t][:, None, None]
            error = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][:, :, None] * error[:, None, :]
            out[t] = np.einsum("hk,hkv->hv", q[t], state)
        scale = 1.0 / np.sqrt(np.mean(out * out, axis=-1, keepdims=True) + s.norm_eps)
        gated = out * scale * self.w[p + "norm.weight"] * _silu(z)
        return gated.reshape(n, -1) @ self.w[p + "out_proj.weight"].T, state, padded[n:]

    def _unit(self, x: Array) -> Array:
        heads = x.reshape(len(x), self.spec.lin_key_heads, self.spec.lin_key_dim)
        return heads / np.sqrt(np.sum(heads * heads, axis=-1, keepdims=True) + 1e-6)
