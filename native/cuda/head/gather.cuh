#pragma once
#include "../gdn/gdn.cuh"

namespace ksl {

// head_in[i] = final[columns[i]], float32 and split.
void gather_columns(Device *device, const float *from, int stride, int width,
                    const int32_t *columns, float *to, const Split &split, int n);

// The trunk hidden of a row's last committed column and of its cuts, into their slabs.
void commit_hidden(Device *device, const RowInfo *rows, const float *final, int stride, int width,
                   float *slabs, int64_t slab_stride, int64_t hidden_offset, int n_rows);

}  // namespace ksl
