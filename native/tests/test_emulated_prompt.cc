// The attention of prompts by single warps, attn/prompt.cu, lane by lane on the host, against plain
// sums over the decoded keys and values: every format and head size, several blocks and tiles, with
// an end inside a tile of keys and rows that a tile of queries does not fill.
#include <emulated.h>

#include "../cuda/attn/attn.cuh"

namespace ksl {

void attn_join_parts(Device *, const FlashArgs &) {
  abort();  // no tile has parts
}

namespace {

constexpr int kHeads = 6, kKvHeads = 2, kGroup = kHeads / kKvHeads;
constexpr int kTokens = 32, kBlocks = 10, kTable = 5;

struct Cache {
  KvLayer kv = {};
  std::vector<uint8_t> data;
  std::vector<int32_t> tables = {7, 2, 9, 0, 4, 1, 8, 3, 6, 5};
};

void put16(uint8_t *to, uint16_t v) {
  memcpy(to, &v, 2);
}
double half_at(const uint8_t *from) {
  uint16_t v;
  memcpy(&v, from, 2);
  return f16_to_f32(v);
}
double float_at(const uint8_t *from) {
  float v;
  memcpy(&v, from, 4);
  return v;
}

Cache make_cache(int format, int d, emulated::Random *random) {
  Cache c;
  KvLayer &kv = c.kv;
  const bool q4 = format == KSL_KV_Q4, bf16 = format == KSL_KV_BF16;
  kv.kv_heads = kKvHeads;
  kv.head_dim = d;
  kv.block_tokens = kTokens;
  kv.table_blocks = kTable;
  kv.k_bytes = q4 ? d / 2 : (bf16 ? 2 * d : d);
  kv.k_scale_bytes = q4 ? d / 8 : (bf16 ? 0 : 4);
  kv.v_bytes = bf16 ? 2 * d : d;
  kv.v_scale_bytes = bf16 ? 0 : 4;
  constexpr int kRows = kTokens * kKvHeads;
  kv.k_scale_offset = kRows * kv.k_bytes;
  kv.v_offset = kv.k_scale_offset + kRows * kv.k_scale_bytes;
  kv.v_scale_offset = kv.v_offset + kRows * kv.v_bytes;
  kv.layer_offset = 256;
  kv.block_bytes = kv.layer_offset + kv.v_scale_offset + kRows * kv.v_scale_bytes;
  c.data.resize(static_cast<size_t>(kBlocks * kv.block_bytes));
  for (int block = 0; block < kBlocks; block++)
    for (int row = 0; row < kRows; row++) {
      uint8_t *const base = c.data.data() + block * kv.block_bytes + kv.layer_offset;
      uint8_t *const k = base + kv.k_offset + row * kv.k_bytes;
      uint8_t *const v = base + kv.v_offset + row * kv.v_bytes;
      for (int i = 0; i < d; i++) {
        const float x = random->normal(), y = random->normal();
        if (bf16) {
          put16(k + 2 * i, f32_to_bf16(x));
          put16(v + 2 * i, f32_to_bf16(y));
        } else {
          if (q4 && i % 2 == 0) k[i / 2] = static_cast<uint8_t>(random->below(256));
          if (!q4) k[i] = f32_to_e4m3(64 * x);
          v[i] = f32_to_e4m3(32 * y);
        }
      }
      for (int i = 0; q4 && i < d / 32; i++) {
        uint8_t *const pair = base + kv.k_scale_offset + row * kv.k_scale_bytes + i * 4;
        put16(pair, f32_to_f16(random->uniform(0.1f, 0.4f)));
        put16(pair + 2, f32_to_f16(static_cast<float>(random->below(16))));
      }
      const float scales[2] = {exp2f(static_cast<float>(random->below(3)) - 7),
                               exp2f(static_cast<float>(random->below(3)) - 6)};
      if (!q4 && !bf16) memcpy(base + kv.k_scale_offset + row * 4, &scales[0], 4);
      if (!bf16) memcpy(base + kv.v_scale_offset + row * 4, &scales[1], 4);
    }
  kv.blocks = c.data.data();
  kv.tables = c.tables.data();
  return c;
}

// Keys and values as the format says.
void decode(const Cache &c, int format, int slot, int position, int head, std::vector<double> *k,
            std::vector<double> *v) {
  const KvLayer &kv = c.kv;
  const int block = c.tables[static_cast<size_t>(slot * kTable + position / kTokens)];
  const int row = position % kTokens * kKvHeads + head;
  const uint8_t *const base = c.data.data() + block * kv.block_bytes + kv.layer_offset;
  const uint8_t *const key = base + kv.k_offset + row * kv.k_bytes;
  const uint8_t *const value = base + kv.v_offset + row * kv.v_bytes;
  for (int i = 0; i < kv.head_dim; i++) {
    if (format == KSL_KV_BF16) {
      uint16_t bits[2];
      memcpy(&bits[0], key + 2 * i, 2);
      memcpy(&bits[1], value + 2 * i, 2);
      (*k)[i] = bf16_to_f32(bits[0]);
      (*v)[i] = bf16_to_f32(bits[1]);
      continue;
    }
    if (format == KSL_KV_Q4) {
      const uint8_t *const pair = base + kv.k_scale_offset + row * kv.k_scale_bytes + i / 32 * 4;
      (*k)[i] = ((key[i / 2] >> 4 * (i & 1) & 15) - half_at(pair + 2)) * half_at(pair);
    } else {
      (*k)[i] = e4m3_to_f32(key[i]) * float_at(base + kv.k_scale_offset + row * 4);
    }
    (*v)[i] = e4m3_to_f32(value[i]) * float_at(base + kv.v_scale_offset + row * 4);
  }
}

bool compare(int format, const char *name, int d, emulated::Random *random) {
  const Cache cache = make_cache(format, d, random);
  const FlashTile tiles[] = {{0, 20, 37, 0, 0, 1, 0, 1}, {20, 42, 100, 1, 0, 3, 0, 1}};
  constexpr int kColumns = 62, kWidth = kHeads;
  std::vector<float> q(static_cast<size_t>(kColumns * kWidth * d)), gates(2 * q.size());
  std::vector<float> pregate(q.size(), NAN), gated(q.size(), NAN);
  for (float &x : q) x = random->normal() * 0.7f;
  for (float &x : gates) x = random->normal();
  FlashArgs a = {};
  a.kv = cache.kv;
  a.format = format;
  a.q = q.data();
  a.q_stride = a.gate.stride = kWidth * d;
  a.heads = kHeads;
  a.tiles = tiles;
  a.n_tiles = 2;
  a.gate.query_gate = gates.data();
  a.gate.query_gate_stride = 2 * kWidth * d;
  a.gate.pregate = pregate.data();
  a.gate.gated = gated.data();
  Device device = {};
  attn_prompt(&device, a);

  std::vector<double> right(q.size()), right_gated(q.size());
  std::vector<std::vector<double>> keys(160, std::vector<double>(d)), values = keys;
  for (const FlashTile &tile : tiles)
    for (int head = 0; head < kKvHeads; head++) {
      for (int at = 0; at < tile.position + tile.columns; at++)
        decode(cache, format, tile.slot, at, head, &keys[at], &values[at]);
      for (int row = 0; row < tile.columns * kGroup; row++) {
        const int column = tile.column + row / kGroup, query = head * kGroup + row % kGroup;
        const size_t first = static_cast<size_t>((column * kWidth + query) * d);
        const int seen = tile.position + row / kGroup + 1;
        std::vector<double> weights(seen);
        double total = 0;
        for (int at = 0; at < seen; at++) {
          double score = 0;
          for (int i = 0; i < d; i++) score += q[first + i] * keys[at][i];
          total += weights[at] = exp(score / sqrt(d));
        }
        for (int i = 0; i < d; i++) {
          double sum = 0;
          for (int at = 0; at < seen; at++) sum += weights[at] * values[at][i];
          const double gate = gates[static_cast<size_t>((column * kWidth + query) * 2 + 1) * d + i];
          right[first + i] = sum / total;
          right_gated[first + i] = sum / total / (1 + exp(-gate));
        }
      }
    }
  char what[64];
  snprintf(what, sizeof what, "%s %d", name, d);
  return emulated::near(what, pregate, right, 3e-3) &&
         emulated::near(what, gated, right_gated, 3e-3);
}

}  // namespace
}  // namespace ksl

int main(int argc, char **argv) {
  emulated::Random random(emulated::begin(argc, argv));
  bool right = true;
  for (const int d : {64, 128, 256}) {
    right &= ksl::compare(KSL_KV_Q4, "q4", d, &random);
    right &= ksl::compare(KSL_KV_FP8, "fp8", d, &random);
    right &= ksl::compare(KSL_KV_BF16, "bf16", d, &random);
  }
  return right ? 0 : 1;
}
