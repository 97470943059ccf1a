#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <new>

#ifdef __linux__
#include <sys/eventfd.h>
#endif

#include "alloc.h"
#include "budget.h"
#include "error.h"
#include "model.h"
#include "thread.h"
#include "wave.h"

namespace {

struct RingEntry {
  ksl::WaveArena arena;
  ksl::Wave wave;
  uint64_t queued_ns;
};

// The synchronisation objects of an engine that was opened so far; says what close must destroy.
struct Opened {
  bool sync, spec, checker, backend, events, thread;
};

}  // namespace

// A wave is outstanding from its submission until its end record was polled, and at most `depth`
// are. So a ring entry is free when its number comes round again, and the completion ring, which
// holds the records of `depth` waves, is never full.
struct ksl_engine {
  ksl::Alloc alloc;
  ksl_config config;
  ksl::ModelSpec spec;
  ksl::Budget budget;
  ksl::WaveChecker checker;
  const ksl::BackendOps *ops;
  ksl::Backend *backend;
  bool later;  // the backend has work for idle times; the engine thread's
  Opened opened;

  // Submit side, the caller's thread.
  RingEntry *entries;  // [depth]
  uint64_t depth;
  uint64_t delivered;  // waves whose end record was polled

  // Completion ring.
  ksl_done *ring;  // [capacity]
  uint64_t capacity;
  ksl_done *scratch;                       // [rows of a wave], the engine thread's
  alignas(64) std::atomic<uint64_t> head;  // records polled
  alignas(64) std::atomic<uint64_t> tail;  // records published
  std::atomic<int32_t> parked;  // the consumer found the ring empty and waits for the descriptor
  int event_read, event_write;

  alignas(64) std::atomic<uint64_t> submitted, started, completed;
  std::atomic<uint64_t> graphs, graph_kernels, graphs_made;
  std::atomic<bool> running, poisoned, closing, abandon;
  ksl_error fatal;  // written once, before `poisoned` is set

  pthread_mutex_t mutex;
  pthread_cond_t work;  // a wave was submitted, or closing
  pthread_cond_t idle;  // the engine thread is about to end
  bool ended;           // under the mutex
  pthread_t thread;
};

