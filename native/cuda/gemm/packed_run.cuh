// Arguments of the packed kernels.
#pragma once
#include "packed.cuh"

namespace ksl {
namespace {

inline PackedArgs packed_args(const Packed &m, const Split &x, const Output *outputs,
                              const PairOutput *pair, int tokens) {
  PackedArgs a = {};
  a.data = m.data;
  a.scale = m.scale;
  a.supers = m.supers;
  a.tiles = m.tiles;
  a.n_parts = m.n_parts;
  a.slices = m.slices;
  for (int i = 0; i < m.n_parts; i++) {
    a.parts[i] = m.parts[i];
    a.outputs[i] = outputs[m.parts[i].matrix];
  }
  a.x = reinterpret_cast<const uint4 *>(x.data);
  a.x_inverse = 1.0f / x.scale;
  a.tokens = tokens;
  if (m.pair) a.pair = *pair;
  a.paired = m.pair;
  return a;
}

}  // namespace
}  // namespace ksl
