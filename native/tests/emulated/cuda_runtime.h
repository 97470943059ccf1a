// Kernels on the host, a block at a time: every thread is a context of its own, which gives way
// where it has to wait for others. Products and matrix loads of a warp are what the instruction set
// says they are, by lane and register; copies arrive at once. Names are CUDA's, or those of
// functions of ours that are instructions, which tests/native/emulated.py takes out of the sources.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <utility>
#include <vector>

#include "cuda_fp16.h"

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline float __int_as_float(int v) {
  float out;
  memcpy(&out, &v, 4);
  return out;
}
inline int __float_as_int(float v) {
  int out;
  memcpy(&out, &v, 4);
  return out;
}
inline float __uint_as_float(unsigned v) {
  return __int_as_float(static_cast<int>(v));
}
inline unsigned __float_as_uint(float v) {
  return static_cast<unsigned>(__float_as_int(v));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
template <class T>
inline T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

inline dim3 threadIdx, blockIdx, blockDim;  // of the thread that runs

namespace emulated {

// What two lanes may exchange, to be noticed.
enum Swap { kNothing, kA, kB, kSum, kPlain, kTransposed };
inline Swap swap = kNothing;
constexpr int kFirst = 13, kSecond = 22;

constexpr size_t kStack = 256 << 10;

struct Warp {
  void *given[32];
  int count = 0, turn = 0;
};
struct Block {
  std::vector<Warp> warps;
  int live = 0, waiting = 0, turn = 0;
  std::function<void()> body;
};
struct Thread {
  ucontext_t context;  // only to begin: setjmp needs no system call
  jmp_buf place;
  std::vector<char> stack = std::vector<char>(kStack);
  int number = 0;
  bool begun = false, done = false;
  const int *turn = nullptr;  // it waits for this to be another number
  int seen = 0;
};
inline Block *block;
inline Thread *now;
inline jmp_buf rounds;
inline bool moved;  // somebody went on in this round

inline void give_way() {
  if (!_setjmp(now->place)) _longjmp(rounds, 1);
}
inline void wait_for(const int *turn, int seen) {
  now->turn = turn;
  now->seen = seen;
  if (*turn == seen) give_way();
  now->turn = nullptr;
}
inline void open_barrier() {
  if (block->waiting < block->live) return;
  block->waiting = 0;
  block->turn++;
  moved = true;
}
inline void synchronise() {
  const int turn = block->turn;
  block->waiting++;
  open_barrier();
  wait_for(&block->turn, turn);
}
// All lanes of a warp bring something; the last one does what they are there for.
template <class T, class F>
inline void meet(T *mine, F act) {
  Warp &warp = block->warps[now->number >> 5];
  warp.given[now->number & 31] = mine;
  const int turn = warp.turn;
  if (++warp.count == 32) {
    warp.count = 0;
    warp.turn++;
    moved = true;
    act(reinterpret_cast<T **>(warp.given));
  }
  wait_for(&warp.turn, turn);
}

inline void thread_body() {
  block->body();
  now->done = true;
  block->live--;
  open_barrier();
  moved = true;
  _longjmp(rounds, 1);
}
inline void run(Thread *thread) {
  now = thread;
  threadIdx = {static_cast<unsigned>(thread->number), 0, 0};
  if (_setjmp(rounds)) return;
  if (now->begun) _longjmp(now->place, 1);
  now->begun = true;
  setcontext(&now->context);
}
inline void run_block(Block *what, std::vector<Thread> *threads) {
  block = what;
  block->live = static_cast<int>(threads->size());
  block->warps.assign(threads->size() / 32, Warp());
  for (size_t i = 0; i < threads->size(); i++) {
    Thread &thread = (*threads)[i];
    thread.number = static_cast<int>(i);
    thread.begun = thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, thread_body, 0);
  }
  while (block->live > 0) {
    moved = false;
    for (Thread &thread : *threads) {
      if (thread.done || (thread.turn != nullptr && *thread.turn == thread.seen)) continue;
      run(&thread);
    }
    if (!moved) {
      fprintf(stderr, "emulated: threads wait for each other for ever\n");
      abort();
    }
  }
}

template <class T, class F>
inline T exchange(T mine, F from) {
  struct Both {
    T in, out;
  } both = {mine, mine};
  meet(&both, [&](Both **all) {
    for (int lane = 0; lane < 32; lane++) {
      const int other = from(lane);
      all[lane]->out = all[other < 0 || other > 31 ? lane : other]->in;
    }
  });
  return both.out;
}

}  // namespace emulated

