#include <string.h>

#include "../../common/thread.h"
#include "mover.cuh"

namespace ksl {

namespace {

void save_image(Mover *m, const Move &move) {
  Device *d = &m->device;
  keep_error(d, cudaStreamWaitEvent(d->stream, move.staged, 0), "saving state");
  keep_error(d,
             cudaMemcpyAsync(m->pinned + move.at, m->staging + move.at, move.bytes,
                             cudaMemcpyDeviceToHost, d->stream),
             "saving state");
  keep_error(d, cudaEventRecord(move.arrived, d->stream), "saving state");
  if (keep_error(d, cudaEventSynchronize(move.arrived), "saving state"))
    memcpy(move.image, m->pinned + move.at, move.bytes);
}

void load_image(Mover *m, const Move &move) {
  Device *d = &m->device;
  memcpy(m->pinned + move.at, move.image, move.bytes);
  keep_error(d,
             cudaMemcpyAsync(m->staging + move.at, m->pinned + move.at, move.bytes,
                             cudaMemcpyHostToDevice, d->stream),
             "loading state");
  keep_error(d, cudaEventRecord(move.staged, d->stream), "loading state");
}

void *mover_body(void *argument) {
  Mover *m = static_cast<Mover *>(argument);
  keep_error(&m->device, cudaSetDevice(0), "moving state");
  pthread_mutex_lock(&m->mutex);
  for (;;) {
    while (m->finished == m->handed && !m->closing) pthread_cond_wait(&m->given, &m->mutex);
    if (m->finished == m->handed) break;
    const Move move = m->moves[m->finished];
    pthread_mutex_unlock(&m->mutex);
    if (move.save)
      save_image(m, move);
    else
      load_image(m, move);
    pthread_mutex_lock(&m->mutex);
    m->finished++;
    pthread_cond_signal(&m->done);
  }
  pthread_mutex_unlock(&m->mutex);
  return nullptr;
}

// The next move, or null where there is no room for it.
Move *next_move(Mover *m, size_t bytes) {
  if (!m->running || m->n == kMaxMoves || m->used + bytes > kMoveBytes) return nullptr;
  Move *move = &m->moves[m->n];
  move->at = m->used;
  move->bytes = bytes;
  m->used += (bytes + 255) / 256 * 256;
  return move;
}

void hand(Mover *m) {
  m->n++;
  pthread_mutex_lock(&m->mutex);
  m->handed = m->n;
  pthread_cond_signal(&m->given);
  pthread_mutex_unlock(&m->mutex);
}

// Until the thread has done its part of the first n moves.
void wait_for(Mover *m, int n) {
  pthread_mutex_lock(&m->mutex);
  while (m->finished < n) pthread_cond_wait(&m->done, &m->mutex);
  pthread_mutex_unlock(&m->mutex);
}

}  // namespace

bool mover_open(Mover *m, uint8_t *staging, Alloc *alloc) {
  m->staging = staging;
  bool ok = !alloc_refused(alloc) &&
            cudaStreamCreateWithFlags(&m->device.stream, cudaStreamNonBlocking) == cudaSuccess &&
            cudaHostAlloc(&m->pinned, kMoveBytes, cudaHostAllocDefault) == cudaSuccess;
  for (int i = 0; i < kMaxMoves && ok; i++)
    ok = cudaEventCreateWithFlags(&m->moves[i].staged, cudaEventDisableTiming) == cudaSuccess &&
         cudaEventCreateWithFlags(&m->moves[i].arrived,
                                  cudaEventDisableTiming | cudaEventBlockingSync) == cudaSuccess;
  cudaGetLastError();
  ok = ok && pthread_mutex_init(&m->mutex, nullptr) == 0 &&
       pthread_cond_init(&m->given, nullptr) == 0 && pthread_cond_init(&m->done, nullptr) == 0;
  m->running = ok && thread_start(&m->thread, mover_body, m) == 0;
  return m->running;
}

void mover_close(Mover *m) {
  if (m->running) {
    pthread_mutex_lock(&m->mutex);
    m->closing = true;
    pthread_cond_signal(&m->given);
    pthread_mutex_unlock(&m->mutex);
    pthread_join(m->thread, nullptr);
    pthread_mutex_destroy(&m->mutex);
    pthread_cond_destroy(&m->given);
    pthread_cond_destroy(&m->done);
  }
  for (const Move &move : m->moves) {
    if (move.staged) cudaEventDestroy(move.staged);
    if (move.arrived) cudaEventDestroy(move.arrived);
  }
  if (m->pinned) cudaFreeHost(m->pinned);
  if (m->device.stream) cudaStreamDestroy(m->device.stream);
}

void mover_begin(Mover *m) {
  m->n = 0;
  m->used = 0;
  if (!m->running) return;
  pthread_mutex_lock(&m->mutex);
  m->handed = m->finished = 0;
  pthread_mutex_unlock(&m->mutex);
}

int mover_fetch(Mover *m, void *image, size_t bytes) {
  Move *move = next_move(m, bytes);
  if (!move) return -1;
  move->save = false;
  move->image = image;
  hand(m);
  return m->n - 1;
}

void mover_place(Mover *m, Device *waves, int number, void *place) {
  wait_for(m, number + 1);
  const Move &move = m->moves[number];
  keep_error(waves, cudaStreamWaitEvent(waves->stream, move.staged, 0), "loading state");
  keep_error(waves,
             cudaMemcpyAsync(place, m->staging + move.at, move.bytes, cudaMemcpyDeviceToDevice,
                             waves->stream),
             "loading state");
}

bool mover_save(Mover *m, Device *waves, const void *place, void *image, size_t bytes) {
  Move *move = next_move(m, bytes);
  if (!move) return false;
  move->save = true;
  move->image = image;
  keep_error(
      waves,
      cudaMemcpyAsync(m->staging + move->at, place, bytes, cudaMemcpyDeviceToDevice, waves->stream),
      "saving state");
  keep_error(waves, cudaEventRecord(move->staged, waves->stream), "saving state");
  hand(m);
  return true;
}

void mover_finish(Mover *m, Device *waves) {
  if (m->n == 0) return;
  wait_for(m, m->n);
  keep_error(waves, m->device.error, m->device.what ? m->device.what : "moving state");
}

}  // namespace ksl
