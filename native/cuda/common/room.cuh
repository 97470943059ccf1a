// What a device has.
#pragma once

namespace ksl {

// Multiprocessors; bytes of shared memory of each, and how many of them a block may have.
struct Room {
  int processors, processor_bytes, block_bytes;
};

// What sm_120 gives a block; sm_90 gives 227 KiB.
constexpr int kSmallRoom = 99 * 1024;

}  // namespace ksl
