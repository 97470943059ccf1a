// A ring as the kernels of products have one, filled by a warp and read by two others, and the same
// with a wait left out: what of it a tool sees. tests/device/test_sanitizer.py builds and runs it.
//
//   races FAULT      one of kNames; exit status 1 where the device fails
#include <cuda_runtime.h>
#include <string.h>

#include "../cuda/common/bulk.cuh"

namespace ksl {

namespace {

enum Fault {
  kNone,
  kStored,    // a warp reads what another one has stored
  kCopied,    // a warp reads what copies of another one bring
  kUnwaited,  // readers do not wait for the bulk copy of a stage
  kRefilled,  // a bulk copy fills a stage that is still read
  kAcross,    // a block reads what another one has stored in device memory
  kLane,      // no fault: a lane arrives for its warp
  kLaneRefilled,
  kFaults
};
const char *const kNames[] = {"none",     "stored", "copied", "unwaited",
                              "refilled", "across", "lane",   "lane-refilled"};
constexpr int kStages = 2, kRounds = 8, kReaders = 2, kWords = 128;

template <int kFault>
__global__ void ring(const unsigned *from, unsigned *across, unsigned *to) {
  __shared__ __align__(128) unsigned stages[kStages][kWords];
  __shared__ __align__(8) unsigned long long full[kStages], empty[kStages], unseen;
  __shared__ unsigned shared[kWords];
  constexpr bool kOneLane = kFault == kLane || kFault == kLaneRefilled;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; s++) {
      bulk_barrier(shared_at(&full[s]), 1);
      bulk_barrier(shared_at(&empty[s]), (kOneLane ? 1 : 32) * kReaders);
    }
    bulk_barrier(shared_at(&unseen), 1);
    bulk_barriers_made();
  }
  __syncthreads();

  unsigned sum = 0;
  if (warp == 0) {
    for (int i = 0; i < kRounds && lane == 0; i++) {
      const int s = i % kStages, turn = i / kStages;
      if (turn > 0) bulk_wait(shared_at(&empty[s]), (turn - 1) & 1);
      bulk_expect(shared_at(&full[s]), sizeof stages[s]);
      bulk_load(shared_at(stages[s]), from + i * kWords, sizeof stages[s], shared_at(&full[s]));
      if ((kFault == kRefilled || kFault == kLaneRefilled) && i == kRounds - 1) {
        bulk_expect(shared_at(&unseen), sizeof stages[s]);
        bulk_load(shared_at(stages[s]), from, sizeof stages[s], shared_at(&unseen));
        bulk_wait(shared_at(&unseen), 0);
      }
    }
  } else {
    for (int i = 0; i < kRounds; i++) {
      const int s = i % kStages, turn = i / kStages;
      if (kFault != kUnwaited || i < kRounds - 1) bulk_wait(shared_at(&full[s]), turn & 1);
      for (int k = warp - 1; k < kWords / 32; k += kReaders) sum += stages[s][k * 32 + lane];
      if (kOneLane) __syncwarp();
      if (!kOneLane || lane == 0) bulk_arrive(shared_at(&empty[s]));
    }
  }

  const int word = threadIdx.x;
  shared[word] = sum;
  if (kFault != kStored) __syncthreads();
  sum += shared[blockDim.x - 1 - word];
  __syncthreads();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_at(&shared[word])),
               "l"(from + word)
               : "memory");
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  if (kFault != kCopied) __syncthreads();
  sum += shared[blockDim.x - 1 - word];

  if (kFault == kAcross) {
    across[blockIdx.x * blockDim.x + word] = sum;
    sum += across[(gridDim.x - 1 - blockIdx.x) * blockDim.x + word];
  }
  to[blockIdx.x * blockDim.x + word] = sum;
}

// Whether there is a fault of that name.
template <int kFault>
bool launch(const char *name, unsigned *memory) {
  if constexpr (kFault == kFaults) {
    return false;
  } else {
    if (strcmp(name, kNames[kFault])) return launch<kFault + 1>(name, memory);
    ring<kFault><<<2, 32 * (1 + kReaders)>>>(memory, memory + 4096, memory + 8192);
    return true;
  }
}

}  // namespace

}  // namespace ksl

int main(int n, char **arguments) {
  if (n != 2) return 2;
  unsigned *memory = nullptr;
  cudaMalloc(&memory, 16384 * sizeof(unsigned));
  cudaMemset(memory, 0, 16384 * sizeof(unsigned));
  if (!ksl::launch<0>(arguments[1], memory)) return 2;
  return cudaDeviceSynchronize() != cudaSuccess;
}
