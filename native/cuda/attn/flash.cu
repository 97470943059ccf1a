// Attention of long pieces of prompts with warpgroup products (sm_90a): tiles of up to 128 queries
// (columns x the query heads of a KV head) against tiles of 64 keys. Of four warpgroups the first
// unpacks stored keys into halves in shared memory, the second values, two multiply.
//
// Queries, probabilities and unpacked keys are rounded to halves; sums are float32. Where tiles are
// too few for the device, the keys of each are divided: parts leave sums, which join.cu adds in
// order.
#include "prompt.cuh"
#include "wgmma.cuh"

namespace ksl {

namespace {

// Rows [first, first + rows) of a tile's queries by kThreads threads, in units that make a power of
// two the exponential. Dims of q4 are in the order in which codes unpack. to: panels of kFlashRows.
template <int kFormat, int kDim, int kThreads>
__device__ inline void load_queries(const FlashArgs &a, const FlashTile &tile, int head, int first,
                                    int rows, uint8_t *to, int thread) {
  constexpr int kChunks = kDim / 8, kAhead = 4;  // items whose loads are under way
  const float unit = 1.4426950408889634f / sqrtf(static_cast<float>(kDim));
  const int group = a.heads / a.kv.kv_heads;
  for (int from = thread; from < rows * kChunks; from += kAhead * kThreads) {
    float4 q[kAhead][2];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int item = from + i * kThreads, row = first + item / kChunks;
      q[i][0] = q[i][1] = make_float4(0, 0, 0, 0);
      if (item < rows * kChunks && row < tile.columns * group) {
        const float4 *at = reinterpret_cast<const float4 *>(
            a.q + static_cast<int64_t>(tile.column + row / group) * a.q_stride +
            (head * group + row % group) * kDim + item % kChunks * 8);
        q[i][0] = at[0];
        q[i][1] = at[1];
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int item = from + i * kThreads, row = first + item / kChunks, chunk = item % kChunks;
      if (item >= rows * kChunks) break;
      const float4 &x = q[i][0], &y = q[i][1];
      *reinterpret_cast<uint4 *>(to + (chunk >> 3) * (kFlashRows * 128) +
                                 swizzled(row, chunk & 7)) =
          kFormat == KSL_KV_Q4
              ? make_uint4(two_of(x.x * unit, y.x * unit), two_of(x.y * unit, y.y * unit),
                           two_of(x.z * unit, y.z * unit), two_of(x.w * unit, y.w * unit))
              : make_uint4(two_of(x.x * unit, x.y * unit), two_of(x.z * unit, x.w * unit),
                           two_of(y.x * unit, y.y * unit), two_of(y.z * unit, y.w * unit));
    }
  }
}

// A row of a tile when its keys are done, by the four lanes t that have it: greatest score, each
// lane's part of the sum, and by two(j) dims 8 j + 2 t and the next. All lanes of a warp come here.
template <int kDim, class Two>
__device__ inline void finish_row(const FlashArgs &a, const FlashTile &tile, int head, int row,
                                  float most, float total, const Two &two) {
  const int t = threadIdx.x & 3, heads = a.kv.kv_heads, group = a.heads / heads;
  const float sum = quad_sum(total);
  if (row >= tile.columns * group) return;
  if (tile.parts > 1) {
    const int64_t at = flash_partial(a, blockIdx.x / heads, head) + row;
    if (t == 0) a.partial_sums[at] = make_float2(most, sum);
#pragma unroll
    for (int j = 0; j < kDim / 8; j++)
      *reinterpret_cast<float2 *>(a.partial + at * kDim + j * 8 + 2 * t) = two(j);
    return;
  }
  const float scale = sum > 0 ? 1.0f / sum : 0.0f;  // no key: position 0 of a layer without row 0
  const int column = tile.column + row / group, query_head = head * group + row % group;
  // Gates of many dims are under way together: a store does not let later loads pass.
  constexpr int kTogether = kDim / 8 < 16 ? kDim / 8 : 16;
#pragma unroll
  for (int first = 0; first < kDim / 8; first += kTogether) {
    float2 gates[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++)
      gates[j] = gate_of2(a.gate, column, query_head, (first + j) * 8 + 2 * t, kDim);
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const float2 v = two(first + j);
      gate_store2(a.gate, column, query_head, (first + j) * 8 + 2 * t, kDim, v.x * scale,
                  v.y * scale, gates[j]);
    }
  }
}

constexpr int kDim = 256;
constexpr int kKeys = kFlashKeys;
constexpr int kRows = kFlashRows;
constexpr int kThreads = 512;

// Shared memory. Staged: what a loading thread has asked for and nobody else reads, and the scales
// of each warp; bf16 needs neither.
template <int kFormat>
struct Layout {
  static constexpr int kKPasses = kFormat == KSL_KV_BF16 ? 0 : (kFormat == KSL_KV_Q4 ? 4 : 8);
  static constexpr int kVPasses = kFormat == KSL_KV_BF16 ? 0 : 8;
  static constexpr int kQuery = 0, kK = kQuery + kRows * kDim * 2, kV = kK + 2 * kKeys * kDim * 2;
  static constexpr int kKStaged = kV + 2 * kKeys * kDim * 2;
  static constexpr int kVStaged = kKStaged + kKPasses * 128 * 16;
  static constexpr int kKScales = kVStaged + kVPasses * 128 * 16;  // q4: [passes][128] of 4 bytes
  static constexpr int kVScales = kKScales + (kFormat == KSL_KV_Q4 ? 4 * 128 * 4 : 4 * kKeys * 4);
  static constexpr int kBarriers = kVScales + 4 * kKeys * 4;
  static constexpr int kAll = kBarriers + 8 * 8;
};

#if KSL_WGMMA

constexpr int kPanel = kKeys * 128, kGroups = kKeys / 16;

struct Barriers {
  uint64_t k_full[2], k_empty[2], v_full[2], v_empty[2];
};

struct Place {
  const uint8_t *base;
  int row;
};

// Where the 16-key groups of a head lie, one after the other; keys that are not there read as those
// of block 0.
struct Pages {
  const KvLayer &kv;
  const int32_t *table;
  int head, keys, position;
  int index, at;  // block of the table, and key of it
  __device__ Pages(const KvLayer &layer, const int32_t *blocks, int h, int n, int first)
      : kv(layer), table(blocks), head(h), keys(n), position(first) {
    index = position / kv.block_tokens;
    at = position - index * kv.block_tokens;
  }
  template <int kCount>
  __device__ void find(Place (&out)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const bool there = position < keys;
      out[i].base = kv.blocks + kv.layer_offset + (there ? table[index] : 0) * kv.block_bytes;
      out[i].row = there ? at * kv.kv_heads + head : head;
      position += 16;
      at += 16;
      if (at == kv.block_tokens) {
        at = 0;
        index++;
      }
    }
  }
};

