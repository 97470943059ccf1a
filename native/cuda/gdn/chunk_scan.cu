// The state through the chunks of a row. A block has one value head and 64 of its value dims; the
// state stays in registers, 16 keys a warp, and in shared memory as two halves, 22 bits, of which a
// sixteenth is kept: so a half reaches a million.
//
// Shared memory holds one chunk, so that an sm_120 runs it: what the products with the state read
// is overwritten by the next chunk's as soon as they are done, the rest when U has been used.
#include "../common/mma.cuh"
#include "chunk.cuh"

namespace ksl {

namespace {

constexpr int kThreads = 256;
constexpr int kDims = 64;  // value dims of a block
constexpr float kScale = 0.0625f;

struct Shared {
  ChunkOperands operands;
  // U takes the place of the state, which only the first products read.
  uint8_t high[kChunkDim * 128], low[kChunkDim * 128];
  uint64_t first, second;  // W and e^G Q, then keys and scores have come
};
static_assert(sizeof(Shared) <= kSmallRoom, "an sm_120 runs it");
static_assert(sizeof(ChunkOperands) % 1024 == 0, "panels begin at multiples of 1024 bytes");
constexpr int kFirstBytes = sizeof(ChunkOperands::w) + sizeof(ChunkOperands::q);
constexpr int kSecondBytes = sizeof(ChunkOperands::keys) + sizeof(ChunkOperands::scores);
static_assert(kFirstBytes + kSecondBytes == sizeof(ChunkOperands), "two pieces");

__device__ inline void split2(float x, float y, uint32_t *high, uint32_t *low) {
  const __half2 h = __floats2half2_rn(x, y);
  const __half2 l = __floats2half2_rn(x - __low2float(h), y - __high2float(h));
  *high = reinterpret_cast<const uint32_t &>(h);
  *low = reinterpret_cast<const uint32_t &>(l);
}

__global__ void __launch_bounds__(kThreads, 1) scan_kernel(const __grid_constant__ ChunkArgs a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared &s = *reinterpret_cast<Shared *>(memory);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.y, heads = a.shape.value_heads, first_dim = blockIdx.z * kDims;
  const ChunkRun run = a.runs[blockIdx.x];
  if (tid == 0) {
    barrier_init(&s.first, 1);
    barrier_init(&s.second, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  begin_chained();

  const auto operands = [&](int index) -> const ChunkOperands * {
    return a.operands + static_cast<int64_t>(run.first + index - a.first) * heads + head;
  };
  const auto load_first = [&](int index) {
    if (tid == 0) copy_bulk(s.operands.w, operands(index)->w, kFirstBytes, &s.first);
  };
  const auto load_second = [&](int index) {
    if (tid == 0) copy_bulk(s.operands.keys, operands(index)->keys, kSecondBytes, &s.second);
  };
  // The tokens and value dims of this warp's part of U and O.
  const int tile = warp & 3, side = warp >> 2;
  float2 values[4][2];  // V' of them, of the next chunk
  const auto load_values = [&](const ChunkInfo &chunk) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = tile * 16 + g + 8 * r;
      const float *from = a.core + static_cast<int64_t>(chunk.column + row) * a.core_stride +
                          head * kChunkDim + first_dim + side * 32 + 2 * t;
#pragma unroll
      for (int j = 0; j < 4; j++)
        values[j][r] =
            row < chunk.n ? *reinterpret_cast<const float2 *>(from + j * 8) : make_float2(0, 0);
    }
  };
  ChunkInfo chunk = a.chunks[run.first];
  load_first(0);
  load_second(0);
  load_values(chunk);

  // Rows 16 warp + g and 8 later, columns 8 j + 2 t and + 1.
  const int64_t state_at = a.slabs.state_offset +
                           static_cast<int64_t>(head) * kChunkDim * kChunkDim + first_dim +
                           (warp * 16 + g) * kChunkDim + 2 * t;
  float state[8][4];
  {
    const float *from = a.slabs.data + run.slab * a.slabs.stride + state_at;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float2 x = *reinterpret_cast<const float2 *>(from + r * 8 * kChunkDim + j * 8);
        state[j][2 * r] = x.x * kScale;
        state[j][2 * r + 1] = x.y * kScale;
      }
  }
  const auto store = [&](int slab) {
    float *to = a.slabs.data + slab * a.slabs.stride + state_at;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        *reinterpret_cast<float2 *>(to + r * 8 * kChunkDim + j * 8) =
            make_float2(state[j][2 * r] / kScale, state[j][2 * r + 1] / kScale);
  };

