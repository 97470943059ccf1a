// What kernels know of the rows of a wave.
#pragma once
#include "device.cuh"

namespace ksl {

// One row of the wave. committed: columns whose state the slab gets; keep < 0: all of them, as they
// are computed. tiled: a long piece of a prompt, which the kernels for many columns take.
struct RowInfo {
  int32_t column, n, slot, slab, keep, committed, start, n_cuts, tiled;
  int32_t cut_offset[KSL_MAX_CUTS], cut_slab[KSL_MAX_CUTS];
};

}  // namespace ksl