namespace ksl {
namespace {

#ifdef __APPLE__
constexpr clockid_t kWaitClock = CLOCK_REALTIME;  // conditions know no other clock there
#else
constexpr clockid_t kWaitClock = CLOCK_MONOTONIC;
#endif
constexpr int kIdleMs = 20;  // without a wave, before what was left for idle times is done

// ---------------------------------------------------------------- descriptor

int event_open(ksl_engine *e, ksl_error *error) {
#ifdef __linux__
  e->event_read = e->event_write = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (e->event_read < 0)
    return fail(error, KSL_NOMEM, "no completion descriptor: %s", strerror(errno));
#else
  int ends[2];
  if (pipe(ends) != 0)
    return fail(error, KSL_NOMEM, "no completion descriptor: %s", strerror(errno));
  for (int i = 0; i < 2; i++) {
    fcntl(ends[i], F_SETFL, O_NONBLOCK);
    fcntl(ends[i], F_SETFD, FD_CLOEXEC);
  }
  e->event_read = ends[0];
  e->event_write = ends[1];
#endif
  return KSL_OK;
}

void event_close(ksl_engine *e) {
  if (e->event_write != e->event_read) close(e->event_write);
  close(e->event_read);
}

// A full pipe or counter is readable already, so a failed write loses nothing.
void event_set(ksl_engine *e) {
  const uint64_t one = 1;
  ssize_t rc;
  do rc = write(e->event_write, &one, sizeof one);
  while (rc < 0 && errno == EINTR);
}

// A short read has emptied it: an eventfd gives 8 bytes at most.
void event_clear(ksl_engine *e) {
  uint64_t junk[8];
  ssize_t rc;
  do rc = read(e->event_read, junk, sizeof junk);
  while (rc == static_cast<ssize_t>(sizeof junk) || (rc < 0 && errno == EINTR));
}

// ---------------------------------------------------------------- engine thread

void push(ksl_engine *e, uint64_t *tail, const ksl_done *record) {
  e->ring[*tail % e->capacity] = *record;
  ++*tail;
}

// Makes all records of a wave visible at once, then wakes the consumer if it sleeps.
void publish(ksl_engine *e, uint64_t tail) {
  e->completed.fetch_add(1);
  e->running.store(false);
  e->tail.store(tail);
  if (e->parked.exchange(0) != 0) event_set(e);
}

void poison(ksl_engine *e, int code, const ksl_error *error) {
  e->fatal = *error;
  e->fatal.code = KSL_FATAL;
  if (e->fatal.text[0] == 0) fail(&e->fatal, KSL_FATAL, "the backend failed with code %d", code);
  e->poisoned.store(true);
}

void run_wave(ksl_engine *e, RingEntry *entry) {
  Wave *wave = &entry->wave;
  ksl_done end = ksl_done();
  end.wave = wave->id;
  end.row = -1;
  end.slot = -1;
  end.flags = KSL_DONE_WAVE_END;
  end.queued_ns = entry->queued_ns;
  end.started_ns = now_ns();
  wave->drafts_ns = &end.drafts_ns;
  for (int i = 0; i < wave->n_rows; i++) {
    e->scratch[i] = ksl_done();
    e->scratch[i].wave = wave->id;
    e->scratch[i].row = i;
    e->scratch[i].slot = wave->rows[i].slot;
  }
  if (!e->poisoned.load()) {
    ksl_error error = ksl_error();
    const int rc = e->ops->run(e->backend, wave, e->scratch, &error);
    if (rc != KSL_OK) poison(e, rc, &error);
    if (e->ops->graphs != nullptr) {
      Graphs graphs = Graphs();
      e->ops->graphs(e->backend, &graphs);
      e->graphs.store(graphs.kept, std::memory_order_relaxed);
      e->graph_kernels.store(graphs.kernels, std::memory_order_relaxed);
      e->graphs_made.store(graphs.made, std::memory_order_relaxed);
    }
  }
  end.ended_ns = now_ns();
  uint64_t tail = e->tail.load(std::memory_order_relaxed);
  if (e->poisoned.load()) {
    end.status = KSL_FATAL;
  } else {
    for (int i = 0; i < wave->n_rows; i++) push(e, &tail, &e->scratch[i]);
  }
  push(e, &tail, &end);
  publish(e, tail);
  e->later = e->ops->finish != nullptr && !e->poisoned.load() && e->ops->finish(e->backend, false);
}

bool has_work(const ksl_engine *e) {
  return e->started.load() != e->submitted.load() || e->closing.load();
}

timespec deadline_after(int ms) {
  timespec t;
  clock_gettime(kWaitClock, &t);
  t.tv_sec += ms / 1000;
  t.tv_nsec += static_cast<long>(ms % 1000) * 1000000;
  if (t.tv_nsec >= 1000000000) {
    t.tv_nsec -= 1000000000;
    t.tv_sec++;
  }
  return t;
}

// Waits for a wave, or until the engine closes. The mutex is held. What the backend left for idle
// times is done when nothing came for a while.
void wait_for_work(ksl_engine *e) {
  const timespec until = deadline_after(kIdleMs);
  int rc = 0;
  while (!has_work(e) && (!e->later || rc == 0)) {
    if (e->later)
      rc = pthread_cond_timedwait(&e->work, &e->mutex, &until);
    else
      pthread_cond_wait(&e->work, &e->mutex);
  }
  while (!has_work(e) && e->later) {
    pthread_mutex_unlock(&e->mutex);
    e->later = e->ops->finish(e->backend, true);
    pthread_mutex_lock(&e->mutex);
  }
}

// The next wave, or null when the engine closes.
RingEntry *next_wave(ksl_engine *e) {
  pthread_mutex_lock(&e->mutex);
  const uint64_t number = e->started.load();
  while (!has_work(e)) wait_for_work(e);
  const bool any = number != e->submitted.load() && !e->abandon.load();
  if (any) {
    e->running.store(true);
    e->started.store(number + 1);
  } else {
    e->ended = true;
    pthread_cond_signal(&e->idle);
  }
  pthread_mutex_unlock(&e->mutex);
  return any ? &e->entries[number % e->depth] : nullptr;
}

void *engine_body(void *argument) {
  ksl_engine *e = static_cast<ksl_engine *>(argument);
  thread_be_nice(e->config.nice);
  for (RingEntry *entry = next_wave(e); entry != nullptr; entry = next_wave(e)) run_wave(e, entry);
  return nullptr;
}

// ---------------------------------------------------------------- open and close

int sync_open(ksl_engine *e, ksl_error *error) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
#ifndef __APPLE__
  pthread_condattr_setclock(&attributes, kWaitClock);
#endif
  const bool ok = pthread_mutex_init(&e->mutex, nullptr) == 0 &&
                  pthread_cond_init(&e->work, &attributes) == 0 &&
                  pthread_cond_init(&e->idle, &attributes) == 0;
  pthread_condattr_destroy(&attributes);
  if (!ok) return fail(error, KSL_NOMEM, "no memory for the engine's locks");
  e->opened.sync = true;
  return KSL_OK;
}

int rings_open(ksl_engine *e, ksl_error *error) {
  const size_t rows = static_cast<size_t>(e->config.slots);  // a wave has one row per slot at most
  e->depth = static_cast<uint64_t>(e->config.ring_depth);
  e->capacity = e->depth * (rows + 1);
  e->entries = alloc_many<RingEntry>(&e->alloc, e->depth);
  e->ring = alloc_many<ksl_done>(&e->alloc, e->capacity);
  e->scratch = alloc_many<ksl_done>(&e->alloc, rows);
  if (e->entries == nullptr || e->ring == nullptr || e->scratch == nullptr)
    return fail(error, KSL_NOMEM, "out of memory for a ring of %d waves", e->config.ring_depth);
  return KSL_OK;
}

int open_parts(ksl_engine *e, const ksl_config *config, const ksl_tensor *tensors, int n,
               ksl_error *error) {
  e->config = *config;
  TensorTable table;
  int rc = spec_init(&e->spec, config, &e->alloc, error);
  e->opened.spec = rc == KSL_OK;
  e->config.layer_kinds = e->spec.layer_kinds;
  if (rc == KSL_OK) rc = budget_init(&e->budget, &e->spec, config, error);
  if (rc == KSL_OK) rc = table_init(&table, tensors, n, error);
  if (rc == KSL_OK) rc = rings_open(e, error);
  if (rc == KSL_OK)
    rc = checker_init(&e->checker, &e->spec, &e->config, &e->budget, &e->alloc, error);
  e->opened.checker = rc == KSL_OK;
  if (rc == KSL_OK) rc = sync_open(e, error);
  if (rc == KSL_OK) rc = event_open(e, error);
  e->opened.events = rc == KSL_OK;
  if (rc == KSL_OK) rc = e->ops->open(&e->spec, &e->config, &table, &e->alloc, &e->backend, error);
  e->opened.backend = rc == KSL_OK;
  if (rc != KSL_OK) return rc;
  const int started = thread_start(&e->thread, engine_body, e);
  if (started != 0)
    return fail(error, KSL_NOMEM, "the engine thread does not start: %s", strerror(started));
  e->opened.thread = true;
  return KSL_OK;
}

void stop_thread(ksl_engine *e, int deadline_ms) {
  const timespec until = deadline_after(deadline_ms > 0 ? deadline_ms : 0);
  pthread_mutex_lock(&e->mutex);
  e->closing.store(true);
  pthread_cond_signal(&e->work);
  int rc = 0;
  while (!e->ended && rc == 0) rc = pthread_cond_timedwait(&e->idle, &e->mutex, &until);
  e->abandon.store(true);
  pthread_mutex_unlock(&e->mutex);
  pthread_join(e->thread, nullptr);
}

void destroy(ksl_engine *e) {
  if (e->opened.backend) e->ops->close(e->backend);
  if (e->opened.events) event_close(e);
  if (e->opened.sync) {
    pthread_cond_destroy(&e->work);
    pthread_cond_destroy(&e->idle);
    pthread_mutex_destroy(&e->mutex);
  }
  if (e->opened.checker) checker_free(&e->checker);
  if (e->entries != nullptr)
    for (uint64_t i = 0; i < e->depth; i++) arena_free(&e->entries[i].arena);
  alloc_free(e->entries);
  alloc_free(e->ring);
  alloc_free(e->scratch);
  if (e->opened.spec) spec_free(&e->spec);
  e->~ksl_engine();
  alloc_free(e);
}

}  // namespace

