// What every thread of the engine does at its start. No thread is started here.
#pragma once
#include <pthread.h>

namespace ksl {

// Starts a thread with every signal blocked, so that signals go to the host program's threads.
// Returns 0 or an errno value.
int thread_start(pthread_t *thread, void *(*body)(void *), void *argument);
// Lowers the priority of the calling thread (Linux: of this thread only; elsewhere nothing).
void thread_be_nice(int nice);
// Tells the core that this is a spin loop.
void thread_relax(void);

}  // namespace ksl
