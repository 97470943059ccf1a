// Kernels that stream packed weights through shared memory into tensor cores, for few tokens.
//
// Blocks have equal shares of a matrix's tiles and one of the slices of its input elements; a
// tile's elements in a slice are divided among warps. An output element is therefore: for every
// slice and way one chain of products of 16 elements in ascending order, ways added in order, then
// slices (two by two if few tokens join them, then in order, by whoever reads the sums). Nothing
// else in the wave changes that, and both kernels keep to it.
//
// Weights do not depend on the kernel in front: what fits into the rings is fetched before waiting
// for it.
//
// Of one and two tokens the norm that they read is made by every block for itself: make_norm.
#pragma once
#include "../common/bulk.cuh"
#include "../norm/run.cuh"
#include "expand.cuh"
#include "plain_ring.cuh"

namespace ksl {
namespace {

// Warps of a block's tiles: the fewer there can be, the more registers each has.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBoundWarps = kSmallStreamWarps;
// Sums whose scales registers do not hold until they are wanted; where sums are kept twice.
constexpr int kScalesLate = 8, kScalesLateTwice = 8;
// Nothing fits beside a block, see stream_most_beside.
constexpr bool kHasRoom = false;
#else
constexpr int kBoundWarps = kMaxStreamWarps;
constexpr int kScalesLate = 9, kScalesLateTwice = 4;
constexpr bool kHasRoom = true;
#endif

struct StreamArgs {
  const uint8_t *data;
  const float *scale;
  int supers, tiles, set_tiles, ways, slices, shares;
  int joins, slice_ways;     // slices that a block adds, and the ways of each
  int steps;                 // of the longest chain
  int stages, x_stages;      // of a ring; of one for activations, where they have their own
  int pitch;                 // of blocks of weights in a stage: line_pitch or their bytes
  int plain_warps;           // of a block
  int plain_half, plain_at;  // of a ring for plain rows, 0: there is none; where it lies
  int plain_bytes;           // of a plain row behind what it meets in shared memory; 0: it is not
  int n_parts;
  PackedPart parts[kGroupParts];
  Output outputs[kGroupParts];  // by part
  const uint8_t *x;             // of a Split
  int64_t group_bytes;          // from eight tokens to the next eight
  float x_inverse, x_scale;
  int tokens;
  bool adds;  // to the output; blocks of two slices are a cluster
  bool paired;
  PairOutput pair;
  InputNorm norm;   // made instead of reading x if it has a gain
  int norm_warps;   // of a block, that make it
  PlainArgs plain;  // rows that the last warps of the blocks take
  int pairs;        // rows of warps of stream_many that have two tiles, where others have one
};

__device__ inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where a block of weights lies in its place: as far from a line of 128 bytes as in memory.
template <int kBytes>
struct Lines {
  static constexpr bool kMoved = kHasRoom && kBytes % 128 != 0;
  static constexpr int kPitch = line_pitch(kBytes);
  unsigned mask, first;
  // first: index of a block.
  __device__ Lines(const StreamArgs &a, int first)
      : mask(a.pitch > kBytes ? 112 : 0),
        first(static_cast<unsigned>(reinterpret_cast<uintptr_t>(a.data)) +
              static_cast<unsigned>(first) * kBytes) {}
  // Of a block so many behind it.
  __device__ int at(int behind) const {
    return kMoved ? static_cast<int>((first + static_cast<unsigned>(behind) * kBytes) & mask) : 0;
  }
};

// Sums of kTiles tiles and 8 kGroups tokens over the 256 elements of a block. x: a lane's place in
// the activations in shared memory, kPart bytes for every 8 of its elements, 8 kPart for every
// group.
template <int kEncoding, int kTiles, int kGroups, int kPart>
__device__ inline void consume(const uint8_t *const (&blocks)[kTiles], const uint8_t *x, int lane,
                               float (&sum)[kTiles][kGroups][4]) {
  constexpr bool kLate = Expand<kEncoding>::kLate;
  constexpr int kLateTiles = kLate ? kTiles : 1, kLateGroups = kLate ? kGroups : 1;
  Expand<kEncoding> expand[kTiles];
  float late[kLateTiles][kLateGroups][4];
#pragma unroll
  for (int m = 0; m < kTiles; m++) expand[m].begin(blocks[m], lane);
#pragma unroll
  for (int piece = 0; piece < 4; piece++) {
    if (kLate && (piece & 1) == 0) {
#pragma unroll
      for (int i = 0; i < kLateTiles * kLateGroups * 4; i++)
        late[i / (kLateGroups * 4)][i / 4 % kLateGroups][i & 3] = 0;
    }
#pragma unroll
    for (int m = 0; m < kTiles; m++) expand[m].piece(blocks[m], lane, piece);
#pragma unroll
    for (int part = 0; part < 2; part++) {
      uint4 b[kGroups];
#pragma unroll
      for (int t = 0; t < kGroups; t++)
        b[t] = *reinterpret_cast<const uint4 *>(x + (t * 8 + piece * 2 + part) * kPart);
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int m = 0; m < kTiles; m++) {
          unsigned w[4];
          expand[m].fragment(part * 2 + half, w);
#pragma unroll
          for (int t = 0; t < kGroups; t++)
            multiply_add(kLate ? late[m % kLateTiles][t % kLateGroups] : sum[m][t], w,
                         half ? b[t].z : b[t].x, half ? b[t].w : b[t].y);
        }
      }
    }
    if constexpr (kLate) {
      if ((piece & 1) == 0) continue;
#pragma unroll
      for (int m = 0; m < kTiles; m++) {
        const float2 factors = expand[m].factors(blocks[m], piece >> 1);
#pragma unroll
        for (int i = 0; i < kGroups * 4; i++)
          sum[m][i >> 2][i & 3] =
              fmaf(i & 2 ? factors.y : factors.x, late[m][i >> 2][i & 3], sum[m][i >> 2][i & 3]);
      }
    }
  }
}

