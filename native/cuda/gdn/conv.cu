// Depthwise causal convolution, SiLU, unit norm of queries and keys, and the gates.
#include "gdn.cuh"

namespace ksl {

namespace {

// The pre-conv value of a channel `offset` positions from the start of a row, -3..-1 from history.
__device__ inline float column_at(const float *qkv, int stride, const float *history, int channels,
                                  int offset, int channel) {
  return offset >= 0 ? qkv[static_cast<int64_t>(offset) * stride + channel]
                     : history[(kHistory + offset) * channels + channel];
}

// A block is one column and one head: query heads, then key heads, then value heads.
__global__ void conv_kernel(const __grid_constant__ ConvArgs a) {
  begin_chained();
  __shared__ float scratch[32];
  const GdnShape &s = a.shape;
  const int column = a.list != nullptr ? a.list[blockIdx.x] : blockIdx.x;
  const int head = blockIdx.y, i = threadIdx.x;
  if (a.row_of[column] < 0) return;
  const RowInfo &row = a.rows[a.row_of[column]];
  const bool unit = head < 2 * s.key_heads;
  const int dim = unit ? s.key_dim : s.value_dim;
  const int channel =
      unit ? head * s.key_dim + i
           : 2 * s.key_heads * s.key_dim + (head - 2 * s.key_heads) * s.value_dim + i;
  const int first = a.keep ? row.keep : row.column;
  const int offset = column - first;
  if (a.keep && offset >= row.committed) return;
  float *history = a.slabs.data + row.slab * a.slabs.stride + a.slabs.history_offset;
  const float *qkv = a.qkv + static_cast<int64_t>(first) * a.qkv_stride;
  float y = 0;
  if (i < dim) {
    float window[kTaps];
    for (int t = 0; t < kTaps; t++)
      window[t] = column_at(qkv, a.qkv_stride, history, s.channels, offset - kHistory + t, channel);
    float sum = a.taps[channel] * window[0];
    for (int t = 1; t < kTaps; t++) sum = fmaf(a.taps[t * s.channels + channel], window[t], sum);
    y = silu(sum);
    const int64_t at = static_cast<int64_t>(column) * a.conv_stride + channel;
    if (a.conv_silu != nullptr) a.conv_silu[at] = y;
    if (!unit) a.conv[at] = y;
    if (a.history && row.n == 1 && row.keep < 0) {
      for (int t = 0; t < kHistory; t++) history[t * s.channels + channel] = window[t + 1];
      for (int c = 0; c < row.n_cuts; c++) {
        float *to = a.slabs.data + row.cut_slab[c] * a.slabs.stride + a.slabs.history_offset;
        for (int t = 0; t < kHistory; t++) to[t * s.channels + channel] = window[t + 1];
      }
    }
  }
  if (unit) {
    const float r = 1.0f / sqrtf(block_sum(y * y, scratch) + 1e-6f);
    const float scale = head < s.key_heads ? 1.0f / sqrtf(static_cast<float>(s.key_dim)) : 1.0f;
    if (i < dim) a.conv[static_cast<int64_t>(column) * a.conv_stride + channel] = y * r * scale;
  } else if (i == 0 && a.gates) {
    const int h = head - 2 * s.key_heads;
    const int64_t at = static_cast<int64_t>(column) * a.head_stride + h;
    a.decay[at] = gdn_decay(a.a[at], a.decay_rate[h], a.dt_bias[h], a.g + at);
    a.beta[at] = sigmoid(a.b[at]);
  }
}

__global__ void keep_kernel(const __grid_constant__ KeepArgs a) {
  const int column = blockIdx.x;
  if (a.row_of[column] < 0) return;
  const RowInfo &row = a.rows[a.row_of[column]];
  if (row.keep < 0) return;
  float *to = a.to + (row.keep + column - row.column) * a.to_stride;
  const float *qkv = a.qkv + static_cast<int64_t>(column) * a.qkv_stride;
  for (int i = threadIdx.x; i < a.channels; i += blockDim.x) to[i] = qkv[i];
  for (int i = threadIdx.x; i < a.heads; i += blockDim.x) {
    to[a.qkv_stride + i] = a.decay[static_cast<int64_t>(column) * a.head_stride + i];
    to[a.qkv_stride + a.head_stride + i] = a.beta[static_cast<int64_t>(column) * a.head_stride + i];
  }
}

__global__ void history_kernel(const __grid_constant__ HistoryArgs a) {
  const RowInfo &row = a.rows[blockIdx.x];
  const int channel = blockIdx.y * blockDim.x + threadIdx.x;
  if (channel >= a.channels || (row.keep >= 0) != a.keep || row.n == 0) return;
  if ((!a.keep && row.n == 1) || (a.tiled && !row.tiled)) return;
  const float *qkv = a.qkv + static_cast<int64_t>(a.keep ? row.keep : row.column) * a.qkv_stride;
  float *history = a.slabs.data + row.slab * a.slabs.stride + a.slabs.history_offset;
  float old[kHistory];
  for (int t = 0; t < kHistory; t++) old[t] = history[t * a.channels + channel];
  const auto push = [&](int n, float *to) {
    for (int t = 0; t < kHistory; t++) {
      const int offset = n - kHistory + t;
      to[t * a.channels + channel] =
          offset < 0 ? old[kHistory + offset]
                     : qkv[static_cast<int64_t>(offset) * a.qkv_stride + channel];
    }
  };
  if (!a.keep)
    for (int c = 0; c < row.n_cuts; c++)
      push(row.cut_offset[c],
           a.slabs.data + row.cut_slab[c] * a.slabs.stride + a.slabs.history_offset);
  push(a.keep ? row.committed : row.n, history);
}

}  // namespace

void gdn_conv(Device *device, const ConvArgs &a, int columns) {
  const GdnShape &s = a.shape;
  const dim3 grid(columns, 2 * s.key_heads + s.value_heads);
  const int most = s.key_dim > s.value_dim ? s.key_dim : s.value_dim;
  KSL_CHAIN(device, "gdn_conv", conv_kernel, grid, padded32(most), a);
}

void gdn_keep(Device *device, const KeepArgs &a, int columns) {
  KSL_LAUNCH(device, "gdn_keep", keep_kernel, columns, 256, a);
}

void gdn_history(Device *device, const HistoryArgs &a, int n_rows) {
  KSL_LAUNCH(device, "gdn_history", history_kernel, dim3(n_rows, divide_up(a.channels, 256)), 256,
             a);
}

}  // namespace ksl
