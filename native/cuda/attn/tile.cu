// Attention of short rows on tensor cores: 8 kTiles query heads of a row, one KV head, one unit of
// keys.
//
// The 16 rows of a product are eight queries, as the high halves of their values and as what those
// leave over; the two results are added. Stored codes are exact in a half. So scores and weighted
// values have the accuracy of float32, and those of a query depend on nothing beside it.
#include <cuda_bf16.h>

#include "../common/mma.cuh"
#include "attn.cuh"

namespace ksl {

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kKeys = kTileKeys;
constexpr int kWarpKeys = kKeys / kWarps;
constexpr int kStages = 2;
constexpr float kProbability = 4096;  // probabilities are halves of [0, kProbability]
// Keys so far before a column that is a row of its own may have been stored in this wave: VERIFY
// columns and drafts.
constexpr int kRecent = 64;
static_assert(kRecent > 2 * KSL_MAX_DRAFT + 1, "settled keys");
static_assert(kWarpKeys == 16, "the keys of a warp lie in one block");

// Shared memory. The pitches keep the rows that a warp reads at one time in different banks.
template <int kFormat, int kDim, int kTiles>
struct Layout {
  static constexpr bool kQ4 = kFormat == KSL_KV_Q4, kBf16 = kFormat == KSL_KV_BF16;
  static constexpr int kKBytes = kQ4 ? kDim / 2 : (kBf16 ? kDim * 2 : kDim);
  static constexpr int kKScale = kQ4 ? kDim / 8 : 4;  // bf16: not there
  static constexpr int kVBytes = kBf16 ? kDim * 2 : kDim;
  static constexpr int kKPitch = kKBytes + (kBf16 ? 32 : 16);
  static constexpr int kVPitch = kVBytes + 16;
  static constexpr int kScales = kKeys * kKPitch, kV = kScales + (kBf16 ? 0 : kKeys * kKScale);
  static constexpr int kVScales = kV + kKeys * kVPitch;
  static constexpr int kStage = kVScales + (kBf16 ? 0 : kKeys * 4);
  static constexpr int kQuery = kStages * kStage;  // fragments of a: [tiles][steps][lanes]
  static constexpr int kWeights = kQuery + kTiles * kDim * 32;  // fragments: [tiles][warps][lanes]
  static constexpr int kHighs = kWeights + kTiles * kWarps * 512;  // [tiles][8][warps]
  static constexpr int kHighScales = kHighs + kTiles * 8 * kWarps * 4;
  static constexpr int kTotals = kHighScales + kTiles * 8 * kWarps * 4;
  static constexpr int kSums = kTotals + kTiles * 8 * kWarps * 4;  // q4: of 32 channels
  static constexpr int kAll = kSums + (kQ4 ? kTiles * 8 * (kDim / 32) * 4 : 0);
  static_assert(kStage % 16 == 0 && kV % 16 == 0, "16-byte copies");
};

// An sm_120 runs the packed formats; bf16 keys of 256 dims are left to core.cu there.
static_assert(Layout<KSL_KV_Q4, 256, 3>::kAll <= kSmallRoom, "q4");
static_assert(Layout<KSL_KV_FP8, 256, 2>::kAll <= kSmallRoom, "fp8");
static_assert(Layout<KSL_KV_BF16, 128, 2>::kAll <= kSmallRoom, "bf16");

// Dim of slot pair `pair` (slots 2 t, 2 t + 1 or 2 t + 8, 2 t + 9) of step s, and the distance to
// the second of the pair: the order in which a lane unpacks stored keys.
template <int kFormat>
__device__ inline int dim_of(int s, int pair, int t) {
  if (kFormat == KSL_KV_Q4) return 32 * (s >> 1) + 8 * t + 2 * (s & 1) + pair;
  return 16 * s + 4 * t + 2 * pair;
}
template <int kFormat>
constexpr int kPairStep = kFormat == KSL_KV_Q4 ? 4 : 1;

// The high parts of two values and what they leave over.
template <bool kBf16>
__device__ inline void halves(float x, float y, uint32_t *high, uint32_t *low) {
  if (kBf16) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    const __nv_bfloat162 l = __floats2bfloat162_rn(x - __low2float(h), y - __high2float(h));
    *high = reinterpret_cast<const uint32_t &>(h);
    *low = reinterpret_cast<const uint32_t &>(l);
  } else {
    const __half2 h = __floats2half2_rn(x, y);
    const __half2 l = __floats2half2_rn(x - __low2float(h), y - __high2float(h));
    *high = reinterpret_cast<const uint32_t &>(h);
    *low = reinterpret_cast<const uint32_t &>(l);
  }
}

// Copies chunks of keys, one after the other. A block holds whole groups of 16 keys.
template <int kFormat, int kDim, int kTiles>
struct Loader {
  typedef Layout<kFormat, kDim, kTiles> L;
  static constexpr int kGroups = kKeys / 16;
  const KvLayer &kv;
  const int32_t *table;
  int head, keys;
  int position, index, at,
      last;                // of the next group that is looked up; last: block with keys
  int32_t block[kGroups];  // of the groups of the next chunk
  int row[kGroups];

