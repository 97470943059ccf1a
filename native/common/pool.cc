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

// What is left of one worker's part of a run: the run's number, chunks in it, the next one to take.
struct Part {
  alignas(64) std::atomic<uint64_t> left;
};

// One run is one generation. The caller publishes the task and every worker's part and raises
// `generation`; each takes the chunks of its own part. When the caller is done and the workers are
// not, soon after, it takes what they have not begun: a worker that does not run, because the
// system gave its core to somebody else, delays nothing but the chunk it is in, and when it comes
// it finds nothing to do, since a chunk is taken by changing a number that holds the generation.
// Both sides spin for a while and then sleep; a side that is about to sleep says so in `parked` or
// `waiting` before it looks at the counter a last time, so no wake-up is lost.
struct Pool {
  int threads;  // the caller included
  int started;  // worker threads that run
  int nice;
  bool spins;
  Worker *workers;  // [threads - 1]
  Part *parts;      // [threads]
  pthread_mutex_t mutex;
  pthread_cond_t work, done;

  PoolTask task;
  void *context;
  int n, unit, units, chunks;
  std::atomic<bool> stop;
  alignas(64) std::atomic<uint64_t> generation;
  alignas(64) std::atomic<int> finished;
  alignas(64) std::atomic<int> parked;
  std::atomic<int> waiting;
};

namespace {

// How long a side spins before it sleeps. Inline stages lie between two runs of a wave, and waking
// a thread takes longer than all of them; between waves the host needs about as long.
constexpr uint64_t kSpinNs = 100000;
// How long the caller waits before it takes work from others: longer than parts differ.
constexpr uint64_t kPatienceNs = 5000;
constexpr int kSpinsPerLook = 16;  // relaxes between two looks at the clock

// Spins until `ready` or until the time is over; whether it is ready.
template <typename Ready>
bool spin(const Pool *pool, uint64_t ns, Ready ready) {
  if (ready()) return true;
  if (!pool->spins) return false;
  const uint64_t end = now_ns() + ns;
  do {
    for (int i = 0; i < kSpinsPerLook; i++) {
      if (ready()) return true;
      thread_relax();
    }
  } while (now_ns() < end);
  return false;
}

// A part has so many chunks at most: enough that a helper can take over, few enough that taking
// them costs nothing.
constexpr int kChunks = 4;

// Units [0, return) lie before chunk `chunk` of part `part`.
int64_t units_before(const Pool *pool, int part, int chunk) {
  const int64_t all = static_cast<int64_t>(pool->threads) * pool->chunks;
  return pool->units * (static_cast<int64_t>(part) * pool->chunks + chunk) / all;
}

uint64_t part_of(uint64_t generation, int chunks) {
  return generation << 32 | static_cast<uint64_t>(chunks) << 16;
}

// The next chunk of a part of that run, -1 when none is left. Fields of the run may be read only
// while a chunk of it is held.
int take(Part *part, uint64_t generation) {
  uint64_t left = part->left.load(std::memory_order_acquire);
  for (;;) {
    const int next = static_cast<int>(left & 0xffff);
    if (left >> 32 != (generation & 0xffffffff) || next >= static_cast<int>(left >> 16 & 0xffff))
      return -1;
    if (part->left.compare_exchange_weak(left, left + 1, std::memory_order_acq_rel)) return next;
  }
}

// Takes the chunks of one part that are left; how many.
int work_on(Pool *pool, int part, int worker, uint64_t generation) {
  int taken = 0;
  for (int chunk; (chunk = take(&pool->parts[part], generation)) >= 0; taken++) {
    const int64_t begin = units_before(pool, part, chunk) * pool->unit;
    const int64_t end = units_before(pool, part, chunk + 1) * pool->unit;
    const int last = static_cast<int>(end < pool->n ? end : pool->n);
    if (begin < last) pool->task(pool->context, worker, static_cast<int>(begin), last);
  }
  return taken;
}

void wait_for_work(Pool *pool, uint64_t seen) {
  if (spin(pool, kSpinNs, [=] { return pool->generation.load(std::memory_order_acquire) != seen; }))
    return;
  pthread_mutex_lock(&pool->mutex);
  pool->parked.fetch_add(1);
  while (pool->generation.load() == seen) pthread_cond_wait(&pool->work, &pool->mutex);
  pool->parked.fetch_sub(1);
  pthread_mutex_unlock(&pool->mutex);
}

// Until the workers have finished `chunks`, less those that the caller takes over.
void wait_for_done(Pool *pool, int chunks, uint64_t generation) {
  const auto done = [=] { return pool->finished.load(std::memory_order_acquire) == chunks; };
  if (spin(pool, kPatienceNs, done)) return;
  for (int i = 1; i < pool->threads; i++) chunks -= work_on(pool, i, 0, generation);
  const auto rest_done = [=] { return pool->finished.load(std::memory_order_acquire) == chunks; };
  if (spin(pool, kSpinNs, rest_done)) return;
  pthread_mutex_lock(&pool->mutex);
  pool->waiting.store(1);
  while (pool->finished.load() != chunks) pthread_cond_wait(&pool->done, &pool->mutex);
  pool->waiting.store(0);
  pthread_mutex_unlock(&pool->mutex);
}

// Lets the workers see what was published before.
void start_generation(Pool *pool) {
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
    seen = pool->generation.load();
    if (pool->stop.load()) return nullptr;
    const int taken = work_on(pool, self->index, self->index, seen);
    if (taken == 0) continue;
    pool->finished.fetch_add(taken);
    if (pool->waiting.load() == 0) continue;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_signal(&pool->done);
    pthread_mutex_unlock(&pool->mutex);
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
  void *parts = alloc_array(alloc, static_cast<size_t>(threads), sizeof(Part));
  if (memory == nullptr || workers == nullptr || parts == nullptr) {
    alloc_free(memory);
    alloc_free(workers);
    alloc_free(parts);
    fail(error, KSL_NOMEM, "out of memory for %d worker threads", threads);
    return nullptr;
  }
  Pool *pool = new (memory) Pool();
  pool->threads = threads;
  pool->nice = nice;
  // With more threads than cores a spinning thread keeps the one it waits for from running.
  pool->spins = threads <= sysconf(_SC_NPROCESSORS_ONLN);
  pool->workers = workers;
  pool->parts = static_cast<Part *>(parts);
  for (int i = 0; i < threads; i++) new (&pool->parts[i]) Part();
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
  const int per_part = pool->units / pool->threads;
  pool->chunks = per_part >= 2 * kChunks ? kChunks : 1;
  pool->finished.store(0, std::memory_order_relaxed);
  const uint64_t generation = pool->generation.load(std::memory_order_relaxed) + 1;
  for (int i = 0; i < pool->threads; i++) {
    pool->parts[i].left.store(part_of(generation, pool->chunks), std::memory_order_release);
  }
  start_generation(pool);
  const int taken = work_on(pool, 0, 0, generation);
  wait_for_done(pool, pool->threads * pool->chunks - taken, generation);
}

void pool_destroy(Pool *pool) {
  if (pool == nullptr) return;
  pool->stop.store(true);
  start_generation(pool);
  for (int i = 0; i < pool->started; i++) pthread_join(pool->workers[i].thread, nullptr);
  pthread_cond_destroy(&pool->work);
  pthread_cond_destroy(&pool->done);
  pthread_mutex_destroy(&pool->mutex);
  alloc_free(pool->workers);
  alloc_free(pool->parts);
  pool->~Pool();
  alloc_free(pool);
}

}  // namespace ksl