// The scales of rows g and g + 8 of a tile: asked for before its products, needed after them.
__device__ inline float2 row_scales(const StreamArgs &a, int tile, int last, int lane) {
  if (tile >= last) return make_float2(0, 0);
  const float *scale = a.scale + tile * 16 + (lane >> 2);
  return make_float2(__ldg(scale), __ldg(scale + 8));
}

// What a lane has of eight tokens: rows g and g + 8 of a tile, two tokens of each.
__device__ inline void scale_group(const StreamArgs &a, float2 scales, float (&c)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) c[i] = c[i] * a.x_inverse * (i & 2 ? scales.y : scales.x);
}

// Rows g and g + 8 of a tile.
__device__ inline void write_rows(const StreamArgs &a, int tile, int slice, int token, int g,
                                  float low, float high) {
  if (token >= a.tokens) return;
  if (a.paired) {
    const int row = tile * 8 + g;
    if (row >= a.parts[0].rows) return;
    if (a.outputs[0].y != nullptr) {
      a.outputs[0].y[static_cast<int64_t>(token) * a.outputs[0].stride + row] = low;
      a.outputs[1].y[static_cast<int64_t>(token) * a.outputs[1].stride + row] = high;
    }
    const float value = silu(low) * high;
    if (a.pair.act != nullptr)
      a.pair.act[static_cast<int64_t>(token) * a.pair.stride + row] = value;
    if (a.pair.split.data != nullptr) split_store(a.pair.split, token, row, value);
    return;
  }
  int part = 0;
  while (part + 1 < a.n_parts && tile >= a.parts[part + 1].first) part++;
  const int row = (tile - a.parts[part].first) * 16 + g;
  const Output &to = a.outputs[part];
  float *y = to.y + slice * to.slice_stride + static_cast<int64_t>(token) * to.stride;
  if (row < a.parts[part].rows) y[row] = low;
  if (row + 8 < a.parts[part].rows) y[row + 8] = high;
}

__device__ inline void write_group(const StreamArgs &a, int tile, int slice, int token, int lane,
                                   const float (&c)[4]) {
  token += 2 * (lane & 3);
  write_rows(a, tile, slice, token, lane >> 2, c[0], c[2]);
  write_rows(a, tile, slice, token + 1, lane >> 2, c[1], c[3]);
}

// The same of several eights, in few instructions: a kernel has read none of these before, and
// every read of them stands in line behind weights.
template <int kGroups>
__device__ inline void write_tile(const StreamArgs &a, int tile, int slice, int token, int lane,
                                  const float (&c)[kGroups][4]) {
  const int g = lane >> 2;
  token += 2 * (lane & 3);
  if (a.paired) {
    const Split &split = a.pair.split;
    if (a.outputs[0].y != nullptr || a.pair.act != nullptr || split.groups > 0 || split.rows ||
        split.data == nullptr) {
#pragma unroll
      for (int t = 0; t < kGroups; t++)
        write_group(a, tile, slice, token - 2 * (lane & 3) + 8 * t, lane, c[t]);
      return;
    }
    const int row = tile * 8 + g;
    __half *to = split_at(split, token, row & ~7) + (row & 7);
#pragma unroll
    for (int t = 0; t < kGroups; t++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const __half value = __float2half_rn(silu(c[t][i]) * c[t][i + 2] * split.scale);
        if (token + 8 * t + i < a.tokens && row < a.parts[0].rows) to[i * 32] = value;
      }
      to += split.pieces * 512;
    }
    return;
  }
  int part = 0;
  while (part + 1 < a.n_parts && tile >= a.parts[part + 1].first) part++;
  const int row = (tile - a.parts[part].first) * 16 + g, rows = a.parts[part].rows;
  const Output &output = a.outputs[part];
  float *to =
      output.y + slice * output.slice_stride + static_cast<int64_t>(token) * output.stride + row;
#pragma unroll
  for (int t = 0; t < kGroups; t++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool there = token + 8 * t + i < a.tokens;
      if (there && row < rows) to[0] = c[t][i];
      if (there && row + 8 < rows) to[8] = c[t][i + 2];
      to += i == 0 ? output.stride : 7 * output.stride;
    }
  }
}

