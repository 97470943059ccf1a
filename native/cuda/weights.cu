// Finds, checks, fills and repacks the weights.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../common/error.h"
#include "state.cuh"
#include "state/fill.cuh"

namespace ksl {

namespace {

constexpr int64_t kStageBytes = 64 << 20;  // stored codes of one piece on their way

struct Loader {
  Backend *b;
  const TensorTable *tensors;
  ksl_error *error;
  char prefix[64];
  // staging on the device
  uint8_t *codes, *scales;
  float *globals;
  unsigned *most;
  int64_t codes_bytes, scales_bytes, globals_bytes;
  // one tensor that comes from a read function: codes, scales, globals, and their capacities
  void *held[3];
  uint64_t held_bytes[3];
};

int out_of_memory(Loader *in, const char *name) {
  return fail(in->error, KSL_NOMEM, "There is not enough device memory for the weights (%s).",
              name);
}

int device_failed(Loader *in, const char *name) {
  const Device &d = in->b->device;
  return fail(in->error, KSL_NOMEM, "Loading %s failed in %s: %s.", name, d.what ? d.what : "CUDA",
              cudaGetErrorString(d.error));
}

const ksl_tensor *find(Loader *in, const char *name, int64_t rows, int64_t cols) {
  char full[128];
  snprintf(full, sizeof full, "%s%s", in->prefix, name);
  return table_find(in->tensors, full, rows, cols, false, in->error);
}

// When the values of *tensor come from a read function: reads all of them into host memory, where
// they stay until the next call, and lets *tensor be `copy`, which has them.
int hold_values(Loader *in, const ksl_tensor **tensor, ksl_tensor *copy) {
  const ksl_tensor *t = *tensor;
  if (!t->read || in->b->measuring) return KSL_OK;
  // What was held before may still be on its way.
  if (!keep_error(&in->b->device, cudaStreamSynchronize(in->b->device.stream), "copying weights"))
    return device_failed(in, t->name);
  uint64_t bytes[3];
  encoding_bytes(t->encoding, t->rows, t->cols, &bytes[0], &bytes[1], &bytes[2]);
  for (int i = 0; i < 3; i++) {
    if (bytes[i] <= in->held_bytes[i]) continue;
    free(in->held[i]);
    in->held[i] = malloc(bytes[i]);
    in->held_bytes[i] = in->held[i] ? bytes[i] : 0;
    if (!in->held[i])
      return fail(in->error, KSL_NOMEM, "There is not enough memory to read the weights (%s).",
                  t->name);
  }
  float *globals = static_cast<float *>(in->held[2]);
  if (t->read(t->context, 0, t->rows, in->held[0], in->held[1], globals))
    return fail(in->error, KSL_INVALID, "tensor %s: its rows cannot be read", t->name);
  *copy = *t;
  copy->read = nullptr;
  copy->data = in->held[0];
  copy->scales = in->held[1];
  copy->globals = globals;
  copy->data_bytes = bytes[0];
  copy->scales_bytes = bytes[1];
  copy->globals_bytes = bytes[2];
  *tensor = copy;
  return KSL_OK;
}

bool is_packed(int encoding) {
  return encoding == KSL_ENC_E2M3 || encoding == KSL_ENC_NVFP4;
}
// Whether bf16 matrices are packed as halves: where nothing asks for float32 activations, on
// devices that multiply many tokens by them.
bool packs_bf16(const Backend *b) {
  return b->major == 9 && b->config->activations == KSL_ACT_AUTO;
}

void copy_in(Loader *in, void *to, const void *from, uint64_t bytes) {
  if (bytes == 0) return;
  keep_error(&in->b->device,
             cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, in->b->device.stream),
             "copying weights");
}

// Rows [row0, row0 + rows) of a tensor into the buffers of `raw`. row0: a multiple of 128.
void read_rows(Loader *in, const ksl_tensor *t, int64_t row0, int rows, const Raw &raw) {
  if (in->b->measuring) return;
  uint8_t *codes = static_cast<uint8_t *>(const_cast<void *>(raw.codes));
  void *scales = const_cast<void *>(raw.scales);
  float *globals = const_cast<float *>(raw.globals);
  if (t->fill_kind != KSL_FILL_NONE) {
    const FillArgs a = {t->fill_kind,
                        t->fill_seed,
                        t->fill_scale,
                        t->encoding,
                        row0,
                        rows,
                        static_cast<int>(t->cols),
                        codes,
                        scales,
                        globals,
                        in->most};
    fill_rows(&in->b->device, a);
    return;
  }
  uint64_t skip[3] = {0, 0, 0}, size[3];
  if (row0 > 0) encoding_bytes(t->encoding, row0, t->cols, &skip[0], &skip[1], &skip[2]);
  encoding_bytes(t->encoding, rows, t->cols, &size[0], &size[1], &size[2]);
  copy_in(in, codes, static_cast<const uint8_t *>(t->data) + skip[0], size[0]);
  copy_in(in, scales, static_cast<const uint8_t *>(t->scales) + skip[1], size[1]);
  copy_in(in, globals, reinterpret_cast<const uint8_t *>(t->globals) + skip[2], size[2]);
}

// A tensor as stored, in memory of its own.
int load_raw(Loader *in, const ksl_tensor *t, Raw *out) {
  ksl_tensor copy;
  const int code = hold_values(in, &t, &copy);
  if (code) return code;
  Backend *b = in->b;
  uint64_t codes, scales, globals;
  encoding_bytes(t->encoding, t->rows, t->cols, &codes, &scales, &globals);
  uint8_t *memory = static_cast<uint8_t *>(own_device(b, codes));
  uint8_t *scale_memory = static_cast<uint8_t *>(own_device(b, scales + 1));
  float *global_memory = static_cast<float *>(own_device(b, globals + 4));
  if (!memory || !scale_memory || !global_memory) return out_of_memory(in, t->name);
  *out = {t->encoding,  static_cast<int>(t->rows), static_cast<int>(t->cols), memory, scale_memory,
          global_memory};
  if (t->encoding == KSL_ENC_NVFP4 && t->fill_kind != KSL_FILL_NONE) {
    unsigned *most = static_cast<unsigned *>(own_device(b, globals));
    if (!most) return out_of_memory(in, t->name);
    unsigned *saved = in->most;
    in->most = most;
    read_rows(in, t, 0, static_cast<int>(t->rows), *out);
    in->most = saved;
  } else {
    read_rows(in, t, 0, static_cast<int>(t->rows), *out);
  }
  b->encodings |= 1u << t->encoding;
  b->weight_bytes += codes + scales + globals;
  if (b->device.error != cudaSuccess) return device_failed(in, t->name);
  return KSL_OK;
}

// The largest E8M0 byte of a tensor, or a bound of it for one that is made here.
int packed_unit(const ksl_tensor *t) {
  if (t->encoding != KSL_ENC_E2M3) return 0;
  int most = 0;
  if (t->fill_kind == KSL_FILL_NONE) {
    for (uint64_t i = 0; i < t->scales_bytes; i++) {
      const int e = static_cast<const uint8_t *>(t->scales)[i];
      if (e > most) most = e;
    }
    return most;
  }
  int e = 0;
  const double fraction = frexp(fabs(static_cast<double>(t->fill_scale)) / 7.5, &e);
  if (fraction == 0) return 127;
  if (fraction == 0.5) e--;
  return (e < -127 ? -127 : (e > 127 ? 127 : e)) + 127;
}

int pack_tensor(Loader *in, const ksl_tensor *t, Packed *to, int first, int mode) {
  if (in->b->measuring) return KSL_OK;
  ksl_tensor copy;
  const int code = hold_values(in, &t, &copy);
  if (code) return code;
  Backend *b = in->b;
  uint64_t per_block[3];  // of 128 rows
  encoding_bytes(t->encoding, 128, t->cols, &per_block[0], &per_block[1], &per_block[2]);
  int64_t piece = kStageBytes / static_cast<int64_t>(per_block[0]) * 128;
  if (piece < 128) piece = 128;
  const int unit = packed_unit(t);
  const Raw raw = {t->encoding, 0, static_cast<int>(t->cols), in->codes, in->scales, in->globals};
  for (int64_t row = 0; row < t->rows; row += piece) {
    const int rows = static_cast<int>(t->rows - row < piece ? t->rows - row : piece);
    read_rows(in, t, row, rows, raw);
    pack_rows(&b->device, raw, row, rows, to, first, mode, unit);
  }
  b->encodings |= 1u << t->encoding;
  return b->device.error == cudaSuccess ? KSL_OK : device_failed(in, t->name);
}

struct Wanted {
  const char *name;
  int64_t rows;
};

// What becomes of a group's products: written as they are, gate and up joined, or added to x by a
// reader that can add slices.
enum GroupUse { kApart, kPaired, kSummed };

// Memory of a packed form, and the rows of those of `tensors` that are its parts.
int fill_packed(Loader *in, const ksl_tensor *const *tensors, GroupUse use, Packed *m) {
  Backend *b = in->b;
  const int columns = b->config->wave_columns, slots = b->config->slots;
  const bool sliced = slices_pay(columns > slots ? columns : slots, b->wide);
  const int block = packed_block_bytes(m->encoding);
  m->shares = choose_shares(m->tiles, m->supers, block, use == kSummed && sliced, b->device.room);
  m->joined = join_slices(m->shares, m->tiles, block, b->device.room);
  if (m->shares.slices > b->most_slices) b->most_slices = m->shares.slices;
  const uint64_t bytes =
      static_cast<uint64_t>(m->tiles) * m->supers * packed_block_bytes(m->encoding);
  m->data = static_cast<uint8_t *>(own_device(b, bytes));
  m->scale = own_many<float>(b, static_cast<size_t>(m->tiles) * 16);
  if (!m->data || !m->scale) return out_of_memory(in, tensors[m->parts[0].matrix]->name);
  b->weight_bytes += bytes + static_cast<uint64_t>(m->tiles) * 64;
  for (int p = 0; p < m->n_parts; p++) {
    const int code =
        pack_tensor(in, tensors[m->parts[p].matrix], m, m->parts[p].first, m->pair ? 1 + p : 0);
    if (code) return code;
  }
  return KSL_OK;
}

// Matrices [0, n) with one input into a group.
int load_group(Loader *in, const Wanted *wanted, int n, int64_t cols, GroupUse use, Group *out,
               bool read_per_token = true) {
  Backend *b = in->b;
  const ksl_tensor *tensors[kGroupParts];
  bool all_bf16 = true;
  for (int i = 0; i < n; i++) {
    tensors[i] = find(in, wanted[i].name, wanted[i].rows, cols);
    if (!tensors[i]) return KSL_INVALID;
    all_bf16 = all_bf16 && tensors[i]->encoding == KSL_ENC_BF16;
  }
  *out = Group{};
  const uint64_t before = b->weight_bytes;
  const bool pair = use == kPaired && tensors[0]->encoding == tensors[1]->encoding;
  const auto packed_form = [&](int encoding) {
    Packed m = {};
    m.encoding = encoding;
    m.cols = static_cast<int>(cols);
    m.supers = divide_up(cols, kSuper);
    m.pair = pair;
    for (int j = 0; j < n; j++) {
      if (tensors[j]->encoding != encoding) continue;
      PackedPart *part = &m.parts[m.n_parts++];
      part->matrix = j;
      part->rows = static_cast<int>(wanted[j].rows);
      part->tiles = divide_up(wanted[j].rows, pair ? 8 : 16);
      part->first = pair ? 0 : m.tiles;
      m.tiles = pair ? part->tiles : m.tiles + part->tiles;
    }
    return m;
  };
  // A few bf16 rows beside packed matrices are taken along by their kernel as they are.
  const bool whole_bf16 = all_bf16 && packs_bf16(b);
  for (int i = 0; i < n; i++) {
    const int encoding = tensors[i]->encoding;
    if (!is_packed(encoding) && !whole_bf16) {
      out->plain_matrix[out->n_plain] = i;
      const int code = load_raw(in, tensors[i], &out->plain[out->n_plain++]);
      if (code) return code;
      continue;
    }
    bool done = false;
    for (int j = 0; j < i; j++) done = done || tensors[j]->encoding == encoding;
    if (done) continue;
    Packed *m = &out->packed[out->n_packed++];
    *m = packed_form(encoding);
    const int code = fill_packed(in, tensors, use, m);
    if (code) return code;
  }
  if (read_per_token) b->token_bytes += b->weight_bytes - before;
  if (out->n_packed > 0 && out->n_plain > 0 && packs_bf16(b)) {
    out->halves = packed_form(KSL_ENC_BF16);
    if (out->halves.n_parts < out->n_plain)  // others are among them
      out->halves = Packed{};
    else
      return fill_packed(in, tensors, use, &out->halves);
  }
  return KSL_OK;
}

// A small tensor as float32 [rows][cols], `offset` added to each value.
int load_values(Loader *in, const char *name, int64_t rows, int64_t cols, float offset,
                float **out) {
  Backend *b = in->b;
  const ksl_tensor *t = find(in, name, rows, cols);
  if (!t) return KSL_INVALID;
  ksl_tensor copy;
  const int code = hold_values(in, &t, &copy);
  if (code) return code;
  if (t->encoding != KSL_ENC_F32 && t->encoding != KSL_ENC_BF16)
    return fail(in->error, KSL_INVALID, "Tensor %s must be float32 or bfloat16.", t->name);
  float *values = own_many<float>(b, rows * cols);
  if (!values) return out_of_memory(in, t->name);
  const Raw raw = {
      t->encoding, static_cast<int>(rows), static_cast<int>(cols), in->codes, in->scales,
      in->globals};
  read_rows(in, t, 0, static_cast<int>(rows), raw);
  if (!b->measuring) decode_values(&b->device, raw, offset, values);
  b->weight_bytes += rows * cols * sizeof(float);
  *out = values;
  return b->device.error == cudaSuccess ? KSL_OK : device_failed(in, t->name);
}

int load_linear(Loader *in, LinearWeights *w) {
  Backend *b = in->b;
  const ModelSpec *s = b->spec;
  const int channels = s->conv_channels, heads = s->lin_value_heads;
  const Wanted inputs[] = {{"linear_attn.in_proj_qkv.weight", channels},
                           {"linear_attn.in_proj_z.weight", s->v_width},
                           {"linear_attn.in_proj_b.weight", heads},
                           {"linear_attn.in_proj_a.weight", heads}};
  const Wanted output = {"linear_attn.out_proj.weight", s->hidden};
  float *taps = nullptr;
  int code = load_group(in, inputs, 4, s->hidden, kApart, &w->in);
  if (!code) code = load_group(in, &output, 1, s->v_width, kSummed, &w->out);
  if (!code) code = load_values(in, "linear_attn.conv1d.weight", channels, kTaps, 0, &taps);
  if (!code) code = load_values(in, "linear_attn.A_log", heads, 1, 0, &w->decay_rate);
  if (!code) code = load_values(in, "linear_attn.dt_bias", heads, 1, 0, &w->dt_bias);
  if (!code) code = load_values(in, "linear_attn.norm.weight", s->lin_value_dim, 1, 0, &w->norm);
  if (code) return code;
  w->taps = own_many<float>(b, static_cast<size_t>(kTaps) * channels);
  if (!w->taps) return out_of_memory(in, "linear_attn.conv1d.weight");
  if (b->measuring) return KSL_OK;
  negative_exp(&b->device, w->decay_rate, heads);
  transpose_taps(&b->device, taps, w->taps, channels, kTaps);
  return KSL_OK;
}

int load_full(Loader *in, FullWeights *w, bool stores_alone) {
  const ModelSpec *s = in->b->spec;
  const Wanted inputs[] = {{"self_attn.q_proj.weight", 2 * s->q_width},
                           {"self_attn.k_proj.weight", s->kv_width},
                           {"self_attn.v_proj.weight", s->kv_width}};
  const Wanted output = {"self_attn.o_proj.weight", s->hidden};
  int code = KSL_OK;
  if (stores_alone) {
    // Keys and values of the MTP layer are made without its queries.
    code = load_group(in, inputs, 1, s->hidden, kApart, &w->in, false);
    if (!code) code = load_group(in, inputs + 1, 2, s->hidden, kApart, &w->kv);
  } else {
    code = load_group(in, inputs, 3, s->hidden, kApart, &w->in);
  }
  if (!code) {
    code = load_group(in, &output, 1, s->q_width, kSummed, &w->out, !stores_alone);
  }
  if (!code) code = load_values(in, "self_attn.q_norm.weight", s->head_dim, 1, 1, &w->q_norm);
  if (!code) code = load_values(in, "self_attn.k_norm.weight", s->head_dim, 1, 1, &w->k_norm);
  return code;
}

int load_layer(Loader *in, LayerWeights *w, bool mtp) {
  const ModelSpec *s = in->b->spec;
  int code = load_values(in, "input_layernorm.weight", s->hidden, 1, 1, &w->in_norm);
  if (!code)
    code = load_values(in, "post_attention_layernorm.weight", s->hidden, 1, 1, &w->post_norm);
  if (!code) {
    code = w->kind == KSL_LAYER_FULL ? load_full(in, &w->full, mtp) : load_linear(in, &w->linear);
  }
  const Wanted gate_up[] = {{"mlp.gate_proj.weight", s->intermediate},
                            {"mlp.up_proj.weight", s->intermediate}};
  const Wanted down = {"mlp.down_proj.weight", s->hidden};
  if (!code) code = load_group(in, gate_up, 2, s->hidden, kPaired, &w->gate_up, !mtp);
  if (!code) code = load_group(in, &down, 1, s->intermediate, kSummed, &w->down, !mtp);
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
  const uint64_t before = b->weight_bytes;
  if (!head && embedding->encoding == KSL_ENC_BF16 && packs_bf16(b)) {
    const Wanted wanted = {"model.embed_tokens.weight", s->vocab};
    const int code = load_group(in, &wanted, 1, s->hidden, kApart, &b->head);
    const Packed &m = b->head.packed[0];
    b->embedding = {kRawPackedBf16, s->vocab, s->hidden, m.data, m.scale, nullptr};
    return code;
  }
  const int code = load_raw(in, embedding, &b->embedding);
  if (code) return code;
  if (head) {
    const Wanted wanted = {"lm_head.weight", s->vocab};
    return load_group(in, &wanted, 1, s->hidden, kApart, &b->head);
  }
  b->head = Group{};
  b->head.plain[0] = b->embedding;
  b->head.n_plain = 1;
  b->token_bytes += b->weight_bytes - before;
  return KSL_OK;
}

int load_mtp(Loader *in) {
  Backend *b = in->b;
  const int h = b->spec->hidden;
  const Wanted fc = {"mtp.fc.weight", h};
  int code = load_group(in, &fc, 1, 2 * static_cast<int64_t>(h), kApart, &b->mtp_fc);
  if (!code)
    code = load_values(in, "mtp.pre_fc_norm_embedding.weight", h, 1, 1, &b->mtp_norm_embedding);
  if (!code) code = load_values(in, "mtp.pre_fc_norm_hidden.weight", h, 1, 1, &b->mtp_norm_hidden);
  if (!code) code = load_values(in, "mtp.norm.weight", h, 1, 1, &b->mtp_norm);
  if (code) return code;
  LayerWeights *layer = &b->layers[b->spec->layers];
  layer->kind = KSL_LAYER_FULL;
  layer->index = b->spec->full_layers;
  snprintf(in->prefix, sizeof in->prefix, "mtp.layers.0.");
  return load_layer(in, layer, true);
}

// Staging for the largest piece of any tensor.
int make_staging(Loader *in) {
  int64_t codes = 1, scales = 1, globals = 4;
  for (int i = 0; i < in->tensors->n; i++) {
    const ksl_tensor &t = in->tensors->tensors[i];
    uint64_t block[3], all[3];
    if (!encoding_bytes(t.encoding, 128, t.cols, &block[0], &block[1], &block[2])) continue;
    if (!encoding_bytes(t.encoding, t.rows, t.cols, &all[0], &all[1], &all[2])) continue;
    const bool small = t.cols <= kTaps;  // read as a whole by load_values
    const bool halves = t.encoding == KSL_ENC_BF16 && packs_bf16(in->b);
    if (!is_packed(t.encoding) && !halves && !small) continue;
    int64_t pieces = kStageBytes / static_cast<int64_t>(block[0]);
    if (pieces < 1) pieces = 1;
    const int64_t needed[3] = {static_cast<int64_t>(block[0]) * pieces,
                               static_cast<int64_t>(block[1]) * pieces,
                               static_cast<int64_t>(block[2]) * pieces};
    int64_t *most[3] = {&codes, &scales, &globals};
    for (int k = 0; k < 3; k++) {
      const int64_t whole = static_cast<int64_t>(all[k]);
      const int64_t piece = small || whole < needed[k] ? whole : needed[k];
      if (piece > *most[k]) *most[k] = piece;
    }
  }
  in->codes_bytes = codes;
  in->scales_bytes = scales;
  in->globals_bytes = globals;
  if (in->b->measuring) return KSL_OK;
  return cudaMalloc(&in->codes, codes) == cudaSuccess &&
                 cudaMalloc(&in->scales, scales) == cudaSuccess &&
                 cudaMalloc(&in->globals, globals) == cudaSuccess &&
                 cudaMalloc(&in->most, globals) == cudaSuccess
             ? KSL_OK
             : out_of_memory(in, "staging");
}

int load_all(Loader *in) {
  Backend *b = in->b;
  const ModelSpec *spec = b->spec;
  int code = make_staging(in);
  if (!code) code = load_head(in);
  if (!code) code = load_values(in, "model.norm.weight", spec->hidden, 1, 1, &b->final_norm);
  int linear = 0, full = 0;
  for (int i = 0; i < spec->layers && !code; i++) {
    LayerWeights *layer = &b->layers[i];
    layer->kind = spec->layer_kinds[i];
    layer->index = layer->kind == KSL_LAYER_FULL ? full++ : linear++;
    snprintf(in->prefix, sizeof in->prefix, "model.layers.%d.", i);
    code = load_layer(in, layer, false);
  }
  in->prefix[0] = 0;
  if (!code && spec->mtp_layers) code = load_mtp(in);
  if (b->measuring) return code;
  // The staging and the caller's data are in use until here.
  if (!keep_error(&b->device, cudaStreamSynchronize(b->device.stream), "loading weights") && !code)
    code = device_failed(in, "the weights");
  return code;
}

}  // namespace

int load_weights(Backend *b, const TensorTable *tensors, uint64_t *staging, ksl_error *error) {
  Loader in = {};
  in.b = b;
  in.tensors = tensors;
  in.error = error;
  b->layers = alloc_many<LayerWeights>(b->alloc, b->spec->layers + b->spec->mtp_layers);
  if (!b->layers) return out_of_memory(&in, "layers");
  const int code = load_all(&in);
  cudaFree(in.codes);
  cudaFree(in.scales);
  cudaFree(in.globals);
  cudaFree(in.most);
  for (void *held : in.held) free(held);
  *staging = in.codes_bytes + in.scales_bytes + 2 * in.globals_bytes;
  return code;
}

}  // namespace ksl
