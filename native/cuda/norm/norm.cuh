#pragma once
#include "../common/rows.cuh"
#include "../gemm/gemm.cuh"

namespace ksl {

constexpr int kMaxHidden = 16384;

// What also becomes of `out` where each column is a row: it takes the place of the hidden state of
// the row's slab, and that one goes to place `entry` of `before`.
struct HiddenArgs {
  const RowInfo *rows;  // null: nothing
  const int32_t *row_of, *entry;
  float *hidden;  // of slab 0
  int64_t slab_stride;
  float *before;  // [entries][out_stride], or null: not wanted
};

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
  HiddenArgs keep;
};
void add_norm(Device *device, const NormArgs &a, int columns);
// The same of a wave whose split is a panel: without zero_at and keep.
void panel_norm(Device *device, const NormArgs &a, int columns);

}  // namespace ksl