  __device__ Loader(const KvLayer &layer, int slot, int h, int n, int chunk)
      : kv(layer),
        table(layer.tables + static_cast<int64_t>(slot) * layer.table_blocks),
        head(h),
        keys(n),
        position(chunk * kKeys) {
    index = position / kv.block_tokens;
    at = position - index * kv.block_tokens;
    last = (keys - 1) / kv.block_tokens;
    look_up();
  }

  __device__ void look_up() {
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
      // Behind the last key any block of the row does: its bytes are not copied.
      block[i] = table[min(index, last)];
      row[i] = at * kv.kv_heads + head;
      position += 16;
      at += 16;
      const bool over = at == kv.block_tokens;
      at = over ? 0 : at;
      index += over;
    }
  }

  // The chunk that was looked up; looks up the one after it.
  __device__ void load(uint8_t *stage) {
    const int left = keys - (position - kKeys);
    plane<L::kKBytes, L::kKPitch>(stage, kv.k_offset, left);
    plane<L::kVBytes, L::kVPitch>(stage + L::kV, kv.v_offset, left);
    if (!L::kBf16) {
      plane<L::kKScale, L::kKScale>(stage + L::kScales, kv.k_scale_offset, left);
      plane<4, 4>(stage + L::kVScales, kv.v_scale_offset, left);
    }
    look_up();
  }

  // Selections that leave both arrays in registers.
  __device__ int of_group(const int32_t (&values)[kGroups], int group) const {
    return group & 2 ? (group & 1 ? values[3] : values[2]) : (group & 1 ? values[1] : values[0]);
  }

  template <int kBytes, int kPitch>
  __device__ void plane(uint8_t *to, int offset, int left) const {
    constexpr int kUnit = kBytes < 16 ? kBytes : 16, kParts = kBytes / kUnit;
    constexpr int kRound = kThreads / kParts;
    static_assert(kThreads % kParts == 0 && kGroups == 4, "whole keys");
    const int part = threadIdx.x % kParts, mine = threadIdx.x / kParts;
    const uint8_t *const layer = kv.blocks + kv.layer_offset + offset + part * kUnit;
    uint8_t *const place = to + mine * kPitch + part * kUnit;
#pragma unroll
    for (int first = 0; first < kKeys; first += kRound) {
      const int key = first + mine;
      if (kRound > kKeys && key >= kKeys) break;
      const int b = kRound <= 16 ? block[first >> 4] : of_group(block, key >> 4);
      const int r = kRound <= 16 ? row[first >> 4] : of_group(row, key >> 4);
      const uint8_t *from = layer + b * kv.block_bytes + (r + (key & 15) * kv.kv_heads) * kBytes;
      copy_async<kUnit>(place + first * kPitch, from, key < left);
    }
  }
};

