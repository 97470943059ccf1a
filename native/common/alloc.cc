#include "alloc.h"

#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace ksl {
namespace {

constexpr size_t kHugePage = static_cast<size_t>(2) << 20;

// calloc leaves large zero pages untouched, which aligned allocators with a memset would not; the
// pointer to free is kept just below the aligned block.
void *aligned_zeros(Alloc *alloc, size_t bytes, size_t align) {
  if (alloc_refused(alloc)) return nullptr;
  const size_t extra = align + sizeof(void *);
  if (bytes > SIZE_MAX - extra) return nullptr;
  char *raw = static_cast<char *>(calloc(1, bytes + extra));
  if (raw == nullptr) return nullptr;
  const uintptr_t first = reinterpret_cast<uintptr_t>(raw) + sizeof(void *);
  const uintptr_t aligned = (first + align - 1) & ~static_cast<uintptr_t>(align - 1);
  void **block = reinterpret_cast<void **>(aligned);
  block[-1] = raw;
  alloc->bytes += bytes;
  return block;
}

}  // namespace

void *alloc_bytes(Alloc *alloc, size_t bytes) {
  return aligned_zeros(alloc, bytes, kAlign);
}

void *alloc_huge(Alloc *alloc, size_t bytes) {
  void *memory = aligned_zeros(alloc, bytes, kHugePage);
#ifdef __linux__
  // Whole pages only: what shares the last one is not ours. It is advice; failing changes nothing.
  if (memory != nullptr) madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  return memory;
}

void *alloc_array(Alloc *alloc, size_t count, size_t size) {
  size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes)) bytes = SIZE_MAX;
  return alloc_bytes(alloc, bytes);
}

void alloc_discard(void *part, size_t bytes) {
#ifdef __linux__
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(part) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(part) + bytes) & ~(page - 1);
  if (first < end) madvise(reinterpret_cast<void *>(first), end - first, MADV_DONTNEED);
#endif
}

void alloc_touch(void *part, size_t bytes) {
  constexpr size_t kPage = 4096;  // or less than one: touching a page twice costs nothing
  const uintptr_t first = reinterpret_cast<uintptr_t>(part), end = first + bytes;
  for (uintptr_t at = first; at < end; at = (at & ~(kPage - 1)) + kPage)
    *reinterpret_cast<volatile char *>(at) = 0;
}

void alloc_free(void *memory) {
  if (memory != nullptr) free(static_cast<void **>(memory)[-1]);
}

}  // namespace ksl
