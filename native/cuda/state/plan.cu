// What is planned on the host comes to the device.
#include "plan.cuh"

namespace ksl {

namespace {

constexpr int kThreads = 256;

// A block is one part.
__global__ void plan_kernel(const __grid_constant__ PlanArgs a) {
  const PlanPart part = a.parts[blockIdx.x];
  const int *const from = static_cast<const int *>(part.from);
  int *const to = static_cast<int *>(part.to);
  for (int i = threadIdx.x; i < part.words * part.runs; i += kThreads) {
    const int run = i / part.words, at = run * part.pitch + i - run * part.words;
    to[at] = __ldcv(from + at);
  }
}

}  // namespace

void fetch_plan(Device *device, const PlanArgs &a) {
  KSL_LAUNCH(device, "plan", plan_kernel, a.n, kThreads, a);
}

}  // namespace ksl
