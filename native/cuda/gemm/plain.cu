// Any encoding, decoded in the kernel, float32 products. A block computes one row; thread t takes
// the elements 4 t .. 4 t + 3 of every 512 in ascending order, then the threads are added in a
// fixed tree.
#include "gemm.cuh"

namespace ksl {

namespace {

constexpr int kThreads = 128;

struct PlainArgs {
  Raw matrices[kGroupParts];
  Output outputs[kGroupParts];
  int first_row[kGroupParts + 1];  // of each matrix in the numbering of warps
  int n;
  const float *x;
  int x_stride, tokens;
};

template <int kEncoding>
__device__ inline void four_values(const Raw &m, int64_t row, int k, float (&w)[4]) {
  if (k + 4 <= m.cols && (m.cols & 3) == 0) {
    if (kEncoding == KSL_ENC_BF16) {
      const uint2 v = *reinterpret_cast<const uint2 *>(static_cast<const uint16_t *>(m.codes) +
                                                       row * m.cols + k);
      w[0] = __uint_as_float(v.x << 16);
      w[1] = __uint_as_float(v.x & 0xffff0000u);
      w[2] = __uint_as_float(v.y << 16);
      w[3] = __uint_as_float(v.y & 0xffff0000u);
      return;
    }
    if (kEncoding == KSL_ENC_F32) {
      const float4 v =
          *reinterpret_cast<const float4 *>(static_cast<const float *>(m.codes) + row * m.cols + k);
      w[0] = v.x;
      w[1] = v.y;
      w[2] = v.z;
      w[3] = v.w;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = k + i < m.cols ? raw_value<kEncoding>(m, row, k + i) : 0.0f;
}

template <int kEncoding, int kTokens>
__device__ inline void dot(const Raw &m, const PlainArgs &a, int64_t row, int token, int thread,
                           float (&sum)[kTokens]) {
#pragma unroll 5
  for (int k = thread * 4; k < m.cols; k += kThreads * 4) {
    float w[4];
    four_values<kEncoding>(m, row, k, w);
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      const int at = token + t < a.tokens ? token + t : a.tokens - 1;
      const float *x = a.x + static_cast<int64_t>(at) * a.x_stride + k;
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (k + i < m.cols) sum[t] = fmaf(w[i], x[i], sum[t]);
    }
  }
}

template <int kTokens>
__global__ void __launch_bounds__(kThreads) plain_kernel(const __grid_constant__ PlainArgs a) {
  begin_chained();
  __shared__ float sums[kTokens][kThreads / 32];
  const int thread = threadIdx.x, item = blockIdx.x;
  int which = 0;
  while (item >= a.first_row[which + 1]) which++;
  const Raw &m = a.matrices[which];
  const int64_t row = item - a.first_row[which];
  const int token = blockIdx.y * kTokens;
  float sum[kTokens] = {};
  switch (m.encoding) {
    case KSL_ENC_F32:
      dot<KSL_ENC_F32, kTokens>(m, a, row, token, thread, sum);
      break;
    case KSL_ENC_BF16:
      dot<KSL_ENC_BF16, kTokens>(m, a, row, token, thread, sum);
      break;
    case KSL_ENC_FP8:
      dot<KSL_ENC_FP8, kTokens>(m, a, row, token, thread, sum);
      break;
    case KSL_ENC_E2M3:
      dot<KSL_ENC_E2M3, kTokens>(m, a, row, token, thread, sum);
      break;
    default:
      dot<KSL_ENC_NVFP4, kTokens>(m, a, row, token, thread, sum);
  }
#pragma unroll
  for (int t = 0; t < kTokens; t++) {
    const float part = warp_sum(sum[t]);
    if ((thread & 31) == 0) sums[t][thread >> 5] = part;
  }
  __syncthreads();
  if (thread >= kTokens || token + thread >= a.tokens) return;
  float total = sums[thread][0];
  for (int w = 1; w < kThreads / 32; w++) total += sums[thread][w];
  a.outputs[which].y[static_cast<int64_t>(token + thread) * a.outputs[which].stride + row] = total;
}

void run_plain(Device *device, const Raw *matrices, const Output *outputs, int n, const float *x,
               int x_stride, int tokens) {
  PlainArgs a = {};
  a.n = n;
  for (int i = 0; i < n; i++) {
    a.matrices[i] = matrices[i];
    a.outputs[i] = outputs[i];
    a.first_row[i + 1] = a.first_row[i] + matrices[i].rows;
  }
  a.x = x;
  a.x_stride = x_stride;
  a.tokens = tokens;
  const int blocks = a.first_row[a.n];
  if (tokens == 1) {
    KSL_CHAIN(device, "plain", plain_kernel<1>, dim3(blocks, 1), kThreads, a);
  } else if (tokens <= 4) {
    KSL_CHAIN(device, "plain", plain_kernel<4>, dim3(blocks, 1), kThreads, a);
  } else {
    KSL_CHAIN(device, "plain", plain_kernel<8>, dim3(blocks, divide_up(tokens, 8)), kThreads, a);
  }
}

}  // namespace

void packed_e2m3(Device *device, const Packed &m, const Split &x, const Output *outputs,
                 const PairOutput *pair, int tokens);
void packed_nvfp4(Device *device, const Packed &m, const Split &x, const Output *outputs,
                  const PairOutput *pair, int tokens);
bool dense_takes(const Raw &m, int tokens);
void run_dense(Device *device, const Raw *matrices, const Output *outputs, int n, const float *x,
               int x_stride, int tokens);
void wide_product(Device *device, const Packed &m, const Panel &x, const Output *outputs,
                  const PairOutput *pair, int tokens);
void wide_product8(Device *device, const Packed &m, const Panel8 &x, const Output *outputs,
                   const PairOutput *pair, int tokens);
void quantize_panel(Device *device, const Panel &from, const Panel8 &to, int pieces, int tokens);

void gemm_group(Device *device, const Group &group, const float *x, int x_stride,
                const Split &split, const Output *outputs, const PairOutput *pair, int tokens) {
  bool quantized = false;
  for (int i = 0; i < group.n_packed; i++) {
    const Packed &m = group.packed[i];
    if (split.groups > 0 && m.encoding == KSL_ENC_E2M3 && split.e4m3) {
      if (!quantized)
        quantize_panel(device, panel_of(split), panel8_of(split), split.pieces, tokens);
      quantized = true;
      wide_product8(device, m, panel8_of(split), outputs, pair, tokens);
    } else if (split.groups > 0) {
      wide_product(device, m, panel_of(split), outputs, pair, tokens);
    } else if (m.encoding == KSL_ENC_E2M3) {
      packed_e2m3(device, m, split, outputs, pair, tokens);
    } else {
      packed_nvfp4(device, m, split, outputs, pair, tokens);
    }
  }
  Raw plain[kGroupParts], dense[kGroupParts];
  Output plain_out[kGroupParts], dense_out[kGroupParts];
  int n_plain = 0, n_dense = 0;
  for (int i = 0; i < group.n_plain; i++) {
    const bool takes = dense_takes(group.plain[i], tokens);
    (takes ? dense : plain)[takes ? n_dense : n_plain] = group.plain[i];
    (takes ? dense_out : plain_out)[takes ? n_dense++ : n_plain++] = outputs[group.plain_matrix[i]];
  }
  if (n_plain > 0) run_plain(device, plain, plain_out, n_plain, x, x_stride, tokens);
  if (n_dense > 0) run_dense(device, dense, dense_out, n_dense, x, x_stride, tokens);
}

}  // namespace ksl
