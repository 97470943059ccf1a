// The exported functions of ksl.h.
#include "abi.h"

#include <math.h>
#include <string.h>

#include "alloc.h"
#include "backend.h"
#include "codec.h"
#include "engine.h"
#include "error.h"
#include "kv_row.h"
#include "model.h"
#include "sample.h"

#ifndef KSL_ABI_HASH
#error "the build passes KSL_ABI_HASH, KSL_VERSION and KSL_SOURCE_DIGEST"
#endif

namespace ksl {
namespace {

struct SizeOf {
  const char *name;
  uint64_t bytes;
};

#define KSL_SIZE(type) {#type, sizeof(type)}
const SizeOf kSizes[] = {
    KSL_SIZE(ksl_error), KSL_SIZE(ksl_tensor),   KSL_SIZE(ksl_config),  KSL_SIZE(ksl_info),
    KSL_SIZE(ksl_op),    KSL_SIZE(ksl_sampling), KSL_SIZE(ksl_logprob), KSL_SIZE(ksl_cut),
    KSL_SIZE(ksl_row),   KSL_SIZE(ksl_edit),     KSL_SIZE(ksl_tap),     KSL_SIZE(ksl_wave),
    KSL_SIZE(ksl_done),  KSL_SIZE(ksl_progress),
};
#undef KSL_SIZE

// Shape, encoding and pointers of a codec call.
int check_codec(int encoding, int64_t rows, int64_t cols, const void *codes, const void *scales,
                const float *globals, const float *values, ksl_error *error) {
  uint64_t code_bytes = 0, scale_bytes = 0, global_bytes = 0;
  if (!encoding_bytes(encoding, rows, cols, &code_bytes, &scale_bytes, &global_bytes))
    return fail(error, KSL_INVALID, "codec: encoding %d does not take shape [%lld, %lld]", encoding,
                static_cast<long long>(rows), static_cast<long long>(cols));
  if (codes == nullptr || values == nullptr || (scale_bytes > 0 && scales == nullptr) ||
      (global_bytes > 0 && globals == nullptr))
    return fail(error, KSL_INVALID, "codec: a buffer of encoding %d is null", encoding);
  return KSL_OK;
}

int check_finite(const float *src, int64_t rows, int64_t cols, ksl_error *error) {
  for (int64_t i = 0; i < rows * cols; i++) {
    float v;
    memcpy(&v, reinterpret_cast<const char *>(src) + i * 4, sizeof v);
    if (!isfinite(v))
      return fail(error, KSL_INVALID, "codec: the value at row %lld, column %lld is not finite",
                  static_cast<long long>(i / cols), static_cast<long long>(i % cols));
  }
  return KSL_OK;
}

struct KvSide {
  int codes, scales;  // bytes of a row
};
KvSide side_bytes(int format, int side, int head_dim) {
  const KvRow row = kv_row(format, head_dim);
  return side == kKvKey ? KvSide{row.k, row.k_scale} : KvSide{row.v, row.v_scale};
}

int check_kv_rows(int format, int side, int64_t rows, int head_dim, ksl_error *error) {
  if (format < KSL_KV_F32 || format > KSL_KV_INT8RING_INT4 || side < kKvKey || side > kKvValue ||
      rows < 0 || head_dim < 1 || head_dim > 1 << 16)
    return fail(error, KSL_INVALID, "KV rows: format %d, side %d or shape [%lld, %d] is unknown",
                format, side, static_cast<long long>(rows), head_dim);
  const char *limit = kv_format_limit(format, head_dim);
  if (limit)
    return fail(error, KSL_INVALID, "KV format %s takes %s, not %d", kv_format_name(format), limit,
                head_dim);
  return KSL_OK;
}

int check_sample(const float *logits, int32_t vocab, int32_t token_limit,
                 const ksl_sampling *sampling, const int32_t *id, ksl_error *error) {
  if (logits == nullptr || sampling == nullptr || id == nullptr)
    return fail(error, KSL_INVALID, "sample: logits, sampling or id is null");
  if (vocab < 1 || vocab > 1 << 24)
    return fail(error, KSL_INVALID, "sample: vocab is %d, must be 1 to %d", vocab, 1 << 24);
  if (token_limit < 1 || token_limit > vocab)
    return fail(error, KSL_INVALID, "sample: token_limit is %d, must be 1 to %d", token_limit,
                vocab);
  return sampling_check(sampling, vocab, error);
}

int sample_once(SlotState *slot, SampleScratch *scratch, const float *logits, int vocab,
                int token_limit, const ksl_sampling *sampling, const uint32_t *mask, int position,
                int32_t *id, float *adjusted, ksl_error *error) {
  slot_configure(slot, vocab, sampling);
  if (mask != nullptr) {
    memcpy(slot->mask, mask, (static_cast<size_t>(vocab) + 31) / 32 * sizeof(uint32_t));
    slot->has_mask = true;
  }
  if (sample_token(slot, logits, vocab, token_limit, position, nullptr, 0, scratch, adjusted, id))
    return KSL_OK;
  return fail(error, KSL_INVALID, "sample: the logits have a NaN or leave nothing to sample from");
}

}  // namespace
}  // namespace ksl

