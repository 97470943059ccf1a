// The inner kernels compiled for one instruction set. No standard header with inline code may be
// included here: a linker could keep this object's copy of an inline function for every machine.
#include "kernels.h"
#include "vec_avx2.h"
// clang-format off: the bodies use the vector type above
#include "math.inl"
#include "norm.inl"
#include "gemm.inl"
#include "quant.inl"
#include "gemm_int.inl"
#include "gdn_scan.inl"
#include "attn.inl"
// clang-format on

namespace ksl {

extern const Kernels kernels_avx2 = {
    "avx2",
    gemm,
    quantize,
    gemm_int,
    rmsnorm,
    l2norm,
    gated_norm,
    add,
    silu_mul,
    sigmoid_mul,
    conv_silu,
    conv_step,
    rope,
    delta_scan,
    delta_replay,
    delta_step,
    {"float", attn_query, attn_tile, attn_combine, attn_finish},
};

}  // namespace ksl
