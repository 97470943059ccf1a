// FP6 weights.
#include "packed.cuh"
#include "packed_run.cuh"

namespace ksl {

void packed_e2m3(Device *device, const Packed &m, const Split &x, const Output *outputs,
                 const PairOutput *pair, int tokens) {
  run_packed<KSL_ENC_E2M3>(device, packed_args(m, x, outputs, pair, tokens));
}

}  // namespace ksl
