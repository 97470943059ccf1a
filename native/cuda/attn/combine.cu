// Joins the units of a column in the order of attn.h, then the gate.
#include "attn.cuh"

namespace ksl {

namespace {

// A block is one column and query head, a thread one dim.
__global__ void combine_kernel(const __grid_constant__ CombineArgs a) {
  begin_chained();
  const int column = blockIdx.x, head = blockIdx.y, i = threadIdx.x;
  if (i >= a.d) return;
  const int position = a.columns.position[column], group = a.heads / a.kv_heads;
  float value = 0;
  if (position >= a.first_key) {
    const int chunks = position / kChunkKeys + 1;
    const int units = a.unit_chunks ? (chunks + a.unit_chunks - 1) / a.unit_chunks : 1;
    const int per_span = a.unit_chunks == 1 ? kSpanChunks : 1;
    const int64_t step = static_cast<int64_t>(group) * (a.d + 2);
    const float *from =
        a.partial + (static_cast<int64_t>(column) * a.kv_heads + head / group) * a.units * step +
        head % group * (a.d + 2);
    float m = -INFINITY, l = 0, acc = 0;
    for (int u = 0; u < units; u += per_span) {
      float span_m = -INFINITY, span_l = 0, span_acc = 0;
      for (int j = u; j < u + per_span && j < units; j++) {
        const float *p = from + j * step;
        const float pm = p[a.d], pl = p[a.d + 1], pa = p[i];
        const float most = fmaxf(span_m, pm);
        const float old = expf(span_m - most), now = expf(pm - most);
        span_acc = fmaf(span_acc, old, pa * now);
        span_l = fmaf(span_l, old, pl * now);
        span_m = most;
      }
      const float most = fmaxf(m, span_m);
      const float old = expf(m - most), now = expf(span_m - most);
      acc = fmaf(acc, old, span_acc * now);
      l = fmaf(l, old, span_l * now);
      m = most;
    }
    value = acc / l;
  }
  gate_store(a.gate, column, head, i, a.d, value, gate_of(a.gate, column, head, i, a.d));
}

}  // namespace

void attn_combine(Device *device, const CombineArgs &a) {
  KSL_CHAIN(device, "attn_combine", combine_kernel, dim3(a.columns.n, a.heads), padded32(a.d), a);
}

}  // namespace ksl
