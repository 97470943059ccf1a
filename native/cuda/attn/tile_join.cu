// The end of tile.cu: spans of a column and head joined in a fixed order, every fourth one by
// itself, then the gate. A block is one column, one query head and 64 of its dims.
#include "../common/mma.cuh"
#include "attn.cuh"

namespace ksl {

namespace {

constexpr int kParts = 4;  // a thread has four dims of every fourth span
constexpr int kDims = 64, kThreads = kDims / 4 * kParts, kWarps = kThreads / 32;
static_assert(kThreads == kDims, "a thread stores one");
constexpr int kPiece = 128;  // spans whose sums are at hand at one time
// Blocks of more columns do not all come up before the wait: they would go through it twice behind
// it.
constexpr int kFewColumns = 16;

__device__ inline float4 scaled_add(const float4 &to, float before, const float4 &v, float after) {
  return make_float4(fmaf(to.x, before, v.x * after), fmaf(to.y, before, v.y * after),
                     fmaf(to.z, before, v.z * after), fmaf(to.w, before, v.w * after));
}

// Every warp knows the sums of all spans by itself. kUnits: of a span. A thread has kAhead spans
// under way before it uses the first.
template <int kUnits, int kAhead>
__global__ void __launch_bounds__(kThreads)
    join_kernel(const __grid_constant__ TileArgs a, const __grid_constant__ GateArgs o) {
  __shared__ float2 all_spans[kWarps][kPiece];  // greatest score, then weight; sum
  __shared__ float2 all_factors[kWarps][kUnits > 1 ? kPiece : 1][kUnits];  // before, of a unit
  __shared__ __align__(16) float round_parts[2][kParts][kDims];
  __shared__ float round_totals[2][kParts];
  allow_next();
  const int d = a.kv.head_dim, head = blockIdx.y, part = threadIdx.x / (kDims / 4);
  const int place = threadIdx.x % (kDims / 4), dim = partial_place(blockIdx.z * kDims + place * 4);
  const int at = a.first + blockIdx.x, column = a.list != nullptr ? a.list[at] : at;
  const int position = a.columns.position[column];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float2 *const spans = all_spans[warp];
  float2(*const factors)[kUnits] = all_factors[warp];
  const int chunks = position / kTileKeys + 1;
  const int units = (chunks + a.unit_chunks - 1) / a.unit_chunks;
  const int n_spans = (units + kUnits - 1) / kUnits;
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * a.heads + head) * a.units;
  const float2 *const sums = a.partial_sums + index;
  const float *const from = a.partial + index * d + dim;
  const int own = blockIdx.z * kDims + threadIdx.x;
#pragma unroll 1
  for (int round = gridDim.x > kFewColumns ? 1 : first_round(); round < 2; round++) {
    const bool real = round == 1;
    if (real) wait_before();
    float (*const parts)[kDims] = round_parts[round];
    float *const totals = round_totals[round];
    const int there = real ? units : 0;
    float gate = 0;
    if (real) gate = gate_of(o, column, head, own, d);
    if (real && position < a.kv.first_key) {
      gate_store(o, column, head, own, d, 0, gate);
      return;
    }
    float4 v[kAhead][kUnits];
    const auto ask = [&](int first) {
#pragma unroll
      for (int j = 0; j < kAhead; j++) {
#pragma unroll
        for (int k = 0; k < kUnits; k++) {
          const int u = (first + j * kParts + part) * kUnits + k;
          v[j][k] = make_float4(0, 0, 0, 0);
          if (u < there)
            v[j][k] = *reinterpret_cast<const float4 *>(from + static_cast<int64_t>(u) * d);
        }
      }
    };
    ask(0);
    float most = -INFINITY, total = 0;
    float4 acc = {};
    for (int piece = 0; piece < n_spans; piece += kPiece) {
      const int here = min(kPiece, n_spans - piece);
      float piece_most = -INFINITY;
      __syncwarp();
      for (int s = lane; s < here; s += 32) {
        float2 unit[kUnits];
#pragma unroll
        for (int k = 0; k < kUnits; k++) {
          const int u = (piece + s) * kUnits + k;
          unit[k] = u < there ? sums[u] : make_float2(-INFINITY, 0);
        }
        float span_most = -INFINITY, span_total = 0;
#pragma unroll
        for (int k = 0; k < kUnits; k++) {
          const Join join(span_most, unit[k].x);
          span_total = join.add(span_total, unit[k].y);
          span_most = join.most;
          if (kUnits > 1) factors[s][k] = make_float2(join.old, join.now);
        }
        spans[s] = make_float2(span_most, span_total);
        piece_most = fmaxf(piece_most, span_most);
      }
      piece_most = warp_max(piece_most);
      for (int s = lane; s < here; s += 32) spans[s].x = exp2_fast(spans[s].x - piece_most);
      __syncwarp();
      float4 sum = {};
      float sum_total = 0;
      for (int first = 0; first < here; first += kAhead * kParts) {
#pragma unroll
        for (int j = 0; j < kAhead; j++) {
          const int s = first + j * kParts + part;
          if (s >= here) break;
          float4 span = v[j][0];
          if constexpr (kUnits > 1) {
            span = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int k = 0; k < kUnits; k++) {
              // A unit that is not there is nothing: neither its values nor its factor change a
              // bit.
              const float2 f = factors[s][k];
              span = scaled_add(span, f.x, v[j][k], f.y);
            }
          }
          const float2 weight = spans[s];
          sum_total = fmaf(weight.y, weight.x, sum_total);
          sum.x = fmaf(span.x, weight.x, sum.x), sum.y = fmaf(span.y, weight.x, sum.y);
          sum.z = fmaf(span.z, weight.x, sum.z), sum.w = fmaf(span.w, weight.x, sum.w);
        }
        ask(piece + first + kAhead * kParts);
      }
      const Join join(most, piece_most);
      acc = scaled_add(acc, join.old, sum, join.now);
      total = join.add(total, sum_total);
      most = join.most;
    }
    *reinterpret_cast<float4 *>(parts[part] + place * 4) = acc;
    if (place == 0) totals[part] = total;
    __syncthreads();
    const int i = threadIdx.x;
    const float value = (parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i]);
    GateArgs to = o;
    if (!real) to.pregate = to.gated = nullptr, to.split.data = nullptr;
    gate_store(to, column, head, own, d,
               value / ((totals[0] + totals[1]) + (totals[2] + totals[3])), gate);
  }
}

// As many spans under way as there are: the registers of more would leave blocks waiting.
template <int kUnits, int kMost>
void run(Device *device, const TileArgs &a, const GateArgs &o, int n, int spans) {
  const dim3 grid(n, a.heads, a.kv.head_dim / kDims);
  constexpr int kLess = kMost / 4;
  if (spans <= kLess * kParts)
    launch_chained(device, "attn_tile_join", join_kernel<kUnits, kLess>, grid, kThreads, 0, a, o);
  else
    launch_chained(device, "attn_tile_join", join_kernel<kUnits, kMost>, grid, kThreads, 0, a, o);
}

}  // namespace

void attn_tile_join(Device *device, const TileArgs &a, const GateArgs &o, int n) {
  if (a.unit_chunks == kTileSpan)
    run<1, 16>(device, a, o, n, a.units);
  else
    run<kTileSpan, 4>(device, a, o, n, divide_up(a.units, kTileSpan));
}

}  // namespace ksl