// The lane, kept in a register: it is not to be asked for again in loops.
__device__ inline int pinned_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Keeps it in a register from here on: it is not to be computed behind a wait.
__device__ inline int pinned(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// In 32 bits: a kernel cannot begin to fetch before it has divided.
__device__ inline int part_begin(unsigned all, unsigned part, unsigned parts) {
  return static_cast<int>(all * part / parts);
}

// What a block has of a matrix.
struct Share {
  int slice, begin, range;  // of the supers
  int first, last;          // tiles
  __device__ explicit Share(const StreamArgs &a) {
    const int share = blockIdx.x / a.slices;
    slice = blockIdx.x % a.slices;
    begin = part_begin(a.supers, slice, a.slices);
    range = part_begin(a.supers, slice + 1, a.slices) - begin;
    first = part_begin(a.tiles, share, a.shares);
    last = part_begin(a.tiles, share + 1, a.shares);
  }
};

// What a way has of the supers of a block.
struct Chain {
  int skip, n;
  __device__ Chain(const StreamArgs &a, const Share &share, int way) {
    const int slices = a.slices * a.joins, which = way / a.slice_ways;
    const int slice = share.slice * a.joins + which, part = way - which * a.slice_ways;
    const int begin = part_begin(a.supers, slice, slices);
    const int range = part_begin(a.supers, slice + 1, slices) - begin;
    const int first = part_begin(range, part, a.slice_ways);
    skip = begin - share.begin + first;
    n = part_begin(range, part + 1, a.slice_ways) - first;
  }
};

// What the warps behind the others do; the rows are dealt out to blocks, the tokens to warps.
__device__ inline void take_plain(const StreamArgs &a, int warp, int lane) {
  const int rows = a.plain.first_row[a.plain.n];
  if (warp == 0 && lane == 0) plain_ahead(a.plain, blockIdx.x);
  wait_before();
  for (int item = blockIdx.x; item < rows; item += gridDim.x) {
    if (a.tokens == 1) {
      if (warp == 0) plain_row<1, 1>(a.plain, item, 0, lane);
      continue;
    }
    for (int token = warp * kPlainTokens; token < a.tokens; token += a.plain_warps * kPlainTokens)
      plain_row<kPlainTokens, 1>(a.plain, item, token, lane);
  }
}

// The same through their ring, if they have one: `memory` is the block's.
__device__ inline void take_plain_beside(const StreamArgs &a, uint8_t *memory, int warp, int lane) {
  if (a.plain_half > 0)
    plain_rows_ring({a.plain_warps, 2 * a.plain_half, memory + a.plain_at}, a.plain, warp, lane);
  else
    take_plain(a, warp, lane);
}

// Warps [0, warps) of a block meet.
__device__ inline void meet(int warps) {
  asm volatile("bar.sync 1, %0;" ::"r"(warps * 32) : "memory");
}

// Adds the sums of ways [first, end) of a warp's tiles.
template <int kTiles, int kGroups>
__device__ inline void add_ways(const float *others, int first, int end,
                                float (&sum)[kTiles][kGroups][4]) {
  constexpr int kSums = kTiles * kGroups * 4;
#pragma unroll 1
  for (int w = first; w < end; w++) {
#pragma unroll
    for (int i = 0; i < kSums; i++)
      sum[i / (kGroups * 4)][i / 4 % kGroups][i & 3] += others[((w - 1) * kSums + i) * 32];
  }
}
// The second slice that a block joins to the first, which has its scales already; such blocks have
// one set, so the sums still lie there.
__device__ inline void join_second(const StreamArgs &a, const float *others, float2 scales,
                                   float (&sum)[4]) {
  float second[1][1][4] = {};
  add_ways(others, a.slice_ways, a.ways, second);
  scale_group(a, scales, second[0][0]);
#pragma unroll
  for (int i = 0; i < 4; i++) sum[i] += second[0][0][i];
}

// What a tile's sums are added to: rows g and g + 8, two tokens of each.
template <int kTokens>
__device__ inline void rows_before(const StreamArgs &a, int tile, int lane, float (&c)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = 2 * (lane & 3) + (i & 1), row = tile * 16 + (lane >> 2) + 4 * (i & 2);
    if (token < kTokens && token < a.tokens && row < a.parts[0].rows)
      c[i] = a.outputs[0].y[static_cast<int64_t>(token) * a.outputs[0].stride + row];
  }
}
// Adds them. given: [kTokens][16] of the tile in shared memory, where the block of the first of two
// slices puts its sums into that of the other, for which the barrier `came` waits there.
template <int kTokens>
__device__ inline void add_rows(const StreamArgs &a, int tile, int slice, int lane, float *given,
                                unsigned came, const float (&before)[4], const float (&c)[4]) {
  const bool first = slice + 1 < a.slices;
  if (!first && a.slices > 1) bulk_wait(came, 0);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = 2 * (lane & 3) + (i & 1), row = (lane >> 2) + 4 * (i & 2);
    if (token >= kTokens) continue;
    float *const at = given + token * 16 + row;
    if (first) {
      cluster_give(shared_at(at), c[i], came, slice + 1);
      continue;
    }
    if (token >= a.tokens || tile * 16 + row >= a.parts[0].rows) continue;
    const float sum = a.slices > 1 ? *at + c[i] : c[i];
    a.outputs[0].y[static_cast<int64_t>(token) * a.outputs[0].stride + tile * 16 + row] =
        before[i] + sum;
  }
}