  // Rows of the matrices that a lane names: transposed pairs of b, plain pairs of a.
  const int b_row = lane & 15, b_chunk = lane >> 4;
  for (int index = 0; index < run.n; index++) {
    const bool more = index + 1 < run.n;
    const ChunkInfo next = a.chunks[run.first + (more ? index + 1 : index)];
    const float decay = a.decays[static_cast<int64_t>(run.first + index - a.first) * heads + head];
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        uint32_t high, low;
        split2(state[j][2 * r], state[j][2 * r + 1], &high, &low);
        const int to = swizzled(warp * 16 + g + 8 * r, j) + t * 4;
        *reinterpret_cast<uint32_t *>(s.high + to) = high;
        *reinterpret_cast<uint32_t *>(s.low + to) = low;
      }
    barrier_wait(&s.first, index & 1);
    __syncthreads();

    float u[4][4] = {}, o[4][4] = {};
#pragma unroll
    for (int step = 0; step < 8; step++) {
      const int at = (step >> 2) * (kChunk * 128) +
                     swizzled(tile * 16 + (lane & 15), (step & 3) * 2 + (lane >> 4));
      const uint4 w = load_matrices(s.operands.w[0] + at);
      const uint4 q = load_matrices(s.operands.q[0] + at);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const int from = swizzled(step * 16 + b_row, side * 4 + j + b_chunk);
        const uint4 high = load_transposed(s.high + from);
        const uint4 low = load_transposed(s.low + from);
        mma16<false>(u[j], w, low.x, low.y);
        mma16<false>(u[j + 1], w, low.z, low.w);
        mma16<false>(o[j], q, low.x, low.y);
        mma16<false>(o[j + 1], q, low.z, low.w);
        mma16<false>(u[j], w, high.x, high.y);
        mma16<false>(u[j + 1], w, high.z, high.w);
        mma16<false>(o[j], q, high.x, high.y);
        mma16<false>(o[j + 1], q, high.z, high.w);
      }
    }
    __syncthreads();
    if (more) load_first(index + 1);
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float2 v = values[j][r];
        uint32_t high, low;
        split2(fmaf(v.x, kScale, -u[j][2 * r]), fmaf(v.y, kScale, -u[j][2 * r + 1]), &high, &low);
        const int to = swizzled(tile * 16 + g + 8 * r, side * 4 + j) + t * 4;
        *reinterpret_cast<uint32_t *>(s.high + to) = high;
        *reinterpret_cast<uint32_t *>(s.low + to) = low;
      }
    if (more) load_values(next);
    barrier_wait(&s.second, index & 1);
    __syncthreads();

#pragma unroll
    for (int step = 0; step < 4; step++) {
      if (step > tile) break;  // tokens behind these
      const uint4 w = load_matrices(s.operands.scores +
                                    swizzled(tile * 16 + (lane & 15), step * 2 + (lane >> 4)));
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const int from = swizzled(step * 16 + b_row, side * 4 + j + b_chunk);
        const uint4 high = load_transposed(s.high + from);
        const uint4 low = load_transposed(s.low + from);
        mma16<false>(o[j], w, low.x, low.y);
        mma16<false>(o[j + 1], w, low.z, low.w);
        mma16<false>(o[j], w, high.x, high.y);
        mma16<false>(o[j + 1], w, high.z, high.w);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = tile * 16 + g + 8 * r;
      if (row >= chunk.n) continue;
      float *to = a.core + static_cast<int64_t>(chunk.column + row) * a.core_stride +
                  head * kChunkDim + first_dim + side * 32 + 2 * t;
#pragma unroll
      for (int j = 0; j < 4; j++)
        *reinterpret_cast<float2 *>(to + j * 8) =
            make_float2(o[j][2 * r] / kScale, o[j][2 * r + 1] / kScale);
    }

#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) state[j][i] *= decay;
#pragma unroll
    for (int step = 0; step < 4; step++) {
      const uint4 k = load_matrices(s.operands.keys +
                                    swizzled(warp * 16 + (lane & 15), step * 2 + (lane >> 4)));
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int from = swizzled(step * 16 + b_row, j + b_chunk);
        const uint4 high = load_transposed(s.high + from);
        const uint4 low = load_transposed(s.low + from);
        mma16<false>(state[j], k, low.x, low.y);
        mma16<false>(state[j + 1], k, low.z, low.w);
        mma16<false>(state[j], k, high.x, high.y);
        mma16<false>(state[j + 1], k, high.z, high.w);
      }
    }
    if (chunk.cut_slab >= 0) store(chunk.cut_slab);
    __syncthreads();
    if (more) load_second(index + 1);
    chunk = next;
  }
  store(run.slab);
}

}  // namespace

bool gdn_chunks_run(const GdnShape &shape) {
  if (shape.key_dim != kChunkDim || shape.value_dim != kChunkDim) return false;
  const bool runs = cudaFuncSetAttribute(scan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         sizeof(Shared)) == cudaSuccess;
  cudaGetLastError();
  return runs;
}

void gdn_chunk_scan(Device *device, const ChunkArgs &a) {
  launch_chained(device, "gdn_chunk_scan", scan_kernel,
                 dim3(a.n_runs, a.shape.value_heads, kChunkDim / kDims), kThreads, sizeof(Shared),
                 a);
}

}  // namespace ksl
