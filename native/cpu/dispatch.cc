// Which kernel tables this machine can run.
#include "../common/abi.h"
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ksl {
namespace {

#if defined(__x86_64__)

struct Features {
  bool avx2, avx512, bf16;
};

// Registers that the operating system saves (XCR0).
uint64_t saved_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

// Every extension that build.py compiles the objects for must be present.
Features detect() {
  uint32_t a, b, c1, d, b7, c7;
  Features found = {false, false, false};
  if (!__get_cpuid(1, &a, &b, &c1, &d)) return found;
  const uint32_t fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
  if ((c1 & (fma | osxsave | avx | f16c)) != (fma | osxsave | avx | f16c)) return found;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) return found;
  const uint64_t saved = saved_state(), ymm = 0x06, zmm = 0xe6;
  const uint32_t avx2 = 1u << 5;
  found.avx2 = (b7 & avx2) && (saved & ymm) == ymm;
  const uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
  const uint32_t vbmi = 1u << 1, vnni = 1u << 11;
  found.avx512 = found.avx2 && (b7 & (f | dq | bw | vl)) == (f | dq | bw | vl) &&
                 (c7 & (vbmi | vnni)) == (vbmi | vnni) && (saved & zmm) == zmm;
  uint32_t a71, b71, c71, d71;
  const uint32_t bf16 = 1u << 5;
  found.bf16 = found.avx512 && __get_cpuid_count(7, 1, &a71, &b71, &c71, &d71) && (a71 & bf16);
  return found;
}

const Kernels *table_avx2() {
  return detect().avx2 ? &kernels_avx2 : nullptr;
}
const Kernels *table_avx512() {
  return detect().avx512 ? &kernels_avx512 : nullptr;
}

bool has_bf16() {
  return detect().bf16;
}

#else

const Kernels *table_avx2() {
  return nullptr;
}
const Kernels *table_avx512() {
  return nullptr;
}

#endif

}  // namespace

const Kernels *kernels_for(int isa) {
  switch (isa) {
    case KSL_ISA_SCALAR:
      return &kernels_scalar;
    case KSL_ISA_AVX2:
      return table_avx2();
    case KSL_ISA_AVX512:
      return table_avx512();
    case KSL_ISA_AUTO: {
      const Kernels *best = table_avx512();
      if (!best) best = table_avx2();
      return best ? best : &kernels_scalar;
    }
    default:
      return nullptr;
  }
}

const Bf16Kernels *bf16_for(const Kernels *kernels) {
#if defined(__x86_64__)
  if (kernels == &kernels_avx512 && has_bf16()) return &kernels_avx512bf16;
#else
  (void)kernels;
#endif
  return nullptr;
}

const char *kernels_list(void) {
  if (table_avx512()) return "scalar avx2 avx512";
  return table_avx2() ? "scalar avx2" : "scalar";
}

}  // namespace ksl
