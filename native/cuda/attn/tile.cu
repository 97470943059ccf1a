// Attention of short rows on tensor cores: 8 kTiles query heads of a row, one KV head, one unit of
// keys.
//
// The 16 rows of a product are eight queries, as the high halves of their values and as what those
// leave over; the two results are added. Stored codes are exact in a half. So scores and weighted
// values have the accuracy of float32, and those of a query depend on nothing beside it.
#include "head_rows.cuh"
#include "tile_products.cuh"

namespace ksl {

namespace {

constexpr float kProbability = 4096;  // probabilities are halves of [0, kProbability]
// Keys so far before a column that is a row of its own may have been stored in this wave: VERIFY
// columns and drafts.
constexpr int kRecent = 64;
static_assert(kRecent > 2 * KSL_MAX_DRAFT + 1, "settled keys");
constexpr int kByTile = 64;  // columns in which a block looks for its tile

// What a block works on: pairs (column, query head) from `pair` on of the columns of a row.
struct Work {
  int index;  // of the first column in this launch
  int column, columns, pair, pairs, slot;
};

// The column that tile number `tile` of the rows begins with, -1: there are fewer.
__device__ inline int tile_column(const TileArgs &a, int tile, int per_tile) {
  const int lane = threadIdx.x & 31;
  for (int first = 0; first < a.n; first += 32) {
    const int c = first + lane, row = c < a.n ? a.columns.row[c] : -1;
    unsigned begin = __ballot_sync(kAll, row >= 0 && (c - a.rows[row].column) % per_tile == 0);
    const int here = __popc(begin);
    if (tile < here) {
      for (; tile > 0; tile--) begin &= begin - 1;
      return first + __ffs(begin) - 1;
    }
    tile -= here;
  }
  return -1;
}

template <int kTiles>
__device__ inline bool find_work(const TileArgs &a, int group, Work *w) {
  const int parts = (group + 8 * kTiles - 1) / (8 * kTiles);
  const int part = blockIdx.z % parts;
  const int index = a.by_tile ? tile_column(a, blockIdx.z, 8 * kTiles / group) : blockIdx.z / parts;
  if (index < 0) return false;
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
    const int in_tile = offset % per_tile, launched = a.by_tile ? a.n : gridDim.z / parts;
    if (in_tile && index) return false;
    w->columns = min(min(per_tile - in_tile, row.n - offset), launched - index);
  }
  w->pair = part * 8 * kTiles;
  w->pairs = min(8 * kTiles, w->columns * group - w->pair);
  return true;
}

// Where the key and value of a column that is a row of its own go.
struct Own {
  int chunk;  // -1: not of this block
  int key;    // in the chunk
  KvPlace place;
  bool stored;  // by this block
};

// Words [0, kBytes / 4) of threads from `begin` on: of the stage, and of the pool.
template <int kThreads, int kBytes>
__device__ inline void place_words(const uint8_t *from, uint8_t *stage, uint8_t *pool,
                                   bool stored) {
  for (int i = threadIdx.x * 4; i < kBytes; i += kThreads * 4) {
    const uint32_t word = *reinterpret_cast<const uint32_t *>(from + i);
    *reinterpret_cast<uint32_t *>(stage + i) = word;
    if (stored) *reinterpret_cast<uint32_t *>(pool + i) = word;
  }
}
template <class L>
__device__ inline void place_own(const KvLayer &kv, const Own &own, const uint8_t *from,
                                 uint8_t *stage) {
  uint8_t *const pool = own.place.base;
  const int64_t row = own.place.row;
  constexpr int kThreads = L::kThreads;
  place_words<kThreads, L::kKBytes>(from, stage + own.key * L::kKPitch,
                                    pool + kv.k_offset + row * L::kKBytes, own.stored);
  place_words<kThreads, L::kVBytes>(from + L::kNewV, stage + L::kV + own.key * L::kVPitch,
                                    pool + kv.v_offset + row * L::kVBytes, own.stored);
  if (L::kBf16) return;
  place_words<kThreads, L::kKScale>(from + L::kKBytes, stage + L::kScales + own.key * L::kKScale,
                                    pool + kv.k_scale_offset + row * L::kKScale, own.stored);
  place_words<kThreads, 4>(from + L::kNewV + L::kVBytes, stage + L::kVScales + own.key * 4,
                           pool + kv.v_scale_offset + row * 4, own.stored);
}

// What heads.cu makes, of the queries of a block and of its own key and value: queries in float32,
// keys and values as they are stored.
template <int kWarps, int kFormat, int kDim>
__device__ __forceinline__ void make_heads(const HeadsArgs &h, const Work &w, int group,
                                           const Own &own, uint8_t *memory) {
  typedef Layout<kWarps, kFormat, kDim, 1> L;
  constexpr int kPer = kDim / 32;
  constexpr int kTogether = 8 / kWarps;  // heads, of which each is a chain of exchanges
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, at = lane * kPer;
  const int head = blockIdx.y, jobs = w.pairs + (own.chunk >= 0 ? 2 : 0);
  float q_gain[kPer], k_gain[kPer];
  load(h.q_norm + at, q_gain);
  load(h.k_norm + at, k_gain);
  const int64_t kv_at = static_cast<int64_t>(w.column) * h.kv_stride + head * kDim + at;
  const float *const queries = h.query_gate + static_cast<int64_t>(w.column) * h.query_gate_stride +
                               2 * (head * group + w.pair) * kDim + at;
  const auto source = [&](int job) {
    if (job < w.pairs) return queries + 2 * job * kDim;
    return (job == w.pairs ? h.k : h.v) + kv_at;
  };
  wait_before();
  const Turn<kPer> turn(h, w.column, lane);
  uint8_t *const made = memory + L::kNew;
  const auto put = [&](int job, const float (&x)[kPer]) {
    const bool query = job < w.pairs, key = job == w.pairs;
    if (query && L::kMakesFragments) {
      if constexpr (L::kMakesFragments)
        save_fragments<L::kQ4, L::kBf16>(x, reinterpret_cast<uint4 *>(memory + L::kQuery) + job * 4,
                                         32, reinterpret_cast<float *>(memory + L::kSums) + job, 8,
                                         lane);
    } else if (query) {
      save(reinterpret_cast<float *>(memory + L::kQuery) + job * L::kPitch + at, x);
    } else if (L::kBf16) {
      uint16_t *const to = reinterpret_cast<uint16_t *>(key ? made : made + L::kNewV) + at;
#pragma unroll
      for (int i = 0; i < kPer; i++) to[i] = f32_to_bf16(x[i]);
    } else if (L::kQ4 && key) {
      save_q4(x, made, reinterpret_cast<__half2 *>(made + L::kKBytes), lane);
    } else {
      uint8_t *const to = key ? made : made + L::kNewV;
      save_e4m3(x, to, reinterpret_cast<float *>(to + kDim), lane);
    }
  };
#pragma unroll 1
  for (int job = warp; job < jobs; job += kTogether * kWarps) {
    float x[kTogether][kPer] = {}, raw[kPer], gain[kTogether][kPer];
    const auto mine = [&](int j) { return job + j * kWarps; };
#pragma unroll
    for (int j = 0; j < kTogether; j++)
      if (mine(j) < jobs) load(source(mine(j)), x[j]);
#pragma unroll
    for (int i = 0; i < kPer; i++) {
      raw[i] = job > w.pairs ? x[0][i] : x[kTogether - 1][i];  // a value
#pragma unroll
      for (int j = 0; j < kTogether; j++) gain[j][i] = mine(j) == w.pairs ? k_gain[i] : q_gain[i];
    }
    norm_and_turn(x, gain, turn, h.eps);
    if (L::kQ4) rotate_lanes(x, lane);
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      if (mine(j) >= jobs) break;
      if (mine(j) > w.pairs)
        put(mine(j), raw);
      else
        put(mine(j), x[j]);
    }
  }
}

