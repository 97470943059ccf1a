// Worker threads with a static partition, from which the others may take what a thread that does
// not run leaves undone. The calling thread (the engine thread) is worker 0.
#pragma once
#include "abi.h"
#include "alloc.h"

namespace ksl {

struct Pool;

// A task covers items [begin, end) as worker `worker`; a worker runs one at a time, perhaps several
// in a run.
typedef void (*PoolTask)(void *context, int worker, int begin, int end);

// Starts threads - 1 workers at the given nice value. Null on failure (error text set).
Pool *pool_create(int threads, int nice, Alloc *alloc, ksl_error *error);
int pool_threads(const Pool *pool);
// Splits [0, n) into contiguous pieces, each a multiple of `grain` except the last, runs them all
// and returns when all are done. With one thread, or n <= grain, runs in the caller.
void pool_run(Pool *pool, int n, int grain, PoolTask task, void *context);
void pool_destroy(Pool *pool);

}  // namespace ksl