constexpr int kFewPlainWarps = 1;  // its tokens are one set of them
// The same in stream_few_beside.
template <int kTokens>
__device__ inline void take_few_plain(const StreamArgs &a, int lane) {
  const int rows = a.plain.first_row[a.plain.n];
  if (lane == 0) plain_ahead(a.plain, blockIdx.x);
  wait_before();
  for (int row = blockIdx.x; row < rows; row += gridDim.x)
    plain_row<kTokens, 1>(a.plain, row, 0, lane);
}

// The lanes that there are tokens for of pieces of 32, several on their way at once.
template <int kLanes>
__device__ inline void copy_tokens(const uint4 *from, uint4 *to, int n, int threads) {
  constexpr int kAtOnce = kLanes / 2;
  for (int first = threadIdx.x; first < n; first += kAtOnce * threads) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; k++) {
      const int i = first + k * threads;
      if (i < n) v[k] = from[i / kLanes * 32 + i % kLanes];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; k++)
      if (first + k * threads < n) to[first + k * threads] = v[k];
  }
}

constexpr int kMostRuns = 24;
// In place of a copy of x: warp `run` of a.norm_warps makes that run of 256 elements of the norm,
// with the bits of norm.cu. floats: where plain rows read it, if there are any. gains: memory for
// the run's weights until `loaded`, where it arrives when it has read everything. squares: zeros.
template <int kTokens>
__device__ inline void make_norm(const StreamArgs &a, int run, int lane, float4 *gains,
                                 unsigned loaded, float (&squares)[kTokens][kMostRuns], uint8_t *x,
                                 float *floats) {
  const InputNorm &n = a.norm;
  const int i = (run * 32 + lane) * kRun;
  const bool inside = i < n.width;
  float v[kTokens][kRun] = {};
  // No kernel writes them; later they would come behind the weights. Behind the width x is zero,
  // and so has what it is multiplied by to be.
  gains += run * 64 + lane;
  if (inside) {
    float gain[kRun];
    load8(n.gain + i, gain);
#pragma unroll
    for (int k = 0; k < kRun; k++)
      if (i + k >= n.width) gain[k] = 0;
    gains[0] = make_float4(gain[0], gain[1], gain[2], gain[3]);
    gains[32] = make_float4(gain[4], gain[5], gain[6], gain[7]);
  }
  wait_before();
#pragma unroll
  for (int t = 0; t < kTokens; t++) {
    if (inside) {
      const int64_t at = static_cast<int64_t>(t) * n.stride + i;
      load8(n.x + at, v[t]);
    }
    float square = 0;
#pragma unroll
    for (int k = 0; k < kRun; k++) square = fmaf(v[t][k], v[t][k], square);
    square = warp_sum(square);
    if (lane == 0) squares[t][run] = square;
  }
  float gain[kRun] = {};
  if (inside) {
    const float4 low = gains[0], high = gains[32];
    gain[0] = low.x, gain[1] = low.y, gain[2] = low.z, gain[3] = low.w;
    gain[4] = high.x, gain[5] = high.y, gain[6] = high.z, gain[7] = high.w;
  }
  __syncwarp();
  if (lane == 0) bulk_arrive(loaded);
  const int threads = a.norm_warps * 32;
  asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory");
#pragma unroll
  for (int t = 0; t < kTokens; t++) {
    float square = 0;
#pragma unroll
    for (int w = 0; w < kMostRuns; w += 4) {
      const float4 four = *reinterpret_cast<const float4 *>(&squares[t][w]);
      square = square + four.x + four.y + four.z + four.w;
    }
    const float r = norm_factor(square, n.width, n.eps);
#pragma unroll
    for (int k = 0; k < kRun; k++) v[t][k] = v[t][k] * r * gain[k];
    if (run >= a.supers) continue;
    alignas(16) __half2 halves[kRun / 2];
#pragma unroll
    for (int k = 0; k < kRun; k += 2)
      halves[k / 2] = __halves2half2(__float2half_rn(v[t][k] * a.x_scale),
                                     __float2half_rn(v[t][k + 1] * a.x_scale));
    reinterpret_cast<uint4 *>(
        x)[((i >> 6) * 2 + (i >> 3 & 1)) * kTokens * 4 + t * 4 + (i >> 4 & 3)] =
        *reinterpret_cast<const uint4 *>(halves);
    if (a.plain.n > 0 && i < a.plain.x_stride) store8(floats + t * a.plain.x_stride + i, v[t]);
  }
  asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory");
}

// Stages that blocks beside others, and those of stream_many, fill before they wait: loads of the
// kernel in front, for which they wait, and those of a norm, would stand in line behind more.
constexpr int kStagesAhead = 2;

