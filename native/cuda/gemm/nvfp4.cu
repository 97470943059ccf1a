// NVFP4 weights.
#include "stream_run.cuh"

namespace ksl {

void stream_nvfp4(Device *device, const Packed &m, const Split &x, const Output *outputs,
                  const PairOutput *pair, const PlainArgs &plain, int tokens,
                  const InputNorm *norm) {
  run_stream<KSL_ENC_NVFP4>(device, stream_args(m, x, outputs, pair, plain, tokens, norm));
}

}  // namespace ksl
