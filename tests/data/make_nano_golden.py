"""Makes nano_golden.json: what the bundled model must answer, by an independent float64 forward.

    python tests/data/make_nano_golden.py [CONTAINER [OUT]]

Reads the container with a decoder of its own, dequantizes every matrix with numpy and runs the
prompts of nano_bf16_golden.json token by token (no chunked form, no code of the engine): 64 greedy
ids that do not stop at end tokens, the first step's five largest logits, and those of the MTP head
at the last prompt position, fed with the first output id. A few minutes on one core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
STEPS = 64


# ---------------------------------------------------------------- container


def read_container(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """(config, tensors as float64)."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    table = json.loads(header["__metadata__"]["ksl"])["tensors"]

    def entry(name: str, dtype: type) -> np.ndarray:
        begin, end = header[name]["data_offsets"]
        data = np.frombuffer(raw, np.uint8, end - begin, 8 + size + begin)
        return data.view(dtype).reshape(header[name]["shape"])

    tensors = {}
    for name, item in table.items():
        if item["encoding"] == "bf16":
            value = (entry(name, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif item["encoding"] == "f32":
            value = entry(name, np.float32)
        elif item["encoding"] == "e2m3":
            value = decode_e2m3(entry(f"{name}.codes", np.uint8), entry(f"{name}.scales", np.uint8))
        else:
            raise SystemExit(f"{name}: this script does not decode {item['encoding']}")
        tensors[name] = value.astype(np.float64)
    return json.loads(bytes(entry("file/config.json", np.uint8))), tensors


def decode_e2m3(packed: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Four 6-bit codes `s ee mmm` in three bytes, times 2^(byte - 127) of their 128 x 128 block."""
    rows = packed.shape[0]
    bits = np.unpackbits(packed, axis=1, bitorder="little").reshape(rows, -1, 6).astype(np.int64)
    mantissa = bits[..., 0] + 2 * bits[..., 1] + 4 * bits[..., 2]
    exponent = bits[..., 3] + 2 * bits[..., 4]
    magnitude = np.where(
        exponent == 0, mantissa / 8.0, (1 + mantissa / 8.0) * np.exp2(exponent - 1.0)
    )
    value = np.where(bits[..., 5] == 1, -magnitude, magnitude)
    for r, c in np.ndindex(exponents.shape):
        scale = np.exp2(float(exponents[r, c]) - 127)
        value[r * 128 : r * 128 + 128, c * 128 : c * 128 + 128] *= scale
    return value


# ---------------------------------------------------------------- forward


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


class Model:
    """The text tower of one sequence; every method appends tokens to the caches it is given."""

    def __init__(self, config: dict, tensors: dict[str, np.ndarray]) -> None:
        self.c, self.w = config, tensors
        self.kinds = config["layer_types"]
        self.head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        rope = config["rope_parameters"]
        dims = int(config["head_dim"] * rope["partial_rotary_factor"])
        self.inverse = rope["rope_theta"] ** (-np.arange(0, dims, 2) / dims)

    def rms(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + self.c["rms_norm_eps"]) * (1 + self.w[name])

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """x [tokens, heads, dim]: the first dims in pairs (j, j + half)."""
        half = len(self.inverse)
        angle = positions[:, None, None] * self.inverse
        a, b = x[..., :half], x[..., half : 2 * half]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)

    def attention(self, u: np.ndarray, p: str, cache: dict, start: int) -> np.ndarray:
        c, w = self.c, self.w
        n, d = len(u), c["head_dim"]
        positions = np.arange(start, start + n)
        both = (u @ w[p + "q_proj.weight"].T).reshape(n, c["num_attention_heads"], 2 * d)
        q, gate = both[..., :d], both[..., d:]
        k = (u @ w[p + "k_proj.weight"].T).reshape(n, -1, d)
        v = (u @ w[p + "v_proj.weight"].T).reshape(n, -1, d)
        q = self.rotate(self.rms(q, p + "q_norm.weight"), positions)
        k = self.rotate(self.rms(k, p + "k_norm.weight"), positions)
        k = cache["k"] = np.concatenate([cache["k"], k]) if "k" in cache else k
        v = cache["v"] = np.concatenate([cache["v"], v]) if "v" in cache else v
        first = start + n - len(k)  # position of the oldest row
        visible = np.arange(first, start + n)[None, :] <= positions[:, None]
        group = c["num_attention_heads"] // c["num_key_value_heads"]
        out = np.empty_like(q)
        for head in range(c["num_attention_heads"]):
            score = q[:, head] @ k[:, head // group].T / np.sqrt(d)
            score = np.where(visible, score, -np.inf)
            weight = np.exp(score - score.max(-1, keepdims=True))
            out[:, head] = weight @ v[:, head // group] / weight.sum(-1, keepdims=True)
        return (out * sigmoid(gate)).reshape(n, -1) @ w[p + "o_proj.weight"].T

    def delta(self, u: np.ndarray, p: str, cache: dict) -> np.ndarray:
        c, w = self.c, self.w
        n, taps = len(u), c["linear_conv_kernel_dim"]
        hk, hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        columns = u @ w[p + "in_proj_qkv.weight"].T
        history = cache.setdefault("conv", np.zeros((taps - 1, columns.shape[1])))
        padded = np.concatenate([history, columns])
        cache["conv"] = padded[-(taps - 1) :]
        kernel = w[p + "conv1d.weight"]
        mixed = silu(sum(kernel[:, j] * padded[j : j + n] for j in range(taps)))
        q = mixed[:, : hk * dk].reshape(n, hk, dk)
        k = mixed[:, hk * dk : 2 * hk * dk].reshape(n, hk, dk)
        v = mixed[:, 2 * hk * dk :].reshape(n, hv, dv)
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(dk)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        q, k = np.repeat(q, hv // hk, 1), np.repeat(k, hv // hk, 1)
        beta = sigmoid(u @ w[p + "in_proj_b.weight"].T)
        step = np.logaddexp(0, u @ w[p + "in_proj_a.weight"].T + w[p + "dt_bias"])
        decay = np.exp(-np.exp(w[p + "A_log"]) * step)
        state = cache.get("state", np.zeros((hv, dk, dv)))
        out = np.empty((n, hv, dv))
        for t in range(n):
            state = state * decay[t, :, None, None]
            error = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t, :, :, None] * error[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
        cache["state"] = state
        z = (u @ w[p + "in_proj_z.weight"].T).reshape(n, hv, dv)
        mean = (out * out).mean(-1, keepdims=True)
        normed = out / np.sqrt(mean + c["rms_norm_eps"]) * w[p + "norm.weight"] * silu(z)
        return normed.reshape(n, -1) @ w[p + "out_proj.weight"].T

    def layer(self, x: np.ndarray, p: str, kind: str, cache: dict, start: int) -> np.ndarray:
        u = self.rms(x, p + "input_layernorm.weight")
        if kind == "full_attention":
            x = x + self.attention(u, p + "self_attn.", cache, start)
        else:
            x = x + self.delta(u, p + "linear_attn.", cache)
        u = self.rms(x, p + "post_attention_layernorm.weight")
        gate = silu(u @ self.w[p + "mlp.gate_proj.weight"].T)
        inner = gate * (u @ self.w[p + "mlp.up_proj.weight"].T)
        return x + inner @ self.w[p + "mlp.down_proj.weight"].T

    def trunk(self, ids: list[int], caches: list[dict], start: int) -> np.ndarray:
        """Hidden states after the final norm [tokens, hidden]."""
        x = self.w["model.embed_tokens.weight"][ids]
        for index, kind in enumerate(self.kinds):
            x = self.layer(x, f"model.layers.{index}.", kind, caches[index], start)
        return self.rms(x, "model.norm.weight")

    def mtp(self, ids: list[int], hidden: np.ndarray) -> np.ndarray:
        """MTP states of the pairs (ids[i], hidden[i]), where ids[i] follows hidden[i]'s token."""
        embedded = self.rms(
            self.w["model.embed_tokens.weight"][ids], "mtp.pre_fc_norm_embedding.weight"
        )
        normed = self.rms(hidden, "mtp.pre_fc_norm_hidden.weight")
        x = np.concatenate([embedded, normed], -1) @ self.w["mtp.fc.weight"].T
        x = self.layer(x, "mtp.layers.0.", "full_attention", {}, 1)
        return self.rms(x, "mtp.norm.weight")


def top5(logits: np.ndarray) -> list[list[float]]:
    order = np.argsort(-logits, kind="stable")[:5]
    return [[int(i), round(float(logits[i]), 5)] for i in order]


def run(model: Model, prompt: list[int]) -> dict:
    caches: list[dict] = [{} for _ in model.kinds]
    hidden = model.trunk(prompt, caches, 0)
    first = logits = model.head @ hidden[-1]
    output, gap = [], np.inf
    for step in range(STEPS):
        best = np.sort(logits)[-2:]
        gap = min(gap, best[1] - best[0])
        output.append(int(logits.argmax()))
        if step + 1 < STEPS:
            logits = model.head @ model.trunk(output[-1:], caches, len(prompt) + step)[-1]
    draft = model.head @ model.mtp([*prompt[1:], output[0]], hidden)[-1]
    return {
        "prompt_ids": prompt,
        "output_ids": output,
        "first_top5": top5(first),
        "mtp_first_top5": top5(draft),
        "smallest_top2_gap": round(float(gap), 5),
    }


def main() -> None:
    default = HERE.parent.parent / "kslserve" / "data" / "ksl-nano.ksl"
    container = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "nano_golden.json"
    model = Model(*read_container(container))
    prompts = json.loads((HERE / "nano_bf16_golden.json").read_text())["items"]
    items = []
    for item in prompts:
        items.append(run(model, item["prompt_ids"]))
        print(f"{len(items)}/{len(prompts)}", flush=True)
    note = (
        "Greedy outputs of the bundled FP6 model in float64 on its dequantized weights, by "
        "make_nano_golden.py; decoding does not stop at end tokens."
    )
    rows = ",\n".join("  " + json.dumps(item, separators=(",", ":")) for item in items)
    out.write_text(f'{{"note": {json.dumps(note)}, "items": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
