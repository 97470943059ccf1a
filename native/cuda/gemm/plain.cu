// Matrices of any encoding, a warp a row; and the choice of kernels for a group.
#include "plain.cuh"

namespace ksl {

namespace {

constexpr int kRows = 8;  // of a block

template <int kTokens>
__global__ void __launch_bounds__(kRows * 32) plain_kernel(const __grid_constant__ PlainArgs a) {
  begin_chained();
  plain_row<kTokens>(a, blockIdx.x * kRows + (threadIdx.x >> 5), blockIdx.y * kTokens,
                     threadIdx.x & 31);
}

void run_plain(Device *device, const PlainArgs &a) {
  const int blocks = divide_up(a.first_row[a.n], kRows);
  if (a.tokens == 1)
    KSL_CHAIN(device, "plain", plain_kernel<1>, blocks, kRows * 32, a);
  else
    KSL_CHAIN(device, "plain", plain_kernel<kPlainTokens>,
              dim3(blocks, divide_up(a.tokens, kPlainTokens)), kRows * 32, a);
}

PlainArgs plain_args(const Raw *matrices, const Output *outputs, int n, const float *x,
                     int x_stride, int tokens) {
  PlainArgs a = {};
  a.n = n;
  for (int i = 0; i < n; i++) {
    a.matrices[i] = matrices[i];
    a.outputs[i] = outputs[i];
    a.first_row[i + 1] = a.first_row[i] + matrices[i].rows;
  }
  a.x = x;
  a.x_stride = x_stride;
  a.tokens = tokens;
  return a;
}

}  // namespace

bool dense_takes(const Raw &m, int tokens);
void run_dense(Device *device, const Raw *matrices, const Output *outputs, int n, const float *x,
               int x_stride, int tokens);
void wide_product(Device *device, const Packed &m, const Panel &x, const Output *outputs,
                  const PairOutput *pair, int tokens);
void wide_product8(Device *device, const Packed &m, const Panel8 &x, const Output *outputs,
                   const PairOutput *pair, int tokens);
void quantize_scaled(Device *device, const Panel &from, const Scaled &to, int encoding, int pieces,
                     int tokens);
void scaled_product(Device *device, const Packed &m, const Panel &from, const Scaled &x,
                    const Output *outputs, const PairOutput *pair, int tokens);
void quantize_panel(Device *device, const Panel &from, const Panel8 &to, int pieces, int tokens);

void gemm_group(Device *device, const Group &group, const float *x, int x_stride,
                const Split &split, const Output *outputs, const PairOutput *pair, int tokens,
                const InputNorm *norm) {
  Raw plain[kGroupParts], dense[kGroupParts];
  Output plain_out[kGroupParts], dense_out[kGroupParts];
  int n_plain = 0, n_dense = 0;
  const bool floats = plain_reads_floats(group, split);
  for (int i = 0; i < group.n_plain && floats; i++) {
    const Raw &m = group.plain[i];
    const Output &out = outputs[group.plain_matrix[i]];
    if (dense_takes(m, tokens)) {
      dense[n_dense] = m;
      dense_out[n_dense++] = out;
    } else {
      plain[n_plain] = m;
      plain_out[n_plain++] = out;
    }
  }
  // First: the panel has just been written.
  if (!floats && group.n_plain > 0)
    wide_product(device, group.halves, panel_of(split), outputs, nullptr, tokens);
  PlainArgs rows = plain_args(plain, plain_out, n_plain, x, x_stride, tokens);
  bool quantized = false;
  for (int i = 0; i < group.n_packed; i++) {
    const Packed &m = group.packed[i];
    if (split.groups > 0 && split.scaled) {
      quantize_scaled(device, panel_of(split), scaled_of(split), m.encoding, split.pieces, tokens);
      scaled_product(device, m, panel_of(split), scaled_of(split), outputs, pair, tokens);
    } else if (split.groups > 0 && m.encoding == KSL_ENC_E2M3 && split.e4m3) {
      if (!quantized && !split.direct)
        quantize_panel(device, panel_of(split), panel8_of(split), split.pieces, tokens);
      quantized = true;
      wide_product8(device, m, panel8_of(split), outputs, pair, tokens);
    } else if (split.groups > 0) {
      wide_product(device, m, panel_of(split), outputs, pair, tokens);
    } else {
      if (split.rows)
        stream_quads(device, m, split, outputs, pair, rows, tokens);
      else if (m.encoding == KSL_ENC_E2M3)
        stream_e2m3(device, m, split, outputs, pair, rows, tokens, norm);
      else if (m.encoding == KSL_ENC_BF16)
        stream_bf16(device, m, split, outputs, pair, rows, tokens, norm);
      else
        stream_nvfp4(device, m, split, outputs, pair, rows, tokens, norm);
      rows.n = 0;  // the first of them takes these along
    }
  }
  if (rows.n > 0) run_plain(device, rows);
  if (n_dense > 0) run_dense(device, dense, dense_out, n_dense, x, x_stride, tokens);
}

bool takes_sum(const Device &device, const Group &group, int tokens) {
  if (tokens > kFewTokens || group.n_packed != 1 || group.n_plain > 0) return false;
  const Packed &m = group.packed[0];
  return stream_adds(m.joined, m.tiles, m.supers, packed_block_bytes(m.encoding), device.room);
}

bool takes_norm(const Device &device, const Group &group, int width, int tokens) {
  if (tokens > kNormTokens || group.n_packed != 1) return false;
  const Packed &m = group.packed[0];
  return m.encoding != KSL_ENC_BF16 && m.cols == width &&
         stream_makes_norm(m.joined, packed_block_bytes(m.encoding), m.supers, group.n_plain > 0,
                           tokens, device.room);
}

bool plain_reads_floats(const Group &group, const Split &split) {
  return group.n_plain > 0 && !(split.halves && group.halves.n_parts > 0);
}

}  // namespace ksl
