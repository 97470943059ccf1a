// The inner kernels compiled for one instruction set. No standard header with inline code may be
// included here: a linker could keep this object's copy of an inline function for every machine.
#include "kernels.h"
#include "vec_scalar.h"
// clang-format off: the bodies use the vector type above
#include "isa.inl"
// clang-format on

namespace ksl {

extern const Kernels kernels_scalar;
constexpr Kernels kernels_scalar = kernels_named("scalar");

}  // namespace ksl