// Up to kTokens tokens: the activations of the slice stay in shared memory, and a ring, which one
// warp fills, has a block of weights for every tile and way of a set in each stage. The others have
// a tile each, or one of its ways, and do little beside products: the kernel takes as long as their
// instructions do.
template <int kEncoding, int kTokens, bool kBeside, bool kNorm>
__device__ inline void few(const StreamArgs &a) {
  constexpr int kBytes = Expand<kEncoding>::kBytes;
  constexpr int kLanes = kTokens * 4, kPart = kLanes * 16;
  // kNorm: the barrier that says that what the norm is made of has come; sums of its runs.
  __shared__ uint64_t loaded;
  __shared__ __align__(16) float squares[kTokens][kMostRuns];
  // Of one that adds: for the sums of the other slice.
  __shared__ uint64_t came;
  extern __shared__ __align__(128) uint8_t memory[];
  allow_next();
  const int lane = pinned_lane(), warp = threadIdx.x >> 5;
  const int warps = a.set_tiles * a.ways, stages = a.stages;
  const int pitch = Lines<kBytes>::kMoved ? a.pitch : kBytes, stage = warps * pitch;
  const unsigned base = shared_at(memory), barriers = base + stages * stage;  // full, empty
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; i++) {
      bulk_barrier(barriers + i * 16, 1);
      bulk_barrier(barriers + i * 16 + 8, warps);
    }
    if (kNorm) bulk_barrier(shared_at(&loaded), a.norm_warps);
    if (!kBeside) plain_ring_barriers({a.plain_warps, 2 * a.plain_half, memory + a.plain_at});
    if (!kNorm) bulk_barrier(shared_at(&came), 1);
    bulk_barriers_made();
  }
  if (!kNorm && a.adds) cluster_arrive();
  if (kNorm && threadIdx.x < kTokens * kMostRuns) (&squares[0][0])[threadIdx.x] = 0;
  __syncthreads();
  // What the other slice gives, see add_rows; x; [set_tiles][ways - 1][4][32]: sums of the ways but
  // the first; kNorm: what plain rows read
  uint8_t *x = memory + stages * (stage + 16);
  float *const given = reinterpret_cast<float *>(x);
  if (!kNorm && a.adds) x += a.set_tiles * kTokens * 64;
  // A lane of the warp that fetches has the tile and way of a warp. All is divided before anything
  // is waited for.
  const Share share(a);
  const int of = warp == warps ? lane : warp, way = of % a.ways, slot = of / a.ways;
  const Chain chain(a, share, way);
  const int n = pinned(chain.n), skip = pinned(chain.skip), steps = a.steps;
  if constexpr (kNorm) {
    if (warp != warps) {
      const int rows = warp == warps + 1 ? a.plain.first_row[a.plain.n] : 0;
      const int own = static_cast<int>(blockIdx.x);
      float *floats =
          reinterpret_cast<float *>(x + a.supers * 8 * kPart + a.set_tiles * (a.ways - 1) * 512);
      uint16_t *weights = reinterpret_cast<uint16_t *>(floats + a.supers * kTokens * 256);
      if (a.plain_bytes > 0 && own < rows) plain_fetch(a.plain, own, lane, weights);
      float4 *gains = reinterpret_cast<float4 *>(a.plain.n > 0 ? reinterpret_cast<uint8_t *>(floats)
                                                               : memory + (stages - 1) * stage);
      make_norm<kTokens>(a, warp - (warp > warps), lane, gains, shared_at(&loaded), squares, x,
                         floats);
      for (int row = own; row < rows; row += gridDim.x) {
        if (a.plain_bytes == 0) {
          plain_row<kTokens, 1>(a.plain, floats, row, 0, lane);
          continue;
        }
        if (row != own) plain_fetch(a.plain, row, lane, weights);
        plain_fetched<kTokens>(a.plain, floats, row, lane, weights);
      }
    }
    if (warp > warps) return;
  } else if (warp > warps) {
    if constexpr (kBeside)
      take_few_plain<kTokens>(a, lane);
    else
      take_plain_beside(a, memory, warp - warps - 1, lane);
    return;
  }
  if (warp == warps) {
    const int64_t tile_bytes = static_cast<int64_t>(a.supers) * kBytes;
    const uint8_t *from = a.data + (share.first + slot) * tile_bytes +
                          static_cast<int64_t>(share.begin + skip) * kBytes;
    const Lines<kBytes> lines(a, (share.first + slot) * a.supers + share.begin + skip);
    const uint64_t policy = bulk_policy(true);
    int place = 0, phase = 1, ahead = 0;
    for (int set = share.first; set < share.last; set += a.set_tiles) {
      const bool has_tile = lane < warps && set + slot < share.last;
#pragma unroll 1
      for (int i = 0; i < steps; i++) {
        if (kBeside && ahead++ == kStagesAhead) {
          if (kNorm)
            bulk_wait(shared_at(&loaded), 0);
          else
            wait_before();
        }
        const bool there = has_tile && i < n;
        const int blocks = __popc(__ballot_sync(kAll, there));
        const unsigned full = barriers + place * 16;
        if (lane == 0) {
          bulk_wait(full + 8, phase);
          bulk_expect(full, blocks * kBytes);
        }
        __syncwarp();
        if (there)
          bulk_load(
              base + place * stage + lane * pitch + lines.at((set - share.first) * a.supers + i),
              from + i * kBytes, kBytes, full, policy);
        if (++place == stages) {
          place = 0;
          phase ^= 1;
        }
      }
      from += a.set_tiles * tile_bytes;
    }
    if (!kNorm && a.adds) cluster_began();
    return;
  }
  float *others = reinterpret_cast<float *>(x + share.range * 8 * kPart);
  if constexpr (!kNorm) {
    if (a.adds && threadIdx.x == 0)
      bulk_expect(shared_at(&came), (share.last - share.first) * kTokens * 64);
    if (a.adds) cluster_began();
    wait_before();
    copy_tokens<kLanes>(reinterpret_cast<const uint4 *>(a.x) + share.begin * 8 * 32,
                        reinterpret_cast<uint4 *>(x), share.range * 8 * kLanes, warps * 32);
    meet(warps);
  }
  x += skip * 8 * kPart + (min(lane >> 2, kTokens - 1) * 4 + (lane & 3)) * 16;
  const uint8_t *const own = memory + warp * pitch;
  const unsigned last_full = barriers + stages * 16;
  const uint8_t *weights = own;
  unsigned full = barriers;
  int phase = 0;
  for (int set = share.first; set < share.last; set += a.set_tiles) {
    const int tile = set + slot;
    const float2 scales = row_scales(a, tile, share.last, lane);
    const bool works = tile < share.last;
    const Lines<kBytes> lines(a, tile * a.supers + share.begin + skip);
    float sum[1][1][4] = {}, before[4] = {};
    if (!kNorm && a.adds && way == 0 && works && share.slice + 1 == a.slices)
      rows_before<kTokens>(a, tile, lane, before);
    const uint8_t *at = x;
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      bulk_wait(full, phase);
      if (works && i < n) {
        const uint8_t *const one[1] = {weights + lines.at(i)};
        consume<kEncoding, 1, 1, kPart>(one, at, lane, sum);
        at += 8 * kPart;
      }
      __syncwarp();
      if (lane == 0) bulk_arrive(full + 8);
      full += 16;
      weights += stage;
      if (full == last_full) {
        full = barriers;
        weights = own;
        phase ^= 1;
      }
    }
    if (a.ways > 1) {
      float *to = others + slot * (a.ways - 1) * 128 + lane;
      for (int i = 0; i < 4 && way > 0; i++) to[((way - 1) * 4 + i) * 32] = sum[0][0][i];
      meet(warps);
      if (way == 0) add_ways(to, 1, a.slice_ways, sum);
      if (set + a.set_tiles < share.last) meet(warps);
    }
    if (way != 0 || !works) continue;
    scale_group(a, scales, sum[0][0]);
    if (a.joins > 1) join_second(a, others + slot * (a.ways - 1) * 128 + lane, scales, sum[0][0]);
    if (!kNorm && a.adds)
      add_rows<kTokens>(a, tile, share.slice, lane, given + slot * kTokens * 16, shared_at(&came),
                        before, sum[0][0]);
    else
      write_tile(a, tile, share.slice, 0, lane, sum[0]);
  }
}

