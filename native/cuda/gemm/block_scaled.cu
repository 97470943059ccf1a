// The block-scaled products: activations made from a panel of halves, launches.
#include "block_scaled.cuh"

namespace ksl {

namespace {

constexpr int kQuantizeThreads = 256;

// 16 elements of a group from a panel's row, see panel.cuh. piece: of the row.
__device__ inline void scaled_read(const uint8_t *row, int token, int t, float (&values)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const __half2 two = *reinterpret_cast<const __half2 *>(row + panel_byte(token, 16 * t + i));
    values[i] = __low2float(two);
    values[i + 1] = __high2float(two);
  }
}

// A block makes one token; threads 4 i to 4 i + 3 a piece.
template <bool kNvfp4>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_scaled_kernel(const __grid_constant__ Panel from, const __grid_constant__ Scaled to,
                           int pieces) {
  begin_chained();
  __shared__ float scratch[32];
  const int token = blockIdx.x, t = threadIdx.x & 3;
  const unsigned quad = 0xfu << (threadIdx.x & 28);
  const auto read = [&](int item, float (&values)[16]) {
    scaled_read(panel_row(from, token, item >> 2), token, t, values);
  };
  float factor = 1.0f, values[16];
  if (kNvfp4) {
    float most = 0;
    bool number = true;
    for (int item = threadIdx.x; item < pieces * 4; item += kQuantizeThreads) {
      read(item, values);
      for (const float v : values) {
        most = fmaxf(most, fabsf(v));
        number = number && v == v;
      }
    }
    most = block_max(most, scratch);
    factor = nv4_factor(__syncthreads_and(number) ? most : __int_as_float(0x7fc00000));
    if (threadIdx.x == 0) to.factors[token] = factor;
  }
  for (int item = threadIdx.x; item < pieces * 4; item += kQuantizeThreads) {
    const int piece = item >> 2;
    const int64_t stage = static_cast<int64_t>(piece / kScaledStage) * to.tokens + token;
    uint8_t *out = to.data + (static_cast<int64_t>(piece) * to.tokens + token) * kScaledPiece;
    read(item, values);
    if (kNvfp4) {
      nv4_write(values, factor, t, piece % kScaledStage, out, to.scales + stage * kNv4Scales);
    } else {
      uint32_t exponents[2];
#pragma unroll
      for (int product = 0; product < 2; product++) {
        float most = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(values[8 * product + i]));
        most = fmaxf(most, __shfl_xor_sync(quad, most, 1));
        most = fmaxf(most, __shfl_xor_sync(quad, most, 2));
        exponents[product] = mx8_exponent(most);
      }
      mx8_write(values, exponents, t, piece % kScaledStage, out, to.scales + stage * kMx8Scales);
    }
  }
}

template <int kEncoding, bool kPair>
void launch_scaled(Device *device, const ScaledArgs &args) {
  typedef ScaledShared<kEncoding, kPair> Use;
  static const bool raised = raise_shared(device, block_scaled<kEncoding, kPair>, Use::kBytes);
  (void)raised;  // per instance; the engine has one thread
  ScaledArgs a = args;
  a.row_steps = divide_up(a.tiles, kScaledRows);
  a.token_steps = divide_up(a.tokens, kScaledTokens);
  const int steps = a.row_steps * a.token_steps, most = device->room.processors;
  launch_chained(device, "block_scaled", block_scaled<kEncoding, kPair>,
                 steps < most ? steps : most, kScaledThreads, Use::kBytes, a);
}

}  // namespace

bool block_scaled_runs(const Device &device, int major) {
  return major == 12 && device.room.block_bytes >= kSmallRoom;
}

void quantize_scaled(Device *device, const Panel &from, const Scaled &to, int encoding, int pieces,
                     int tokens) {
  if (encoding == KSL_ENC_E2M3)
    KSL_CHAIN(device, "quantize_scaled", quantize_scaled_kernel<false>, tokens, kQuantizeThreads,
              from, to, pieces);
  else
    KSL_CHAIN(device, "quantize_scaled", quantize_scaled_kernel<true>, tokens, kQuantizeThreads,
              from, to, pieces);
}

void scaled_product(Device *device, const Packed &m, const Panel &from, const Scaled &x,
                    const Output *outputs, const PairOutput *pair, int tokens) {
  ScaledArgs a = {};
  a.data = m.data;
  a.scale = m.scale;
  a.supers = m.supers;
  a.tiles = m.tiles;
  a.n_parts = m.n_parts;
  for (int i = 0; i < m.n_parts; i++) {
    a.parts[i] = m.parts[i];
    a.outputs[i] = outputs[m.parts[i].matrix];
  }
  a.x = x;
  a.tokens = tokens;
  if (m.pair) {
    a.act = pair->act;
    a.act_stride = pair->stride;
    a.act_panel = panel_of(pair->split);
  }
  // 2^14 in the packed scales of FP6, 2^7 in the sums' scales of NVFP4.
  if (m.encoding == KSL_ENC_E2M3) {
    a.inverse = 0x1p-14f / from.scale;
    a.x.factors = nullptr;
    if (m.pair)
      launch_scaled<KSL_ENC_E2M3, true>(device, a);
    else
      launch_scaled<KSL_ENC_E2M3, false>(device, a);
  } else {
    a.inverse = 0x1p-7f / from.scale;
    if (m.pair)
      launch_scaled<KSL_ENC_NVFP4, true>(device, a);
    else
      launch_scaled<KSL_ENC_NVFP4, false>(device, a);
  }
}

}  // namespace ksl
