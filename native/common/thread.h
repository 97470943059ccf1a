// What every thread of the engine does at its start, and its clock. No thread is started here.
#pragma once
#include <pthread.h>
#include <stdint.h>
#include <time.h>

namespace ksl {

// Starts a thread with every signal blocked, so that signals go to the host program's threads.
// Returns 0 or an errno value.
int thread_start(pthread_t *thread, void *(*body)(void *), void *argument);
// Lowers the priority of the calling thread (Linux: of this thread only; elsewhere nothing).
void thread_be_nice(int nice);
// CLOCK_MONOTONIC.
inline uint64_t now_ns(void) {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * UINT64_C(1000000000) + static_cast<uint64_t>(t.tv_nsec);
}
// Tells the core that this is a spin loop.
void thread_relax(void);

}  // namespace ksl
