// ModelSpec: what the engine knows of a model. Dimensions come from ksl_config; tensors are found
// by canonical name and checked for shape, encoding and byte sizes before anything reads them.
#pragma once
#include "abi.h"
#include "alloc.h"

namespace ksl {

struct ModelSpec {
  int vocab, hidden, intermediate, layers;
  const uint8_t *layer_kinds;  // [layers], owned by the spec
  int heads, kv_heads, head_dim, rotary_dims;
  int lin_key_heads, lin_value_heads, lin_key_dim, lin_value_dim, conv_taps;
  int mtp_layers, token_limit;
  double rope_theta;
  float norm_eps;
  // derived
  int linear_layers, full_layers;
  int kv_layers;      // full_layers + mtp_layers; the MTP layer is the last
  int conv_channels;  // 2 * lin_key_heads * lin_key_dim + lin_value_heads * lin_value_dim
  int q_width;        // heads * head_dim
  int kv_width;       // kv_heads * head_dim
  int v_width;        // lin_value_heads * lin_value_dim
};

// Fills `spec` from the configuration and checks every dimension. layer_kinds is copied; spec_free
// frees the copy. The layer kind decides which dimensions must be set: lin_* only with a linear
// layer, heads only with a full (or MTP) layer.
int spec_init(ModelSpec *spec, const ksl_config *config, Alloc *alloc, ksl_error *error);
void spec_free(ModelSpec *spec);

// Index from canonical name to tensor; checks duplicates, encodings and byte sizes on init.
struct TensorTable {
  const ksl_tensor *tensors;
  int n;
};
int table_init(TensorTable *table, const ksl_tensor *tensors, int n, ksl_error *error);

// The tensor of that name with exactly that shape; null with an error text (name, expected and
// found shape) otherwise. `optional`: absent is null without an error.
const ksl_tensor *table_find(const TensorTable *table, const char *name, int64_t rows, int64_t cols,
                             bool optional, ksl_error *error);

// Bytes of codes, scales and globals of a matrix in an encoding; false if the encoding is unknown
// or cols does not fit it.
bool encoding_bytes(int encoding, int64_t rows, int64_t cols, uint64_t *codes, uint64_t *scales,
                    uint64_t *globals);

}  // namespace ksl
