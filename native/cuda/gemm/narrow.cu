// Narrow bf16 matrices beside packed ones, many tokens: halves of a panel as sums of two bf16, which
// is exact, with weights as they are stored.
//
// A cluster has 32 tokens and six tiles of 16 rows; its two blocks have half of the input elements
// each, 64 at a time in a ring in shared memory. Of a block's eight warps two divide the tiles and
// four the products of 16 elements, see pack.cu. What these parts leave is added in order.
#include "../common/mma.cuh"
#include "gemm.cuh"

namespace ksl {

namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kTiles = 6, kMine = kTiles / 2, kGroups = 4;  // of eight tokens
constexpr int kCluster = 2, kParts = kCluster * kWarps / 2;
constexpr int kSums = kTiles * kGroups * 4;
constexpr int kWeights = kTiles * 16 * 128, kStage = kWeights + kGroups * 1024, kStages = 5;
static_assert(kStages * kStage <= kSmallRoom, "an sm_120 runs it");
static_assert(kWarps / 2 * kSums * 128 <= kStages * kStage, "sums take the ring's place");

struct NarrowArgs {
  Raw matrices[kGroupParts];
  Output outputs[kGroupParts];
  int first_tile[kGroupParts + 1];
  int n, pieces;
  Panel x;
  int tokens;
};

// Two halves as the sum of two pairs of bf16.
__device__ inline void two_bf16(unsigned halves, unsigned *high, unsigned *low) {
  const float2 v = __half22float2(*reinterpret_cast<const __half2 *>(&halves));
  unsigned h, l;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(v.y), "f"(v.x));
  const float x = v.x - __uint_as_float(h << 16), y = v.y - __uint_as_float(h & 0xffff0000u);
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(l) : "f"(y), "f"(x));
  *high = h;
  *low = l;
}