// A row is read by 16 bytes, and packed keys and values come by 16-key group. Of eight keys four
// lanes side by side ask for 64 bytes of one; what they get is staged in an order in which lane
// (key % 8, part % 4) takes it out without conflicts, and that lane's stores to a panel fill all
// banks.
template <int kFormat>
struct Loader {
  typedef Layout<kFormat> L;
  const KvLayer &kv;
  uint8_t *memory;
  int warp, lane, thread;  // of the warpgroup

  // Where a warp stages 16 bytes of eight keys and four parts.
  __device__ static int staged_at(int key, int part) {
    return key * 64 + ((part ^ (key >> 1)) & 3) * 16;
  }

  // Passes of rows of 256 bytes: eight keys, one quarter of the row a warp.
  __device__ void ask256(int group, int staged, int scales, const Place &place, int offset,
                         int offset_of_scales, int left) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int pass = group * 2 + i, key = pass * 8 + (lane >> 2), part = warp * 4 + (lane & 3);
      const int row = place.row + (key & 15) * kv.kv_heads;
      copy_async<16>(memory + staged + (pass * 4 + warp) * 512 + staged_at(lane >> 2, lane & 3),
                     place.base + (offset + row * 256 + part * 16), key < left);
    }
    const int key = group * 16 + (lane & 15), row = place.row + (lane & 15) * kv.kv_heads;
    if (lane < 16)
      copy_async<4>(memory + scales + (warp * kKeys + key) * 4,
                    place.base + (offset_of_scales + row * 4), key < left);
  }
  __device__ void ask_k(int group, const Place &place, int left) const {
    if constexpr (kFormat != KSL_KV_Q4) {
      ask256(group, L::kKStaged, L::kKScales, place, kv.k_offset, kv.k_scale_offset, left);
    } else {
      const int key = (group * 2 + (warp >> 1)) * 8 + (lane >> 2);
      const int part = (warp & 1) * 4 + (lane & 3);
      const int row = place.row + (key & 15) * kv.kv_heads;
      copy_async<16>(
          memory + L::kKStaged + (group * 4 + warp) * 512 + staged_at(lane >> 2, lane & 3),
          place.base + (kv.k_offset + row * 128 + part * 16), key < left);
      copy_async<4>(memory + L::kKScales + (group * 128 + thread) * 4,
                    place.base + (kv.k_scale_offset + row * 32 + part * 4), key < left);
    }
  }
  __device__ void ask_v(int group, const Place &place, int left) const {
    ask256(group, L::kVStaged, L::kVScales, place, kv.v_offset, kv.v_scale_offset, left);
  }

  // taken: called when what was asked for lies in registers.
  template <class Taken>
  __device__ void unpack256(int group, int staged, int scales, uint8_t *to,
                            const Taken &taken) const {
    uint4 codes[2];
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int pass = group * 2 + i, key = pass * 8 + (lane & 7);
      codes[i] = *reinterpret_cast<const uint4 *>(memory + staged + (pass * 4 + warp) * 512 +
                                                  staged_at(lane & 7, lane >> 3));
      scale[i] = reinterpret_cast<const float *>(memory + scales)[warp * kKeys + key];
    }
    taken();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int key = (group * 2 + i) * 8 + (lane & 7), part = warp * 4 + (lane >> 3);
      unpack_piece8(codes[i], scale[i], to + (part >> 2) * kPanel, key, (part & 3) * 2);
    }
  }
  template <class Taken>
  __device__ void unpack_k(int group, uint8_t *to, const Taken &taken) const {
    if constexpr (kFormat != KSL_KV_Q4) {
      unpack256(group, L::kKStaged, L::kKScales, to, taken);
    } else {
      const uint8_t *const from = memory + L::kKStaged + (group * 4 + warp) * 512;
      const uint4 codes = *reinterpret_cast<const uint4 *>(from + staged_at(lane & 7, lane >> 3));
      const __half2 pair = *reinterpret_cast<const __half2 *>(
          memory + L::kKScales + (group * 128 + warp * 32 + (lane & 7) * 4 + (lane >> 3)) * 4);
      taken();
      const int key = (group * 2 + (warp >> 1)) * 8 + (lane & 7);
      const int part = (warp & 1) * 4 + (lane >> 3);
      unpack_piece4(codes, pair, to + (part >> 1) * kPanel, key, (part & 1) * 4);
    }
  }
  template <class Taken>
  __device__ void unpack_v(int group, uint8_t *to, const Taken &taken) const {
    unpack256(group, L::kVStaged, L::kVScales, to, taken);
  }

  // Rows of 512 bytes straight to their places; a thread then rounds what it asked for itself.
  // Eight lanes side by side have keys k and k + 4, whose parts lie in different banks.
  __device__ int place512(int pass, int *key, int *part) const {
    *key = pass / 2 * 8 + (lane >> 2 & 1) * 4 + (lane >> 3);
    *part = (pass & 1) * 16 + warp * 4 + (lane & 3);
    return (*part >> 3) * kPanel + swizzled(*key, *part & 7);
  }
  __device__ void ask512(uint8_t *to, const Place (&place)[4], int offset, int left) const {
#pragma unroll
    for (int pass = 0; pass < 16; pass++) {
      int key, part;
      const int at = place512(pass, &key, &part);
      const Place &p = place[pass >> 2];
      copy_async<16>(to + at,
                     p.base + offset +
                         static_cast<int64_t>(p.row + (key & 15) * kv.kv_heads) * 512 + part * 16,
                     key < left);
    }
  }
  __device__ void round512(uint8_t *to) const {
#pragma unroll
    for (int pass = 0; pass < 16; pass++) {
      int key, part;
      unpack_piece16(to + place512(pass, &key, &part));
    }
  }
};

