// Log-probabilities of raw logits and their top entries.
#include "../../common/noise.h"
#include "sample.cuh"

namespace ksl {

namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads)
    logprob_kernel(const LogprobJob *jobs, const float *all_logits, int64_t stride, int vocab,
                   const int32_t *ids, ksl_logprob *all_out) {
  __shared__ float scratch[32];
  __shared__ double sums[32];
  __shared__ float best_value[32];
  __shared__ int best_id[32];
  const LogprobJob &job = jobs[blockIdx.x];
  const float *logits = all_logits + job.row * stride;
  ksl_logprob *out = all_out + job.out;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float most = -INFINITY;
  for (int i = threadIdx.x; i < vocab; i += kThreads) most = fmaxf(most, logits[i]);
  most = block_max(most, scratch);
  double sum = 0;
  for (int i = threadIdx.x; i < vocab; i += kThreads)
    sum += static_cast<double>(exp_f32(logits[i] - most));
  for (int i = 16; i > 0; i >>= 1) sum += __shfl_xor_sync(kAll, sum, i);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  double total = 0;
  for (int w = 0; w < kThreads / 32; w++) total += sums[w];
  const double base = static_cast<double>(most) + log_f64(total);
  const int id = job.sampled >= 0 ? ids[job.sampled] : job.id;
  if (threadIdx.x == 0) {
    out[0].id = id < 0 ? -1 : id;
    out[0].logprob = id < 0 ? 0.0f : static_cast<float>(static_cast<double>(logits[id]) - base);
  }
  // One entry a pass: the best that comes after the last one taken.
  float last = INFINITY;
  int last_id = -1;
  for (int entry = 1; entry <= job.top_n; entry++) {
    float value = -INFINITY;
    int at = -1;
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const float v = logits[i];
      if (v > last || (v == last && i <= last_id)) continue;
      if (at < 0 || v > value) {
        value = v;
        at = i;
      }
    }
    for (int i = 16; i > 0; i >>= 1) {
      const float other = __shfl_xor_sync(kAll, value, i);
      const int other_id = __shfl_xor_sync(kAll, at, i);
      if (other_id >= 0 && (at < 0 || other > value || (other == value && other_id < at))) {
        value = other;
        at = other_id;
      }
    }
    __syncthreads();
    if (lane == 0) {
      best_value[warp] = value;
      best_id[warp] = at;
    }
    __syncthreads();
    value = best_value[0];
    at = best_id[0];
    for (int w = 1; w < kThreads / 32; w++) {
      if (best_id[w] >= 0 &&
          (at < 0 || best_value[w] > value || (best_value[w] == value && best_id[w] < at))) {
        value = best_value[w];
        at = best_id[w];
      }
    }
    if (threadIdx.x == 0) {
      out[entry].id = at;
      out[entry].logprob =
          at < 0 ? -INFINITY : static_cast<float>(static_cast<double>(value) - base);
    }
    last = value;
    last_id = at < 0 ? vocab : at;
  }
}

}  // namespace

void logprobs(Device *device, const LogprobJob *jobs, int n, const float *logits, int64_t stride,
              int vocab, const int32_t *ids, ksl_logprob *out) {
  KSL_LAUNCH(device, "logprobs", logprob_kernel, n, kThreads, jobs, logits, stride, vocab, ids,
             out);
}

}  // namespace ksl