// A shared float of a block of the cluster.
__device__ inline float cluster_load(const float *at, unsigned rank) {
  float v;
  asm volatile(
      "{.reg .b32 r;\n mapa.shared::cluster.u32 r, %1, %2;\n ld.shared::cluster.f32 %0, [r];}"
      : "=f"(v)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(at))), "r"(rank)
      : "memory");
  return v;
}
__device__ inline void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads)
    narrow_kernel(const __grid_constant__ NarrowArgs a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  typedef float Sums[kSums][32];
  Sums *const sums = reinterpret_cast<Sums *>(memory);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, s = lane & 3;
  const unsigned rank = blockIdx.x % kCluster;
  const int token0 = blockIdx.x / kCluster * (kGroups * 8), tile0 = blockIdx.y * kTiles;
  const int side = warp & 1, product = warp >> 1, cols = a.matrices[0].cols;
  const auto find = [&](int tile) {
    int which = 0;
    while (which + 1 < a.n && tile >= a.first_tile[which + 1]) which++;
    return which;
  };
  // A thread brings one 16-byte chunk of three rows, and one of the panel.
  const int chunk = threadIdx.x & 7;
  const uint16_t *rows[kMine];
#pragma unroll
  for (int i = 0; i < kMine; i++) {
    const int local = i * 32 + (threadIdx.x >> 3);
    const int tile = min(tile0 + local / 16, a.first_tile[a.n] - 1), which = find(tile);
    const Raw &m = a.matrices[which];
    // Rows behind the last are computed as the last, and never written.
    const int row = min((tile - a.first_tile[which]) * 16 + local % 16, m.rows - 1);
    rows[i] = static_cast<const uint16_t *>(m.codes) + static_cast<int64_t>(row) * cols + chunk * 8;
  }
  const int group = min(token0 / 8 + static_cast<int>(threadIdx.x >> 6), a.x.groups - 1);
  const uint8_t *x = a.x.data + static_cast<int64_t>(group) * 1024 + (threadIdx.x & 63) * 16;
  const int64_t piece_bytes = static_cast<int64_t>(a.x.groups) * 1024;
  const int begin = a.pieces * static_cast<int>(rank) / kCluster;
  const int end = a.pieces * (static_cast<int>(rank) + 1) / kCluster;
  const auto load = [&](int piece) {
    if (piece < end) {
      uint8_t *to = memory + (piece - begin) % kStages * kStage;
#pragma unroll
      for (int i = 0; i < kMine; i++)
        copy_async<16>(to + swizzled(i * 32 + (threadIdx.x >> 3), chunk), rows[i] + piece * kPiece,
                       piece * kPiece + chunk * 8 < cols);
      copy_async<16>(to + kWeights + threadIdx.x * 16, x + piece * piece_bytes, true);
    }
    copy_commit();
  };
  begin_chained();
#pragma unroll
  for (int i = 0; i + 1 < kStages; i++) load(begin + i);
  float sum[kMine][kGroups][4] = {};
  for (int piece = begin; piece < end; piece++) {
    copy_wait<kStages - 2>();
    __syncthreads();
    load(piece + kStages - 1);
    const uint8_t *const from = memory + (piece - begin) % kStages * kStage;
    uint4 weights[kMine];
#pragma unroll
    for (int t = 0; t < kMine; t++) {
      const int row = (side * kMine + t) * 16 + g;
      const int at = swizzled(row, 2 * s + (product >> 1)) + (product & 1) * 8;
      const uint2 upper = *reinterpret_cast<const uint2 *>(from + at);
      const uint2 lower = *reinterpret_cast<const uint2 *>(from + at + 8 * 128);
      weights[t] = make_uint4(upper.x, lower.x, upper.y, lower.y);
    }
#pragma unroll
    for (int e = 0; e < kGroups; e++) {
      unsigned high[2], low[2];
#pragma unroll
      for (int c = 0; c < 2; c++)
        two_bf16(*reinterpret_cast<const unsigned *>(from + kWeights + e * 1024 +
                                                     swizzled(g, 2 * product + c) + s * 4),
                 &high[c], &low[c]);
#pragma unroll
      for (int t = 0; t < kMine; t++) {
        mma16<true>(sum[t][e], weights[t], low[0], low[1]);
        mma16<true>(sum[t][e], weights[t], high[0], high[1]);
      }
    }
  }
  copy_wait<0>();
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kMine; t++)
#pragma unroll
    for (int e = 0; e < kGroups; e++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        sums[product][((side * kMine + t) * kGroups + e) * 4 + i][lane] = sum[t][e][i];
  cluster_meet();
  for (int at = rank * (kSums * 16) + threadIdx.x; at < (static_cast<int>(rank) + 1) * (kSums * 16);
       at += kThreads) {
    // Neighbours have neighbouring rows of one token.
    const int row = at & 15, token_at = at >> 4 & (8 * kGroups - 1), t = at / (128 * kGroups);
    const int from = (row & 7) * 4 + (token_at & 7) / 2;
    const int item = (t * kGroups + (token_at >> 3)) * 4 + (row >> 3) * 2 + (token_at & 1);
    float total = 0;
#pragma unroll
    for (int p = 0; p < kParts; p++)
      total += cluster_load(&sums[p % (kWarps / 2)][item][from], p / (kWarps / 2));
    const int tile = tile0 + t;
    if (tile >= a.first_tile[a.n]) continue;
    const int which = find(tile);
    const int r = (tile - a.first_tile[which]) * 16 + row, token = token0 + token_at;
    if (token < a.tokens && r < a.matrices[which].rows)
      a.outputs[which].y[static_cast<int64_t>(token) * a.outputs[which].stride + r] = total;
  }
  cluster_meet();  // the other block reads these sums
}

}  // namespace

bool narrow_takes(const Raw &m) {
  return m.encoding == KSL_ENC_BF16 && m.cols % 16 == 0;
}

// Matrices with one input that narrow_takes.
void run_narrow(Device *device, const Raw *matrices, const Output *outputs, int n, const Panel &x,
                int tokens) {
  NarrowArgs a = {};
  a.n = n;
  for (int i = 0; i < n; i++) {
    a.matrices[i] = matrices[i];
    a.outputs[i] = outputs[i];
    a.first_tile[i + 1] = a.first_tile[i] + divide_up(matrices[i].rows, 16);
  }
  a.pieces = divide_up(matrices[0].cols, kPiece);
  a.x = x;
  a.tokens = tokens;
  static bool raised = false;  // the engine has one thread
  if (!raised) raised = raise_shared(device, narrow_kernel, kStages * kStage);
  launch_chained(
      device, "narrow", narrow_kernel,
      dim3(divide_up(tokens, kGroups * 8) * kCluster, divide_up(a.first_tile[n], kTiles)), kThreads,
      kStages * kStage, a);
}

}  // namespace ksl