// Scores of this warp's 16 keys: of row g and keys 2 t, 2 t + 1 of the first and the second eight.
template <int kFormat, int kDim, int kTiles, int kUsed>
__device__ __forceinline__ void score_keys(const uint8_t *stage, const uint8_t *memory, int warp,
                                           int g, int t, float (&score)[kUsed][4]) {
  typedef Layout<kFormat, kDim, kTiles> L;
  const uint4 *query = reinterpret_cast<const uint4 *>(memory + L::kQuery) + (g * 4 + t);
  const float *sums = reinterpret_cast<const float *>(memory + L::kSums);
  if constexpr (L::kQ4) {
    constexpr int kGroups = kDim / 32, kBatch = kGroups < 4 ? kGroups : 4;
#pragma unroll
    for (int m = 0; m < kUsed; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) score[m][i] = 0;
#pragma unroll
    for (int first = 0; first < kGroups; first += kBatch) {
      uint32_t pairs[4][kBatch];  // scale and zero point of keys 2 t, 2 t + 1,
                                  // and eight later
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint8_t *from = stage + L::kScales +
                              (warp * kWarpKeys + (i >> 1) * 8 + 2 * t + (i & 1)) * L::kKScale +
                              first * 4;
        if constexpr (kBatch == 4)
          *reinterpret_cast<uint4 *>(pairs[i]) = *reinterpret_cast<const uint4 *>(from);
        else
          *reinterpret_cast<uint2 *>(pairs[i]) = *reinterpret_cast<const uint2 *>(from);
      }
#pragma unroll
      for (int k = 0; k < kBatch; k++) {
        const int group = first + k;
        uint32_t b[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++)
          unpack_codes(
              *reinterpret_cast<const uint32_t *>(
                  stage + (warp * kWarpKeys + j * 8 + g) * L::kKPitch + group * 16 + t * 4),
              b[j]);
#pragma unroll
        for (int m = 0; m < kUsed; m++) {
          const uint4 q0 = query[(m * (kDim / 16) + 2 * group) * 32],
                      q1 = query[(m * (kDim / 16) + 2 * group + 1) * 32];
          const float sum = sums[(m * kGroups + group) * 8 + g];
#pragma unroll
          for (int j = 0; j < 2; j++) {
            float c[4];
            mma16_first(c, q0, b[j][0], b[j][1]);
            mma16<false>(c, q1, b[j][2], b[j][3]);
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const __half2 pair = reinterpret_cast<const __half2 &>(pairs[2 * j + e][k]);
              score[m][2 * j + e] =
                  fmaf(__low2float(pair), fmaf(-__high2float(pair), sum, c[e] + c[e + 2]),
                       score[m][2 * j + e]);
            }
          }
        }
      }
    }
  } else {
    float c[kUsed][2][4] = {};
#pragma unroll
    for (int s = 0; s < kDim / 16; s++) {
      uint32_t b[2][2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint8_t *row = stage + (warp * kWarpKeys + j * 8 + g) * L::kKPitch;
        if (L::kBf16) {
          const uint2 w = *reinterpret_cast<const uint2 *>(row + s * 32 + t * 8);
          b[j][0] = w.x;
          b[j][1] = w.y;
        } else {
          const uint32_t w = *reinterpret_cast<const uint32_t *>(row + s * 16 + t * 4);
          b[j][0] = e4m3_halves(w);
          b[j][1] = e4m3_halves(w >> 16);
        }
      }
#pragma unroll
      for (int m = 0; m < kUsed; m++) {
        const uint4 q = query[(m * (kDim / 16) + s) * 32];
#pragma unroll
        for (int j = 0; j < 2; j++) mma16<L::kBf16>(c[m][j], q, b[j][0], b[j][1]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float2 scale = {1, 1};
      if (!L::kBf16)
        scale = *reinterpret_cast<const float2 *>(stage + L::kScales +
                                                  (warp * kWarpKeys + j * 8 + 2 * t) * 4);
#pragma unroll
      for (int m = 0; m < kUsed; m++) {
        score[m][2 * j] = (c[m][j][0] + c[m][j][2]) * scale.x;
        score[m][2 * j + 1] = (c[m][j][1] + c[m][j][3]) * scale.y;
      }
    }
  }
}

__device__ inline float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(kAll, v, 1));
  return fmaxf(v, __shfl_xor_sync(kAll, v, 2));
}
__device__ inline float quad_sum(float v) {
  v += __shfl_xor_sync(kAll, v, 1);
  return v + __shfl_xor_sync(kAll, v, 2);
}