// The row of a position that is no key.
__device__ inline void clear_own(const KvLayer &kv, const KvPlace &place) {
  const int64_t row = place.row;
  for (int i = threadIdx.x; i < kv.k_bytes; i += blockDim.x)
    place.base[kv.k_offset + row * kv.k_bytes + i] = 0;
  for (int i = threadIdx.x; i < kv.k_scale_bytes; i += blockDim.x)
    place.base[kv.k_scale_offset + row * kv.k_scale_bytes + i] = 0;
  for (int i = threadIdx.x; i < kv.v_bytes; i += blockDim.x)
    place.base[kv.v_offset + row * kv.v_bytes + i] = 0;
  for (int i = threadIdx.x; i < kv.v_scale_bytes; i += blockDim.x)
    place.base[kv.v_scale_offset + row * kv.v_scale_bytes + i] = 0;
}

struct Most {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};
// Of the n values of a query, four and four.
template <int n, class F>
__device__ inline float of_row(const float *row, F f) {
  static_assert(n == 4 || n == 8, "fours");
  const float4 a = *reinterpret_cast<const float4 *>(row);
  const float four = f(f(a.x, a.y), f(a.z, a.w));
  if (n == 4) return four;
  const float4 b = *reinterpret_cast<const float4 *>(row + n - 4);
  return f(four, f(f(b.x, b.y), f(b.z, b.w)));
}

