// The inner kernels compiled for one instruction set. No standard header with inline code may be
// included here: a linker could keep this object's copy of an inline function for every machine.
#include "kernels.h"
#include "vec_avx2.h"
// clang-format off: the bodies use the vector type above
#include "isa.inl"
// clang-format on

namespace ksl {

extern const Kernels kernels_avx2;
constexpr Kernels kernels_avx2 = kernels_named("avx2");

}  // namespace ksl