// B fragments of kOwn columns for slots (2 t, 2 t + 1) of a step: the same dims of two keys.
template <bool kBf16, int kOwn>
__device__ inline void value_pair(const uint8_t *first, const uint8_t *second,
                                  uint32_t (&out)[kOwn]) {
  if constexpr (kBf16) {
    uint32_t a[kOwn / 2], b[kOwn / 2];
    if constexpr (kOwn == 8) {
      *reinterpret_cast<uint4 *>(a) = *reinterpret_cast<const uint4 *>(first);
      *reinterpret_cast<uint4 *>(b) = *reinterpret_cast<const uint4 *>(second);
    } else {
#pragma unroll
      for (int i = 0; i < kOwn / 2; i++) {
        a[i] = reinterpret_cast<const uint32_t *>(first)[i];
        b[i] = reinterpret_cast<const uint32_t *>(second)[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn / 2; i++) {
      out[2 * i] = __byte_perm(a[i], b[i], 0x5410);
      out[2 * i + 1] = __byte_perm(a[i], b[i], 0x7632);
    }
  } else if constexpr (kOwn == 2) {
    const uint32_t mixed = __byte_perm(*reinterpret_cast<const uint16_t *>(first),
                                       *reinterpret_cast<const uint16_t *>(second), 0x5140);
    out[0] = e4m3_halves(mixed);
    out[1] = e4m3_halves(mixed >> 16);
  } else {
    uint32_t a[kOwn / 4], b[kOwn / 4];
    if constexpr (kOwn == 8) {
      *reinterpret_cast<uint2 *>(a) = *reinterpret_cast<const uint2 *>(first);
      *reinterpret_cast<uint2 *>(b) = *reinterpret_cast<const uint2 *>(second);
    } else {
      a[0] = *reinterpret_cast<const uint32_t *>(first);
      b[0] = *reinterpret_cast<const uint32_t *>(second);
    }
#pragma unroll
    for (int i = 0; i < kOwn / 4; i++) {
      const uint32_t low = __byte_perm(a[i], b[i], 0x5140), high = __byte_perm(a[i], b[i], 0x7362);
      out[4 * i] = e4m3_halves(low);
      out[4 * i + 1] = e4m3_halves(low >> 16);
      out[4 * i + 2] = e4m3_halves(high);
      out[4 * i + 3] = e4m3_halves(high >> 16);
    }
  }
}

// What a block works on: pairs (column, query head) from `pair` on of the columns of a row.
struct Work {
  int index, column, columns, pair, pairs,
      slot;  // index: of the first column in this launch
};

template <int kTiles>
__device__ inline bool find_work(const TileArgs &a, int group, Work *w) {
  const int parts = (group + 8 * kTiles - 1) / (8 * kTiles);
  const int index = blockIdx.z / parts, part = blockIdx.z % parts;
  const int c = a.list != nullptr ? a.list[a.first + index] : a.first + index;
  w->index = index;
  w->column = c;
  w->columns = 1;
  w->slot = a.columns.slot[c];
  if (w->slot < 0) return false;
  if (a.rows != nullptr) {
    const RowInfo &row = a.rows[a.columns.row[c]];
    // The block of a tile's first column has it whole, as far as it lies in this launch.
    const int per_tile = parts > 1 ? 1 : 8 * kTiles / group, offset = c - row.column;
    const int in_tile = offset % per_tile, launched = gridDim.z / parts;
    if (in_tile && index) return false;
    w->columns = min(min(per_tile - in_tile, row.n - offset), launched - index);
  }
  w->pair = part * 8 * kTiles;
  w->pairs = min(8 * kTiles, w->columns * group - w->pair);
  return true;
}

// kUsed: groups of eight queries that the block has.
template <int kFormat, int kDim, int kTiles, int kUsed>
__device__ __forceinline__ void reduce_units(const TileArgs &a, const Work &w, int begin, int end,
                                             Loader<kFormat, kDim, kTiles> &loader,
                                             uint8_t *memory) {
  typedef Layout<kFormat, kDim, kTiles> L;
  constexpr int kOwn = kDim / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.y, group = a.heads / a.kv.kv_heads;
  float acc[kUsed][2 * kOwn], most[kUsed], total[kUsed];
  int limit[kUsed];  // keys that the query of this lane's row sees
#pragma unroll
  for (int m = 0; m < kUsed; m++) {
    const int pair = m * 8 + g;
    limit[m] = pair < w.pairs ? a.columns.position[w.column] + (w.pair + pair) / group + 1 : 0;
    most[m] = -INFINITY;
    total[m] = 0;
#pragma unroll
    for (int i = 0; i < 2 * kOwn; i++) acc[m][i] = 0;
  }
  float *const highs = reinterpret_cast<float *>(memory + L::kHighs);
  float *const high_scales = reinterpret_cast<float *>(memory + L::kHighScales);
  float *const totals = reinterpret_cast<float *>(memory + L::kTotals);
  uint4 *const weights = reinterpret_cast<uint4 *>(memory + L::kWeights);

  for (int chunk = begin; chunk < end; chunk++) {
    const uint8_t *stage = memory + (chunk - begin) % kStages * L::kStage;
    copy_wait<0>();
    __syncthreads();
    if (chunk + 1 < end) loader.load(memory + (chunk + 1 - begin) % kStages * L::kStage);
    copy_commit();

    float p[kUsed][4];
    score_keys<kFormat, kDim, kTiles, kUsed>(stage, memory, warp, g, t, p);
    float scale[4] = {1, 1, 1, 1};
    if (!L::kBf16) {
      const float *at =
          reinterpret_cast<const float *>(stage + L::kVScales) + warp * kWarpKeys + 2 * t;
      const float2 low = *reinterpret_cast<const float2 *>(at),
                   high = *reinterpret_cast<const float2 *>(at + 8);
      scale[0] = low.x, scale[1] = low.y, scale[2] = high.x, scale[3] = high.y;
    }
#pragma unroll
    for (int m = 0; m < kUsed; m++) {
      float high = -INFINITY, high_scale = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = chunk * kKeys + warp * kWarpKeys + (i >> 1) * 8 + 2 * t + (i & 1);
        const bool sees = key < limit[m] && key >= a.kv.first_key;
        p[m][i] = sees ? p[m][i] : -INFINITY;
        high = fmaxf(high, p[m][i]);
        high_scale = fmaxf(high_scale, sees ? scale[i] : 0.0f);
      }
      high = quad_max(high);
      if (!L::kBf16) high_scale = quad_max(high_scale);
      if (t == 0) {
        highs[(m * 8 + g) * kWarps + warp] = high;
        high_scales[(m * 8 + g) * kWarps + warp] = high_scale;
      }
    }
    __syncthreads();
    float chunk_most[kUsed], back[kUsed];
#pragma unroll
    for (int m = 0; m < kUsed; m++) {
      const float4 h = *reinterpret_cast<const float4 *>(highs + (m * 8 + g) * kWarps);
      const float4 s = *reinterpret_cast<const float4 *>(high_scales + (m * 8 + g) * kWarps);
      const float high = fmaxf(fmaxf(h.x, h.y), fmaxf(h.z, h.w));
      const float high_scale = L::kBf16 ? 1.0f : fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w));
      const float from = high == -INFINITY ? 0.0f : high;
      // Scales are powers of two: exact. At most kProbability is left.
      const float to = high_scale > 0 ? __fdividef(kProbability, high_scale) : 0.0f;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        p[m][i] = exp2_fast(p[m][i] - from);
        sum += p[m][i];
        p[m][i] *= L::kBf16 ? to : scale[i] * to;
      }
      sum = quad_sum(sum);
      if (t == 0) totals[(m * 8 + g) * kWarps + warp] = sum;
      uint4 x;
      halves<L::kBf16>(p[m][0], p[m][1], &x.x, &x.y);
      halves<L::kBf16>(p[m][2], p[m][3], &x.z, &x.w);
      weights[(m * kWarps + warp) * 32 + lane] = x;
      chunk_most[m] = high;
      back[m] = high_scale / kProbability;
    }
    __syncthreads();

    float c[kUsed][kOwn][4] = {};
    const uint8_t *values =
        stage + L::kV + (warp * (kDim / kWarps) + g * kOwn) * (L::kBf16 ? 2 : 1);
