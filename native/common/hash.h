// The counter-based hash behind sampling noise and fill tensors.
#pragma once
#include <stdint.h>

#include "device.h"

namespace ksl {

// A bijection of 64-bit words that spreads every input bit over the output (the finalizer of
// splitmix64).
KSL_HD inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

enum : uint64_t { kGolden = UINT64_C(0x9e3779b97f4a7c15) };

// The i-th word of the stream named by `key`; mix64(seed) makes a good key of any seed.
KSL_HD inline uint64_t hash_at(uint64_t key, uint64_t i) {
  return mix64(key + (i + 1) * kGolden);
}

}  // namespace ksl