// kUsed: groups of eight queries that the block has. own: null, or keys that come from memory.
template <int kWarps, int kFormat, int kDim, int kTiles, int kUsed>
__device__ __forceinline__ void reduce_units(const TileArgs &a, const Work &w, int begin, int end,
                                             Loader<kWarps, kFormat, kDim, kTiles> &loader,
                                             const Own *own, uint8_t *memory) {
  typedef Layout<kWarps, kFormat, kDim, kTiles> L;
  // Of a warp: dims by eights, keys by eights, and the scores that a lane has of a query.
  constexpr int kOwn = kDim / (8 * kWarps), kEights = L::kEights, kScores = L::kScores;
  constexpr int kAllEights = kKeys / 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.y, group = a.heads / a.kv.kv_heads;
  float acc[kUsed][2 * kOwn], most[kUsed], total[kUsed];
  int limit[kUsed];  // keys that the query of this lane's row sees
  const int sees_first = a.columns.position[w.column] + 1;  // of the first column's
#pragma unroll
  for (int m = 0; m < kUsed; m++) {
    const int pair = m * 8 + g;
    limit[m] = pair < w.pairs ? sees_first + (w.pair + pair) / group : 0;
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
    uint8_t *const stage = memory + L::kFirst + (chunk - begin) % kStages * L::kStage;
    copy_wait<0>();
    __syncthreads();
    if (own != nullptr && chunk == own->chunk) {
      place_own<L>(a.kv, *own, memory + L::kNew, stage);
      __syncthreads();
    }
    if (chunk + 1 < end)
      loader.load(memory + L::kFirst + (chunk + 1 - begin) % kStages * L::kStage);
    copy_commit();

    float p[kUsed][kScores];
    score_keys<L, kUsed>(stage, memory, warp, g, t, p);
    float scale[kScores];
#pragma unroll
    for (int j = 0; j < kEights; j++) {
      float2 two = {1, 1};
      if (!L::kBf16)
        two = *reinterpret_cast<const float2 *>(stage + L::kVScales +
                                                ((warp * kEights + j) * 8 + 2 * t) * 4);
      scale[2 * j] = two.x, scale[2 * j + 1] = two.y;
    }
#pragma unroll
    for (int m = 0; m < kUsed; m++) {
      float high = -INFINITY, high_scale = 0;
#pragma unroll
      for (int i = 0; i < kScores; i++) {
        const int key = chunk * kKeys + (warp * kEights + (i >> 1)) * 8 + 2 * t + (i & 1);
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
      const int row = (m * 8 + g) * kWarps;
      const float high = of_row<kWarps>(highs + row, Most());
      const float high_scale = L::kBf16 ? 1.0f : of_row<kWarps>(high_scales + row, Most());
      const float from = high == -INFINITY ? 0.0f : high;
      // Scales are powers of two: exact. At most kProbability is left.
      const float to = high_scale > 0 ? __fdividef(kProbability, high_scale) : 0.0f;
#pragma unroll
      for (int j = 0; j < kEights; j++) {
        float sum = 0;
#pragma unroll
        for (int i = 2 * j; i < 2 * j + 2; i++) {
          p[m][i] = exp2_fast(p[m][i] - from);
          sum += p[m][i];
          p[m][i] *= L::kBf16 ? to : scale[i] * to;
        }
        sum = quad_sum(sum);
        const int eight = warp * kEights + j;
        if (t == 0) totals[(m * 8 + g) * kAllEights + eight] = sum;
        // Half of a step's.
        uint2 x;
        halves<L::kBf16>(p[m][2 * j], p[m][2 * j + 1], &x.x, &x.y);
        reinterpret_cast<uint2 *>(
            weights)[((m * kKeySteps + (eight >> 1)) * 32 + lane) * 2 + (eight & 1)] = x;
      }
      chunk_most[m] = high;
      back[m] = high_scale / kProbability;
    }
    __syncthreads();

    float c[kUsed][kOwn][4] = {};
    const uint8_t *values =
        stage + L::kV + (warp * (kDim / kWarps) + g * kOwn) * (L::kBf16 ? 2 : 1);
#pragma unroll
    for (int s = 0; s < kKeySteps; s++) {
      const uint8_t *row = values + (16 * s + 2 * t) * L::kVPitch;
      uint32_t b0[kOwn], b1[kOwn];
      value_pair<L::kBf16, kOwn>(row, row + L::kVPitch, b0);
      value_pair<L::kBf16, kOwn>(row + 8 * L::kVPitch, row + 9 * L::kVPitch, b1);
#pragma unroll
      for (int m = 0; m < kUsed; m++) {
        const uint4 x = weights[(m * kKeySteps + s) * 32 + lane];
#pragma unroll
        for (int i = 0; i < kOwn; i++) mma16<L::kBf16>(c[m][i], x, b0[i], b1[i]);
      }
    }
#pragma unroll
    for (int m = 0; m < kUsed; m++) {
      const Join join(most[m], chunk_most[m]);
      const float sum = of_row<kAllEights>(totals + (m * 8 + g) * kAllEights, Sum());
      total[m] = join.add(total[m], sum);
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
        const int column = limit[m] - sees_first, query = w.pair + pair - column * group;
        const int64_t index =
            (static_cast<int64_t>(w.index + column) * a.heads + head * group + query) * a.units +
            unit;
        float *const to = a.partial + index * kDim;
        const int dim = warp * (kDim / kWarps) + t * 2 * kOwn;
        if constexpr (kOwn == 1) {
          save(to + partial_place(dim & ~3) + (dim & 3), acc[m]);
        } else {
#pragma unroll
          for (int i = 0; i < 2 * kOwn; i += 4)
            *reinterpret_cast<float4 *>(to + partial_place(dim + i)) =
                make_float4(acc[m][i], acc[m][i + 1], acc[m][i + 2], acc[m][i + 3]);
        }
        if (warp == 0 && t == 0) a.partial_sums[index] = make_float2(most[m], total[m]);
      }
      most[m] = -INFINITY;
      total[m] = 0;
#pragma unroll
      for (int i = 0; i < 2 * kOwn; i++) acc[m][i] = 0;
    }
  }
}

