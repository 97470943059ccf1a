// FP6 weights.
#include "stream_run.cuh"

namespace ksl {

void stream_e2m3(Device *device, const Packed &m, const Split &x, const Output *outputs,
                 const PairOutput *pair, const PlainArgs &plain, int tokens,
                 const InputNorm *norm) {
  run_stream<KSL_ENC_E2M3>(device, stream_args(m, x, outputs, pair, plain, tokens, norm));
}

}  // namespace ksl
