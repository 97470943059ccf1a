// Images of SAVE and LOAD ops between the caller's memory and the pools, on a stream and a thread
// of their own: the stream of the waves only copies between the pools and a staging area of the
// device.
#pragma once
#include <pthread.h>

#include "../../common/alloc.h"
#include "../common/device.cuh"

namespace ksl {

// Staging of one wave, on the device and pinned in host memory. What does not fit is copied on the
// stream of the waves.
constexpr size_t kMoveBytes = 32 << 20;
constexpr int kMaxMoves = 64;

struct Move {
  bool save;
  void *image;
  size_t at, bytes;     // in the staging areas
  cudaEvent_t staged;   // SAVE: it is in the device's staging area; LOAD: the same
  cudaEvent_t arrived;  // SAVE: it is in the pinned one
};

struct Mover {
  Device device;  // of the thread: its stream, its first error
  uint8_t *staging, *pinned;
  Move moves[kMaxMoves];  // of the wave, in the order in which they were given
  int n;
  size_t used;
  pthread_mutex_t mutex;
  pthread_cond_t given, done;
  int handed, finished;  // of the moves; under the mutex
  bool closing;
  bool running;  // there is a thread: without one every image goes the slow way
  pthread_t thread;
};

// Starts the thread. staging: kMoveBytes of device memory. False where there is no pinned memory
// (counted by `alloc`) or thread: nothing is wrong then.
bool mover_open(Mover *mover, uint8_t *staging, Alloc *alloc);
void mover_close(Mover *mover);
// A new wave: no moves.
void mover_begin(Mover *mover);
// Begins a LOAD; its number, or -1 where it has to go the slow way.
int mover_fetch(Mover *mover, void *image, size_t bytes);
// Puts the image of a LOAD that was begun into its place, in the order of the waves' stream.
void mover_place(Mover *mover, Device *waves, int number, void *place);
// Begins a SAVE of what the place holds at this point of the waves' stream; false as above.
bool mover_save(Mover *mover, Device *waves, const void *place, void *image, size_t bytes);
// Returns when all images of the wave are where they belong.
void mover_finish(Mover *mover, Device *waves);

}  // namespace ksl