// Queries in float32 as fragments, in units that make a power of two the exponential.
template <int kWarps, int kFormat, int kDim, int kTiles, bool kMakes>
__device__ __forceinline__ void float_queries(const TileArgs &a, const Work &w, int slots,
                                              uint8_t *memory) {
  typedef Layout<kWarps, kFormat, kDim, kTiles> L;
  constexpr int kSteps = kDim / 16, kThreads = L::kThreads;
  const int head = blockIdx.y, group = a.heads / a.kv.kv_heads;
  if (kMakes) __syncthreads();

  const float unit = 1.4426950408889634f / sqrtf(static_cast<float>(kDim));
  const auto query_at = [&](int pair) -> const float * {
    if (kMakes) return reinterpret_cast<const float *>(memory + L::kQuery) + pair * L::kPitch;
    const int p = w.pair + pair;
    return a.q + static_cast<int64_t>(w.column + p / group) * a.q_stride +
           (head * group + p % group) * kDim;
  };
  // Fragments of a thread; all loads come first.
  constexpr int kMine = (kSteps + kWarps - 1) / kWarps;
  const int warp = threadIdx.x >> 5;
  const int l = threadIdx.x & 31;
  float x[kTiles][kMine][4];
#pragma unroll
  for (int m = 0; m < kTiles; m++) {
    if (m >= slots) break;
    const int pair = m * 8 + (l >> 2);
    const bool there = pair < w.pairs;
    const float *q = query_at(there ? pair : 0);
#pragma unroll
    for (int i = 0; i < kMine; i++) {
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int d = dim_of<kFormat>(min(warp + i * kWarps, kSteps - 1), k >> 1, l & 3);
        x[m][i][k] = there ? q[d + (k & 1) * kPairStep<kFormat>] * unit : 0.0f;
      }
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
          const float4 v = q[k];
          sum += ((v.x * unit + v.y * unit) + (v.z * unit + v.w * unit));
        }
      }
      reinterpret_cast<float *>(memory + L::kSums)[(pair / 8 * kGroups + channels) * 8 + pair % 8] =
          sum;
    }
  }
  if (kMakes) __syncthreads();