int engine_open(const BackendOps *ops, const ksl_config *config, const ksl_tensor *tensors, int n,
                ksl_engine **out, ksl_error *error) {
  if (out == nullptr) return fail(error, KSL_INVALID, "open: out is null");
  *out = nullptr;
  if (config == nullptr) return fail(error, KSL_INVALID, "open: config is null");
  Alloc alloc = {0, config->test_hooks ? config->fail_alloc_at : 0, 0};
  void *memory = alloc_bytes(&alloc, sizeof(ksl_engine));
  if (memory == nullptr) return fail(error, KSL_NOMEM, "out of memory for the engine");
  ksl_engine *e = new (memory) ksl_engine();
  e->alloc = alloc;
  e->ops = ops;
  e->parked.store(1);
  const int rc = open_parts(e, config, tensors, n, error);
  if (rc != KSL_OK) {
    destroy(e);
    return rc;
  }
  *out = e;
  return KSL_OK;
}

int engine_info(ksl_engine *e, ksl_info *info) {
  if (e == nullptr || info == nullptr) return KSL_INVALID;
  *info = ksl_info();
  info->vocab = e->spec.vocab;
  info->hidden = e->spec.hidden;
  info->layers = e->spec.layers;
  info->mtp_layers = e->spec.mtp_layers;
  info->slots = e->config.slots;
  info->slabs = e->config.slabs;
  info->blocks = e->config.blocks;
  info->block_tokens = e->config.block_tokens;
  info->threads = 1;
  info->has_mtp = e->spec.mtp_layers > 0;
  info->slab_bytes = e->budget.slab_bytes;
  info->block_bytes = e->budget.block_bytes;
  info->kv_token_bytes = e->budget.kv_token_bytes;
  info->pool_bytes = e->budget.pool_bytes;
  snprintf(info->activation, sizeof info->activation, "float");
  e->ops->info(e->backend, info);
  if (info->numerics[0] == 0)
    snprintf(info->numerics, sizeof info->numerics, "%.16s/%s/%s/kv-%s/act-%s", ksl_source_digest(),
             e->ops->name, info->isa, kv_format_name(e->config.kv_format), info->activation);
  return KSL_OK;
}

