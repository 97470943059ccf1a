// Launches of the wide kernels: how many tokens a block takes at a time.
#pragma once
#include "wide.cuh"
#include "wide_fp8.cuh"

namespace ksl {
namespace {

// Multiprocessors; a block needs one for itself.
inline int wide_blocks() {
  static int count = 0;
  if (count == 0) cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0);
  return count > kWideCluster ? count : kWideCluster;
}

// raised: whether the kernel may have that much shared memory already.
inline void launch_wide(Device *device, void (*kernel)(WideArgs), bool *raised, int bytes,
                        int columns, const WideArgs &args) {
  if (!*raised) {
    keep_error(device,
               cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "wide");
    *raised = true;
  }
  WideArgs a = args;
  a.token_steps = divide_up(a.tokens, columns);
  a.row_steps = divide_up(a.tiles, kWideTiles * kWideCluster);
  const int steps = a.row_steps * a.token_steps, clusters = wide_blocks() / kWideCluster;
  launch_chained(device, "wide", kernel, (steps < clusters ? steps : clusters) * kWideCluster,
                 kWideThreads, bytes, a);
}

// Instances by columns. The engine has one thread.
template <int kEncoding, bool kPair, int kColumns>
void launch_half(Device *device, const WideArgs &a) {
  static bool raised = false;
  launch_wide(device, wide<kEncoding, kColumns, kPair>, &raised,
              WideShared<kEncoding, kColumns, 2>::kBytes, kColumns, a);
}
template <bool kPair, int kColumns>
void launch_fp8(Device *device, const WideArgs &a) {
  static bool raised = false;
  launch_wide(device, wide8<kColumns, kPair>, &raised,
              WideShared<KSL_ENC_E2M3, kColumns, 1>::kBytes, kColumns, a);
}

template <int kEncoding, bool kPair>
void launch_half_columns(Device *device, const WideArgs &a, int columns) {
  switch (columns) {
    case 64:
      return launch_half<kEncoding, kPair, 64>(device, a);
    case 128:
      return launch_half<kEncoding, kPair, 128>(device, a);
    case 160:
      return launch_half<kEncoding, kPair, 160>(device, a);
    case 192:
      return launch_half<kEncoding, kPair, 192>(device, a);
    default:
      return launch_half<kEncoding, kPair, 256>(device, a);
  }
}
template <bool kPair>
void launch_fp8_columns(Device *device, const WideArgs &a, int columns) {
  switch (columns) {
    case 64:
      return launch_fp8<kPair, 64>(device, a);
    case 128:
      return launch_fp8<kPair, 128>(device, a);
    case 160:
      return launch_fp8<kPair, 160>(device, a);
    default:
      return launch_fp8<kPair, 256>(device, a);
  }
}

// Rounds of blocks times what one takes: its tokens, and as much as `more` of them for its weights.
inline int wide_columns(int tiles, int tokens, bool e4m3) {
  constexpr int kChoices[] = {256, 192, 160, 128, 64};
  const int more = e4m3 ? 90 : 16;
  const int clusters = wide_blocks() / kWideCluster;
  const int row_steps = divide_up(tiles, kWideTiles * kWideCluster);
  int best = 0;
  int64_t least = 0;
  for (const int columns : kChoices) {
    if (e4m3 && columns == 192) continue;
    const int64_t steps = static_cast<int64_t>(row_steps) * divide_up(tokens, columns);
    const int64_t cost = divide_up(steps, clusters) * static_cast<int64_t>(columns + more);
    if (best != 0 && cost >= least) continue;
    best = columns;
    least = cost;
  }
  return best;
}

// Everything but the activations.
inline WideArgs wide_args(const Packed &m, const Output *outputs, const PairOutput *pair,
                          int tokens) {
  WideArgs a = {};
  a.data = m.data;
  a.scale = m.scale;
  a.supers = m.supers;
  a.tiles = m.tiles;
  a.n_parts = m.n_parts;
  for (int i = 0; i < m.n_parts; i++) {
    a.parts[i] = m.parts[i];
    a.outputs[i] = outputs[m.parts[i].matrix];
  }
  a.tokens = tokens;
  if (m.pair) {
    a.act = pair->act;
    a.act_stride = pair->stride;
    a.act_panel = panel_of(pair->split);
  }
  return a;
}

template <int kEncoding>
void run_wide(Device *device, const Packed &m, const Panel &x, const Output *outputs,
              const PairOutput *pair, int tokens, int columns) {
  WideArgs a = wide_args(m, outputs, pair, tokens);
  a.x = x.data;
  a.groups = x.groups;
  a.x_inverse = packed_inverse(kEncoding) / x.scale;
  if (m.pair) {
    launch_half_columns<kEncoding, true>(device, a, columns);
  } else {
    launch_half_columns<kEncoding, false>(device, a, columns);
  }
}

inline void run_wide8(Device *device, const Packed &m, const Panel8 &x, const Output *outputs,
                      const PairOutput *pair, int tokens, int columns) {
  WideArgs a = wide_args(m, outputs, pair, tokens);
  a.x = x.data;
  a.groups = x.groups;
  a.x_inverse = packed_inverse(KSL_ENC_E2M3);
  a.token_inverse = x.inverse;
  if (m.pair) {
    launch_fp8_columns<true>(device, a, columns);
  } else {
    launch_fp8_columns<false>(device, a, columns);
  }
}

}  // namespace
}  // namespace ksl