#pragma unroll
  for (int m = 0; m < kTiles; m++) {
    if (m >= slots) break;
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      if (warp + i * kWarps >= kSteps) break;
      uint4 out;
      halves<L::kBf16>(x[m][i][0], x[m][i][1], &out.x, &out.y);
      halves<L::kBf16>(x[m][i][2], x[m][i][3], &out.z, &out.w);
      reinterpret_cast<uint4 *>(memory + L::kQuery)[(m * kSteps + warp + i * kWarps) * 32 + l] =
          out;
    }
  }
}

// Every `step`th query of a block, without a division for each.
struct Queries {
  int pair, column, query, group;
  __device__ Queries(const Work &w, int first, int of_group)
      : pair(first), column((w.pair + first) / of_group), group(of_group) {
    query = w.pair + first - column * group;
  }
  __device__ void advance(int step) {
    pair += step;
    query += step;
    for (; query >= group; query -= group) column++;
  }
};

// Copies fragments of queries as heads.cu leaves them: zeros of those that are not there.
template <int kWarps, int kFormat, int kDim, int kTiles>
struct QueryCopy {
  typedef Layout<kWarps, kFormat, kDim, kTiles> L;
  static constexpr int kPieces = kDim / 4, kSteps = kDim / 16, kThreads = L::kThreads;
  static constexpr int kTogether = kThreads / kPieces, kSums = kThreads / 8;
  const TileArgs &a;
  const Work &w;
  Queries at, sums_at;
  __device__ QueryCopy(const TileArgs &args, const Work &work)
      : a(args),
        w(work),
        at(work, threadIdx.x / kPieces, args.heads / args.kv.kv_heads),
        sums_at(work, threadIdx.x / 8, args.heads / args.kv.kv_heads) {}

  __device__ void operator()(int slots, uint8_t *memory) {
    static_assert(kThreads % kPieces == 0, "a thread has one piece of queries");
    const int piece = threadIdx.x % kPieces, channels = threadIdx.x % 8;
    const int64_t row = static_cast<int64_t>(w.column) * a.heads + blockIdx.y * at.group;
    const float *const q = a.q + static_cast<int64_t>(w.column) * a.q_stride +
                           blockIdx.y * at.group * kDim + piece * 4;
    uint8_t *const to = memory + L::kQuery + ((piece >> 2) * 32 + (piece & 3)) * 16;
#pragma unroll 4
    for (; at.pair < slots * 8; at.advance(kTogether)) {
      const bool there = at.pair < w.pairs;
      const int from = there ? at.column * a.q_stride + at.query * kDim : 0;
      copy_async<16>(to + ((at.pair >> 3) * kSteps * 32 + (at.pair & 7) * 4) * 16, q + from, there);
    }
    if (!L::kQ4) return;
    const float *const sums = a.q_sums + row * 8 + channels;
    for (; sums_at.pair < slots * 8; sums_at.advance(kSums)) {
      const bool there = sums_at.pair < w.pairs;
      const int from = there ? (sums_at.column * a.heads + sums_at.query) * 8 : 0;
      copy_async<4>(
          memory + L::kSums + (((sums_at.pair >> 3) * 8 + channels) * 8 + (sums_at.pair & 7)) * 4,
          sums + from, there);
    }
  }
};