inline void __syncthreads() {
  emulated::synchronise();
}
inline void __syncwarp(unsigned = 0xffffffffu) {
  int nothing = 0;
  emulated::meet(&nothing, [](int **) {});
}
template <class T>
inline T __shfl_xor_sync(unsigned, T v, int mask) {
  return emulated::exchange(v, [=](int lane) { return lane ^ mask; });
}
template <class T>
inline T __shfl_up_sync(unsigned, T v, int by) {
  return emulated::exchange(v, [=](int lane) { return lane - by; });
}
template <class T>
inline T __shfl_down_sync(unsigned, T v, int by) {
  return emulated::exchange(v, [=](int lane) { return lane + by; });
}
template <class T>
inline T __shfl_sync(unsigned, T v, int from) {
  return emulated::exchange(v, [=](int) { return from; });
}
inline bool __any_sync(unsigned, bool mine) {
  emulated::meet(&mine, [](bool **all) {
    bool any = false;
    for (int lane = 0; lane < 32; lane++) any |= *all[lane];
    for (int lane = 0; lane < 32; lane++) *all[lane] = any;
  });
  return mine;
}
inline size_t __cvta_generic_to_shared(const void *p) {
  return reinterpret_cast<size_t>(p);
}

// ---- launches
typedef void *cudaStream_t;
enum cudaError_t { cudaSuccess };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  unsigned numAttrs;
};
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
template <class F>
inline cudaError_t cudaFuncSetAttribute(F *, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <class... P, class... A>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...),
                                      A &&...arguments) {
  std::vector<emulated::Thread> threads(config->blockDim.x);
  emulated::Block block;
  blockDim = config->blockDim;
  block.body = [&]() { kernel(arguments...); };
  const dim3 grid = config->gridDim;
  for (unsigned i = 0; i < grid.x * grid.y * grid.z; i++) {
    blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    emulated::run_block(&block, &threads);
  }
  return cudaSuccess;
}

// ---- functions of ours that are instructions
namespace ksl {

inline void allow_next() {}
inline void wait_before() {}

// m16n8k16: lane = 4 g + t. Half i of the registers of A, of B, and register i of the sums.
struct HalfPlace {
  int row, slot;  // B: row is the column of the product
};
constexpr HalfPlace half_a(int lane, int i) {
  return {(lane >> 2) + 8 * (i >> 1 & 1), 2 * (lane & 3) + (i & 1) + 8 * (i >> 2)};
}
constexpr HalfPlace half_b(int lane, int i) {
  return {lane >> 2, 2 * (lane & 3) + (i & 1) + 8 * (i >> 1)};
}
constexpr HalfPlace half_sum(int lane, int i) {
  return {(lane >> 2) + 8 * (i >> 1), 2 * (lane & 3) + (i & 1)};
}

template <bool kBf16>
inline void mma16(float (&c)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
  struct Mine {
    float *c;
    uint16_t a[8], b[4];
  } mine = {c, {}, {}};
  const uint32_t b[2] = {b0, b1};
  memcpy(mine.a, &a, 16);
  memcpy(mine.b, b, 8);
  emulated::meet(&mine, [](Mine **all) {
    Mine &first = *all[emulated::kFirst], &second = *all[emulated::kSecond];
    if (emulated::swap == emulated::kA) std::swap(first.a, second.a);
    if (emulated::swap == emulated::kB) std::swap(first.b, second.b);
    const auto value = [](uint16_t v) { return kBf16 ? bf16_to_f32(v) : f16_to_f32(v); };
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; lane++) {
      for (int i = 0; i < 8; i++) {
        const HalfPlace at = half_a(lane, i);
        left[at.row][at.slot] = value(all[lane]->a[i]);
      }
      for (int i = 0; i < 4; i++) {
        const HalfPlace at = half_b(lane, i);
        right[at.slot][at.row] = value(all[lane]->b[i]);
      }
    }
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        const HalfPlace at = half_sum(lane, i);
        float sum = all[lane]->c[i];
        for (int k = 0; k < 16; k++) sum += left[at.row][k] * right[k][at.slot];
        all[lane]->c[i] = sum;
      }
    if (emulated::swap == emulated::kSum)
      for (int i = 0; i < 4; i++) std::swap(first.c[i], second.c[i]);
  });
}
inline void mma16_first(float (&c)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
  c[0] = c[1] = c[2] = c[3] = 0;
  mma16<false>(c, a, b0, b1);
}

