// Attention of long pieces of prompts with products of single warps, for devices, heads and formats
// that flash.cu does not take: tiles of up to 128 queries (columns x the query heads of a KV head),
// 16 of them a warp with their products in registers, against tiles of keys that the block unpacks
// into halves while it multiplies the ones before.
//
// Queries, probabilities and unpacked keys are rounded to halves; sums are float32.
#include "prompt.cuh"

namespace ksl {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kRows = kFlashRows;
static_assert(kRows == 16 * kWarps, "16 rows a warp");

struct PromptArgs {
  FlashArgs flash;
  unsigned block_groups, per_block;  // groups of 16 keys of a block; 2^32 over it, rounded up
};

// Which 16 bytes of a row of kBytes, and of which key, a thread moves in a pass: eight keys side by
// side in a warp, so that its stores to a panel fill all banks. kEach: every piece has 4 bytes of
// scales of its own, else one lane asks for those of a key and its warp reads them.
template <int kBytes, bool kEach>
struct Piece {
  static constexpr int kParts = kBytes / 16, kNear = kParts < 4 ? kParts : 4;
  static constexpr int kShare = kEach ? 1 : kNear;                     // lanes of a key
  static constexpr int kPass = kThreads * 16 + kThreads / kShare * 4;  // bytes staged
  int key, part;
  __device__ Piece(int pass) {
    const int warp = pass * kWarps + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    part = warp % (kParts / kNear) * kNear + (lane >> 3) % kNear;
    key = (warp / (kParts / kNear) * (4 / kNear) + (lane >> 3) / kNear) * 8 + (lane & 7);
  }
  // Where its scales are staged in a pass.
  __device__ static int scale_at() {
    const int lane = threadIdx.x & 31, mine = (lane >> 3) / kShare * 8 + (lane & 7);
    return kThreads * 16 + ((threadIdx.x >> 5) * (32 / kShare) + mine) * 4;
  }
  __device__ static bool asks_scale() { return (threadIdx.x >> 3 & 3) % kShare == 0; }
};

// Shared memory: two tiles of keys and values in panels of 64 dims, first of all the queries; what
// a warp has asked for and no other reads.
template <int kFormat, int kDim>
struct Layout {
  static constexpr bool kQ4 = kFormat == KSL_KV_Q4, kBf16 = kFormat == KSL_KV_BF16;
  static constexpr int kKeys = kDim == 256 ? 32 : 64;
  static constexpr int kPanels = (kDim + 63) / 64, kPanel = kKeys * 128;
  static constexpr int kPlane = kPanels * kPanel, kStage = 2 * kPlane;  // keys, then values
  static constexpr int kKBytes = kQ4 ? kDim / 2 : (kBf16 ? kDim * 2 : kDim);
  static constexpr int kVBytes = kBf16 ? kDim * 2 : kDim;
  static constexpr int passes(int bytes) {
    return (kKeys * (bytes / 16) + kThreads - 1) / kThreads;
  }
  static constexpr int kKPasses = passes(kKBytes), kVPasses = passes(kVBytes);
  static constexpr int kQuery = kPanels * kRows * 128;
  static constexpr int kStaged = 2 * kStage > kQuery ? 2 * kStage : kQuery;
  typedef Piece<kKBytes, kQ4> KPiece;
  typedef Piece<kVBytes, false> VPiece;
  static constexpr int kVStaged = kStaged + kKPasses * KPiece::kPass;
  static constexpr int kStagedBytes = kBf16 ? 0 : kVStaged - kStaged + kVPasses * VPiece::kPass;
  // Registers do not hold all fragments of 256-dim queries: the last ones, by warp and lane.
  static constexpr int kHeld = kDim != 256 ? kDim / 16 : (kQ4 ? 11 : (kBf16 ? 9 : 12));
  static constexpr int kRest = kStaged + kStagedBytes;
  static constexpr int kAll = kRest + (kDim / 16 - kHeld) * kWarps * 512;
  static_assert(kAll <= kSmallRoom, "an sm_120 runs it");
};

template <int kFormat, int kDim>
struct Loader {
  typedef Layout<kFormat, kDim> L;
  const PromptArgs &p;
  const int32_t *table;
  int head, keys;
  uint8_t *memory;

