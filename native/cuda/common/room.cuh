// What a device has.
#pragma once

namespace ksl {

// Multiprocessors; bytes of shared memory of each, and how many of them a block may have.
struct Room {
  int processors, processor_bytes, block_bytes;
};

}  // namespace ksl
