#include "alloc.h"

#include <stdlib.h>

namespace ksl {

// calloc leaves large zero pages untouched, which aligned allocators with a memset would not; the
// pointer to free is kept just below the aligned block.
void *alloc_bytes(Alloc *alloc, size_t bytes) {
  alloc->count++;
  if (alloc->count == alloc->fail_at) return nullptr;
  const size_t extra = kAlign + sizeof(void *);
  if (bytes > SIZE_MAX - extra) return nullptr;
  char *raw = static_cast<char *>(calloc(1, bytes + extra));
  if (raw == nullptr) return nullptr;
  const uintptr_t first = reinterpret_cast<uintptr_t>(raw) + sizeof(void *);
  const uintptr_t aligned = (first + kAlign - 1) & ~static_cast<uintptr_t>(kAlign - 1);
  void **block = reinterpret_cast<void **>(aligned);
  block[-1] = raw;
  alloc->bytes += bytes;
  return block;
}

void *alloc_array(Alloc *alloc, size_t count, size_t size) {
  size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes)) bytes = SIZE_MAX;
  return alloc_bytes(alloc, bytes);
}

void alloc_free(void *memory) {
  if (memory != nullptr) free(static_cast<void **>(memory)[-1]);
}

}  // namespace ksl
