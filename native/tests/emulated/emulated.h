// What programs of emulated kernels share: their arguments, random numbers, and the verdict.
#pragma once
#include <cuda_runtime.h>

#include <random>

namespace emulated {

struct Random {
  std::mt19937 engine;
  explicit Random(unsigned seed) : engine(seed) {}
  uint32_t below(uint32_t n) { return engine() % n; }
  float normal() { return std::normal_distribution<float>()(engine); }
  float uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(engine);
  }
};

// PROGRAM SEED [a|b|sum|plain|transposed], with two lanes swapped, or
// PROGRAM SEED WAIT|none WARP early|late, with a wait left out while a warp is late.
inline unsigned begin(int argc, char **argv) {
  const char *names[] = {"", "a", "b", "sum", "plain", "transposed"};
  for (int i = 1; i < 6 && argc > 2; i++)
    if (strcmp(argv[2], names[i]) == 0) swap = static_cast<Swap>(i);
  if (argc > 4) {
    if (strcmp(argv[2], "none") != 0) missing = atoi(argv[2]);
    late = atoi(argv[3]);
    early = strcmp(argv[4], "early") == 0;
  }
  if (argc < 2 || (argc == 3 && swap == kNothing)) exit(2);
  return static_cast<unsigned>(atoi(argv[1]));
}

// Whether values are those that are right, up to a relative distance; false with a line.
inline bool near(const char *what, const std::vector<float> &found,
                 const std::vector<double> &right, double limit) {
  double off = 0, size = 0;
  for (size_t i = 0; i < right.size(); i++) {
    off += (found[i] - right[i]) * (found[i] - right[i]);
    size += right[i] * right[i];
  }
  const double distance = sqrt(off / size);
  if (distance <= limit) return true;
  fprintf(stderr, "wrong: %s %g\n", what, distance);
  if (missing >= 0) exit(1);
  return false;
}

}  // namespace emulated
