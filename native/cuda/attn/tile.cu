// Attention of short rows on tensor cores: 8 kTiles query heads of a row, one KV head, one unit of
// keys.
//
// The 16 rows of a product are eight queries, as the high halves of their values and as what those
// leave over; the two results are added. Stored codes are exact in a half. So scores and weighted
// values have the accuracy of float32, and those of a query depend on nothing beside it.
#include "tile_products.cuh"

namespace ksl {

namespace {

constexpr float kProbability = 4096;  // probabilities are halves of [0, kProbability]
// Keys so far before a column that is a row of its own may have been stored in this wave: VERIFY
// columns and drafts.
constexpr int kRecent = 64;
static_assert(kRecent > 2 * KSL_MAX_DRAFT + 1, "settled keys");

// What a block works on: pairs (column, query head) from `pair` on of the columns of a row.
struct Work {
  int index;  // of the first column in this launch
  int column, columns, pair, pairs, slot;
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
        const int d = dim_of<kFormat>((threadIdx.x >> 5) + i * kWarps, k >> 1, l & 3);
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
#pragma unroll
  for (int m = 0; m < kTiles; m++) {
    if (m >= slots) break;
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      uint4 out;
      halves<L::kBf16>(x[m][i][0], x[m][i][1], &out.x, &out.y);
      halves<L::kBf16>(x[m][i][2], x[m][i][3], &out.z, &out.w);
      reinterpret_cast<uint4 *>(
          memory + L::kQuery)[(m * kSteps + (threadIdx.x >> 5) + i * kWarps) * 32 + l] = out;
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
  constexpr int kMany = most_tiles(kFormat), kFewer = 2;
  if (ask)
    return run<kFormat, kDim, 1>(device, a, columns, true) &&
           run<kFormat, kDim, kFewer>(device, a, columns, true) &&
           run<kFormat, kDim, kMany>(device, a, columns, true);
  if (a.rows == nullptr) return run<kFormat, kDim, 1>(device, a, columns, false);
  if constexpr (kMany > kFewer) {
    // Blocks of fewer queries are done sooner, where all of them run at once.
    const int group = a.heads / a.kv.kv_heads, together = 8 * kFewer / group;
    const int tiles = together > 0 ? divide_up(columns, together) : 2 * columns;
    if (a.units * a.kv.kv_heads * tiles <= slots<kFormat, kDim, kFewer>())
      return run<kFormat, kDim, kFewer>(device, a, columns, false);
  }
  return run<kFormat, kDim, kMany>(device, a, columns, false);
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
  // All columns at once or, where that is more than there is room for, in equal parts: a few that
  // were left over would take nearly as long as a full part.
  const int64_t fit = room / (static_cast<int64_t>(a.units) * a.heads);
  const int parts = static_cast<int>((a.n + fit - 1) / fit), most = divide_up(a.n, parts);
  float *const memory = a.partial;
  a.partial_sums = reinterpret_cast<float2 *>(memory + room * a.kv.head_dim);
  for (int first = 0; first < a.n;) {
    const int left = a.n - first, n = left < most ? left : most;
    a.first = first;
    by_format(device, a, n, false);
    attn_tile_join(device, a, o, n);
    first += n;
  }
}

}  // namespace ksl
