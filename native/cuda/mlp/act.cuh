#pragma once
#include "../common/split.cuh"

namespace ksl {

// act = silu(gate) * up, where gate and up are separate products.
void mlp_act(Device *device, const float *gate, const float *up, float *act, int stride, int width,
             const Split &split, int columns);

}  // namespace ksl