// Register i of a lane is of matrix i, whose rows lanes 8 i to 8 i + 7 name.
inline uint4 load_any(const void *row, bool transposed) {
  struct Mine {
    const uint8_t *row;
    uint32_t out[4];
  } mine = {static_cast<const uint8_t *>(row), {}};
  emulated::meet(&mine, [=](Mine **all) {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        uint16_t halves[2];
        for (int e = 0; e < 2; e++) {
          const int across = lane >> 2, along = 2 * (lane & 3) + e;
          const int r = transposed ? along : across, column = transposed ? across : along;
          memcpy(&halves[e], all[8 * i + r]->row + 2 * column, 2);
        }
        memcpy(&all[lane]->out[i], halves, 4);
      }
    if (emulated::swap == (transposed ? emulated::kTransposed : emulated::kPlain))
      std::swap(all[emulated::kFirst]->out, all[emulated::kSecond]->out);
  });
  return {mine.out[0], mine.out[1], mine.out[2], mine.out[3]};
}
inline uint4 load_matrices(const void *row) {
  return load_any(row, false);
}
inline uint4 load_transposed(const void *row) {
  return load_any(row, true);
}

template <int kBytes>
inline void copy_async(void *to, const void *from, bool there) {
  if (there)
    memcpy(to, from, kBytes);
  else
    memset(to, 0, kBytes);
}
inline void copy_commit() {}
template <int kLeft>
inline void copy_wait() {}

// A barrier of one arrival counts its phases.
inline void barrier_init(uint64_t *barrier, int) {
  *barrier = 0;
}
inline void barrier_arrive(uint64_t *barrier) {
  ++*barrier;
  emulated::moved = true;
}
inline void copy_bulk(void *to, const void *from, int bytes, uint64_t *barrier) {
  memcpy(to, from, static_cast<size_t>(bytes));
  barrier_arrive(barrier);
}
inline void barrier_wait(uint64_t *barrier, int parity) {
  while (static_cast<int>(*barrier & 1) == parity) emulated::give_way();
}

inline uint32_t two_halves(float x, float y) {
  const __half2 v = __floats2half2_rn(x, y);
  uint32_t out;
  memcpy(&out, &v, 4);
  return out;
}
inline uint32_t e4m3_halves(uint32_t two) {
  return two_halves(e4m3_to_f32(static_cast<uint8_t>(two)),
                    e4m3_to_f32(static_cast<uint8_t>(two >> 8)));
}
inline uint32_t bf16_halves(uint32_t two) {
  const auto near = [](float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); };
  return two_halves(near(bf16_to_f32(static_cast<uint16_t>(two))),
                    near(bf16_to_f32(static_cast<uint16_t>(two >> 16))));
}
inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  return (a & mask) | bits;
}
inline float exp2_fast(float x) {
  return exp2f(x);
}
inline uint16_t e4m3_pair(float first, float second) {
  return static_cast<uint16_t>(f32_to_e4m3(first) | f32_to_e4m3(second) << 8);
}
inline __half panel_half(float x) {
  return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
}

}  // namespace ksl
