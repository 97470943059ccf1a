// Columns for the head, and the trunk hidden state of slabs.
#include "gather.cuh"

namespace ksl {

namespace {

constexpr int kThreads = 256;

__global__ void gather_kernel(const float *from, int stride, int width, const int32_t *columns,
                              float *to, Split split) {
  begin_chained();
  const int i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= width) return;
  const float x = from[static_cast<int64_t>(columns[blockIdx.x]) * stride + i];
  to[static_cast<int64_t>(blockIdx.x) * stride + i] = x;
  if (split.data != nullptr) split_store(split, blockIdx.x, i, x);
}

__global__ void hidden_kernel(const RowInfo *rows, const float *final, int stride, int width,
                              float *slabs, int64_t slab_stride, int64_t hidden_offset) {
  begin_chained();
  const RowInfo &row = rows[blockIdx.x];
  const int which = blockIdx.y;  // 0: the end of the row, then its cuts
  if (row.n == 0 || which > row.n_cuts) return;
  const int offset = which == 0 ? row.committed : row.cut_offset[which - 1];
  const int slab = which == 0 ? row.slab : row.cut_slab[which - 1];
  const int i = blockIdx.z * kThreads + threadIdx.x;
  if (i < width)
    slabs[slab * slab_stride + hidden_offset + i] =
        final[static_cast<int64_t>(row.column + offset - 1) * stride + i];
}

}  // namespace

void gather_columns(Device *device, const float *from, int stride, int width,
                    const int32_t *columns, float *to, const Split &split, int n) {
  KSL_CHAIN(device, "gather", gather_kernel, dim3(n, divide_up(width, kThreads)), kThreads, from,
            stride, width, columns, to, split);
}

void commit_hidden(Device *device, const RowInfo *rows, const float *final, int stride, int width,
                   float *slabs, int64_t slab_stride, int64_t hidden_offset, int n_rows) {
  KSL_CHAIN(device, "hidden", hidden_kernel,
            dim3(n_rows, 1 + KSL_MAX_CUTS, divide_up(width, kThreads)), kThreads, rows, final,
            stride, width, slabs, slab_stride, hidden_offset);
}

}  // namespace ksl