#pragma unroll
    for (int s = 0; s < kKeys / 16; s++) {
      const uint8_t *row = values + (16 * s + 2 * t) * L::kVPitch;
      uint32_t b0[kOwn], b1[kOwn];
      value_pair<L::kBf16, kOwn>(row, row + L::kVPitch, b0);
      value_pair<L::kBf16, kOwn>(row + 8 * L::kVPitch, row + 9 * L::kVPitch, b1);
#pragma unroll
      for (int m = 0; m < kUsed; m++) {
        const uint4 x = weights[(m * kWarps + s) * 32 + lane];
#pragma unroll
        for (int i = 0; i < kOwn; i++) mma16<L::kBf16>(c[m][i], x, b0[i], b1[i]);
      }
    }
#pragma unroll
    for (int m = 0; m < kUsed; m++) {
      const float4 sum = *reinterpret_cast<const float4 *>(totals + (m * 8 + g) * kWarps);
      const Join join(most[m], chunk_most[m]);
      total[m] = join.add(total[m], (sum.x + sum.y) + (sum.z + sum.w));
      most[m] = join.most;
      // Column 2 t of product i is dim kOwn 2 t + i of this warp's dims, column 2 t + 1 kOwn later.
#pragma unroll
      for (int i = 0; i < kOwn; i++) {
        acc[m][i] = join.add(acc[m][i], (c[m][i][0] + c[m][i][2]) * back[m]);
        acc[m][kOwn + i] = join.add(acc[m][kOwn + i], (c[m][i][1] + c[m][i][3]) * back[m]);
      }
    }
    if (chunk + 1 < end && (chunk + 1) % a.unit_chunks != 0) continue;
    // The end of a unit.
    const int unit = chunk / a.unit_chunks;
#pragma unroll
    for (int m = 0; m < kUsed; m++) {
      const int pair = m * 8 + g;
      // Not of this block, or a unit that the column does not have.
      if (pair < w.pairs && unit * a.unit_chunks * kKeys < limit[m]) {
        const int p = w.pair + pair;
        const int64_t index =
            (static_cast<int64_t>(w.index + p / group) * a.heads + head * group + p % group) *
                a.units +
            unit;
        float *to = a.partial + index * kDim + warp * (kDim / kWarps) + t * 2 * kOwn;
#pragma unroll
        for (int i = 0; i < 2 * kOwn; i += 4)
          *reinterpret_cast<float4 *>(to + i) =
              make_float4(acc[m][i], acc[m][i + 1], acc[m][i + 2], acc[m][i + 3]);
        if (warp == 0 && t == 0) a.partial_sums[index] = make_float2(most[m], total[m]);
      }
      most[m] = -INFINITY;
      total[m] = 0;
#pragma unroll
      for (int i = 0; i < 2 * kOwn; i++) acc[m][i] = 0;
    }
  }
}