template <int kFormat>
__device__ void multiply(const FlashArgs &a, const FlashTile &tile, int head, uint8_t *memory) {
  typedef Layout<kFormat> L;
  Barriers *barriers = reinterpret_cast<Barriers *>(memory + L::kBarriers);
  const int thread = threadIdx.x & 127, half = (threadIdx.x >> 7) - 2;
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int group = a.heads / a.kv.kv_heads;
  load_queries<kFormat, kDim, 128>(a, tile, head, half * 64, 64, memory + L::kQuery, thread);
  wgmma_publish();
  asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory");

  const uint32_t base = shared_address(memory);
  const uint64_t query = matrix_descriptor(base + L::kQuery + half * 8192, 16);
  const uint64_t keys_at = matrix_descriptor(base + L::kK, 16);
  const uint64_t values_at = matrix_descriptor(base + L::kV, kPanel);
  const int rows = tile.columns * group, tiles = tile.last - tile.first;
  int limit[2];  // keys that the queries of this lane's two rows see
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = half * 64 + warp * 16 + g + 8 * r;
    limit[r] = tile.position + (row < rows ? row / group : 0) + 1;
  }
  const int whole = tile.position + (half * 64 + warp * 16) / group + 1;  // keys all rows here see

  float out[2][kDim / 4] = {}, score[kKeys / 2], most[2] = {-INFINITY, -INFINITY}, total[2] = {};
  uint32_t p[kKeys / 16][4];
  const auto ask_scores = [&](int tile_index) {
    const int stage = tile_index & 1;
    barrier_wait(&barriers->k_full[stage], tile_index >> 1 & 1);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < kDim / 16; s++)
      wgmma_rows64(score, query + (((s >> 2) * (kRows * 128) + (s & 3) * 32) >> 4),
                   keys_at + ((stage * (kKeys * kDim * 2) + (s >> 2) * kPanel + (s & 3) * 32) >> 4),
                   s > 0);
    wgmma_commit();
  };
  // Probabilities of the scores, in place; returns by how much what came before counts less.
  const auto soften = [&](int tile_index, float (&old)[2]) {
    const int first = (tile.first + tile_index) * kKeys;
    if (first + kKeys > whole || first < a.kv.first_key) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; i++) {
        const int key = first + (i >> 2) * 8 + 2 * t + (i & 1);
        if (key >= limit[i >> 1 & 1] || key < a.kv.first_key) score[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float high = -INFINITY;
#pragma unroll
      for (int i = 0; i < kKeys / 8; i++)
        high = fmaxf(high, fmaxf(score[4 * i + 2 * r], score[4 * i + 2 * r + 1]));
      high = fmaxf(most[r], quad_max(high));
      const float from = high == -INFINITY ? 0.0f : high;
      old[r] = exp2_fast(most[r] - from);
      most[r] = high;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kKeys / 8; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float x = exp2_fast(score[4 * i + 2 * r + e] - from);
          score[4 * i + 2 * r + e] = x;
          sum += x;
        }
      }
      total[r] = fmaf(total[r], old[r], sum);
    }
  };
  const auto pack = [&]() {
#pragma unroll
    for (int s = 0; s < kKeys / 16; s++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        // Fragment registers: rows g and g + 8 of slots 2 t, then of slots 2 t + 8.
        const __half2 two = __floats2half2_rn(score[8 * s + 4 * (k >> 1) + 2 * (k & 1)],
                                              score[8 * s + 4 * (k >> 1) + 2 * (k & 1) + 1]);
        p[s][k] = reinterpret_cast<const uint32_t &>(two);
      }
  };

  const auto add_values = [&](int tile_index) {
    const int stage = tile_index & 1;
    barrier_wait(&barriers->v_full[stage], tile_index >> 1 & 1);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < kKeys / 16; s++)