// heads: made from them, or null.
template <int kWarps, int kFormat, int kDim, int kTiles, bool kMakes>
__device__ __forceinline__ void tile(const TileArgs &a, const HeadsArgs *heads) {
  typedef Layout<kWarps, kFormat, kDim, kTiles> L;
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
  if (begin >= end) return;
  Own own = {-1, last % kKeys, {}, w.pair == 0};
  if (kMakes && end == chunks) {
    own.chunk = end - 1;
    own.place = kv_place(a.kv, w.slot, last, head);
  }
  if (last < a.kv.first_key) {
    if (own.chunk < 0) return;
    wait_before();
    clear_own(a.kv, own.place);
    return;
  }

  Loader<kWarps, kFormat, kDim, kTiles> loader(a.kv, w.slot, head, kMakes ? last : keys, begin);
  // Keys of earlier waves can be asked for while the kernels before this one still run.
  const int before = a.rows != nullptr ? a.rows[a.columns.row[w.column]].start
                                       : a.columns.position[w.column] - kRecent;
  const bool early = kMakes || (begin + 1) * kKeys <= before;
  if (early) loader.load(memory + L::kFirst);
  const int used = (w.pairs + 7) / 8;
  const int slots = kTiles == 1 ? 1 : (used == 1 ? 1 : kTiles);
  if constexpr (kMakes) {
    make_heads<kWarps, kFormat, kDim>(*heads, w, group, own, memory);
  } else if constexpr (kDim == kFragmentDim) {
    QueryCopy<kWarps, kFormat, kDim, kTiles> copy_queries(a, w);
    wait_before();
    if (a.q_sums != nullptr) copy_queries(slots, memory);
  } else {
    wait_before();
  }
  if (!early) loader.load(memory + L::kFirst);
  copy_commit();
  if (!(kMakes ? L::kMakesFragments : kDim == kFragmentDim && a.q_sums != nullptr))
    float_queries<kWarps, kFormat, kDim, kTiles, kMakes>(a, w, slots, memory);
  if (kTiles == 1 || used == 1)
    reduce_units<kWarps, kFormat, kDim, kTiles, 1>(a, w, begin, end, loader,
                                                   kMakes ? &own : nullptr, memory);
  else
    reduce_units<kWarps, kFormat, kDim, kTiles, kTiles>(a, w, begin, end, loader, nullptr, memory);
}

// Few warps have more of what they load; where blocks have one chunk of keys, which is a chain of
// latencies, many are sooner done. Their bits are the same.
constexpr int kFewWarps = 4, kManyWarps = 8;
template <int kFormat, int kDim, int kTiles>
__global__ void __launch_bounds__(kFewWarps * 32, kTiles == 1 && kFormat != KSL_KV_BF16 ? 3 : 1)
    tile_kernel(const __grid_constant__ TileArgs a) {
  tile<kFewWarps, kFormat, kDim, kTiles, false>(a, nullptr);
}
template <int kWarps, int kFormat, int kDim>
__global__ void __launch_bounds__(kWarps * 32,
                                  kWarps == kManyWarps ? 2 : (kFormat != KSL_KV_BF16 ? 3 : 1))
    tile_heads_kernel(const __grid_constant__ TileArgs a, const __grid_constant__ HeadsArgs heads) {
  tile<kWarps, kFormat, kDim, 1, true>(a, &heads);
}