template <int kFormat, int kDim, int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles == 1 && kFormat != KSL_KV_BF16 ? 3 : 1)
    tile_kernel(const __grid_constant__ TileArgs a) {
  typedef Layout<kFormat, kDim, kTiles> L;
  constexpr int kSteps = kDim / 16;
  extern __shared__ __align__(16) uint8_t memory[];
  allow_next();
  const int head = blockIdx.y, group = a.heads / a.kv.kv_heads;
  Work w;
  if (!find_work<kTiles>(a, group, &w)) return;
  const int last = a.columns.position[w.column] + (w.pair + w.pairs - 1) / group;
  const int keys = last + 1, chunks = (keys + kKeys - 1) / kKeys;
  // Blocks have equal shares of the units that these columns have.
  const int units = (chunks + a.unit_chunks - 1) / a.unit_chunks, blocks = gridDim.x;
  const int together = (units + blocks - 1) / blocks * a.unit_chunks;
  const int begin = blockIdx.x * together, end = min(chunks, begin + together);
  if (begin >= end || last < a.kv.first_key) return;

  Loader<kFormat, kDim, kTiles> loader(a.kv, w.slot, head, keys, begin);
  // Keys of earlier waves can be asked for while the kernels before this one still run.
  const int own = a.rows != nullptr ? a.rows[a.columns.row[w.column]].start
                                    : a.columns.position[w.column] - kRecent;
  const bool early = (begin + 1) * kKeys <= own;
  if (early) loader.load(memory);
  wait_before();
  if (!early) loader.load(memory);
  copy_commit();

  // Queries as fragments, in units that make a power of two the exponential.
  const int used = (w.pairs + 7) / 8;
  const float unit = 1.4426950408889634f / sqrtf(static_cast<float>(kDim));
  const auto query_at = [&](int pair) -> const float * {
    const int p = w.pair + pair;
    return a.q + static_cast<int64_t>(w.column + p / group) * a.q_stride +
           (head * group + p % group) * kDim;
  };
  const int slots = kTiles == 1 ? 1 : (used == 1 ? 1 : kTiles);
  constexpr int kMine = kSteps * 32 / kThreads;  // fragments of a thread; all loads come first
  static_assert(kSteps * 32 % kThreads == 0, "whole rounds");
#pragma unroll 1
  for (int m = 0; m < slots; m++) {
    float x[kMine][4];
    const int l = threadIdx.x & 31, pair = m * 8 + (l >> 2);
    const bool there = pair < w.pairs;
    const float *q = query_at(there ? pair : 0);
#pragma unroll
    for (int i = 0; i < kMine; i++) {
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int d = dim_of<kFormat>((threadIdx.x >> 5) + i * kWarps, k >> 1, l & 3);
        x[i][k] = there ? q[d + (k & 1) * kPairStep<kFormat>] * unit : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      uint4 out;
      halves<L::kBf16>(x[i][0], x[i][1], &out.x, &out.y);
      halves<L::kBf16>(x[i][2], x[i][3], &out.z, &out.w);
      reinterpret_cast<uint4 *>(
          memory + L::kQuery)[(m * kSteps + (threadIdx.x >> 5) + i * kWarps) * 32 + l] = out;
    }
  }
  if (L::kQ4) {
    constexpr int kGroups = kDim / 32;
    for (int i = threadIdx.x; i < slots * 8 * kGroups; i += kThreads) {
      const int pair = i / kGroups, channels = i % kGroups;
      float sum = 0;
      if (pair < w.pairs) {
        const float4 *q = reinterpret_cast<const float4 *>(query_at(pair) + channels * 32);
#pragma unroll
        for (int k = 0; k < 8; k++) {
          const float4 x = q[k];
          sum += ((x.x * unit + x.y * unit) + (x.z * unit + x.w * unit));
        }
      }
      reinterpret_cast<float *>(memory + L::kSums)[(pair / 8 * kGroups + channels) * 8 + pair % 8] =
          sum;
    }
  }
  if (kTiles == 1 || used == 1)
    reduce_units<kFormat, kDim, kTiles, 1>(a, w, begin, end, loader, memory);
  else
    reduce_units<kFormat, kDim, kTiles, kTiles>(a, w, begin, end, loader, memory);
}

// Blocks that the device takes at one time, 0 if it has too little shared memory.
template <int kFormat, int kDim, int kTiles>
int slots() {
  typedef Layout<kFormat, kDim, kTiles> L;
  static int found = -1;  // per instance; the engine has one thread
  if (found < 0) {
    int device = 0, processors = 0, blocks = 0;
    const auto kernel = tile_kernel<kFormat, kDim, kTiles>;
    const bool runs = cudaGetDevice(&device) == cudaSuccess &&
                      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) ==
                          cudaSuccess &&
                      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           L::kAll) == cudaSuccess &&
                      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads,
                                                                    L::kAll) == cudaSuccess;
    found = runs ? processors * blocks : 0;
    cudaGetLastError();
  }
  return found;
}

template <int kFormat, int kDim, int kTiles>
bool run(Device *device, TileArgs a, int columns, bool ask) {
  const int together = slots<kFormat, kDim, kTiles>();
  if (ask || together == 0) return together > 0;
  const int group = a.heads / a.kv.kv_heads, parts = divide_up(group, 8 * kTiles);
  // As many blocks as run at once have the units of a tile of columns.
  const int per_tile = a.rows != nullptr && parts == 1 ? 8 * kTiles / group : 1;
  const int others = a.kv.kv_heads * divide_up(columns, per_tile) * parts;
  const int blocks = together < 2 * others ? 1 : together / others;
  launch_chained(device, "attn_tile", tile_kernel<kFormat, kDim, kTiles>,
                 dim3(blocks < a.units ? blocks : a.units, a.kv.kv_heads, columns * parts),
                 kThreads, Layout<kFormat, kDim, kTiles>::kAll, a);
  return true;
}

// Eights of queries that a block takes at once: as many as registers hold.
constexpr int most_tiles(int format) {
  return format == KSL_KV_Q4 ? 3 : 2;
}

template <int kFormat, int kDim>
bool by_tiles(Device *device, const TileArgs &a, int columns, bool ask) {
  constexpr int kMany = most_tiles(kFormat);
  if (ask)
    return run<kFormat, kDim, 1>(device, a, columns, true) &&
           run<kFormat, kDim, kMany>(device, a, columns, true);
  return a.rows == nullptr ? run<kFormat, kDim, 1>(device, a, columns, false)
                           : run<kFormat, kDim, kMany>(device, a, columns, false);
}