#pragma unroll
      for (int side = 0; side < 2; side++)
        wgmma_columns128(
            out[side], p[s],
            values_at + ((stage * (kKeys * kDim * 2) + side * (2 * kPanel) + s * 2048) >> 4));
    wgmma_commit();
  };

  ask_scores(0);
  wgmma_wait<0>();
  if (lane == 0) barrier_arrive(&barriers->k_empty[0]);
  float old[2];
  soften(0, old);
  pack();
  for (int i = 0; i + 1 < tiles; i++) {
    ask_scores(i + 1);
    add_values(i);
    wgmma_wait<1>();
    soften(i + 1, old);
    // Always, but not before the probabilities are there: else the wait for the values' product
    // would be moved in front of what runs beside it.
    if (lane == 0 && !(total[0] + total[1] < 0)) barrier_arrive(&barriers->k_empty[(i + 1) & 1]);
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&barriers->v_empty[i & 1]);
    pack();
    if (__any_sync(kAll, old[0] != 1.0f || old[1] != 1.0f)) {
#pragma unroll
      for (int k = 0; k < kDim / 2; k++) out[k >> 6][k & 63] *= old[k >> 1 & 1];
    }
  }
  add_values(tiles - 1);
  wgmma_wait<0>();

#pragma unroll
  for (int r = 0; r < 2; r++)
    finish_row<kDim>(a, tile, head, half * 64 + warp * 16 + g + 8 * r, most[r], total[r],
                     [&](int j) {
                       const float *two = out[j >> 4] + 4 * (j & 15) + 2 * r;
                       return make_float2(two[0], two[1]);
                     });
}

