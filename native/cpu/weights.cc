// Finds, checks and repacks the weights.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../common/codec.h"
#include "../common/error.h"
#include "state.h"

namespace ksl {

namespace {

struct Loader {
  Backend *b;
  const TensorTable *tensors;
  ksl_error *error;
  char prefix[64];
  uint8_t *storage;  // of the next matrix
};

int out_of_memory(Loader *in, const char *name) {
  return fail(in->error, KSL_NOMEM, "There is not enough memory for the weights (%s).", name);
}

const ksl_tensor *find(Loader *in, const char *name, int64_t rows, int64_t cols) {
  char full[128];
  snprintf(full, sizeof full, "%s%s", in->prefix, name);
  return table_find(in->tensors, full, rows, cols, false, in->error);
}

constexpr int64_t kScaleRows = 128;          // the height of scale blocks
constexpr uint64_t kReadBytes = 4ull << 20;  // codes that are read at once

// A tensor's rows in its encoding, in pieces, each a matrix of its own: all of a tensor in buffers
// at once, otherwise a multiple of kScaleRows.
struct Source {
  const ksl_tensor *tensor;
  MatrixSource piece;
  int64_t piece_rows;
  float *values;  // of a fill: [piece_rows][cols]
  void *codes, *scales, *globals;
};

void source_free(Source *source) {
  alloc_free(source->values);
  alloc_free(source->codes);
  alloc_free(source->scales);
  alloc_free(source->globals);
}

int source_begin(Loader *in, const ksl_tensor *t, Source *source) {
  *source = Source{};
  source->tensor = t;
  source->piece = {t->encoding, t->rows, t->cols, t->data, t->scales, t->globals};
  source->piece_rows = t->rows;
  if (t->data) return KSL_OK;
  Alloc *alloc = in->b->alloc;
  int64_t rows = t->rows < kScaleRows ? t->rows : kScaleRows;
  uint64_t codes, scales, globals;
  encoding_bytes(t->encoding, rows, t->cols, &codes, &scales, &globals);
  if (t->read && codes < kReadBytes) {
    const int64_t most = rows * static_cast<int64_t>(kReadBytes / codes);
    rows = most < t->rows ? most : t->rows;
    encoding_bytes(t->encoding, rows, t->cols, &codes, &scales, &globals);
  }
  source->piece_rows = rows;
  if (!t->read) source->values = alloc_many<float>(alloc, rows * t->cols);
  if (t->read || source->values) source->codes = alloc_bytes(alloc, codes);
  source->scales = source->codes ? alloc_bytes(alloc, scales) : nullptr;
  source->globals = source->scales ? alloc_bytes(alloc, globals) : nullptr;
  if (source->globals) return KSL_OK;
  source_free(source);
  return out_of_memory(in, t->name);
}

// The piece that starts at `row`; null with an error text when it cannot be read.
const MatrixSource *source_piece(Loader *in, Source *source, int64_t row) {
  const ksl_tensor *t = source->tensor;
  if (t->data) return &source->piece;
  const int64_t n = t->rows - row < source->piece_rows ? t->rows - row : source->piece_rows;
  float *globals = static_cast<float *>(source->globals);
  if (t->read) {
    if (t->read(t->context, row, n, source->codes, source->scales, globals)) {
      fail(in->error, KSL_INVALID, "tensor %s: rows from %lld on cannot be read", t->name,
           static_cast<long long>(row));
      return nullptr;
    }
  } else {
    for (int64_t i = 0; i < n * t->cols; i++) {
      source->values[i] = fill_value(t->fill_kind, t->fill_seed, t->fill_scale,
                                     static_cast<uint64_t>(row * t->cols + i));
    }
    encode_rows(t->encoding, source->values, n, t->cols, 0, n, source->codes, source->scales,
                globals);
  }
  source->piece = {t->encoding, n, t->cols, source->codes, source->scales, globals};
  return &source->piece;
}

int pack(Loader *in, const ksl_tensor *tensor, bool read_per_token, Matrix *out) {
  Backend *b = in->b;
  uint8_t *storage = in->storage;
  in->storage += matrix_bytes(tensor->encoding, tensor->rows, tensor->cols);
  Source source;
  int code = source_begin(in, tensor, &source);
  if (code) return code;
  matrix_begin(tensor->encoding, tensor->rows, tensor->cols, storage, out);
  for (int64_t row = 0; row < tensor->rows && !code; row += source.piece_rows) {
    const MatrixSource *piece = source_piece(in, &source, row);
    if (piece)
      matrix_pack_rows(piece, row, out);
    else
      code = KSL_INVALID;
  }
  source_free(&source);
  if (code) return code;
  b->weight_bytes += out->bytes;
  if (read_per_token) b->token_bytes += out->bytes;
  if (read_per_token) b->has_bf16_products |= has_bf16_products(out);
  b->encodings |= 1u << tensor->encoding;
  return KSL_OK;
}

int load_matrix(Loader *in, const char *name, int64_t rows, int64_t cols, Matrix *out) {
  const ksl_tensor *tensor = find(in, name, rows, cols);
  return tensor ? pack(in, tensor, true, out) : KSL_INVALID;
}

// A small tensor as float32 [rows][cols], `offset` added to each value.
int load_values(Loader *in, const char *name, int64_t rows, int64_t cols, float offset,
                float **out) {
  Backend *b = in->b;
  const ksl_tensor *tensor = find(in, name, rows, cols);
  if (!tensor) return KSL_INVALID;
  if (tensor->encoding != KSL_ENC_F32 && tensor->encoding != KSL_ENC_BF16) {
    return fail(in->error, KSL_INVALID, "Tensor %s must be float32 or bfloat16.", tensor->name);
  }
  float *values = own_floats(b, rows * cols);
  if (!values) return out_of_memory(in, tensor->name);
  Source source;
  int code = source_begin(in, tensor, &source);
  if (code) return code;
  for (int64_t row = 0; row < rows && !code; row += source.piece_rows) {
    const MatrixSource *piece = source_piece(in, &source, row);
    if (!piece) code = KSL_INVALID;
    for (int64_t r = 0; piece && r < piece->rows; r++) {
      decode_row(piece->encoding, piece->codes, piece->scales, piece->globals, piece->rows, cols, r,
                 values + (row + r) * cols);
    }
  }
  source_free(&source);
  if (code) return code;
  for (int64_t i = 0; i < rows * cols; i++) values[i] += offset;
  b->weight_bytes += rows * cols * sizeof(float);
  *out = values;
  return KSL_OK;
}

int load_linear(Loader *in, LinearWeights *w) {
  Backend *b = in->b;
  const ModelSpec *s = b->spec;
  const int channels = s->conv_channels, heads = s->lin_value_heads;
  float *log_decay = nullptr, *taps = nullptr;
  int code = load_matrix(in, "linear_attn.in_proj_qkv.weight", channels, s->hidden, &w->qkv);
  if (!code) code = load_matrix(in, "linear_attn.in_proj_z.weight", s->v_width, s->hidden, &w->z);
  if (!code) code = load_matrix(in, "linear_attn.in_proj_b.weight", heads, s->hidden, &w->b);
  if (!code) code = load_matrix(in, "linear_attn.in_proj_a.weight", heads, s->hidden, &w->a);
  if (!code) {
    code = load_matrix(in, "linear_attn.out_proj.weight", s->hidden, s->v_width, &w->out);
  }
  if (!code) code = load_values(in, "linear_attn.conv1d.weight", channels, kConvTaps, 0, &taps);
  if (!code) code = load_values(in, "linear_attn.A_log", heads, 1, 0, &log_decay);
  if (!code) code = load_values(in, "linear_attn.dt_bias", heads, 1, 0, &w->dt_bias);
  if (!code) code = load_values(in, "linear_attn.norm.weight", s->lin_value_dim, 1, 0, &w->norm);
  if (code) return code;

  for (int h = 0; h < heads; h++) {
    log_decay[h] = static_cast<float>(-exp(static_cast<double>(log_decay[h])));
  }
  w->decay = log_decay;
  w->taps = own_floats(b, static_cast<size_t>(kConvTaps) * channels);
  if (!w->taps) return out_of_memory(in, "linear_attn.conv1d.weight");
  for (int c = 0; c < channels; c++) {
    for (int j = 0; j < kConvTaps; j++) w->taps[j * channels + c] = taps[c * kConvTaps + j];
  }
  return KSL_OK;
}

int load_full(Loader *in, FullWeights *w) {
  const ModelSpec *s = in->b->spec;
  int code = load_matrix(in, "self_attn.q_proj.weight", 2 * s->q_width, s->hidden, &w->q);
  if (!code) code = load_matrix(in, "self_attn.k_proj.weight", s->kv_width, s->hidden, &w->k);
  if (!code) code = load_matrix(in, "self_attn.v_proj.weight", s->kv_width, s->hidden, &w->v);
  if (!code) code = load_matrix(in, "self_attn.o_proj.weight", s->hidden, s->q_width, &w->out);
  if (!code) code = load_values(in, "self_attn.q_norm.weight", s->head_dim, 1, 1, &w->q_norm);
  if (!code) code = load_values(in, "self_attn.k_norm.weight", s->head_dim, 1, 1, &w->k_norm);
  return code;
}

int load_layer(Loader *in, LayerWeights *w) {
  const ModelSpec *s = in->b->spec;
  int code = load_values(in, "input_layernorm.weight", s->hidden, 1, 1, &w->in_norm);
  if (!code) {
    code = load_values(in, "post_attention_layernorm.weight", s->hidden, 1, 1, &w->post_norm);
  }
  if (!code) {
    code = w->kind == KSL_LAYER_FULL ? load_full(in, &w->full) : load_linear(in, &w->linear);
  }
  const int64_t inner = s->intermediate;
  if (!code) code = load_matrix(in, "mlp.gate_proj.weight", inner, s->hidden, &w->gate);
  if (!code) code = load_matrix(in, "mlp.up_proj.weight", inner, s->hidden, &w->up);
  if (!code) code = load_matrix(in, "mlp.down_proj.weight", s->hidden, inner, &w->down);
  return code;
}

int load_head(Loader *in) {
  Backend *b = in->b;
  const ModelSpec *s = b->spec;
  const ksl_tensor *embedding = find(in, "model.embed_tokens.weight", s->vocab, s->hidden);
  if (!embedding) return KSL_INVALID;
  ksl_error quiet = {};
  const ksl_tensor *head =
      table_find(in->tensors, "lm_head.weight", s->vocab, s->hidden, true, &quiet);
  if (!head && quiet.code) return fail(in->error, quiet.code, "%s", quiet.text);
  int code = pack(in, embedding, !head, &b->embedding);
  if (code) return code;
  if (!head) {
    b->head = b->embedding;
    return KSL_OK;
  }
  return pack(in, head, true, &b->head);
}

int load_mtp(Loader *in) {
  Backend *b = in->b;
  const int h = b->spec->hidden;
  // The drafting layer is not read to make a token, except its join and its keys and values.
  const uint64_t read = b->token_bytes;
  int code = load_matrix(in, "mtp.fc.weight", h, 2 * static_cast<int64_t>(h), &b->mtp_fc);
  if (!code) {
    code = load_values(in, "mtp.pre_fc_norm_embedding.weight", h, 1, 1, &b->mtp_norm_embedding);
  }
  if (!code) {
    code = load_values(in, "mtp.pre_fc_norm_hidden.weight", h, 1, 1, &b->mtp_norm_hidden);
  }
  if (!code) code = load_values(in, "mtp.norm.weight", h, 1, 1, &b->mtp_norm);
  if (code) return code;
  LayerWeights *layer = &b->layers[b->spec->layers];
  layer->kind = KSL_LAYER_FULL;
  layer->index = b->spec->full_layers;
  snprintf(in->prefix, sizeof in->prefix, "mtp.layers.0.");
  code = load_layer(in, layer);
  b->token_bytes = read + b->mtp_fc.bytes + layer->full.k.bytes + layer->full.v.bytes;
  return code;
}

}  // namespace

namespace {

// Storage of all tensors as matrices; the part of those that are none stays untouched.
size_t matrices_bytes(const TensorTable *tensors) {
  size_t total = 0;
  for (int i = 0; i < tensors->n; i++) {
    const ksl_tensor *t = &tensors->tensors[i];
    total += matrix_bytes(t->encoding, t->rows, t->cols);
  }
  return total;
}

}  // namespace

int load_weights(Backend *b, const TensorTable *tensors, ksl_error *error) {
  const ModelSpec *spec = b->spec;
  Loader in = {b, tensors, error, "", nullptr};
  b->layers = static_cast<LayerWeights *>(
      own_bytes(b, (spec->layers + spec->mtp_layers) * sizeof(LayerWeights)));
  if (!b->layers) return out_of_memory(&in, "layers");
  in.storage = b->matrices = static_cast<uint8_t *>(alloc_huge(b->alloc, matrices_bytes(tensors)));
  if (!b->matrices) return out_of_memory(&in, "all matrices");
  int code = load_head(&in);
  if (!code) code = load_values(&in, "model.norm.weight", spec->hidden, 1, 1, &b->final_norm);
  int linear = 0, full = 0;
  for (int i = 0; i < spec->layers && !code; i++) {
    LayerWeights *layer = &b->layers[i];
    layer->kind = spec->layer_kinds[i];
    layer->index = layer->kind == KSL_LAYER_FULL ? full++ : linear++;
    snprintf(in.prefix, sizeof in.prefix, "model.layers.%d.", i);
    code = load_layer(&in, layer);
  }
  in.prefix[0] = 0;
  if (!code && spec->mtp_layers) code = load_mtp(&in);
  return code;
}

}  // namespace ksl