template <int kFormat>
bool by_dim(Device *device, const TileArgs &a, int columns, bool ask) {
  switch (a.kv.head_dim) {
    case 64:
      return by_tiles<kFormat, 64>(device, a, columns, ask);
    case 128:
      return by_tiles<kFormat, 128>(device, a, columns, ask);
    case 256:
      return by_tiles<kFormat, 256>(device, a, columns, ask);
    default:
      return false;
  }
}

bool by_format(Device *device, const TileArgs &a, int columns, bool ask) {
  switch (a.format) {
    case KSL_KV_BF16:
      return by_dim<KSL_KV_BF16>(device, a, columns, ask);
    case KSL_KV_FP8:
      return by_dim<KSL_KV_FP8>(device, a, columns, ask);
    case KSL_KV_Q4:
      return by_dim<KSL_KV_Q4>(device, a, columns, ask);
    default:
      return false;
  }
}

// The end: spans joined in a fixed order, every fourth one by itself, then the gate. A block is one
// column and query head, a thread one dim of one of the four parts.
constexpr int kJoinParts = 4;
constexpr int kFewSpans = 16;
constexpr int kJoinSpans = 256;  // at one time

// What a column and head has of partial results.
struct Partials {
  int column, units, spans;
  int64_t index;  // of its first unit
  __device__ Partials(const TileArgs &a, int at, int head, int position) {
    column = a.list != nullptr ? a.list[a.first + at] : a.first + at;
    const int chunks = position / kKeys + 1, per_span = kTileSpan / a.unit_chunks;
    units = (chunks + a.unit_chunks - 1) / a.unit_chunks;
    spans = (units + per_span - 1) / per_span;
    index = (static_cast<int64_t>(at) * a.heads + head) * a.units;
  }
};

// Up to kFewSpans: all values are on their way before the first is used. kUnits: of a span.
template <int kUnits>
__global__ void __launch_bounds__(kMaxHeadDim *kJoinParts)
    join_few(const __grid_constant__ TileArgs a, const __grid_constant__ GateArgs o) {
  constexpr int kOwn = kFewSpans / kJoinParts;
  __shared__ float2 spans[32], units[32][kUnits];  // units: factors before and after
  __shared__ float parts[kJoinParts][kMaxHeadDim], totals[kJoinParts];
  allow_next();
  const int head = blockIdx.y, d = a.kv.head_dim;
  const int i = threadIdx.x % d, part = threadIdx.x / d;
  const int first = a.first + blockIdx.x;
  const int position = a.columns.position[a.list != nullptr ? a.list[first] : first];
  const Partials p(a, blockIdx.x, head, position);
  wait_before();
  const float gate = part == 0 ? gate_of(o, p.column, head, i, d) : 0.0f;
  if (position < a.kv.first_key) {
    if (part == 0) gate_store(o, p.column, head, i, d, 0, gate);
    return;
  }
  const float *from = a.partial + (p.index + part * kUnits) * d + i;
  float v[kOwn][kUnits];
#pragma unroll
  for (int j = 0; j < kOwn; j++) {
#pragma unroll
    for (int k = 0; k < kUnits; k++) {
      v[j][k] = (part + j * kJoinParts) * kUnits + k < p.units ? *from : 0.0f;
      from += d;
    }
    from += (kJoinParts - 1) * kUnits * d;
  }
  if (threadIdx.x < 32) {
    const int s = threadIdx.x;
    float2 sum[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; k++)
      sum[k] = s * kUnits + k < p.units ? a.partial_sums[p.index + s * kUnits + k]
                                        : make_float2(-INFINITY, 0);
    float most = -INFINITY, total = 0;
#pragma unroll
    for (int k = 0; k < kUnits; k++) {
      if (s * kUnits + k >= p.units) break;
      const Join join(most, sum[k].x);
      total = join.add(total, sum[k].y);
      most = join.most;
      units[s][k] = make_float2(join.old, join.now);
    }
    spans[s] = make_float2(exp2_fast(most - warp_max(most)), total);
  }
  __syncthreads();
  float acc = 0, total = 0;
#pragma unroll
  for (int j = 0; j < kOwn; j++) {
    const int s = part + j * kJoinParts;
    if (s >= p.spans) break;
    float span = kUnits == 1 ? v[j][0] : 0.0f;
#pragma unroll
    for (int k = 0; k < kUnits && kUnits > 1; k++) {
      if (s * kUnits + k >= p.units) break;
      span = fmaf(span, units[s][k].x, v[j][k] * units[s][k].y);
    }
    total = fmaf(spans[s].y, spans[s].x, total);
    acc = fmaf(span, spans[s].x, acc);
    asm volatile("" ::: "memory");  // all factors at once would not fit in registers
  }
  parts[part][i] = acc;
  if (i == 0) totals[part] = total;
  __syncthreads();
  if (part != 0) return;
  const float value = (parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i]);
  gate_store(o, p.column, head, i, d, value / ((totals[0] + totals[1]) + (totals[2] + totals[3])),
             gate);
}