  // Where a key of a tile is; one behind the last reads as key 0 of the row.
  struct Place {
    const uint8_t *base;
    int64_t row;
    bool there;
  };
  __device__ Place find(int tile, int key) const {
    const KvLayer &kv = p.flash.kv;
    const int position = tile * L::kKeys + key;
    const bool there = position < keys;
    const unsigned group = there ? static_cast<unsigned>(position) >> 4 : 0;
    const unsigned index = p.block_groups == 1 ? group : __umulhi(group, p.per_block);
    const int at = static_cast<int>(group - index * p.block_groups) * 16 + (position & 15);
    return {kv.blocks + kv.layer_offset + table[index] * kv.block_bytes, at * kv.kv_heads + head,
            there};
  }
  // A piece of a plane: to its panel (bf16, which is unpacked in place), or to where unpack finds
  // it, with its scales.
  template <typename P, int kBytes, bool kQ4>
  __device__ void ask_piece(const Place &at, const P &piece, int pass, int plane, int staged,
                            int offset, int scale_offset) const {
    const uint8_t *from = at.base + offset + at.row * kBytes + piece.part * 16;
    if (L::kBf16) {
      copy_async<16>(
          memory + plane + (piece.part >> 3) * L::kPanel + swizzled(piece.key, piece.part & 7),
          from, at.there);
      return;
    }
    uint8_t *const to = memory + staged + pass * P::kPass;
    copy_async<16>(to + threadIdx.x * 16, from, at.there);
    if (P::asks_scale())
      copy_async<4>(
          to + P::scale_at(),
          at.base + scale_offset + (kQ4 ? at.row * (kDim / 8) + piece.part * 4 : at.row * 4),
          at.there);
  }
  __device__ void ask(int tile, int stage) const {
    typedef typename L::KPiece K;
    typedef typename L::VPiece V;
    const KvLayer &kv = p.flash.kv;
#pragma unroll
    for (int pass = 0; pass < L::kKPasses && L::kQ4; pass++) {
      const K piece(pass);
      if (L::kKPasses * kThreads > L::kKeys * K::kParts && piece.key >= L::kKeys) break;
      ask_piece<K, L::kKBytes, L::kQ4>(find(tile, piece.key), piece, pass, stage, L::kStaged,
                                       kv.k_offset, kv.k_scale_offset);
    }
    // All at once would not fit in the registers that queries and products leave.
    constexpr int kTogether = kDim == 256 ? 1 : L::kVPasses;
#pragma unroll kTogether
    for (int pass = 0; pass < L::kVPasses; pass++) {
      const V piece(pass);
      if (L::kVPasses * kThreads > L::kKeys * V::kParts && piece.key >= L::kKeys) break;
      const Place at = find(tile, piece.key);
      ask_piece<V, L::kVBytes, false>(at, piece, pass, stage + L::kPlane, L::kVStaged, kv.v_offset,
                                      kv.v_scale_offset);
      if constexpr (!L::kQ4)
        ask_piece<V, L::kVBytes, false>(at, piece, pass, stage, L::kStaged, kv.k_offset,
                                        kv.k_scale_offset);
    }
    copy_commit();
  }

  template <int kBytes, int kPasses, bool kQ4>
  __device__ void unpack_plane(int to, int staged) const {
    typedef Piece<kBytes, kQ4> P;
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++) {
      const P piece(pass);
      if (kPasses * kThreads > L::kKeys * P::kParts && piece.key >= L::kKeys) break;
      if constexpr (L::kBf16) {  // in place
        unpack_piece16(memory + to + (piece.part >> 3) * L::kPanel +
                       swizzled(piece.key, piece.part & 7));
        continue;
      }
      const uint8_t *const from = memory + staged + pass * P::kPass;
      const uint4 codes = *reinterpret_cast<const uint4 *>(from + threadIdx.x * 16);
      const uint8_t *const scales = from + P::scale_at();
      if (kQ4)
        unpack_piece4(codes, *reinterpret_cast<const __half2 *>(scales),
                      memory + to + (piece.part >> 1) * L::kPanel, piece.key, (piece.part & 1) * 4);
      else
        unpack_piece8(codes, *reinterpret_cast<const float *>(scales),
                      memory + to + (piece.part >> 2) * L::kPanel, piece.key, (piece.part & 3) * 2);
    }
  }
  __device__ void unpack(int stage) const {
    copy_wait<0>();
    __syncwarp();
    unpack_plane<L::kKBytes, L::kKPasses, L::kQ4>(stage, L::kStaged);
    unpack_plane<L::kVBytes, L::kVPasses, false>(stage + L::kPlane, L::kVStaged);
    __syncwarp();
  }
};