template <int kEncoding, int kTokens>
__global__ void __launch_bounds__((kBoundWarps + kFewPlainWarps + 1) * 32, 1)
    stream_few(const __grid_constant__ StreamArgs a) {
  few<kEncoding, kTokens, false, false>(a);
}
// Leaves registers, and shared memory, for a block of the small kernel behind, which is there when
// this one ends then, and has fetched what it can.
constexpr int kBesideRegisters = 56;
template <int kEncoding, int kTokens>
__global__ void __maxnreg__(kBesideRegisters)
    stream_few_beside(const __grid_constant__ StreamArgs a) {
  few<kEncoding, kTokens, true, false>(a);
}

template <int kEncoding, int kTokens>
__global__ void __maxnreg__(kBesideRegisters) stream_normed(const __grid_constant__ StreamArgs a) {
  if constexpr (kHasRoom) few<kEncoding, kTokens, true, true>(a);
}

// Whether rows of warps of stream_many may have two tiles or one, where registers are few: else
// only the last may have less than the others.
template <int kEncoding, int kTiles>
constexpr bool kMixedRows = kEncoding == KSL_ENC_NVFP4 && kTiles == 2;

// More tokens: the activations of blocks of weights lie beside them in a ring that one warp fills;
// a stage has one block of every tile and way. The others, in rows of all ways, have kTiles tiles
// each, or one.
template <int kEncoding, int kTiles, int kGroups>
__device__ inline void many(const StreamArgs &a) {
  constexpr int kBytes = Expand<kEncoding>::kBytes, kTokens = 8 * kGroups;
  // Products of a stage take as long as its copies do, so that more of them ahead gain nothing, and
  // stand before what the kernel in front has still to read.
  constexpr bool kLong = kEncoding != KSL_ENC_BF16 && kGroups == 2;
  constexpr bool kMixed = kMixedRows<kEncoding, kTiles>;
  extern __shared__ __align__(128) uint8_t memory[];
  allow_next();
  const int lane = pinned_lane(), warp = threadIdx.x >> 5, stages = a.stages;
  const int rows = kMixed ? a.set_tiles - a.pairs : (a.set_tiles + kTiles - 1) / kTiles;
  const int consumers = rows * a.ways;
  const int pitch = Lines<kBytes>::kMoved ? a.pitch : kBytes;
  const int weights = a.set_tiles * pitch, part = weights + kGroups * kSuperBytes;
  const int stage = part * a.ways;
  const unsigned base = shared_at(memory), barriers = base + stages * stage;  // full, empty
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; i++) {
      bulk_barrier(barriers + i * 16, 1);
      bulk_barrier(barriers + i * 16 + 8, consumers);
    }
    plain_ring_barriers({a.plain_warps, 2 * a.plain_half, memory + a.plain_at});
    bulk_barriers_made();
  }
  __syncthreads();
  if (warp > consumers) {
    if (blockIdx.y > 0) return;
    take_plain_beside(a, memory, warp - consumers - 1, lane);
    return;
  }
  const Share share(a);
  const int token = blockIdx.y * kTokens, steps = a.steps;
  if (warp == consumers) {
    // A lane has a tile of a way, or eight of its tokens.
    const int items = a.set_tiles + kGroups, way = min(lane / items, a.ways - 1);
    const int slot = lane - way * items, group = (token >> 3) + slot - a.set_tiles;
    const bool has_tokens = slot >= a.set_tiles;
    const Chain chain(a, share, way);
    const int n = chain.n, super = share.begin + chain.skip;
    const int bytes = has_tokens ? kSuperBytes : kBytes;
    const int64_t tile_bytes = static_cast<int64_t>(a.supers) * kBytes;
    const int64_t set_bytes = has_tokens ? 0 : a.set_tiles * tile_bytes;
    const uint8_t *const from =
        (has_tokens ? a.x + group * a.group_bytes : a.data + (share.first + slot) * tile_bytes) +
        static_cast<int64_t>(super) * bytes;
    const unsigned to = base + way * part +
                        (has_tokens ? weights + (slot - a.set_tiles) * kSuperBytes : slot * pitch);
    const Lines<kBytes> lines(a, (share.first + slot) * a.supers + super);
    const bool used = slot < items && (!has_tokens || group * 8 < a.tokens);
    // Weights leave L2 to what a wave writes and reads again; at 32 tokens that gains nothing.
    constexpr bool kPolicy = kGroups <= 2;
    const uint64_t policy = kPolicy ? bulk_policy(!has_tokens) : 0;
    // Walks over sets, and the steps of each.
    struct Walk {
      int set, step;
      const uint8_t *from;  // of the set
    };
    const auto fetch = [&](Walk &at, int place, bool announced, bool with_weights,
                           bool with_tokens) {
      const bool there = used && at.step < n && (has_tokens || at.set + slot < share.last);
      const unsigned full = barriers + place * 16;
      if (announced) {
        const int tiles = __popc(__ballot_sync(kAll, there && !has_tokens));
        const int groups = __popc(__ballot_sync(kAll, there && has_tokens));
        if (lane == 0) bulk_expect(full, tiles * kBytes + groups * kSuperBytes);
        __syncwarp();
      }
      if (there && (has_tokens ? with_tokens : with_weights)) {
        const int moved = has_tokens ? 0 : lines.at((at.set - share.first) * a.supers + at.step);
        if constexpr (kPolicy)
          bulk_load(to + place * stage + moved, at.from + at.step * bytes, bytes, full, policy);
        else
          bulk_load(to + place * stage + moved, at.from + at.step * bytes, bytes, full);
      }
      if (++at.step == steps) at = {at.set + a.set_tiles, 0, at.from + set_bytes};
    };
    const int total = (share.last - share.first + a.set_tiles - 1) / a.set_tiles * steps;
    const int ready = min(min(kLong ? 1 : kStagesAhead, stages), total);
    Walk at = {share.first, 0, from}, tokens_walk = at;
    for (int i = 0; i < ready; i++) fetch(at, i, true, true, false);
    wait_before();
    for (int i = 0; i < ready; i++) fetch(tokens_walk, i, false, false, true);
    int place = ready, phase = 1;  // of the round before, which a new barrier has behind it
    for (int i = ready; i < total; i++) {
      if (place == stages) {
        place = 0;
        phase ^= 1;
      }
      if (lane == 0) bulk_wait(barriers + place * 16 + 8, phase);
      __syncwarp();
      fetch(at, place++, true, true, true);
    }
    return;
  }
  wait_before();
  const int way = warp % a.ways, row = warp / a.ways;
  const Chain chain(a, share, way);
  const int n = chain.n;
  // [rows][ways - 1][kTiles kGroups 4][32]: sums of the ways but the first
  float *others = reinterpret_cast<float *>(memory + stages * (stage + 16));
  const int first = kMixed ? row + min(row, a.pairs) : row * kTiles;  // of its tiles
  const uint8_t *const own = memory + way * part + first * pitch;
  const uint8_t *const x = memory + way * part + weights + lane * 16;
  // A tile that the set lacks is what lies behind it, or, where that may be less, the one before.
  constexpr bool kBehind = Lines<kBytes>::kPitch <= kGroups * kSuperBytes;
  const int second = kMixed || kBehind || row * kTiles + 1 < a.set_tiles ? pitch : 0;
  const unsigned last_full = barriers + stages * 16;
  unsigned full = barriers;
  int phase = 0, moved = 0;  // by stages
  for (int set = share.first; set < share.last; set += a.set_tiles) {
    const bool works = set + first < share.last;
    const Lines<kBytes> lines(a, (set + first) * a.supers + share.begin + chain.skip);
    float sum[kTiles][kGroups][4] = {};
    constexpr bool kLate =
        kTiles * kGroups >= (Expand<kEncoding>::kLate ? kScalesLateTwice : kScalesLate);
    float2 scales[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles && !kLate; m++)
      scales[m] = row_scales(a, set + first + m, share.last, lane);
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      bulk_wait(full, phase);
      if (works && i < n) {
        const uint8_t *at[kTiles];
#pragma unroll
        for (int m = 0; m < kTiles; m++)
          at[m] = own + moved + m * second + lines.at(m * a.supers + i);
        // The warp that has but one tile of a set is not to be the last.
        if (kMixed ? row >= a.pairs : kLong && kTiles == 2 && row * kTiles + 1 == a.set_tiles) {
          const uint8_t *const one[1] = {at[0]};
          consume<kEncoding, 1, kGroups, 512>(one, x + moved, lane,
                                              reinterpret_cast<float (&)[1][kGroups][4]>(sum));
        } else {
          consume<kEncoding, kTiles, kGroups, 512>(at, x + moved, lane, sum);
        }
      }
      __syncwarp();
      if (lane == 0) bulk_arrive(full + 8);
      full += 16;
      moved += stage;
      if (full == last_full) {
        full = barriers;
        moved = 0;
        phase ^= 1;
      }
    }
    const int own_lane = pinned_lane();  // so that nothing of this is computed before the loop
    if (a.ways > 1) {
      constexpr int kSums = kTiles * kGroups * 4;
      float *to = others + row * (a.ways - 1) * kSums * 32 + own_lane;
      if (way > 0) {
#pragma unroll
        for (int i = 0; i < kSums; i++)
          to[((way - 1) * kSums + i) * 32] = sum[i / (kGroups * 4)][i / 4 % kGroups][i & 3];
      }
      meet(consumers);
      if (way == 0) add_ways(to, 1, a.slice_ways, sum);
      if (set + a.set_tiles < share.last) meet(consumers);
    }
