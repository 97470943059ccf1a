// NVFP4 weights.
#include "packed.cuh"
#include "packed_run.cuh"

namespace ksl {

void packed_nvfp4(Device *device, const Packed &m, const Split &x, const Output *outputs,
                  const PairOutput *pair, int tokens) {
  run_packed<KSL_ENC_NVFP4>(device, packed_args(m, x, outputs, pair, tokens));
}

}  // namespace ksl