// The queries of a tile, in units that make a power of two the exponential. Dims of q4 are in the
// order in which codes unpack.
template <int kFormat, int kDim>
__device__ inline void load_queries(const FlashArgs &a, const FlashTile &tile, int head, int group,
                                    uint8_t *memory) {
  const float unit = 1.4426950408889634f / sqrtf(static_cast<float>(kDim));
  for (int i = threadIdx.x; i < kRows * (kDim / 8); i += kThreads) {
    const int chunk = i % (kDim / 8), row = i / (kDim / 8);
    float q[8] = {};
    if (row < tile.columns * group) {
      const float4 *from = reinterpret_cast<const float4 *>(
          a.q + static_cast<int64_t>(tile.column + row / group) * a.q_stride +
          (head * group + row % group) * kDim + chunk * 8);
      const float4 x = from[0], y = from[1];
      q[0] = x.x, q[1] = x.y, q[2] = x.z, q[3] = x.w;
      q[4] = y.x, q[5] = y.y, q[6] = y.z, q[7] = y.w;
    }
    uint32_t out[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
      out[k] = kFormat == KSL_KV_Q4 ? two_of(q[k] * unit, q[k + 4] * unit)
                                    : two_of(q[2 * k] * unit, q[2 * k + 1] * unit);
    *reinterpret_cast<uint4 *>(memory + (chunk >> 3) * (kRows * 128) + swizzled(row, chunk & 7)) =
        make_uint4(out[0], out[1], out[2], out[3]);
  }
}

template <int kFormat, int kDim>
__global__ void __launch_bounds__(kThreads, 1) prompt_kernel(const __grid_constant__ PromptArgs p) {
  typedef Layout<kFormat, kDim> L;
  constexpr int kKeys = L::kKeys;
  extern __shared__ __align__(1024) uint8_t memory[];
  const FlashArgs &a = p.flash;
  const int heads = a.kv.kv_heads, head = blockIdx.x % heads, group = a.heads / heads;
  const FlashTile tile = a.tiles[blockIdx.x / heads];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int keys = tile.position + tile.columns;
  const int begin = tile.first * (kFlashKeys / kKeys);
  const int end = min(tile.last * (kFlashKeys / kKeys), (keys + kKeys - 1) / kKeys);
  begin_chained();

  const Loader<kFormat, kDim> loader = {
      p, a.kv.tables + static_cast<int64_t>(tile.slot) * a.kv.table_blocks, head, keys, memory};
  if (!L::kBf16 && begin < end) loader.ask(begin, 0);
  load_queries<kFormat, kDim>(a, tile, head, group, memory);
  __syncthreads();
  uint4 query[L::kHeld];
  uint4 *const rest = reinterpret_cast<uint4 *>(memory + L::kRest) + warp * 32 + lane;
#pragma unroll
  for (int s = 0; s < kDim / 16; s++) {
    const uint4 fragment =
        load_matrices(memory + (s >> 2) * (kRows * 128) +
                      swizzled(warp * 16 + (lane & 15), (s & 3) * 2 + (lane >> 4)));
    if (s < L::kHeld)
      query[s] = fragment;
    else
      rest[(s - L::kHeld) * kThreads] = fragment;
  }
  __syncthreads();
  if (begin < end) {
    if (L::kBf16) loader.ask(begin, 0);
    loader.unpack(0);
    if (!L::kBf16 && begin + 1 < end) loader.ask(begin + 1, 0);
  }
  __syncthreads();

  const int rows = tile.columns * group;
  const int whole = tile.position + warp * 16 / group + 1;  // keys that all rows here see
  float out[kDim / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {};

  for (int i = begin; i < end; i++) {
    const int stage = (i - begin & 1) * L::kStage, other = L::kStage - stage;
    if (L::kBf16 && i + 1 < end) loader.ask(i + 1, other);
    float score[kKeys / 8][4] = {};
    const uint8_t *const k_at = memory + stage, *const v_at = k_at + L::kPlane;
#pragma unroll
    for (int s = 0; s < kDim / 16; s++) {
      const uint4 q = s < L::kHeld ? query[s] : rest[(s - L::kHeld) * kThreads];
#pragma unroll
      for (int j = 0; j < kKeys / 8; j += 2) {
        const uint4 b = load_matrices(
            k_at + (s >> 2) * L::kPanel +
            swizzled(j * 8 + (lane >> 4) * 8 + (lane & 7), (s & 3) * 2 + (lane >> 3 & 1)));
        mma16<false>(score[j], q, b.x, b.y);
        mma16<false>(score[j + 1], q, b.z, b.w);
      }
    }
    const int first = i * kKeys;
    if (first + kKeys > whole || first < a.kv.first_key) {
      int limit[2];  // keys that the queries of this lane's two rows see
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = warp * 16 + g + 8 * r;
        limit[r] = tile.position + (row < rows ? row / group : 0) + 1;
      }
#pragma unroll
      for (int j = 0; j < kKeys / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int key = first + j * 8 + 2 * t + (e & 1);
          if (key >= limit[e >> 1] || key < a.kv.first_key) score[j][e] = -INFINITY;
        }
    }
    float old[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float high = -INFINITY;
#pragma unroll
      for (int j = 0; j < kKeys / 8; j++)
        high = fmaxf(high, fmaxf(score[j][2 * r], score[j][2 * r + 1]));
      high = fmaxf(most[r], quad_max(high));
      const float from = high == -INFINITY ? 0.0f : high;
      old[r] = exp2_fast(most[r] - from);
      most[r] = high;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kKeys / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float x = exp2_fast(score[j][2 * r + e] - from);
          score[j][2 * r + e] = x;
          sum += x;
        }
      total[r] = fmaf(total[r], old[r], sum);
    }
    if (__any_sync(kAll, old[0] != 1.0f || old[1] != 1.0f)) {
#pragma unroll
      for (int j = 0; j < kDim / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[j][e] *= old[e >> 1];
    }
#pragma unroll
    for (int s = 0; s < kKeys / 16; s++) {
      const uint4 weights = make_uint4(two_of(score[2 * s][0], score[2 * s][1]),
                                       two_of(score[2 * s][2], score[2 * s][3]),
                                       two_of(score[2 * s + 1][0], score[2 * s + 1][1]),
                                       two_of(score[2 * s + 1][2], score[2 * s + 1][3]));
#pragma unroll
      for (int j = 0; j < kDim / 8; j += 2) {
        const uint4 b = load_transposed(v_at + (j >> 3) * L::kPanel +
                                        swizzled(s * 16 + (lane & 15), (j & 7) + (lane >> 4)));
        mma16<false>(out[j], weights, b.x, b.y);
        mma16<false>(out[j + 1], weights, b.z, b.w);
      }
    }
    if (i + 1 < end) {
      loader.unpack(other);
      if (!L::kBf16 && i + 2 < end) loader.ask(i + 2, 0);
    }
    __syncthreads();
  }

#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = warp * 16 + g + 8 * r;
    const float sum = quad_sum(total[r]);
    if (row >= rows) continue;
    if (tile.parts > 1) {
      const int64_t at = flash_partial(a, blockIdx.x / heads, head) + row;
      if (t == 0) a.partial_sums[at] = make_float2(most[r], sum);
#pragma unroll
      for (int j = 0; j < kDim / 8; j++)
        *reinterpret_cast<float2 *>(a.partial + at * kDim + j * 8 + 2 * t) =
            make_float2(out[j][2 * r], out[j][2 * r + 1]);
      continue;
    }
    const float scale = sum > 0 ? 1.0f / sum : 0.0f;  // no key: position 0 of a layer without row 0
    const int column = tile.column + row / group, query_head = head * group + row % group;
#pragma unroll
    for (int j = 0; j < kDim / 8; j++)
      gate_store2(a.gate, column, query_head, j * 8 + 2 * t, kDim, out[j][2 * r] * scale,
                  out[j][2 * r + 1] * scale,
                  gate_of2(a.gate, column, query_head, j * 8 + 2 * t, kDim));
  }
}