// Any number of spans.
__global__ void __launch_bounds__(kMaxHeadDim *kJoinParts)
    join_many(const __grid_constant__ TileArgs a, const __grid_constant__ GateArgs o) {
  __shared__ float2 spans[kJoinSpans];  // greatest score, then weight; sum
  __shared__ float scratch[32], parts[kJoinParts][kMaxHeadDim], totals[kJoinParts];
  allow_next();
  const int head = blockIdx.y, d = a.kv.head_dim;
  const int i = threadIdx.x % d, part = threadIdx.x / d;
  const int at = a.first + blockIdx.x;
  const int position = a.columns.position[a.list != nullptr ? a.list[at] : at];
  const Partials p(a, blockIdx.x, head, position);
  wait_before();
  const float gate = part == 0 ? gate_of(o, p.column, head, i, d) : 0.0f;
  if (position < a.kv.first_key) {
    if (part == 0) gate_store(o, p.column, head, i, d, 0, gate);
    return;
  }
  const int per_span = kTileSpan / a.unit_chunks;
  const float2 *sums = a.partial_sums + p.index;
  const float *from = a.partial + p.index * d + i;
  float most = -INFINITY;
  for (int u = threadIdx.x; u < p.units; u += blockDim.x) most = fmaxf(most, sums[u].x);
  most = block_max(most, scratch);
  float acc = 0, total = 0;
  for (int first = 0; first < p.spans; first += kJoinSpans) {
    __syncthreads();
    for (int s = threadIdx.x; s < kJoinSpans && first + s < p.spans; s += blockDim.x) {
      float span_most = -INFINITY, span_total = 0;
      for (int u = (first + s) * per_span; u < (first + s + 1) * per_span && u < p.units; u++) {
        const float2 unit = sums[u];
        const Join join(span_most, unit.x);
        span_total = join.add(span_total, unit.y);
        span_most = join.most;
      }
      spans[s] = make_float2(exp2_fast(span_most - most), span_total);
    }
    __syncthreads();
    const int here = min(kJoinSpans, p.spans - first);
#pragma unroll 8
    for (int s = part; s < here; s += kJoinParts) {
      const int u = (first + s) * per_span;
      float span_acc = 0;
      if (per_span == 1) {
        span_acc = from[static_cast<int64_t>(u) * d];
      } else {
        float2 unit[kTileSpan];
        float v[kTileSpan];
#pragma unroll
        for (int j = 0; j < kTileSpan; j++) {
          const bool there = u + j < p.units;
          unit[j] = there ? sums[u + j] : make_float2(-INFINITY, 0);
          v[j] = there ? from[static_cast<int64_t>(u + j) * d] : 0.0f;
        }
        float span_most = -INFINITY;
#pragma unroll
        for (int j = 0; j < kTileSpan; j++) {
          if (u + j >= p.units) break;
          const Join join(span_most, unit[j].x);
          span_acc = join.add(span_acc, v[j]);
          span_most = join.most;
        }
      }
      total = fmaf(spans[s].y, spans[s].x, total);
      acc = fmaf(span_acc, spans[s].x, acc);
    }
  }
  parts[part][i] = acc;
  if (i == 0) totals[part] = total;
  __syncthreads();
  if (part != 0) return;
  const float value = (parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i]);
  gate_store(o, p.column, head, i, d, value / ((totals[0] + totals[1]) + (totals[2] + totals[3])),
             gate);
}

}  // namespace

bool attn_tile_runs(Device *device, int format, int head_dim) {
  TileArgs a = {};
  a.format = format;
  a.kv.head_dim = head_dim;
  return by_format(device, a, 0, true);
}

void attn_tile(Device *device, TileArgs a, const GateArgs &o, int most_position, int64_t room) {
  const int chunks = most_position / kKeys + 1, spans = divide_up(chunks, kTileSpan);
  // Spans make less to join, chunks fill a device with less work.
  const int group = a.heads / a.kv.kv_heads, most_pairs = 8 * most_tiles(a.format);
  const int tiles =
      a.rows != nullptr && group <= most_pairs ? divide_up(a.n, most_pairs / group) : a.n;
  const bool by_span = static_cast<int64_t>(spans) * a.kv.kv_heads * tiles >= kManySpans;
  a.unit_chunks = by_span ? kTileSpan : 1;
  a.units = by_span ? spans : chunks;
  const int64_t fit = room / (static_cast<int64_t>(a.units) * a.heads);
  float *const memory = a.partial;
  a.partial_sums = reinterpret_cast<float2 *>(memory + room * a.kv.head_dim);
  for (int first = 0; first < a.n;) {
    const int left = a.n - first, n = left < fit ? left : static_cast<int>(fit);
    a.first = first;
    by_format(device, a, n, false);
    const dim3 grid(n, a.heads);
    const int threads = a.kv.head_dim * kJoinParts;
    if (spans > kFewSpans)
      KSL_CHAIN(device, "attn_join", join_many, grid, threads, a, o);
    else if (by_span)
      KSL_CHAIN(device, "attn_join", join_few<1>, grid, threads, a, o);
    else
      KSL_CHAIN(device, "attn_join", join_few<kTileSpan>, grid, threads, a, o);
    first += n;
  }
}

}  // namespace ksl