// Blocks that the device takes at one time, 0 if it has too little shared memory.
template <int kFormat, int kDim, int kTiles>
int slots() {
  typedef Layout<kFewWarps, kFormat, kDim, kTiles> L;
  static int found = -1;  // per instance; the engine has one thread
  if (found < 0) {
    int device = 0, processors = 0, blocks = 0;
    const auto kernel = tile_kernel<kFormat, kDim, kTiles>;
    const auto raise = [](auto k, int bytes) {
      return cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) ==
             cudaSuccess;
    };
    const bool runs = cudaGetDevice(&device) == cudaSuccess &&
                      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) ==
                          cudaSuccess &&
                      raise(kernel, L::kAll) &&
                      raise(tile_heads_kernel<kFewWarps, kFormat, kDim>,
                            Layout<kFewWarps, kFormat, kDim, 1>::kAll) &&
                      raise(tile_heads_kernel<kManyWarps, kFormat, kDim>,
                            Layout<kManyWarps, kFormat, kDim, 1>::kAll) &&
                      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, L::kThreads,
                                                                    L::kAll) == cudaSuccess;
    found = runs ? processors * blocks : 0;
    cudaGetLastError();
  }
  return found;
}

template <int kFormat, int kDim>
void run_heads(Device *device, const dim3 &grid, bool one, int bytes, const TileArgs &a,
               const HeadsArgs &heads) {
  if (!one) {
    launch_chained(device, "attn_tile", tile_heads_kernel<kFewWarps, kFormat, kDim>, grid,
                   kFewWarps * 32, bytes, a, heads);
    return;
  }
  typedef Layout<kManyWarps, kFormat, kDim, 1> L;
  launch_chained(device, "attn_tile", tile_heads_kernel<kManyWarps, kFormat, kDim>, grid,
                 L::kThreads, L::kFirst + L::kStage, a, heads);
}

template <int kFormat, int kDim, int kTiles>
bool run(Device *device, const TileArgs &a, const HeadsArgs *heads, int columns, bool ask) {
  const int together = slots<kFormat, kDim, kTiles>();
  if (ask || together == 0) return together > 0;
  const int group = a.heads / a.kv.kv_heads, parts = divide_up(group, 8 * kTiles);
  // As many blocks as run at once have the units of a tile of columns.
  const int per_tile = a.rows != nullptr && parts == 1 ? 8 * kTiles / group : 1;
  const int others = a.kv.kv_heads * divide_up(columns, per_tile) * parts;
  const int blocks = together < 2 * others ? 1 : together / others;
  TileArgs t = a;
  int places = columns * parts;
  t.by_tile = a.rows != nullptr && a.list == nullptr && parts == 1 && columns == a.columns.n &&
              columns <= kByTile;
  if (t.by_tile) {
    const int most = (columns + (per_tile - 1) * a.n_rows) / per_tile;
    if (most < places) places = most;
  }
  typedef Layout<kFewWarps, kFormat, kDim, kTiles> L;
  // One chunk of keys each takes one stage, which fits beside a product.
  const bool one = a.unit_chunks == 1 && blocks >= a.units;
  const int bytes = L::kFirst + (one ? 1 : kStages) * L::kStage;
  const dim3 grid(blocks < a.units ? blocks : a.units, a.kv.kv_heads, places);
  if (heads != nullptr)
    run_heads<kFormat, kDim>(device, grid, one, bytes, t, *heads);
  else
    launch_chained(device, "attn_tile", tile_kernel<kFormat, kDim, kTiles>, grid, L::kThreads,
                   bytes, t);
  return true;
}

// Eights of queries that a block takes at once: as many as registers hold.
constexpr int most_tiles(int format) {
  return format == KSL_KV_Q4 ? 3 : 2;
}