template <int kFormat, int kDim>
void run(Device *device, const PromptArgs &p) {
  typedef Layout<kFormat, kDim> L;
  static bool raised = false;  // per instance; the engine has one thread
  if (!raised) raised = raise_shared(device, prompt_kernel<kFormat, kDim>, L::kAll);
  launch_chained(device, "attn_prompt", prompt_kernel<kFormat, kDim>,
                 p.flash.n_tiles * p.flash.kv.kv_heads, kThreads, L::kAll, p);
}

template <int kFormat>
void by_dim(Device *device, const PromptArgs &p) {
  switch (p.flash.kv.head_dim) {
    case 64:
      return run<kFormat, 64>(device, p);
    case 128:
      return run<kFormat, 128>(device, p);
    default:
      return run<kFormat, 256>(device, p);
  }
}

}  // namespace

bool attn_prompt_runs(int format, int head_dim, int group) {
  return (head_dim == 64 || head_dim == 128 || head_dim == 256) && group <= kRows &&
         (format == KSL_KV_Q4 || format == KSL_KV_FP8 || format == KSL_KV_BF16);
}

void attn_prompt(Device *device, const FlashArgs &a) {
  PromptArgs p = {};
  p.flash = a;
  p.block_groups = a.kv.block_tokens / 16;
  p.per_block = static_cast<unsigned>(((int64_t{1} << 32) + p.block_groups - 1) / p.block_groups);
  switch (a.format) {
    case KSL_KV_BF16:
      by_dim<KSL_KV_BF16>(device, p);
      break;
    case KSL_KV_FP8:
      by_dim<KSL_KV_FP8>(device, p);
      break;
    default:
      by_dim<KSL_KV_Q4>(device, p);
  }
  if (a.partial != nullptr) attn_join_parts(device, a);
}

}  // namespace ksl