#pragma unroll 1
    for (int m = 0; m < kTiles && way == 0; m++) {
      const int slot = first + m;
      const bool lacks = kMixed ? m > 0 && row >= a.pairs : slot >= a.set_tiles;
      if (!lacks && set + slot < share.last) {
        if (kLate) scales[0] = row_scales(a, set + slot, share.last, own_lane);
#pragma unroll
        for (int t = 0; t < kGroups; t++) scale_group(a, scales[0], sum[0][t]);
        if (kTiles * kGroups == 1 && a.joins > 1)
          join_second(a, others + row * (a.ways - 1) * 128 + own_lane, scales[0], sum[0][0]);
        write_tile(a, set + slot, share.slice, token, own_lane, sum[0]);
      }
#pragma unroll
      for (int i = 0; i < kGroups * 4; i++) sum[0][i >> 2][i & 3] = sum[kTiles - 1][i >> 2][i & 3];
      scales[0] = scales[kTiles - 1];
    }
  }
}

// A block has no more warps than leave 80 registers to each: all tiles and ways, who fetches, and
// three of plain rows. Those of NVFP4 that have two tiles leave some to the next kernel, which
// comes up beside them.
template <int kEncoding, int kTiles, int kGroups>
constexpr int many_registers() {
  if (kHasRoom && kEncoding == KSL_ENC_NVFP4 && kTiles == 2 && kGroups <= 2) return 80;
  return 65536 / ((kBoundWarps / kTiles + kMaxPlainWarps + 3) / 4 * 4 * 32) / 8 * 8;
}
template <int kEncoding, int kTiles, int kGroups>
__global__ void __maxnreg__((many_registers<kEncoding, kTiles, kGroups>()))
    stream_many(const __grid_constant__ StreamArgs a) {
  // 32 tokens are multiplied by stream_quads on sm_90a; sums of two tiles of them are kept twice in
  // FP6, for which sm_120a has no registers.
#ifdef __CUDA_ARCH__
  constexpr bool kOther = kGroups == 4 && (kHasRoom || (kEncoding == KSL_ENC_E2M3 && kTiles == 2));
#else
  constexpr bool kOther = false;  // emulated, as either
#endif
  if constexpr (!kOther) many<kEncoding, kTiles, kGroups>(a);
}

}  // namespace
}  // namespace ksl
