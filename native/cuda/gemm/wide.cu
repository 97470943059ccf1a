// The wide kernels of the packed encodings.
#include "wide_run.cuh"

namespace ksl {

void wide_product(Device *device, const Packed &m, const Panel &x, const Output *outputs,
                  const PairOutput *pair, int tokens) {
  const int columns = wide_columns(m.tiles, tokens, false);
  if (m.encoding == KSL_ENC_E2M3) {
    run_wide<KSL_ENC_E2M3>(device, m, x, outputs, pair, tokens, columns);
  } else if (m.encoding == KSL_ENC_BF16) {
    run_wide<KSL_ENC_BF16>(device, m, x, outputs, pair, tokens, columns);
  } else {
    run_wide<KSL_ENC_NVFP4>(device, m, x, outputs, pair, tokens, columns);
  }
}

void wide_product8(Device *device, const Packed &m, const Panel8 &x, const Output *outputs,
                   const PairOutput *pair, int tokens) {
  run_wide8(device, m, x, outputs, pair, tokens, wide_columns(m.tiles, tokens, true));
}

}  // namespace ksl