int engine_event_fd(ksl_engine *e) {
  return e == nullptr ? -1 : e->event_read;
}

int engine_submit(ksl_engine *e, const ksl_wave *wave, ksl_error *error) {
  if (e == nullptr) return fail(error, KSL_INVALID, "submit: engine is null");
  if (e->poisoned.load()) return fail(error, KSL_FATAL, "%s", e->fatal.text);
  const uint64_t number = e->submitted.load(std::memory_order_relaxed);
  if (number - e->delivered >= e->depth)
    return fail(error, KSL_AGAIN, "%d waves are in flight", e->config.ring_depth);
  int rc = wave_check(&e->checker, wave, error);
  if (rc != KSL_OK) return rc;
  RingEntry *entry = &e->entries[number % e->depth];
  rc = wave_copy(&entry->arena, wave, e->spec.vocab, &entry->wave, error);
  if (rc != KSL_OK) {
    wave_revert(&e->checker);
    return rc;
  }
  wave_accept(&e->checker);
  entry->wave.abandon = &e->abandon;
  entry->queued_ns = now_ns();
  pthread_mutex_lock(&e->mutex);
  e->submitted.store(number + 1);
  pthread_cond_signal(&e->work);
  pthread_mutex_unlock(&e->mutex);
  return KSL_OK;
}

int engine_poll(ksl_engine *e, ksl_done *out, int cap) {
  if (e == nullptr || out == nullptr || cap <= 0) return 0;
  uint64_t head = e->head.load(std::memory_order_relaxed);
  int n = 0;
  for (;;) {
    const uint64_t tail = e->tail.load();
    for (; n < cap && head != tail; n++, head++) {
      out[n] = e->ring[head % e->capacity];
      if (out[n].flags & KSL_DONE_WAVE_END) e->delivered++;
    }
    e->head.store(head);
    if (head != tail) return n;  // the descriptor stays readable
    event_clear(e);
    e->parked.store(1);
    // A wave that was published before the engine could see `parked` is taken now, unless the
    // engine saw it after all and has set the descriptor.
    if (e->tail.load() == head || e->parked.exchange(0) == 0) return n;
    if (n == cap) {
      event_set(e);
      return n;
    }
  }
}

int engine_progress(ksl_engine *e, ksl_progress *progress) {
  if (e == nullptr || progress == nullptr) return KSL_INVALID;
  // In this order completed <= started <= submitted whatever happens meanwhile.
  const uint64_t completed = e->completed.load();
  const uint64_t started = e->started.load();
  const bool poisoned = e->poisoned.load();
  progress->completed = completed;
  progress->started = started;
  progress->submitted = e->submitted.load();
  progress->graphs = e->graphs.load(std::memory_order_relaxed);
  progress->graph_kernels = e->graph_kernels.load(std::memory_order_relaxed);
  progress->graphs_made = e->graphs_made.load(std::memory_order_relaxed);
  progress->phase = poisoned ? 3 : (e->closing.load() ? 2 : (e->running.load() ? 1 : 0));
  progress->last_error = poisoned ? KSL_FATAL : KSL_OK;
  return KSL_OK;
}

int engine_last_error(ksl_engine *e, ksl_error *error) {
  if (e == nullptr || error == nullptr) return KSL_INVALID;
  *error = e->poisoned.load() ? e->fatal : ksl_error();
  return KSL_OK;
}

int engine_close(ksl_engine *e, int deadline_ms) {
  if (e == nullptr) return KSL_OK;
  stop_thread(e, deadline_ms);
  destroy(e);
  return KSL_OK;
}

}  // namespace ksl
