#pragma once
#include "../gemm/gemm.cuh"

namespace ksl {

constexpr int kMaxHidden = 16384;

// x += add; out = rms(x) gain. A block is one column. width: at most kMaxHidden. add: the
// sums of slices.
struct NormArgs {
  float *x;
  int stride, width;
  const float *add;  // null: nothing
  Slices slices;
  int64_t slice_stride;
  float *added;  // null, or where that goes too
  const float *gain;
  float eps;
  float *out;  // null: not wanted
  int out_stride;
  Split split;
  const int32_t *zero_at;  // null, or positions: the columns of position 0 get zeros in `out`
};
void add_norm(Device *device, const NormArgs &a, int columns);
// The same of a wave whose split is a panel: without zero_at.
void panel_norm(Device *device, const NormArgs &a, int columns);

}  // namespace ksl
