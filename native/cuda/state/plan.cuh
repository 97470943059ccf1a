// The plan of a wave whose launches are a graph. Its host side is pinned memory at places that
// stay: the first kernel of the wave brings it to the device, which takes no copies of its own.
#pragma once
#include "../common/device.cuh"

namespace ksl {

// `runs` pieces of so many words, `pitch` words apart on both sides.
struct PlanPart {
  const void *from;
  void *to;
  int words, runs, pitch;
};
constexpr int kPlanParts = 4;
struct PlanArgs {
  PlanPart parts[kPlanParts];
  int n;
};
// The kernel behind it is to be launched without a chain.
void fetch_plan(Device *device, const PlanArgs &a);

}  // namespace ksl
