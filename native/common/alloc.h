// The one way to allocate at open: aligned, zeroed, counted, so that a test can make the n-th
// allocation fail. After open only the ring's copies of waves grow, at submit (wave.h).
#pragma once
#include "abi.h"

namespace ksl {

// Counts the allocations of one engine; the `fail_at`-th (1-based) returns null, 0 never.
// Used by one thread at a time. Made by ksl_open, passed to everything that allocates at open.
struct Alloc {
  int64_t count;
  int64_t fail_at;
  uint64_t bytes;  // asked for so far, failed ones not counted
};

enum { kAlign = 64 };

// Counts an allocation, by whichever allocator; true where a test wants it to fail.
inline bool alloc_refused(Alloc *alloc) {
  return ++alloc->count == alloc->fail_at;
}

// Zeroed memory of `bytes` (0 counts as 1), aligned to 64 bytes; null when memory is out.
// Pages that were never written cost no memory.
void *alloc_bytes(Alloc *alloc, size_t bytes);
// The same, aligned to 2 MiB and on pages of that size where the system has them: for what is read
// from end to end for every token. Takes whole pages once touched.
void *alloc_huge(Alloc *alloc, size_t bytes);
// As alloc_bytes for count * size bytes; null if the product overflows.
void *alloc_array(Alloc *alloc, size_t count, size_t size);
// Gives the whole pages of a part of such memory back to the system, until they are written again.
// What the part holds is undefined afterwards.
void alloc_discard(void *part, size_t bytes);
// Takes pages for a part of such memory, as writing it would. What it holds is undefined
// afterwards.
void alloc_touch(void *part, size_t bytes);
// Frees what any of these returned; null is allowed.
void alloc_free(void *memory);

template <typename T>
inline T *alloc_many(Alloc *alloc, size_t count) {
  return static_cast<T *>(alloc_array(alloc, count, sizeof(T)));
}

}  // namespace ksl
