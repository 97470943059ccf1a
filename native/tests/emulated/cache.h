// Paged keys and values in every packed format for tests of attention, and what is right for them.
#pragma once
#include <emulated.h>

#include "../../cuda/attn/attn.cuh"

namespace ksl {
namespace {

constexpr int kHeads = 12, kKvHeads = 2, kGroup = kHeads / kKvHeads;
constexpr int kTokens = 32, kBlocks = 20, kTable = 10;  // two slots

struct Cache {
  KvLayer kv = {};
  std::vector<uint8_t> data;
  std::vector<int32_t> tables;
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
  for (int i = 0; i < kBlocks; i++) c.tables.push_back(i * 7 % kBlocks);
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

// What a query gets: the weighted values of the keys that it sees.
std::vector<double> attend(const Cache &c, int format, int slot, int head, const float *query,
                           int seen) {
  const int d = c.kv.head_dim;
  std::vector<double> k(d), v(d), sum(d);
  double total = 0;
  for (int at = 0; at < seen; at++) {
    decode(c, format, slot, at, head, &k, &v);
    double score = 0;
    for (int i = 0; i < d; i++) score += query[i] * k[i];
    const double weight = exp(score / sqrt(d));
    total += weight;
    for (int i = 0; i < d; i++) sum[i] += weight * v[i];
  }
  for (double &x : sum) x /= total;
  return sum;
}

}  // namespace
}  // namespace ksl
