// The kernel bodies over the vector type that was included before, and their table.
// clang-format off: the bodies use each other
#include "math.inl"
#include "norm.inl"
#include "gemm.inl"
#include "quant.inl"
#include "gemm_int.inl"
#include "gdn_scan.inl"
#include "attn.inl"
// clang-format on

namespace ksl {
namespace {

constexpr Kernels kernels_named(const char *name) {
  return {
      name,
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
}

}  // namespace
}  // namespace ksl
