#include "model.h"

#include <math.h>
#include <string.h>

#include "error.h"

namespace ksl {
namespace {

// Far above any model of the family; keeps every product of two dimensions inside 64 bits.
constexpr int kMaxVocab = 1 << 24;
constexpr int kMaxWidth = 1 << 20;
constexpr int kMaxLayers = 1024;
constexpr int kMaxHeads = 1024;
constexpr int kMaxHeadDim = 1024;
constexpr int kMaxTensors = 1 << 15;

int check_range(const char *field, int64_t value, int64_t low, int64_t high, ksl_error *error) {
  if (value >= low && value <= high) return KSL_OK;
  return fail(error, KSL_INVALID, "config: %s is %lld, must be %lld to %lld", field,
              static_cast<long long>(value), static_cast<long long>(low),
              static_cast<long long>(high));
}

int check_attention(const ModelSpec *s, ksl_error *error) {
  int rc = check_range("heads", s->heads, 1, kMaxHeads, error);
  if (rc == KSL_OK) rc = check_range("kv_heads", s->kv_heads, 1, kMaxHeads, error);
  if (rc == KSL_OK) rc = check_range("head_dim", s->head_dim, 2, kMaxHeadDim, error);
  if (rc == KSL_OK) rc = check_range("rotary_dims", s->rotary_dims, 0, s->head_dim, error);
  if (rc != KSL_OK) return rc;
  if (s->heads % s->kv_heads != 0)
    return fail(error, KSL_INVALID, "config: heads is %d, must be a multiple of kv_heads %d",
                s->heads, s->kv_heads);
  if (s->rotary_dims % 2 != 0)
    return fail(error, KSL_INVALID, "config: rotary_dims is %d, must be even", s->rotary_dims);
  if (!(s->rope_theta > 0) || !isfinite(s->rope_theta))
    return fail(error, KSL_INVALID, "config: rope_theta is %g, must be positive and finite",
                s->rope_theta);
  return KSL_OK;
}

int check_linear(const ModelSpec *s, ksl_error *error) {
  int rc = check_range("lin_key_heads", s->lin_key_heads, 1, kMaxHeads, error);
  if (rc == KSL_OK) rc = check_range("lin_value_heads", s->lin_value_heads, 1, kMaxHeads, error);
  if (rc == KSL_OK) rc = check_range("lin_key_dim", s->lin_key_dim, 1, kMaxHeadDim, error);
  if (rc == KSL_OK) rc = check_range("lin_value_dim", s->lin_value_dim, 1, kMaxHeadDim, error);
  // A slab keeps exactly three pre-conv columns.
  if (rc == KSL_OK) rc = check_range("conv_taps", s->conv_taps, 4, 4, error);
  if (rc != KSL_OK) return rc;
  if (s->lin_value_heads % s->lin_key_heads != 0)
    return fail(error, KSL_INVALID,
                "config: lin_value_heads is %d, must be a multiple of lin_key_heads %d",
                s->lin_value_heads, s->lin_key_heads);
  return KSL_OK;
}

int check_bytes(const ksl_tensor *t, const char *field, const void *data, uint64_t found,
                uint64_t expected, ksl_error *error) {
  if (found != expected)
    return fail(error, KSL_INVALID, "tensor %s: %s holds %llu bytes, must be %llu", t->name, field,
                static_cast<unsigned long long>(found), static_cast<unsigned long long>(expected));
  if (expected > 0 && data == nullptr)
    return fail(error, KSL_INVALID, "tensor %s: %s is null", t->name, field);
  return KSL_OK;
}

int check_tensor(const ksl_tensor *t, int index, ksl_error *error) {
  if (t->name == nullptr || t->name[0] == 0)
    return fail(error, KSL_INVALID, "tensor %d: has no name", index);
  if (t->rows < 1 || t->cols < 1 || t->rows > INT32_MAX || t->cols > INT32_MAX)
    return fail(error, KSL_INVALID, "tensor %s: shape [%lld, %lld] is out of range", t->name,
                static_cast<long long>(t->rows), static_cast<long long>(t->cols));
  uint64_t codes = 0, scales = 0, globals = 0;
  if (!encoding_bytes(t->encoding, t->rows, t->cols, &codes, &scales, &globals))
    return fail(error, KSL_INVALID, "tensor %s: encoding %d does not take shape [%lld, %lld]",
                t->name, t->encoding, static_cast<long long>(t->rows),
                static_cast<long long>(t->cols));
  if (t->read != nullptr) {
    if (t->data == nullptr && t->scales == nullptr && t->globals == nullptr &&
        t->fill_kind == KSL_FILL_NONE)
      return KSL_OK;
    return fail(error, KSL_INVALID, "tensor %s: has a read function and other values", t->name);
  }
  if (t->data == nullptr) {
    if (t->fill_kind != KSL_FILL_UNIFORM && t->fill_kind != KSL_FILL_CONSTANT)
      return fail(error, KSL_INVALID, "tensor %s: has no data and fill kind %d", t->name,
                  t->fill_kind);
    if (!isfinite(t->fill_scale))
      return fail(error, KSL_INVALID, "tensor %s: fill_scale is not finite", t->name);
    return KSL_OK;
  }
  if (t->fill_kind != KSL_FILL_NONE)
    return fail(error, KSL_INVALID, "tensor %s: has data and fill kind %d", t->name, t->fill_kind);
  int rc = check_bytes(t, "data", t->data, t->data_bytes, codes, error);
  if (rc == KSL_OK) rc = check_bytes(t, "scales", t->scales, t->scales_bytes, scales, error);
  if (rc == KSL_OK) rc = check_bytes(t, "globals", t->globals, t->globals_bytes, globals, error);
  return rc;
}

}  // namespace

int spec_init(ModelSpec *spec, const ksl_config *config, Alloc *alloc, ksl_error *error) {
  *spec = ModelSpec{};
  ModelSpec s = ModelSpec{};
  s.vocab = config->vocab;
  s.hidden = config->hidden;
  s.intermediate = config->intermediate;
  s.layers = config->layers;
  s.heads = config->heads;
  s.kv_heads = config->kv_heads;
  s.head_dim = config->head_dim;
  s.rotary_dims = config->rotary_dims;
  s.lin_key_heads = config->lin_key_heads;
  s.lin_value_heads = config->lin_value_heads;
  s.lin_key_dim = config->lin_key_dim;
  s.lin_value_dim = config->lin_value_dim;
  s.conv_taps = config->conv_taps;
  s.mtp_layers = config->mtp_layers;
  s.token_limit = config->token_limit;
  s.rope_theta = config->rope_theta;
  s.norm_eps = config->norm_eps;

  int rc = check_range("vocab", s.vocab, 1, kMaxVocab, error);
  if (rc == KSL_OK) rc = check_range("hidden", s.hidden, 1, kMaxWidth, error);
  if (rc == KSL_OK) rc = check_range("intermediate", s.intermediate, 1, kMaxWidth, error);
  if (rc == KSL_OK) rc = check_range("layers", s.layers, 1, kMaxLayers, error);
  if (rc == KSL_OK) rc = check_range("mtp_layers", s.mtp_layers, 0, 1, error);
  if (rc == KSL_OK) rc = check_range("token_limit", s.token_limit, 1, s.vocab, error);
  if (rc != KSL_OK) return rc;
  if (!(s.norm_eps > 0) || !isfinite(s.norm_eps))
    return fail(error, KSL_INVALID, "config: norm_eps is %g, must be positive and finite",
                static_cast<double>(s.norm_eps));
  if (config->layer_kinds == nullptr)
    return fail(error, KSL_INVALID, "config: layer_kinds is null");
  for (int i = 0; i < s.layers; i++) {
    const int kind = config->layer_kinds[i];
    if (kind != KSL_LAYER_LINEAR && kind != KSL_LAYER_FULL)
      return fail(error, KSL_INVALID, "config: layer_kinds[%d] is %d, must be 0 or 1", i, kind);
    s.linear_layers += kind == KSL_LAYER_LINEAR;
    s.full_layers += kind == KSL_LAYER_FULL;
  }
  s.kv_layers = s.full_layers + s.mtp_layers;
  if (s.kv_layers > 0) rc = check_attention(&s, error);
  if (rc == KSL_OK && s.linear_layers > 0) rc = check_linear(&s, error);
  if (rc != KSL_OK) return rc;
  if (s.kv_layers > 0) {
    s.q_width = s.heads * s.head_dim;
    s.kv_width = s.kv_heads * s.head_dim;
  }
  if (s.linear_layers > 0) {
    s.v_width = s.lin_value_heads * s.lin_value_dim;
    s.conv_channels = 2 * s.lin_key_heads * s.lin_key_dim + s.v_width;
  }

  uint8_t *kinds = alloc_many<uint8_t>(alloc, static_cast<size_t>(s.layers));
  if (kinds == nullptr) return fail(error, KSL_NOMEM, "out of memory for the model description");
  memcpy(kinds, config->layer_kinds, static_cast<size_t>(s.layers));
  s.layer_kinds = kinds;
  *spec = s;
  return KSL_OK;
}

void spec_free(ModelSpec *spec) {
  alloc_free(const_cast<uint8_t *>(spec->layer_kinds));
  spec->layer_kinds = nullptr;
}

int table_init(TensorTable *table, const ksl_tensor *tensors, int n, ksl_error *error) {
  if (n < 1 || n > kMaxTensors)
    return fail(error, KSL_INVALID, "the tensor table has %d entries, must be 1 to %d", n,
                kMaxTensors);
  if (tensors == nullptr) return fail(error, KSL_INVALID, "the tensor table is null");
  for (int i = 0; i < n; i++) {
    const int rc = check_tensor(&tensors[i], i, error);
    if (rc != KSL_OK) return rc;
    for (int j = 0; j < i; j++)
      if (strcmp(tensors[i].name, tensors[j].name) == 0)
        return fail(error, KSL_INVALID, "tensor %s: is given twice", tensors[i].name);
  }
  table->tensors = tensors;
  table->n = n;
  return KSL_OK;
}

const ksl_tensor *table_find(const TensorTable *table, const char *name, int64_t rows, int64_t cols,
                             bool optional, ksl_error *error) {
  for (int i = 0; i < table->n; i++) {
    const ksl_tensor *t = &table->tensors[i];
    if (strcmp(t->name, name) != 0) continue;
    if (t->rows == rows && t->cols == cols) return t;
    fail(error, KSL_INVALID, "tensor %s: shape is [%lld, %lld], must be [%lld, %lld]", name,
         static_cast<long long>(t->rows), static_cast<long long>(t->cols),
         static_cast<long long>(rows), static_cast<long long>(cols));
    return nullptr;
  }
  if (!optional)
    fail(error, KSL_INVALID, "tensor %s: is missing, expected with shape [%lld, %lld]", name,
         static_cast<long long>(rows), static_cast<long long>(cols));
  return nullptr;
}

bool encoding_bytes(int encoding, int64_t rows, int64_t cols, uint64_t *codes, uint64_t *scales,
                    uint64_t *globals) {
  *codes = *scales = *globals = 0;
  if (rows < 1 || cols < 1 || rows > INT32_MAX || cols > INT32_MAX) return false;
  const uint64_t n = static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols);
  const uint64_t row_blocks = (static_cast<uint64_t>(rows) + 127) / 128;
  const uint64_t col_blocks = (static_cast<uint64_t>(cols) + 127) / 128;
  switch (encoding) {
    case KSL_ENC_F32:
      *codes = n * 4;
      return true;
    case KSL_ENC_BF16:
      *codes = n * 2;
      return true;
    case KSL_ENC_FP8:
      *codes = n;
      *scales = row_blocks * col_blocks * 4;
      return true;
    case KSL_ENC_E2M3:
      if (cols % 4 != 0) return false;
      *codes = n / 4 * 3;
      *scales = row_blocks * col_blocks;
      return true;
    case KSL_ENC_NVFP4:
      if (cols % 16 != 0) return false;
      *codes = n / 2;
      *scales = n / 16;
      *globals = row_blocks * 4;
      return true;
    default:
      return false;
  }
}

}  // namespace ksl
