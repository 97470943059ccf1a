// Kernels on the host, a block at a time: every thread is a context of its own, which gives way
// where it has to wait for others. Products and matrix loads of a warp are what the instruction set
// says they are, by lane and register; copies arrive as late as they may. Names are CUDA's, or
// those of functions of ours that are instructions, which tests/native/emulated.py takes out of the
// sources.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <functional>
#include <utility>
#include <vector>

#include "cuda_fp16.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __maxnreg__(...)
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
inline float2 __half22float2(__half2 v) {
  return {__half2float(v.x), __half2float(v.y)};
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
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned byte = both >> 8 * (selector >> 4 * i & 7) & 255;
    out |= (selector >> 4 * i & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}
inline int __ffs(unsigned v) {
  return __builtin_ffs(static_cast<int>(v));
}
inline int __popc(unsigned v) {
  return __builtin_popcount(v);
}
inline float __ldg(const float *at) {
  return *at;
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline unsigned atomicXor(unsigned *at, unsigned bits) {
  const unsigned before = *at;
  *at ^= bits;
  return before;
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

inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the thread that runs

namespace emulated {

// What two lanes may exchange, to be noticed.
enum Swap { kNothing, kA, kB, kSum, kPlain, kTransposed };
inline Swap swap = kNothing;
constexpr int kFirst = 13, kSecond = 22;
// The wait of the sources that is left out, to be noticed; -1: none. The warp that goes on only
// when no other can, by its number modulo those of a block. Whether copies arrive at once, or when
// all threads wait.
inline int missing = -1, late = -1;
inline bool early;
inline bool there(int wait) {
  return wait != missing;
}

constexpr size_t kStack = 64 << 10;
constexpr size_t kShared = 227 << 10;  // the most that a block may have
constexpr size_t kSharedPages = 228 << 10, kBehind = 64 << 10;
// Behind it lies what nobody may touch.
inline uint8_t *const shared = []() {
  void *const at = mmap(nullptr, kSharedPages + kBehind, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
  uint8_t *const memory = static_cast<uint8_t *>(at);
  if (at == MAP_FAILED || mprotect(memory + kSharedPages, kBehind, PROT_NONE) != 0) abort();
  return memory;
}();
inline size_t dynamic_bytes;  // of the launch
// Of a block, aligned to so many bytes: it ends there.
inline uint8_t *dynamic(size_t align) {
  return shared + kSharedPages - (dynamic_bytes + align - 1) / align * align;
}

struct Warp {
  void *given[32];
  int count = 0, turn = 0;
};
struct Block {
  std::vector<Warp> warps;
  int live = 0, waiting = 0, turn = 0;
  int named[16] = {}, named_turn[16] = {};  // those that wait at a barrier of some warps
  std::function<void()> body;
};
struct Copy {
  void *to;
  const void *from;  // null: zeros
  size_t bytes;
  uint64_t *barrier;
  void (*arrive)(uint64_t *barrier, size_t bytes);
  void make() const {
    if (from != nullptr)
      memcpy(to, from, bytes);
    else
      memset(to, 0, bytes);
    if (arrive != nullptr) arrive(barrier, bytes);
  }
};
struct Thread {
  ucontext_t context;  // only to begin: setjmp needs no system call
  jmp_buf place;
  std::vector<char> stack = std::vector<char>(kStack);
  int number = 0;
  bool begun = false, done = false;
  const int *turn = nullptr;  // it waits for this to be another number
  int seen = 0;
  std::vector<Copy> copies;  // asynchronous ones on their way, group by group
  std::vector<size_t> groups;
  bool cluster_began = false;
};
inline std::vector<Copy> bulk;              // those of the block
inline std::vector<const void *> barriers;  // that it has made
inline void check_barrier(const void *barrier) {
  for (const void *made : barriers)
    if (made == barrier) return;
  fprintf(stderr, "emulated: a barrier is used that was not made\n");
  abort();
}
inline Block *block;
inline Thread *now;
inline jmp_buf rounds;
inline bool moved;  // somebody went on in this round

inline void send(const Copy &copy) {
  moved = true;
  if (early)
    copy.make();
  else
    bulk.push_back(copy);
}
// Blocks of a cluster, one after the other: what one has been given by the one before it is on its
// way when all of its threads have arrived, and comes then or behind all other copies.
inline std::vector<Copy> given, coming;
inline unsigned cluster = 1, cluster_arrivals;
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
inline void run_block(Block *what, Thread *threads, int n) {
  block = what;
  block->live = n;
  block->waiting = 0;
  for (int &waiting : block->named) waiting = 0;
  bulk.clear();
  barriers.clear();
  coming.clear();
  cluster_arrivals = 0;
  memset(shared, 0x7f, kSharedPages);
  block->warps.assign(static_cast<size_t>(n / 32), Warp());
  for (int i = 0; i < n; i++) {
    Thread &thread = threads[i];
    thread.number = i;
    thread.turn = nullptr;
    thread.copies.clear();
    thread.groups.clear();
    thread.begun = thread.done = thread.cluster_began = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, thread_body, 0);
  }
  while (block->live > 0) {
    moved = false;
    for (const bool last : {false, true})
      for (int i = 0; i < n && !(last && moved); i++) {
        Thread &thread = threads[i];
        if (thread.done || (late >= 0 && i >> 5 == late % (n >> 5)) != last) continue;
        if (thread.turn != nullptr && *thread.turn == thread.seen) continue;
        run(&thread);
      }
    std::vector<Copy> &next = bulk.empty() ? coming : bulk;
    if (!moved && !next.empty()) {
      const Copy first = next.front();
      next.erase(next.begin());
      first.make();
      moved = true;
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
  struct Both {
    T in, out;
    int from;  // each lane says for itself
  } both = {v, v, from};
  emulated::meet(&both, [](Both **all) {
    for (int lane = 0; lane < 32; lane++) all[lane]->out = all[all[lane]->from & 31]->in;
  });
  return both.out;
}
inline bool __any_sync(unsigned, bool mine) {
  emulated::meet(&mine, [](bool **all) {
    bool any = false;
    for (int lane = 0; lane < 32; lane++) any |= *all[lane];
    for (int lane = 0; lane < 32; lane++) *all[lane] = any;
  });
  return mine;
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  struct Both {
    bool in;
    unsigned out;
  } both = {mine, 0};
  emulated::meet(&both, [](Both **all) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= static_cast<unsigned>(all[lane]->in) << lane;
    for (int lane = 0; lane < 32; lane++) all[lane]->out = bits;
  });
  return both.out;
}
inline size_t __cvta_generic_to_shared(const void *p) {
  return reinterpret_cast<size_t>(p);
}

// ---- launches
typedef void *cudaStream_t;
enum cudaError_t { cudaSuccess };
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
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
inline cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr, int) {
  *out = 3;
  return cudaSuccess;
}
template <class F>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, F *, int, size_t) {
  *out = 2;
  return cudaSuccess;
}
namespace emulated {
template <class... P, class... A>
inline void launch_with(size_t shared_bytes, dim3 grid, dim3 threads_of, void (*kernel)(P...),
                        const A &...arguments) {
  static std::vector<Thread> threads;
  dynamic_bytes = shared_bytes;
  if (threads.size() < threads_of.x) threads.resize(threads_of.x);
  Block block;
  blockDim = threads_of;
  gridDim = grid;
  block.body = [&]() { kernel(arguments...); };
  for (unsigned i = 0; i < grid.x * grid.y * grid.z; i++) {
    blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    run_block(&block, threads.data(), threads_of.x);
  }
}
template <class... P, class... A>
inline void launch(dim3 grid, dim3 threads_of, void (*kernel)(P...), const A &...arguments) {
  launch_with(0, grid, threads_of, kernel, arguments...);
}
}  // namespace emulated
template <class... P, class... A>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...),
                                      A &&...arguments) {
  if (config->dynamicSmemBytes > emulated::kShared) abort();
  emulated::cluster = config->numAttrs > 1 ? config->attrs[1].val.clusterDim.x : 1;
  if (config->gridDim.x % emulated::cluster != 0) abort();
  emulated::launch_with(config->dynamicSmemBytes, config->gridDim, config->blockDim, kernel,
                        arguments...);
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
  emulated::now->copies.push_back({to, there ? from : nullptr, kBytes, nullptr, nullptr});
}
inline void copy_commit() {
  emulated::now->groups.push_back(emulated::now->copies.size());
}
template <int kLeft>
inline void copy_wait() {
  std::vector<size_t> &groups = emulated::now->groups;
  std::vector<emulated::Copy> &copies = emulated::now->copies;
  if (groups.size() <= kLeft) return;
  const size_t ready = groups[groups.size() - 1 - kLeft];
  for (size_t i = 0; i < ready; i++) copies[i].make();
  copies.erase(copies.begin(), copies.begin() + static_cast<long>(ready));
  groups.erase(groups.begin(), groups.end() - kLeft);
  for (size_t &end : groups) end -= ready;
}

// A barrier of one arrival counts its phases.
inline void barrier_init(uint64_t *barrier, int) {
  emulated::barriers.push_back(barrier);
  *barrier = 0;
}
inline void barrier_arrive(uint64_t *barrier) {
  ++*barrier;
  emulated::moved = true;
}
inline void copy_bulk(void *to, const void *from, int bytes, uint64_t *barrier) {
  emulated::send({to, from, static_cast<size_t>(bytes), barrier,
                  [](uint64_t *b, size_t) { barrier_arrive(b); }});
}
inline void barrier_wait(uint64_t *barrier, int parity) {
  emulated::check_barrier(barrier);
  while (static_cast<int>(*barrier & 1) == parity) emulated::give_way();
}

// ---- bulk copies and their barriers. Addresses are 32 bits: programs are linked to low ones.
struct BulkBarrier {
  uint16_t arrivals, left;
  int32_t bytes : 31;  // that are still to come
  uint32_t phase : 1;
};
static_assert(sizeof(BulkBarrier) == 8, "as large as the device's");
inline uint8_t *at_shared(unsigned at) {
  return reinterpret_cast<uint8_t *>(static_cast<uintptr_t>(at));
}
inline BulkBarrier *barrier_at(unsigned at) {
  emulated::check_barrier(at_shared(at));
  return reinterpret_cast<BulkBarrier *>(at_shared(at));
}
inline void bulk_turn(BulkBarrier *barrier) {
  emulated::moved = true;
  if (barrier->left > 0 || barrier->bytes != 0) return;
  barrier->left = barrier->arrivals;
  barrier->phase ^= 1;
}
inline void bulk_barrier(unsigned barrier, unsigned arrivals) {
  emulated::barriers.push_back(at_shared(barrier));
  *barrier_at(barrier) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0, 0};
}
inline void bulk_barriers_made() {}
inline void bulk_expect(unsigned barrier, unsigned bytes) {
  barrier_at(barrier)->bytes += static_cast<int>(bytes);
  barrier_at(barrier)->left--;
  bulk_turn(barrier_at(barrier));
}
inline void bulk_arrive(unsigned barrier) {
  barrier_at(barrier)->left--;
  bulk_turn(barrier_at(barrier));
}
inline void bulk_wait(unsigned barrier, unsigned phase) {
  while (barrier_at(barrier)->phase == phase) emulated::give_way();
}
inline void bulk_load(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
  if ((to | bytes | static_cast<unsigned>(reinterpret_cast<uintptr_t>(from))) & 15) abort();
  emulated::send({at_shared(to), from, bytes, reinterpret_cast<uint64_t *>(barrier_at(barrier)),
                  [](uint64_t *b, size_t n) {
                    BulkBarrier *const at = reinterpret_cast<BulkBarrier *>(b);
                    at->bytes -= static_cast<int>(n);
                    bulk_turn(at);
                  }});
}
inline void cluster_arrive() {
  using namespace emulated;
  if (++cluster_arrivals < static_cast<unsigned>(block->live)) return;
  coming.swap(given);
  for (size_t i = 0; early && i < coming.size(); i++) coming[i].make();
  if (early) coming.clear();
}
inline void cluster_began() {
  emulated::now->cluster_began = true;
}
// To the next block. What comes before that has begun is lost.
inline void cluster_give(unsigned to, float value, unsigned barrier, unsigned rank) {
  const unsigned own = blockIdx.x % emulated::cluster;
  if (rank != own + 1 || rank >= emulated::cluster || (to & 3)) abort();
  static std::vector<float *> values;  // for good: a copy may come late
  if (!emulated::now->cluster_began) return;
  values.push_back(new float(value));
  emulated::given.push_back({at_shared(to), values.back(), sizeof value,
                             reinterpret_cast<uint64_t *>(barrier_at(barrier)),
                             [](uint64_t *b, size_t n) {
                               BulkBarrier *const at = reinterpret_cast<BulkBarrier *>(b);
                               at->bytes -= static_cast<int>(n);
                               bulk_turn(at);
                             }});
}
inline uint64_t bulk_policy(bool once) {
  return once;
}
inline void bulk_load(unsigned to, const void *from, unsigned bytes, unsigned barrier, uint64_t) {
  bulk_load(to, from, bytes, barrier);
}
inline void bulk_ahead(const void *, unsigned) {}
inline int first_round() {
  return 0;
}
inline int pinned(int v) {
  return v;
}
inline int pinned_lane() {
  return emulated::now->number & 31;
}
inline void named_barrier(int name, int threads) {
  emulated::Block *const block = emulated::block;
  const int turn = block->named_turn[name];
  if (++block->named[name] == threads) {
    block->named[name] = 0;
    block->named_turn[name]++;
    emulated::moved = true;
  }
  emulated::wait_for(&block->named_turn[name], turn);
}
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma16<false>(c, {a[0], a[1], a[2], a[3]}, b0, b1);
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
inline void four_halves(unsigned bytes, unsigned &lower, unsigned &upper) {
  lower = e4m3_halves(bytes);
  upper = e4m3_halves(bytes >> 16);
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