template <int kFormat, int kDim>
bool by_tiles(Device *device, const TileArgs &a, const HeadsArgs *heads, int columns, bool ask) {
  constexpr int kMany = most_tiles(kFormat), kFewer = 2;
  if (ask)
    return run<kFormat, kDim, 1>(device, a, heads, columns, true) &&
           run<kFormat, kDim, kFewer>(device, a, heads, columns, true) &&
           run<kFormat, kDim, kMany>(device, a, heads, columns, true);
  if (a.rows == nullptr) return run<kFormat, kDim, 1>(device, a, heads, columns, false);
  if constexpr (kMany > kFewer) {
    // Blocks of fewer queries are done sooner, where all of them run at once.
    const int group = a.heads / a.kv.kv_heads, together = 8 * kFewer / group;
    const int tiles = together > 0 ? divide_up(columns, together) : 2 * columns;
    if (a.units * a.kv.kv_heads * tiles <= slots<kFormat, kDim, kFewer>())
      return run<kFormat, kDim, kFewer>(device, a, heads, columns, false);
  }
  return run<kFormat, kDim, kMany>(device, a, heads, columns, false);
}

template <int kFormat>
bool by_dim(Device *device, const TileArgs &a, const HeadsArgs *heads, int columns, bool ask) {
  switch (a.kv.head_dim) {
    case 64:
      return by_tiles<kFormat, 64>(device, a, heads, columns, ask);
    case 128:
      return by_tiles<kFormat, 128>(device, a, heads, columns, ask);
    case 256:
      return by_tiles<kFormat, 256>(device, a, heads, columns, ask);
    default:
      return false;
  }
}

bool by_format(Device *device, const TileArgs &a, const HeadsArgs *heads, int columns, bool ask) {
  switch (a.format) {
    case KSL_KV_BF16:
      return by_dim<KSL_KV_BF16>(device, a, heads, columns, ask);
    case KSL_KV_FP8:
      return by_dim<KSL_KV_FP8>(device, a, heads, columns, ask);
    case KSL_KV_Q4:
      return by_dim<KSL_KV_Q4>(device, a, heads, columns, ask);
    default:
      return false;
  }
}

}  // namespace

bool attn_tile_runs(Device *device, int format, int head_dim) {
  TileArgs a = {};
  a.format = format;
  a.kv.head_dim = head_dim;
  return by_format(device, a, nullptr, 0, true);
}

bool attn_tile_makes_heads(const Device *device, const KvLayer &kv, int half, int columns,
                           int most_position) {
  constexpr int kFewChunks = 48;  // of a processor
  if (kv.head_dim % 32 != 0 || half % (kv.head_dim / 32) != 0) return false;
  const int64_t chunks = most_position / kKeys + 1;
  return chunks * kv.kv_heads * columns <=
         static_cast<int64_t>(kFewChunks) * device->room.processors;
}

void attn_tile(Device *device, TileArgs a, const HeadsArgs *heads, const GateArgs &o,
               int most_position, int64_t room) {
  const int chunks = most_position / kKeys + 1, spans = divide_up(chunks, kTileSpan);
  // Spans make less to join, chunks fill a device with less work.
  const int group = a.heads / a.kv.kv_heads, most_pairs = 8 * most_tiles(a.format);
  const int tiles =
      a.rows != nullptr && group <= most_pairs ? divide_up(a.n, most_pairs / group) : a.n;
  const bool by_span = static_cast<int64_t>(spans) * a.kv.kv_heads * tiles >= kManySpans;
  a.unit_chunks = by_span ? kTileSpan : 1;
  a.units = by_span ? spans : chunks;
  // All columns at once or, where that is more than there is room for, in equal parts: a few that
  // were left over would take nearly as long as a full part.
  const int64_t fit = room / (static_cast<int64_t>(a.units) * a.heads);
  const int parts = static_cast<int>((a.n + fit - 1) / fit), most = divide_up(a.n, parts);
  float *const memory = a.partial;
  a.partial_sums = reinterpret_cast<float2 *>(memory + room * a.kv.head_dim);
  for (int first = 0; first < a.n;) {
    const int left = a.n - first, n = left < most ? left : most;
    a.first = first;
    by_format(device, a, heads, n, false);
    attn_tile_join(device, a, o, n);
    first += n;
  }
}

}  // namespace ksl
