#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <new>

#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#endif

#include "error.h"
#include "thread.h"

namespace ksl {

struct Worker {
  Pool *pool;
  int index;
  pthread_t thread;
};

// One run is one generation: the caller publishes the task, raises `generation`, works on its own
// part and waits until `remaining` is 0. Both sides spin for a while and then sleep; a side that is
// about to sleep says so in `parked` or `waiting` before it looks at the counter a last time, so no
// wake-up is lost.
struct Pool {
  int threads;  // the caller included
  int started;  // worker threads that run
  int nice;
  bool spins;
  Worker *workers;  // [threads - 1]
  pthread_mutex_t mutex;
  pthread_cond_t work, done;

  PoolTask task;
  void *context;
  int n, unit, units;
  bool stop;
  alignas(64) std::atomic<uint64_t> generation;
  alignas(64) std::atomic<int> remaining;
  alignas(64) std::atomic<int> parked;
  std::atomic<int> waiting;
};

namespace {

// How long a side spins before it sleeps. Inline stages lie between two runs of a wave, and waking
// a thread takes longer than all of them; between waves the host needs about as long.
constexpr uint64_t kSpinNs = 100000;
constexpr int kSpinsPerLook = 64;  // relaxes between two looks at the clock

// Spins until `ready` or until the time is over; whether it is ready.
template <typename Ready>
bool spin(const Pool *pool, Ready ready) {
  if (ready()) return true;
  if (!pool->spins) return false;
  const uint64_t end = now_ns() + kSpinNs;
  do {
    for (int i = 0; i < kSpinsPerLook; i++) {
      if (ready()) return true;
      thread_relax();
    }
  } while (now_ns() < end);
  return false;
}

void run_part(Pool *pool, int worker) {
  const int64_t units = pool->units;
  const int64_t first = units * worker / pool->threads * pool->unit;
  const int64_t last = units * (worker + 1) / pool->threads * pool->unit;
  const int begin = static_cast<int>(first);
  const int end = static_cast<int>(last < pool->n ? last : pool->n);
  if (begin < end) pool->task(pool->context, worker, begin, end);
}

void wait_for_work(Pool *pool, uint64_t seen) {
  if (spin(pool, [=] { return pool->generation.load(std::memory_order_acquire) != seen; })) return;
  pthread_mutex_lock(&pool->mutex);
  pool->parked.fetch_add(1);
  while (pool->generation.load() == seen) pthread_cond_wait(&pool->work, &pool->mutex);
  pool->parked.fetch_sub(1);
  pthread_mutex_unlock(&pool->mutex);
}

void wait_for_done(Pool *pool) {
  if (spin(pool, [=] { return pool->remaining.load(std::memory_order_acquire) == 0; })) return;
  pthread_mutex_lock(&pool->mutex);
  pool->waiting.store(1);
  while (pool->remaining.load() != 0) pthread_cond_wait(&pool->done, &pool->mutex);
  pool->waiting.store(0);
  pthread_mutex_unlock(&pool->mutex);
}

void start_generation(Pool *pool) {
  pool->remaining.store(pool->started);
  pool->generation.fetch_add(1);
  if (pool->parked.load() == 0) return;
  pthread_mutex_lock(&pool->mutex);
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->mutex);
}

void *worker_body(void *argument) {
  Worker *self = static_cast<Worker *>(argument);
  Pool *pool = self->pool;
  thread_be_nice(pool->nice);
  uint64_t seen = 0;
  for (;;) {
    wait_for_work(pool, seen);
    seen++;
    if (pool->stop) return nullptr;
    run_part(pool, self->index);
    if (pool->remaining.fetch_sub(1) == 1 && pool->waiting.load() != 0) {
      pthread_mutex_lock(&pool->mutex);
      pthread_cond_signal(&pool->done);
      pthread_mutex_unlock(&pool->mutex);
    }
  }
}

}  // namespace

int thread_start(pthread_t *thread, void *(*body)(void *), void *argument) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int rc = pthread_create(thread, nullptr, body, argument);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return rc;
}

void thread_be_nice(int nice) {
#ifdef __linux__
  if (nice > 0) setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), nice);
#else
  (void)nice;
#endif
}

void thread_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

Pool *pool_create(int threads, int nice, Alloc *alloc, ksl_error *error) {
  if (threads < 1) threads = 1;
  void *memory = alloc_bytes(alloc, sizeof(Pool));
  Worker *workers = alloc_many<Worker>(alloc, static_cast<size_t>(threads));
  if (memory == nullptr || workers == nullptr) {
    alloc_free(memory);
    alloc_free(workers);
    fail(error, KSL_NOMEM, "out of memory for %d worker threads", threads);
    return nullptr;
  }
  Pool *pool = new (memory) Pool();
  pool->threads = threads;
  pool->nice = nice;
  // With more threads than cores a spinning thread keeps the one it waits for from running.
  pool->spins = threads <= sysconf(_SC_NPROCESSORS_ONLN);
  pool->workers = workers;
  pthread_mutex_init(&pool->mutex, nullptr);
  pthread_cond_init(&pool->work, nullptr);
  pthread_cond_init(&pool->done, nullptr);
  for (int i = 1; i < threads; i++) {
    Worker *w = &workers[i - 1];
    w->pool = pool;
    w->index = i;
    const int rc = thread_start(&w->thread, worker_body, w);
    if (rc != 0) {
      fail(error, KSL_NOMEM, "worker thread %d of %d does not start: %s", i, threads, strerror(rc));
      pool_destroy(pool);
      return nullptr;
    }
    pool->started++;
  }
  return pool;
}

int pool_threads(const Pool *pool) {
  return pool->threads;
}

void pool_run(Pool *pool, int n, int grain, PoolTask task, void *context) {
  if (n <= 0) return;
  if (grain < 1) grain = 1;
  if (pool->threads == 1 || n <= grain) {
    task(context, 0, 0, n);
    return;
  }
  pool->task = task;
  pool->context = context;
  pool->n = n;
  pool->unit = grain;
  pool->units = (n - 1) / grain + 1;
  start_generation(pool);
  run_part(pool, 0);
  wait_for_done(pool);
}

void pool_destroy(Pool *pool) {
  if (pool == nullptr) return;
  pool->stop = true;
  start_generation(pool);
  for (int i = 0; i < pool->started; i++) pthread_join(pool->workers[i].thread, nullptr);
  pthread_cond_destroy(&pool->work);
  pthread_cond_destroy(&pool->done);
  pthread_mutex_destroy(&pool->mutex);
  alloc_free(pool->workers);
  pool->~Pool();
  alloc_free(pool);
}

}  // namespace ksl
