// What the two kernels of short rows share: who has which part of a state, and how it is read.
#pragma once
#include "../common/bulk.cuh"
#include "../common/mma.cuh"
#include "gdn.cuh"

namespace ksl {
namespace {

constexpr int kDim = 128;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kKeys = kDim / 8;  // of a lane

// Neighbouring dims of a lane.
template <int kWide>
struct alignas(kWide * sizeof(float)) Dims {
  float v[kWide];
};
template <int kWide>
__device__ inline void scale_add(Dims<kWide> &to, float a, const Dims<kWide> &x) {
#pragma unroll
  for (int i = 0; i < kWide; i++) to.v[i] = fmaf(a, x.v[i], to.v[i]);
}
// The sum over the lanes that have other keys of the same dims.
template <int kWide>
__device__ inline void sum_keys(Dims<kWide> &x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < kWide; i++) x.v[i] += __shfl_xor_sync(kAll, x.v[i], step);
  }
}

// What a warp makes of a head's output of a token: `out`, elements [to, to + 4) of the token's
// values for a lane, the norm's weights and silu(z) of these.
__device__ inline void write_normed(const StepArgs &a, int token, int to, const float4 &out,
                                    const float4 &gain, const float4 &gate) {
  const int64_t at = static_cast<int64_t>(token) * a.value_stride + to;
  const float square = warp_sum((out.x * out.x + out.y * out.y) + (out.z * out.z + out.w * out.w));
  const float r = 1.0f / sqrtf(square / static_cast<float>(kDim) + a.eps);
  const float4 y = make_float4(out.x * r * gain.x * gate.x, out.y * r * gain.y * gate.y,
                               out.z * r * gain.z * gate.z, out.w * r * gain.w * gate.w);
  if (a.core != nullptr) *reinterpret_cast<float4 *>(a.core + at) = out;
  if (a.gated != nullptr) *reinterpret_cast<float4 *>(a.gated + at) = y;
  if (a.split.data != nullptr) split_store4(a.split, token, to, y);
}

template <int kWide>
struct Vector;
template <>
struct Vector<2> {
  typedef float2 Type;
};
template <>
struct Vector<4> {
  typedef float4 Type;
};
// kOnce: of a state that nobody asks for again before others have pushed it out of L2; replayed
// ones are read soon.
template <bool kOnce, int kWide>
__device__ inline Dims<kWide> take(const float *from) {
  typedef typename Vector<kWide>::Type V;
  const V *const at = reinterpret_cast<const V *>(from);
  const V v = kOnce ? __ldcs(at) : *at;
  return reinterpret_cast<const Dims<kWide> &>(v);
}
template <bool kOnce, int kWide>
__device__ inline void give(float *to, const Dims<kWide> &x) {
  typedef typename Vector<kWide>::Type V;
  V *const at = reinterpret_cast<V *>(to);
  const V v = reinterpret_cast<const V &>(x);
  if (kOnce)
    __stcs(at, v);
  else
    *at = v;
}

// One channel of the convolution: its weights and the last values before it.
struct Channel {
  float tap[kTaps], window[kTaps];
  __device__ void load(const float *taps, const float *history, int channels, int step) {
#pragma unroll
    for (int t = 0; t < kTaps; t++) tap[t] = taps[t * channels];
#pragma unroll
    for (int t = 0; t < kHistory; t++) window[t + 1] = history[t * step];
  }
  __device__ float next(float x) {
#pragma unroll
    for (int t = 0; t < kHistory; t++) window[t] = window[t + 1];
    window[kHistory] = x;
    float sum = tap[0] * window[0];
#pragma unroll
    for (int t = 1; t < kTaps; t++) sum = fmaf(tap[t], window[t], sum);
    return silu(sum);
  }
};

}  // namespace
}  // namespace ksl