#define KSL_API __attribute__((visibility("default")))

extern "C" {

KSL_API const char *ksl_abi_hash(void) {
  return KSL_ABI_HASH;
}
KSL_API const char *ksl_version(void) {
  return KSL_VERSION;
}
KSL_API const char *ksl_source_digest(void) {
  return KSL_SOURCE_DIGEST;
}
KSL_API const char *ksl_isa_list(void) {
  return ksl::kernels_list();
}

KSL_API int32_t ksl_kv_code_bytes(int32_t kv_format, int32_t activations, int32_t isa,
                                  int32_t head_dim) {
  return ksl::kv_code_bytes(kv_format, activations, isa, head_dim);
}

KSL_API uint64_t ksl_sizeof(const char *name) {
  if (name == nullptr) return 0;
  for (const ksl::SizeOf &s : ksl::kSizes)
    if (strcmp(s.name, name) == 0) return s.bytes;
  return 0;
}

KSL_API int ksl_open(const ksl_config *config, const ksl_tensor *tensors, int32_t n,
                     ksl_engine **out, ksl_error *error) {
  return ksl::engine_open(ksl::default_backend(), config, tensors, n, out, error);
}
KSL_API int ksl_get_info(ksl_engine *engine, ksl_info *info) {
  return ksl::engine_info(engine, info);
}
KSL_API int ksl_event_fd(ksl_engine *engine) {
  return ksl::engine_event_fd(engine);
}
KSL_API int ksl_submit(ksl_engine *engine, const ksl_wave *wave, ksl_error *error) {
  return ksl::engine_submit(engine, wave, error);
}
KSL_API int ksl_poll(ksl_engine *engine, ksl_done *out, int32_t cap) {
  return ksl::engine_poll(engine, out, cap);
}
KSL_API int ksl_get_progress(ksl_engine *engine, ksl_progress *progress) {
  return ksl::engine_progress(engine, progress);
}
KSL_API int ksl_last_error(ksl_engine *engine, ksl_error *error) {
  return ksl::engine_last_error(engine, error);
}
KSL_API int ksl_close(ksl_engine *engine, int32_t deadline_ms) {
  return ksl::engine_close(engine, deadline_ms);
}

KSL_API int ksl_encode(int32_t encoding, const float *src, int64_t rows, int64_t cols, void *codes,
                       void *scales, float *globals, ksl_error *error) {
  int rc = ksl::check_codec(encoding, rows, cols, codes, scales, globals, src, error);
  if (rc == KSL_OK && encoding != KSL_ENC_F32 && encoding != KSL_ENC_BF16)
    rc = ksl::check_finite(src, rows, cols, error);
  if (rc == KSL_OK) ksl::encode_rows(encoding, src, rows, cols, 0, rows, codes, scales, globals);
  return rc;
}

KSL_API int ksl_decode(int32_t encoding, const void *codes, const void *scales,
                       const float *globals, int64_t rows, int64_t cols, float *dst,
                       ksl_error *error) {
  const int rc = ksl::check_codec(encoding, rows, cols, codes, scales, globals, dst, error);
  if (rc != KSL_OK) return rc;
  for (int64_t r = 0; r < rows; r++)
    ksl::decode_row(encoding, codes, scales, globals, rows, cols, r, dst + r * cols);
  return KSL_OK;
}

KSL_API int ksl_reorder(const int32_t *order, int64_t n, int32_t unit_bytes, int64_t runs,
                        const void *from, void *to, ksl_error *error) {
  if (order == nullptr || from == nullptr || to == nullptr)
    return ksl::fail(error, KSL_INVALID, "reorder: a buffer is null");
  if (n < 1 || n > INT32_MAX || runs < 0 || (unit_bytes != 3 && unit_bytes != 4))
    return ksl::fail(error, KSL_INVALID, "reorder: %lld units of %d bytes cannot be reordered",
                     static_cast<long long>(n), unit_bytes);
  for (int64_t i = 0; i < n; i++)
    if (order[i] < 0 || order[i] >= n)
      return ksl::fail(error, KSL_INVALID, "reorder: order[%lld] is %d, must be 0 to %lld",
                       static_cast<long long>(i), order[i], static_cast<long long>(n - 1));
  ksl::reorder(order, n, unit_bytes, runs, from, to);
  return KSL_OK;
}

KSL_API int ksl_kv_encode(int32_t kv_format, int32_t side, const float *src, int64_t rows,
                          int32_t head_dim, void *codes, void *scales, ksl_error *error) {
  const int rc = ksl::check_kv_rows(kv_format, side, rows, head_dim, error);
  if (rc != KSL_OK) return rc;
  const ksl::KvSide bytes = ksl::side_bytes(kv_format, side, head_dim);
  for (int64_t r = 0; r < rows; r++)
    ksl::kv_encode(kv_format, side, src + r * head_dim, head_dim,
                   static_cast<uint8_t *>(codes) + r * bytes.codes,
                   static_cast<uint8_t *>(scales) + r * bytes.scales);
  return KSL_OK;
}

KSL_API int ksl_kv_decode(int32_t kv_format, int32_t side, const void *codes, const void *scales,
                          int64_t rows, int32_t head_dim, float *dst, ksl_error *error) {
  const int rc = ksl::check_kv_rows(kv_format, side, rows, head_dim, error);
  if (rc != KSL_OK) return rc;
  const ksl::KvSide bytes = ksl::side_bytes(kv_format, side, head_dim);
  for (int64_t r = 0; r < rows; r++)
    ksl::kv_decode(kv_format, side, static_cast<const uint8_t *>(codes) + r * bytes.codes,
                   static_cast<const uint8_t *>(scales) + r * bytes.scales, head_dim,
                   dst + r * head_dim);
  return KSL_OK;
}

KSL_API int ksl_sample(const float *logits, int32_t vocab, int32_t token_limit,
                       const ksl_sampling *sampling, const uint32_t *mask, int32_t position,
                       int32_t *id, float *adjusted, ksl_error *error) {
  int rc = ksl::check_sample(logits, vocab, token_limit, sampling, id, error);
  if (rc != KSL_OK) return rc;
  ksl::Alloc alloc = {0, 0, 0};
  ksl::SlotState slot = ksl::SlotState();
  ksl::SampleScratch scratch = ksl::SampleScratch();
  if (ksl::slot_init(&slot, vocab, 0, &alloc) && ksl::scratch_init(&scratch, vocab, &alloc))
    rc = ksl::sample_once(&slot, &scratch, logits, vocab, token_limit, sampling, mask, position, id,
                          adjusted, error);
  else
    rc = ksl::fail(error, KSL_NOMEM, "sample: out of memory for %d candidates", vocab);
  ksl::scratch_free(&scratch);
  ksl::slot_free(&slot);
  return rc;
}

}  // extern "C"