// The keys or values of all tiles: a group is asked for when that of the tile before has been
// taken; bf16, whole tiles when there is room for them.
template <int kFormat, bool kValues>
__device__ void load_tiles(const FlashArgs &a, const FlashTile &tile, int head, uint8_t *memory) {
  typedef Layout<kFormat> L;
  Barriers *barriers = reinterpret_cast<Barriers *>(memory + L::kBarriers);
  uint64_t *full = kValues ? barriers->v_full : barriers->k_full;
  uint64_t *empty = kValues ? barriers->v_empty : barriers->k_empty;
  const int32_t *table = a.kv.tables + static_cast<int64_t>(tile.slot) * a.kv.table_blocks;
  const int keys = tile.position + tile.columns, tiles = tile.last - tile.first;
  Pages pages(a.kv, table, head, keys, tile.first * kKeys);
  const int thread = threadIdx.x & 127;
  const Loader<kFormat> loader = {a.kv, memory, thread >> 5, thread & 31, thread};
  if constexpr (kFormat == KSL_KV_BF16) {
    for (int i = 0; i < tiles; i++) {
      const int stage = i & 1;
      uint8_t *to = memory + (kValues ? L::kV : L::kK) + stage * (kKeys * kDim * 2);
      Place place[4];
      pages.find(place);
      barrier_wait(&empty[stage], (i >> 1 & 1) ^ 1);
      loader.ask512(to, place, kValues ? a.kv.v_offset : a.kv.k_offset,
                    keys - (tile.first + i) * kKeys);
      copy_commit();
      copy_wait<0>();
      loader.round512(to);
      wgmma_publish();
      barrier_arrive(&full[stage]);
    }
    return;
  }
  const auto ask = [&](int i, int group) {
    if (i < tiles) {
      Place place[1];
      pages.find(place);
      const int left = keys - (tile.first + i) * kKeys;
      if (kValues)
        loader.ask_v(group, place[0], left);
      else
        loader.ask_k(group, place[0], left);
    }
    copy_commit();
  };
#pragma unroll
  for (int group = 0; group < kGroups; group++) ask(0, group);
  for (int i = 0; i < tiles; i++) {
    const int stage = i & 1;
    uint8_t *to = memory + (kValues ? L::kV : L::kK) + stage * (kKeys * kDim * 2);
    barrier_wait(&empty[stage], (i >> 1 & 1) ^ 1);
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      copy_wait<kGroups - 1>();
      __syncwarp();
      const auto taken = [&] {
        __syncwarp();
        ask(i + 1, group);
      };
      if (kValues)
        loader.unpack_v(group, to, taken);
      else
        loader.unpack_k(group, to, taken);
    }
    wgmma_publish();
    barrier_arrive(&full[stage]);
  }
}

#endif

template <int kFormat>
__global__ void __launch_bounds__(kThreads, 1) flash_kernel(const __grid_constant__ FlashArgs a) {
#if KSL_WGMMA
  extern __shared__ __align__(1024) uint8_t memory[];
  const int head = blockIdx.x % a.kv.kv_heads;
  const FlashTile tile = a.tiles[blockIdx.x / a.kv.kv_heads];
  Barriers *barriers = reinterpret_cast<Barriers *>(memory + Layout<kFormat>::kBarriers);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(&barriers->k_full[i], 128);
      barrier_init(&barriers->v_full[i], 128);
      barrier_init(&barriers->k_empty[i], 8);
      barrier_init(&barriers->v_empty[i], 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  begin_chained();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
    load_tiles<kFormat, false>(a, tile, head, memory);
  } else if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
    load_tiles<kFormat, true>(a, tile, head, memory);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    multiply<kFormat>(a, tile, head, memory);
  }
#endif
}

template <int kFormat>
void run(Device *device, const FlashArgs &a) {
  static bool raised = false;  // per instance; the engine has one thread
  if (!raised)
    raised = keep_error(
        device,
        cudaFuncSetAttribute(flash_kernel<kFormat>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             Layout<kFormat>::kAll),
        "attn_flash");
  launch_chained(device, "attn_flash", flash_kernel<kFormat>, a.n_tiles * a.kv.kv_heads, kThreads,
                 Layout<kFormat>::kAll, a);
  if (a.partial != nullptr) attn_join_parts(device, a);
}

}  // namespace

bool attn_flash_runs(int major, int format, int head_dim, int group) {
  return major == 9 && head_dim == kDim && group <= kRows &&
         (format == KSL_KV_Q4 || format == KSL_KV_FP8 || format == KSL_KV_BF16);
}

void attn_flash(Device *device, const FlashArgs &a) {
  if (a.format == KSL_KV_Q4)
    run<KSL_KV_Q4>(device, a);
  else if (a.format == KSL_KV_FP8)
    run<KSL_KV_FP8>(device, a);
  else
    run<KSL_KV_BF16>(device, a);
}

}  // namespace ksl
