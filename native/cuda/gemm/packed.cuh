// The tensor-core kernels over packed weights. See pack.cu for the layout and split.cuh for the
// activations; products are exact in half precision, sums are float32.
#pragma once
#include "gemm.cuh"

namespace ksl {
namespace {

struct PackedArgs {
  const uint8_t *data;
  const float *scale;
  int supers, tiles, n_parts, slices;
  PackedPart parts[kGroupParts];
  Output outputs[kGroupParts];  // by part
  const uint4 *x;
  float x_inverse;
  int tokens;
  PairOutput pair;
  bool paired;
};

__device__ inline uint4 load_once(const void *p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ inline unsigned half_multiply(unsigned a, unsigned b) {
  const __half2 r = __hmul2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
  return *reinterpret_cast<const unsigned *>(&r);
}

__device__ inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline unsigned word_of(const uint4 &v, int i) {
  return i == 0 ? v.x : (i == 1 ? v.y : (i == 2 ? v.z : v.w));
}

// One block of packed weights of a tile, as a lane holds it.
template <int kEncoding>
struct Block;

template <>
struct Block<KSL_ENC_NVFP4> {
  uint4 codes[4];
  uint2 scales;

  __device__ void load(const uint8_t *p, int lane) {
    for (int i = 0; i < 4; i++) codes[i] = load_once(p + (i * 32 + lane) * 16);
    scales = *reinterpret_cast<const uint2 *>(p + 2048 + lane * 8);
  }
  __device__ void take(const uint4 *p, int lane) {
    for (int i = 0; i < 4; i++) codes[i] = p[i * 32 + lane];
    scales = reinterpret_cast<const uint2 *>(p + 128)[lane];
  }
  // The scales of rows g and g + 8 for a piece, each twice.
  __device__ void factors(int piece, unsigned &lower, unsigned &upper) const {
    const unsigned two = (piece < 2 ? scales.x : scales.y) >> (16 * (piece & 1));
    const unsigned both =
        half_multiply((two & 0x7fu) << 7 | (two & 0x7f00u) << 15, 0x78007800u);  // 2^15
    lower = __byte_perm(both, 0, 0x1010);
    upper = __byte_perm(both, 0, 0x3232);
  }
  __device__ void fragment(int piece, int i, unsigned lower, unsigned upper,
                           unsigned (&a)[4]) const {
    const unsigned w = word_of(codes[piece], i);
    a[0] = half_multiply(w & 0x8e008e00u, lower);
    a[1] = half_multiply(w << 3 & 0x8e008e00u, upper);
    a[2] = half_multiply((w << 6 & 0x0e000e00u) | (w << 1 & 0x80008000u), lower);
    a[3] = half_multiply((w << 9 & 0x0e000e00u) | (w << 2 & 0x80008000u), upper);
  }
};

template <>
struct Block<KSL_ENC_E2M3> {
  uint4 codes[4], plane[2];
  uint2 scales;

  __device__ void load(const uint8_t *p, int lane) {
    for (int i = 0; i < 4; i++) codes[i] = load_once(p + (i * 32 + lane) * 16);
    for (int i = 0; i < 2; i++) plane[i] = load_once(p + 2048 + (i * 32 + lane) * 16);
    scales = *reinterpret_cast<const uint2 *>(p + 3072);
  }
  __device__ void take(const uint4 *p, int lane) {
    for (int i = 0; i < 4; i++) codes[i] = p[i * 32 + lane];
    for (int i = 0; i < 2; i++) plane[i] = p[128 + i * 32 + lane];
    scales = *reinterpret_cast<const uint2 *>(p + 192);
  }
  __device__ void factors(int piece, unsigned &lower, unsigned &upper) const {
    const unsigned both = piece < 2 ? scales.x : scales.y;
    lower = __byte_perm(both, 0, 0x1010);
    upper = __byte_perm(both, 0, 0x3232);
  }
  __device__ void fragment(int piece, int i, unsigned lower, unsigned upper,
                           unsigned (&a)[4]) const {
    const unsigned w = word_of(codes[piece], i);
    const unsigned q = word_of(plane[piece >> 1], (piece & 1) * 2 + (i >> 1)) << (4 * (i & 1));
    a[0] = half_multiply((w & 0x0f000f00u) | (q & 0x80808080u), lower);
    a[1] = half_multiply((w << 4 & 0x0f000f00u) | (q << 1 & 0x80808080u), upper);
    a[2] = half_multiply((w << 8 & 0x0f000f00u) | (q << 2 & 0x80808080u), lower);
    a[3] = half_multiply((w >> 4 & 0x0f000f00u) | (q << 3 & 0x80808080u), upper);
  }
};

// Sums of kTiles x 4 tokens with one block, products of 16 elements in ascending order. at(tile,
// piece, part): a lane's eight halves of an activation tile.
template <int kEncoding, int kTiles, class Activations>
__device__ inline void consume(const Block<kEncoding> &block, float (&sum)[kTiles][4],
                               Activations at) {
#pragma unroll
  for (int piece = 0; piece < 4; piece++) {
    unsigned lower, upper;
    block.factors(piece, lower, upper);
#pragma unroll
    for (int part = 0; part < 2; part++) {
      uint4 b[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; t++) b[t] = at(t, piece, part);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        unsigned w[4];
        block.fragment(piece, part * 2 + half, lower, upper, w);
#pragma unroll
        for (int t = 0; t < kTiles; t++)
          multiply_add(sum[t], w, half ? b[t].z : b[t].x, half ? b[t].w : b[t].y);
      }
    }
  }
}

// Writes a lane's results of one group of four tokens: rows g and g + 8 of the tile.
__device__ inline void finish(const PackedArgs &a, int tile, int group, int lane,
                              const float (&c)[4]) {
  const int token = group * kTileTokens + (lane & 3), g = lane >> 2;
  if (token >= a.tokens) return;
  const float low = (c[0] + c[1]) * a.x_inverse * a.scale[tile * 16 + g];
  const float high = (c[2] + c[3]) * a.x_inverse * a.scale[tile * 16 + g + 8];
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
  float *y = a.outputs[part].y + static_cast<int64_t>(token) * a.outputs[part].stride;
  if (row < a.parts[part].rows) y[row] = low;
  if (row + 8 < a.parts[part].rows) y[row + 8] = high;
}

// Bounds of slice q of all `count` slices.
__device__ inline int slice_begin(int supers, int q, int count) {
  return static_cast<int>(static_cast<int64_t>(supers) * q / count);
}

// The order in which the sums of slices are added: quarters in order, each from its slices in
// order.
__device__ inline int quarter_begin(int slices, int quarter) {
  return slices * quarter / kQuarters;
}

// Adds the sums of a tile's slices, one of each warp, and writes them. partial: [slices][4][32].
__device__ inline void add_slices(const PackedArgs &a, int tile, int slice, int lane,
                                  float *partial, const float (&sum)[4]) {
  if (a.slices == 1) {
    finish(a, tile, 0, lane, sum);
    return;
  }
  for (int i = 0; i < 4; i++) partial[(slice * 4 + i) * 32 + lane] = sum[i];
  __syncthreads();
  if (slice != 0) return;
  float total[4];
  for (int i = 0; i < 4; i++) {
    for (int quarter = 0; quarter < kQuarters; quarter++) {
      const int first = quarter_begin(a.slices, quarter);
      const int last = quarter_begin(a.slices, quarter + 1);
      float fold = 0;
      for (int s = first; s < last; s++) {
        const float value = partial[(s * 4 + i) * 32 + lane];
        fold = s == first ? value : fold + value;
      }
      total[i] = quarter == 0 ? fold : total[i] + fold;
    }
  }
  finish(a, tile, 0, lane, total);
}

__device__ inline void copy_async(void *to, const void *from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
}

// Up to four tokens: a block has one tile, its warps divide the input elements, and their sums are
// added in order. Every warp has kAhead blocks of weights and their activations on their way into
// its part of shared memory, the first weights before the kernel in front has ended.
template <int kEncoding, int kTokens>
struct Few {
  static constexpr int kBytes = kEncoding == KSL_ENC_E2M3 ? kBlockE2m3 : kBlockNvfp4;
  static constexpr int kWeights = kBytes / 16;  // in units of 16 bytes
  static constexpr int kLanes = 8 * kTokens;    // that hold a token
  static constexpr int kStage = kWeights + 8 * kLanes;
  static constexpr int kAhead =
      kTokens == 1 || (kTokens == 2 && kEncoding == KSL_ENC_NVFP4) ? 3 : 2;
  static constexpr int kRing = kAhead * kStage;
  static constexpr int kWarpBytes = kRing * 16 + 4 * 32 * 4;  // and a warp's sums
};

template <int kEncoding, int kTokens>
__global__ void __launch_bounds__(kMaxSlices * 32)
    packed_few(const __grid_constant__ PackedArgs a) {
  typedef Few<kEncoding, kTokens> Use;
  extern __shared__ uint4 memory[];
  const int lane = threadIdx.x & 31, slice = threadIdx.x >> 5, tile = blockIdx.x;
  const int begin = slice_begin(a.supers, slice, a.slices);
  const int n = slice_begin(a.supers, slice + 1, a.slices) - begin;
  const uint4 *weights = reinterpret_cast<const uint4 *>(a.data) +
                         (static_cast<int64_t>(tile) * a.supers + begin) * Use::kWeights;
  const uint4 *x = a.x + begin * 256;
  uint4 *ring = memory + slice * Use::kRing;
  float *partial = reinterpret_cast<float *>(memory + a.slices * Use::kRing);
  allow_next();
  const auto fetch_weights = [&](int i, int place) {
    const uint4 *from = weights + static_cast<int64_t>(i) * Use::kWeights;
    uint4 *to = ring + place * Use::kStage;
#pragma unroll
    for (int u = 0; u < Use::kWeights; u += 32)
      if (u + lane < Use::kWeights) copy_async(to + u + lane, from + u + lane);
  };
  const auto fetch_tokens = [&](int i, int place) {
    const uint4 *from = x + i * 256;
    uint4 *to = ring + place * Use::kStage + Use::kWeights;
#pragma unroll
    for (int u = 0; u < 8 * Use::kLanes; u += 32) {
      const int at = u + lane;
      copy_async(to + at, from + at / Use::kLanes * 32 + at % Use::kLanes);
    }
  };
#pragma unroll
  for (int i = 0; i < Use::kAhead; i++)
    if (i < n) fetch_weights(i, i);
  wait_before();
#pragma unroll
  for (int i = 0; i < Use::kAhead; i++) {
    if (i < n) fetch_tokens(i, i);
    asm volatile("cp.async.commit_group;");
  }
  float sum[1][4] = {};
  uint4 b = make_uint4(0, 0, 0, 0);  // stays zero in the lanes without a token
  int place = 0;
  for (int i = 0; i < n; i++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(Use::kAhead - 1) : "memory");
    __syncwarp();
    const uint4 *stage = ring + place * Use::kStage;
    Block<kEncoding> block;
    block.take(stage, lane);
    consume<kEncoding, 1>(block, sum, [&](int, int piece, int part) {
      if (lane < Use::kLanes) b = stage[Use::kWeights + (piece * 2 + part) * Use::kLanes + lane];
      return b;
    });
    __syncwarp();
    if (i + Use::kAhead < n) {
      fetch_weights(i + Use::kAhead, place);
      fetch_tokens(i + Use::kAhead, place);
    }
    asm volatile("cp.async.commit_group;");
    place = place + 1 == Use::kAhead ? 0 : place + 1;
  }
  add_slices(a, tile, slice, lane, partial, sum[0]);
}

// Loads into the lanes that have a token; the others keep their zeros.
__device__ inline void load_where(uint4 &v, const uint4 *p, unsigned mine) {
  asm volatile(
      "{\n .reg .pred q;\n setp.ne.u32 q, %5, 0;\n"
      " @q ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"(mine));
}

// The same with more warps that keep nothing on its way: what the larger blocks of FP6 leave room
// for.
template <int kEncoding>
__global__ void __maxnreg__(56) packed_near(const __grid_constant__ PackedArgs a) {
  extern __shared__ uint4 memory[];
  float *partial = reinterpret_cast<float *>(memory);  // [slices][4][32]
  const int lane = threadIdx.x & 31, slice = threadIdx.x >> 5, tile = blockIdx.x;
  constexpr int kBytes = kEncoding == KSL_ENC_E2M3 ? kBlockE2m3 : kBlockNvfp4;
  begin_chained();
  float sum[1][4] = {};
  const int begin = slice_begin(a.supers, slice, a.slices);
  const int end = slice_begin(a.supers, slice + 1, a.slices);
  const uint8_t *p = a.data + (static_cast<int64_t>(tile) * a.supers + begin) * kBytes;
  const uint4 *x = a.x + begin * 256 + lane;
  const unsigned mine = (lane >> 3) < a.tokens;
  uint4 b = make_uint4(0, 0, 0, 0);
  for (int super = begin; super < end; super++, p += kBytes, x += 256) {
    Block<kEncoding> block;
    block.load(p, lane);
    consume<kEncoding, 1>(block, sum, [&](int, int piece, int part) {
      load_where(b, x + (piece * 2 + part) * 32, mine);
      return b;
    });
  }
  add_slices(a, tile, slice, lane, partial, sum[0]);
}

// More tokens: a block has 8 / kParts tiles and one set of 4 kTiles tokens, whose activations go
// through shared memory. With kParts 1 a warp takes the quarters of its tile one after the other,
// with 4 one quarter each: the same additions in the same order as above.
template <int kEncoding, int kTiles, int kParts>
__global__ void __launch_bounds__(256, 2) packed_many(const __grid_constant__ PackedArgs a) {
  begin_chained();
  extern __shared__ uint4 activations[];  // [kParts][2][kTiles][4][2][32]
  constexpr int kStage = kTiles * 256;
  constexpr int kBlockTiles = 8 / kParts;
  constexpr int kThreads = 256 / kParts;  // that share a part's activations
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int part_of = warp / kBlockTiles, tile = blockIdx.y * kBlockTiles + warp % kBlockTiles;
  const int first = blockIdx.x * kTiles, groups = (a.tokens + kTileTokens - 1) / kTileTokens;
  const int pieces = a.supers * 4, thread = threadIdx.x % kThreads;
  constexpr int kBytes = kEncoding == KSL_ENC_E2M3 ? kBlockE2m3 : kBlockNvfp4;
  const bool mine = tile < a.tiles;
  const uint8_t *p = a.data + static_cast<int64_t>(mine ? tile : 0) * a.supers * kBytes;
  uint4 *staged = activations + part_of * 2 * kStage;
  // Tokens beyond the last are computed from what an earlier wave left there, and never written.
  const auto stage = [&](int super, int buffer) {
    uint4 *to = staged + buffer * kStage;
#pragma unroll
    for (int i = 0; i < kTiles * kParts; i++) {
      const int at = i * kThreads + thread;
      const int group = min(first + at / 256, groups - 1);
      copy_async(to + at, a.x + (static_cast<int64_t>(group) * pieces + super * 4) * 64 + at % 256);
    }
    asm volatile("cp.async.commit_group;");
  };
  // All parts make the same number of steps, some of them without work.
  const int begin =
      slice_begin(a.supers, quarter_begin(a.slices, kParts == 1 ? 0 : part_of), a.slices);
  int slice = quarter_begin(a.slices, kParts == 1 ? 0 : part_of);
  const int last_slice = kParts == 1 ? a.slices : quarter_begin(a.slices, part_of + 1);
  const int supers_end = slice_begin(a.supers, last_slice, a.slices);
  int steps = supers_end - begin;
  if (kParts > 1) {
    steps = 0;
    for (int q = 0; q < kParts; q++) {
      const int n = slice_begin(a.supers, quarter_begin(a.slices, q + 1), a.slices) -
                    slice_begin(a.supers, quarter_begin(a.slices, q), a.slices);
      steps = max(steps, n);
    }
  }
  float total[kTiles][4] = {}, sum[kTiles][4] = {};
  bool fresh = true;  // nothing in total yet
  Block<kEncoding> block;
  if (begin < supers_end) stage(begin, 0);
  int end = slice_begin(a.supers, slice + 1, a.slices);
  for (int step = 0; step < steps; step++) {
    const int super = begin + step;
    if (super < supers_end) block.load(p + static_cast<int64_t>(super) * kBytes, lane);
    if (super + 1 < supers_end) {
      stage(super + 1, (step + 1) & 1);
      asm volatile("cp.async.wait_group 1;");
    } else {
      asm volatile("cp.async.wait_group 0;");
    }
    __syncthreads();
    if (super < supers_end) {
      const uint4 *x = staged + (step & 1) * kStage + lane;
      consume<kEncoding, kTiles>(block, sum, [&](int t, int piece, int part) {
        return x[t * 256 + (piece * 2 + part) * 32];
      });
      if (super + 1 == end) {
#pragma unroll
        for (int t = 0; t < kTiles; t++)
          for (int i = 0; i < 4; i++) {
            total[t][i] = fresh ? sum[t][i] : total[t][i] + sum[t][i];
            sum[t][i] = 0;
          }
        fresh = false;
        slice++;
        end = slice_begin(a.supers, slice + 1, a.slices);
      }
    }
    __syncthreads();
  }
  if (kParts > 1) {
    float *partial = reinterpret_cast<float *>(activations);  // [warp][kTiles * 4][32]
#pragma unroll
    for (int t = 0; t < kTiles; t++)
      for (int i = 0; i < 4; i++)
        partial[(warp * kTiles * 4 + t * 4 + i) * 32 + lane] = total[t][i];
    __syncthreads();
    if (part_of != 0) return;
#pragma unroll
    for (int t = 0; t < kTiles; t++)
      for (int i = 0; i < 4; i++)
        for (int q = 1; q < kParts; q++)
          total[t][i] += partial[((warp + q * kBlockTiles) * kTiles * 4 + t * 4 + i) * 32 + lane];
  }
  if (!mine) return;
#pragma unroll
  for (int t = 0; t < kTiles; t++) finish(a, tile, first + t, lane, total[t]);
}

template <int kEncoding, int kTiles, int kParts>
void run_many(Device *device, const PackedArgs &a, int groups) {
  // Blocks of the same weights lie side by side.
  const dim3 grid(divide_up(groups, kTiles), divide_up(a.tiles, 8 / kParts));
  constexpr int kShared = 2 * kParts * kTiles * 256 * 16;
  static bool raised = false;  // per instance; the engine has one thread
  if (!raised) {
    keep_error(device,
               cudaFuncSetAttribute(packed_many<kEncoding, kTiles, kParts>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
               "packed");
    raised = true;
  }
  launch_chained(device, "packed", packed_many<kEncoding, kTiles, kParts>, grid, 256, kShared, a);
}

template <int kEncoding, int kTokens>
void run_few(Device *device, const PackedArgs &a) {
  constexpr int kWarpBytes = Few<kEncoding, kTokens>::kWarpBytes;
  static bool raised = false;  // per instance; the engine has one thread
  if (!raised) {
    keep_error(
        device,
        cudaFuncSetAttribute(packed_few<kEncoding, kTokens>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSlices * kWarpBytes),
        "packed");
    raised = true;
  }
  launch_chained(device, "packed", packed_few<kEncoding, kTokens>, a.tiles, a.slices * 32,
                 a.slices * kWarpBytes, a);
}

template <int kEncoding>
void run_packed(Device *device, const PackedArgs &a) {
  const int groups = divide_up(a.tokens, kTileTokens);
  const bool divided = a.slices > kQuarters;
  if (groups == 1) {
    if (kEncoding == KSL_ENC_E2M3)
      launch_chained(device, "packed", packed_near<KSL_ENC_E2M3>, a.tiles, a.slices * 32,
                     a.slices * 512, a);
    else if (a.tokens == 1)
      run_few<kEncoding, 1>(device, a);
    else if (a.tokens == 2)
      run_few<kEncoding, 2>(device, a);
    else
      run_few<kEncoding, 4>(device, a);
  } else if (groups == 2) {
    if (divided)
      run_many<kEncoding, 2, 4>(device, a, groups);
    else
      run_many<kEncoding, 2, 1>(device, a, groups);
  } else {
    if (divided)
      run_many<kEncoding, 4, 4>(device, a, groups);
    else
      run_many<kEncoding, 4, 1>(device, a, groups);
  }
}

}  // namespace
}  // namespace ksl
