// Matrices of bf16 products, and attention on codes, for machines that have
// AVX512-BF16 beside all that isa_avx512 needs. No standard header with inline code may be included
// here, as there.
#include "kernels.h"
#include "vec_avx512.h"
// clang-format off: the bodies use the vector type above
#include "math.inl"
#include "attn.inl"
#include "attn_lanes.inl"
#include "attn_codes.inl"
#include "attn_fill.inl"
#include "attn_q4.inl"
#include "attn_rows.inl"
#include "gemm_bf16.inl"
// clang-format on

namespace ksl {

extern const Bf16Kernels kernels_avx512bf16 = {
    {"codes", attn_query_rows, attn_tile_any, attn_combine, attn_finish},
    {attn_query_bytes, attn_encode, attn_hide, attn_encode_piece, attn_tile_codes},
    round_bf16_column,
    gemm_bf16,
};

}  // namespace ksl
