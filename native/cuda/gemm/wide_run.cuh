// Launches of the wide kernels: how many tokens a block takes at a time.
#pragma once
#include "wide.cuh"

namespace ksl {
namespace {

// Multiprocessors; a block needs one for itself.
inline int wide_blocks() {
  static int count = 0;
  if (count == 0) cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0);
  return count > kWideCluster ? count : kWideCluster;
}

template <int kEncoding, int kColumns, bool kPair>
void launch_wide(Device *device, const WideArgs &args) {
  constexpr int kBytes = WideShared<kEncoding, kColumns>::kBytes;
  static bool raised = false;  // per instance; the engine has one thread
  if (!raised) {
    keep_error(device,
               cudaFuncSetAttribute(wide<kEncoding, kColumns, kPair>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
               "wide");
    raised = true;
  }
  WideArgs a = args;
  a.token_steps = divide_up(a.tokens, kColumns);
  a.row_steps = divide_up(a.tiles, kWideTiles * kWideCluster);
  const int steps = a.row_steps * a.token_steps, clusters = wide_blocks() / kWideCluster;
  launch_chained(device, "wide", wide<kEncoding, kColumns, kPair>,
                 (steps < clusters ? steps : clusters) * kWideCluster, kWideThreads, kBytes, a);
}

template <int kEncoding, bool kPair>
void launch_wide_columns(Device *device, const WideArgs &a, int columns) {
  switch (columns) {
    case 64:
      return launch_wide<kEncoding, 64, kPair>(device, a);
    case 128:
      return launch_wide<kEncoding, 128, kPair>(device, a);
    case 160:
      return launch_wide<kEncoding, 160, kPair>(device, a);
    case 192:
      return launch_wide<kEncoding, 192, kPair>(device, a);
    default:
      return launch_wide<kEncoding, 256, kPair>(device, a);
  }
}

// Rounds of blocks times what one takes, which is a little more than its tokens.
inline int wide_columns(int tiles, int tokens) {
  constexpr int kChoices[] = {256, 192, 160, 128, 64};
  const int clusters = wide_blocks() / kWideCluster;
  const int row_steps = divide_up(tiles, kWideTiles * kWideCluster);
  int best = 0;
  int64_t least = 0;
  for (const int columns : kChoices) {
    const int64_t steps = static_cast<int64_t>(row_steps) * divide_up(tokens, columns);
    const int64_t cost = divide_up(steps, clusters) * static_cast<int64_t>(columns + 16);
    if (best != 0 && cost >= least) continue;
    best = columns;
    least = cost;
  }
  return best;
}

template <int kEncoding>
void run_wide(Device *device, const Packed &m, const Panel &x, const Output *outputs,
              const PairOutput *pair, int tokens, int columns) {
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
  a.x = x.data;
  a.groups = x.groups;
  a.x_inverse = 1.0f / x.scale;
  a.tokens = tokens;

  if (m.pair) {
    a.act = pair->act;
    a.act_stride = pair->stride;
    a.act_panel = panel_of(pair->split);
    launch_wide_columns<kEncoding, true>(device, a, columns);
  } else {
    launch_wide_columns<kEncoding, false>(device, a, columns);
  }
}

}  // namespace
}  // namespace ksl
