// Activations as int8 with one scale per kActBlock columns.
#include "kernels.h"

namespace ksl {
namespace {

// Sixteen columns over their scale, rounded to nearest even; returns their sum.
KSL_INLINE int32_t quantize_group(V x, V inverse, int8_t *codes) {
  const V magic = v_set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V q = v_sub(v_fma(x, inverse, magic), magic);
  v_store_s8(codes, q);
  return (int32_t)v_hsum(q);  // exact: small integers
}

// The first n values of a block.
static void quantize_block(const float *x, int n, QuantizedBlock *to) {
  for (int at = 0; at < kScaleBlock; at += kActBlock) {
    const int m = n - at < kActBlock ? n - at : (int)kActBlock;
    V part[kActBlock / 16];
    V top = v_zero(), rest = v_zero();
#pragma GCC unroll 8
    for (int i = 0; i < kActBlock / 16; i++) {
      const int left = m - 16 * i;
      part[i] = left >= 16 ? v_load(x + at + 16 * i)
                           : (left > 0 ? v_load_n(x + at + 16 * i, left) : v_zero());
      top = v_max(top, v_max(part[i], v_sub(v_zero(), part[i])));
      rest = v_fma(part[i], v_zero(), rest);
    }
    // What is not finite makes the block a NaN, which no product hides; what is tiny is zero.
    const float most = v_hmax(top), bad = v_hsum(rest);
    const bool usable = bad == 0.0f && most > 0x1p-100f;
    to->scales[at / kActBlock] = usable ? most * (1.0f / 127.0f) : bad;
    const V inverse = v_set1(usable ? 127.0f / most : 0.0f);
    int32_t sum = 0;
#pragma GCC unroll 8
    for (int i = 0; i < kActBlock / 16; i++) {
      const V value = bad == 0.0f ? part[i] : v_zero();
      const int32_t s = quantize_group(value, inverse, to->codes + at + 16 * i);
      to->groups[at / kGroup + i] = -kOffset * s;
      sum += s;
    }
    to->blocks[at / kActBlock] = -kOffset * sum;
  }
}

static void quantize(const float *x, int n, QuantizedBlock *out, size_t stride) {
  for (; n > 0; n -= kScaleBlock, x += kScaleBlock, out += stride)
    if (n < kScaleBlock || !quantize_whole(x, out)) quantize_block(x, n, out);
}

}  // namespace
}  // namespace ksl
