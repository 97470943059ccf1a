// The stage table of the CUDA backend, and the taps between stages. A span that is one kernel still
// leaves every tap inside it in a buffer, so all of them can be compared.
#include "embed/embed.cuh"
#include "head/gather.cuh"
#include "mlp/act.cuh"
#include "mtp/input.cuh"
#include "norm/norm.cuh"
#include "state.cuh"

namespace ksl {

bool makes_heads(const Backend *b) {
  return b->attn_tiles && !b->taps && !b->kv_only && !(b->trunk && b->multi) &&
         attn_tile_makes_heads(&b->device, b->kv, b->spec->rotary_dims / 2, b->batch.n,
                               b->most_position);
}

namespace {

const Split kNoSplit = {nullptr, 0, 1.0f, 0, false, false, false};

Split split_for(const Group &group, const Split &split) {
  return group.n_packed > 0 ? split : kNoSplit;
}

// The form of what norms make for these groups.
Split normed_split(const Backend *b, const Group &group, const Group *other = nullptr) {
  Split split = b->hidden_split;
  int packed = 0, halves = 0;
  split.direct = split.groups > 0 && split.e4m3;
  for (const Group *g : {&group, other}) {
    if (g == nullptr) continue;
    halves += g->halves.n_parts;
    for (int i = 0; i < g->n_packed; i++, packed++)
      split.direct = split.direct && g->packed[i].encoding == KSL_ENC_E2M3;
  }
  split.halves = split.groups > 0 && halves > 0;
  return packed > 0 ? split : kNoSplit;
}
// Where their float32 form goes; null: nobody reads it.
float *normed_floats(const Backend *b, const Group &group, const Group *other = nullptr) {
  const Split split = normed_split(b, group, other);
  const bool wanted = b->taps || plain_reads_floats(group, split) ||
                      (other != nullptr && plain_reads_floats(*other, split));
  return wanted ? b->normed : nullptr;
}
// The norm before a layer's mixer. Of the MTP layer two groups read it.
Split in_split(const Backend *b, int layer) {
  const LayerWeights &w = b->layers[layer];
  if (w.kind != KSL_LAYER_FULL) return normed_split(b, w.linear.in);
  return normed_split(b, w.full.in, layer < b->spec->layers ? nullptr : &w.full.kv);
}
float *in_floats(const Backend *b, int layer) {
  const LayerWeights &w = b->layers[layer];
  if (w.kind != KSL_LAYER_FULL) return normed_floats(b, w.linear.in);
  return normed_floats(b, w.full.in, layer < b->spec->layers ? nullptr : &w.full.kv);
}

// Whether the product that reads a norm makes it.
bool makes_norm(const Backend *b, const Group &group) {
  return !b->taps && b->hidden_split.groups == 0 &&
         takes_norm(b->device, group, b->spec->hidden, b->batch.n);
}
// The norm that is left for this product; null: it has been made.
const InputNorm *owed_norm(Backend *b) {
  const bool owed = b->norm_owed;
  b->norm_owed = false;
  return owed ? &b->norm : nullptr;
}
// Of the trunk's layers: the product behind a mixer's or the MLP's.
const Group *in_group(const Backend *b, int layer) {
  const LayerWeights &w = b->layers[layer];
  return w.kind == KSL_LAYER_FULL ? &w.full.in : &w.linear.in;
}

void run_norm(Backend *b, const NormArgs &a) {
  if (a.split.data != nullptr && a.split.groups > 0)
    panel_norm(&b->device, a, b->batch.n);
  else
    add_norm(&b->device, a, b->batch.n);
}

SlabPool slabs_of(const Backend *b, int linear) {
  SlabPool pool = b->slabs;
  pool.state_offset = linear * b->state_layer;
  pool.history_offset = b->conv_offset + linear * b->conv_layer;
  return pool;
}

GdnShape gdn_shape(const ModelSpec *s) {
  return {s->lin_key_heads, s->lin_value_heads, s->lin_key_dim, s->lin_value_dim, s->conv_channels};
}

// The columns of rows that are not tiled, and how many; null: all columns of the batch.
const int32_t *short_columns(const Backend *b, int *n) {
  const bool all = !b->trunk || b->n_chunks == 0;
  *n = all ? b->batch.n : b->n_short;
  return all ? nullptr : b->d_columns + kShort * b->column_capacity;
}

}  // namespace

Rotary rotary_of(const Backend *b) {
  const int half = b->spec->kv_layers ? b->spec->rotary_dims / 2 : 0;
  return {b->frequency, half, b->cos, b->sin};
}

namespace {

void stage_embed(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  embed(&b->device, b->embedding, b->batch, b->x, b->hidden_stride, rotary_of(b));
  b->normed_ready = b->norm_owed = false;
}

void stage_in_norm(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  if (!b->normed_ready)
    norm_columns(b, b->layers[layer].in_norm, in_floats(b, layer), in_split(b, layer), false,
                 false);
  b->normed_ready = false;
}

void stage_gdn_project(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const Output outputs[] = {{b->qkv, b->conv_stride, 0},
                            {b->z, b->value_stride, 0},
                            {b->gate_b, b->head_stride, 0},
                            {b->gate_a, b->head_stride, 0}};
  gemm_group(&b->device, b->layers[layer].linear.in, b->normed, b->hidden_stride,
             in_split(b, layer), outputs, nullptr, b->batch.n, owed_norm(b));
}

ConvArgs conv_args(Backend *b, const LinearWeights &w, int linear) {
  ConvArgs a = {};
  a.shape = gdn_shape(b->spec);
  a.rows = b->d_rows;
  a.row_of = b->batch.row;
  a.slabs = slabs_of(b, linear);
  a.qkv = b->qkv;
  a.qkv_stride = b->conv_stride;
  a.taps = w.taps;
  a.conv = b->conv;
  a.conv_silu = b->taps ? b->conv_silu : nullptr;
  a.conv_stride = b->conv_stride;
  a.a = b->gate_a;
  a.b = b->gate_b;
  a.decay_rate = w.decay_rate;
  a.dt_bias = w.dt_bias;
  a.g = b->g;
  a.decay = b->decay;
  a.beta = b->beta;
  a.head_stride = b->head_stride;
  a.gates = true;
  a.history = true;
  return a;
}

float *kept_layer(Backend *b, int linear) {
  return b->keep + linear * b->keep_columns * b->keep_floats;
}

void stage_gdn_conv(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LayerWeights &w = b->layers[layer];
  ConvArgs c = conv_args(b, w.linear, w.index);
  int n = 0;
  c.list = short_columns(b, &n);
  // gdn_step does all of it for its rows; then these are taps only.
  c.history = !b->gdn_fused;
  if (n > 0 && (!b->gdn_fused || b->taps)) gdn_conv(&b->device, c, n);
  if (b->n_chunks > 0) gdn_chunk_conv(&b->device, c, b->d_chunks, b->n_chunks);
  if (b->gdn_fused ? b->n_chunks > 0 : b->multi) {
    const HistoryArgs a = {b->spec->conv_channels, b->d_rows, slabs_of(b, w.index), b->qkv,
                           b->conv_stride,         false,     b->gdn_fused};
    gdn_history(&b->device, a, b->shape_rows);
  }
  if (b->n_kept > 0 && !b->gdn_fused) {
    const KeepArgs a = {b->d_rows,
                        b->batch.row,
                        b->qkv,
                        b->decay,
                        b->beta,
                        b->spec->conv_channels,
                        b->spec->lin_value_heads,
                        b->conv_stride,
                        b->head_stride,
                        kept_layer(b, w.index),
                        b->keep_floats};
    gdn_keep(&b->device, a, b->batch.n);
  }
}

ScanArgs scan_args(Backend *b, int linear) {
  ScanArgs a = {};
  a.shape = gdn_shape(b->spec);
  a.rows = b->d_rows;
  a.slabs = slabs_of(b, linear);
  a.conv = b->conv;
  a.conv_stride = b->conv_stride;
  a.decay = b->decay;
  a.beta = b->beta;
  a.head_stride = b->head_stride;
  a.eps = b->spec->norm_eps;
  a.split = kNoSplit;
  return a;
}

void scan_chunks(Backend *b, const LayerWeights &w, const ScanArgs &scan) {
  ChunkArgs a = {};
  a.shape = scan.shape;
  a.chunks = b->d_chunks;
  a.slabs = scan.slabs;
  a.conv = b->conv;
  a.conv_stride = b->conv_stride;
  a.g = b->g;
  a.beta = b->beta;
  a.head_stride = b->head_stride;
  a.core = b->core;
  a.core_stride = b->value_stride;
  a.operands = b->chunk_operands;
  a.decays = b->chunk_decays;
  for (int i = 0; i < b->n_batches; i++) {
    const ChunkBatch &batch = b->batches[i];
    a.first = batch.first;
    a.n = batch.n;
    a.runs = b->d_runs + batch.first_run;
    a.n_runs = batch.n_runs;
    gdn_chunk_prepare(&b->device, a);
    gdn_chunk_scan(&b->device, a);
  }
  const ChunkNormArgs n = {b->d_chunks,     a.shape.value_heads, b->core,    b->z,    w.linear.norm,
                           b->value_stride, scan.gated,          scan.split, scan.eps};
  gdn_chunk_norm(&b->device, n, b->n_chunks);
}

// Of the linear layer `linear` and the ones after it.
StepArgs step_args(Backend *b, int linear) {
  StepArgs a = {};
  a.shape = gdn_shape(b->spec);
  a.rows = b->d_rows;
  a.slabs = slabs_of(b, linear);
  a.state_layer = b->state_layer;
  a.history_layer = b->conv_layer;
  a.qkv_stride = b->conv_stride;
  a.head_stride = b->head_stride;
  a.keep = kept_layer(b, linear);
  a.keep_layer = b->keep_columns * b->keep_floats;
  a.keep_stride = static_cast<int>(b->keep_floats);
  a.n_rows = b->shape_rows;
  a.max_rows = b->config->slots;
  a.single = !b->multi;
  a.long_rows = b->multi && b->batch.n > 4 * b->shape_rows;
  a.together = 2 * b->device.room.processors;
  a.arrived = b->gdn_arrived + static_cast<int64_t>(linear) * a.max_rows * a.shape.key_heads;
  return a;
}

void step_rows(Backend *b, const LayerWeights &w) {
  StepArgs a = step_args(b, w.index);
  const bool floats = b->taps || w.linear.out.n_plain > 0;
  a.qkv = b->qkv;
  a.taps[0] = w.linear.taps;
  a.a = b->gate_a;
  a.b = b->gate_b;
  a.decay_rate = w.linear.decay_rate;
  a.dt_bias = w.linear.dt_bias;
  a.z = b->z;
  a.norm = w.linear.norm;
  a.core = b->taps ? b->core : nullptr;
  a.gated = floats ? b->gated : nullptr;
  a.value_stride = b->value_stride;
  a.split = split_for(w.linear.out, b->value_split);
  a.eps = b->spec->norm_eps;
  a.beside = leaves_room(b->device, w.linear.in, b->batch.n);
  gdn_step(&b->device, a);
}

void stage_gdn_scan(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LayerWeights &w = b->layers[layer];
  ScanArgs a = scan_args(b, w.index);
  a.core = b->core;
  a.core_stride = b->value_stride;
  a.z = b->z;
  a.norm = w.linear.norm;
  a.gated = b->gated;
  a.split = split_for(w.linear.out, b->value_split);
  if (b->n_short > 0 && b->gdn_fused)
    step_rows(b, w);
  else if (b->n_short > 0)
    gdn_scan(&b->device, a, b->shape_rows);
  if (!b->taps && w.linear.out.n_plain == 0) a.gated = nullptr;
  if (b->n_chunks > 0) scan_chunks(b, w, a);
}

// A product that is added to x, and the norm that follows, which `reader` makes if it can. Kernels
// of many tokens, and of few, add it themselves.
void out_and_norm(Backend *b, const Group &group, const float *x, int x_stride, const Split &split,
                  const float *gain, float *out, const Split &out_split, bool zero_first,
                  const Group *reader) {
  const bool many = split.groups > 0;
  const bool whole =
      !b->taps && (many ? group.n_packed > 0 : takes_sum(b->device, group, b->batch.n));
  const Output output = {whole ? b->x : b->partials, b->hidden_stride, b->partial_stride, whole};
  gemm_group(&b->device, group, x, x_stride, split, &output, nullptr, b->batch.n);
  if (reader != nullptr && whole && makes_norm(b, *reader)) {
    b->norm = {b->x, b->hidden_stride, b->spec->hidden, gain, b->spec->norm_eps};
    b->norm_owed = true;
    return;
  }
  // Products of many tokens are whole.
  Slices slices = {1, false};
  if (group.n_packed > 0 && !many) slices = slices_of(group.packed[0], b->batch.n);
  NormArgs a = {};
  a.x = b->x;
  a.stride = b->hidden_stride;
  a.width = b->spec->hidden;
  a.add = whole ? nullptr : b->partials;
  a.slices = slices;
  a.slice_stride = b->partial_stride;
  a.added = b->taps ? b->mixed : nullptr;
  a.gain = gain;
  a.eps = b->spec->norm_eps;
  a.out = out;
  a.out_stride = b->hidden_stride;
  a.split = out_split;
  a.zero_at = zero_first ? b->batch.position : nullptr;
  if (out == b->final && b->plain)
    a.keep = {b->d_rows,       b->batch.row,
              b->batch.source, b->slabs.data + b->hidden_offset,
              b->slabs.stride, b->spec->mtp_layers ? b->waiting_hidden : nullptr};
  run_norm(b, a);
}

void stage_gdn_out(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LayerWeights &w = b->layers[layer];
  out_and_norm(b, w.linear.out, b->gated, b->value_stride, b->value_split, w.post_norm,
               normed_floats(b, w.gate_up), normed_split(b, w.gate_up), false, &w.gate_up);
}

void stage_attn_project(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const FullWeights &w = b->layers[layer].full;
  const Output q = {b->query_gate, b->query_gate_stride, 0};
  const Output kv[] = {{b->k, b->kv_stride, 0}, {b->v, b->kv_stride, 0}};
  const Output all[] = {q, kv[0], kv[1]};
  const Split split = in_split(b, layer);
  if (layer < b->spec->layers) {
    gemm_group(&b->device, w.in, b->normed, b->hidden_stride, split, all, nullptr, b->batch.n,
               owed_norm(b));
    return;
  }
  gemm_group(&b->device, w.kv, b->normed, b->hidden_stride, split, kv, nullptr, b->batch.n);
  if (!b->kv_only)
    gemm_group(&b->device, w.in, b->normed, b->hidden_stride, split, &q, nullptr, b->batch.n);
}

KvLayer kv_layer(Backend *b, int layer) {
  KvLayer kv = b->kv;
  kv.layer_offset = b->layers[layer].index * b->kv_layer_bytes;
  kv.first_key = layer == b->spec->layers ? 1 : 0;
  return kv;
}

// Where the heads of a batch leave sums of fragments; null: floats, which all can read.
float *fragment_sums(const Backend *b) {
  const bool made = b->attn_tiles && !b->taps && !(b->trunk && b->n_tiles > 0) &&
                    attn_heads_fragments(b->kv.head_dim, b->spec->rotary_dims / 2);
  return made ? b->pregate : nullptr;
}

HeadsArgs heads_args(Backend *b, int layer) {
  const ModelSpec *s = b->spec;
  const FullWeights &w = b->layers[layer].full;
  HeadsArgs a = {};
  a.columns = b->batch;
  a.kv = kv_layer(b, layer);
  a.format = b->config->kv_format;
  a.query_gate = b->query_gate;
  a.query_gate_stride = b->query_gate_stride;
  a.k = b->k;
  a.v = b->v;
  a.kv_stride = b->kv_stride;
  a.q = b->taps || b->stored_q == b->q ? b->q : nullptr;
  a.stored_q = b->stored_q;
  a.q_sums = fragment_sums(b);
  a.q_stride = b->query_stride;
  a.q_norm = w.q_norm;
  a.k_norm = w.k_norm;
  a.cos = b->cos;
  a.sin = b->sin;
  a.heads = s->heads;
  a.half = s->rotary_dims / 2;
  a.eps = s->norm_eps;
  a.kv_only = b->kv_only;
  a.keep_k = b->taps;
  return a;
}

void stage_attn_heads(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  if (!makes_heads(b)) attn_heads(&b->device, heads_args(b, layer));
}

void stage_attn_core(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const ModelSpec *s = b->spec;
  const KvLayer kv = kv_layer(b, layer);
  const Group &out = b->layers[layer].full.out;
  const GateArgs gate = {b->query_gate,
                         b->query_gate_stride,
                         b->taps ? b->pregate : nullptr,
                         b->taps || out.n_plain > 0 ? b->attn_gated : nullptr,
                         b->query_stride,
                         split_for(out, b->query_split)};
  if (b->attn_tiles) {
    TileArgs a = {};
    a.q_sums = fragment_sums(b);
    a.columns = b->batch;
    a.kv = kv;
    a.format = b->config->kv_format;
    a.q = b->stored_q;
    a.q_stride = b->query_stride;
    a.heads = s->heads;
    a.rows = b->trunk && b->multi ? b->d_rows : nullptr;
    a.n_rows = b->shape_rows;
    a.list = short_columns(b, &a.n);
    a.partial = b->attn_partial;
    const HeadsArgs heads = heads_args(b, layer);
    if (a.n > 0)
      attn_tile(&b->device, a, makes_heads(b) ? &heads : nullptr, gate, b->most_position,
                b->attn_partial_floats / (s->head_dim + 2));
    if (b->trunk && b->n_tiles > 0) {
      FlashArgs f = {kv,         a.format,   a.q,  a.q_stride, s->heads,
                     b->d_tiles, b->n_tiles, gate, nullptr,    nullptr};
      if (b->tiles_divided) {
        f.partial = b->attn_partial;
        f.partial_sums = reinterpret_cast<float2 *>(
            f.partial + static_cast<int64_t>(f.n_tiles) * s->kv_heads * kFlashRows * s->head_dim);
      }
      if (b->flash)
        attn_flash(&b->device, f);
      else
        attn_prompt(&b->device, f);
    }
    return;
  }
  CoreArgs a = {};
  a.columns = b->batch;
  a.kv = kv;
  a.format = b->config->kv_format;
  a.q = b->stored_q;
  a.q_stride = b->query_stride;
  a.heads = s->heads;
  a.partial = b->attn_partial;
  const int chunks = b->most_position / kChunkKeys + 1;
  const int64_t unit = static_cast<int64_t>(s->heads) * (s->head_dim + 2) * b->batch.n;
  a.unit_chunks = 1;
  a.units = chunks;
  if (unit * a.units > b->attn_partial_floats) {
    a.unit_chunks = kSpanChunks;
    a.units = divide_up(chunks, kSpanChunks);
  }
  if (unit * a.units > b->attn_partial_floats) {
    a.unit_chunks = 0;
    a.units = 1;
  }
  attn_core(&b->device, a);
  CombineArgs c = {};
  c.columns = b->batch;
  c.partial = b->attn_partial;
  c.units = a.units;
  c.unit_chunks = a.unit_chunks;
  c.heads = s->heads;
  c.kv_heads = s->kv_heads;
  c.d = s->head_dim;
  c.first_key = a.kv.first_key;
  c.gate = gate;
  attn_combine(&b->device, c);
}

void stage_attn_out(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LayerWeights &w = b->layers[layer];
  out_and_norm(b, w.full.out, b->attn_gated, b->query_stride, b->query_split, w.post_norm,
               normed_floats(b, w.gate_up), normed_split(b, w.gate_up), false, &w.gate_up);
}

void stage_mlp(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LayerWeights &w = b->layers[layer];
  const Split act_split = split_for(w.down, b->mlp_split);
  const bool pair = w.gate_up.n_packed == 1 && w.gate_up.packed[0].pair;
  const bool parts = !pair || b->taps;
  const bool floats = parts || w.down.n_plain > 0;
  const Output outputs[] = {{parts ? b->mlp_gate : nullptr, b->mlp_stride, 0},
                            {parts ? b->mlp_up : nullptr, b->mlp_stride, 0}};
  const PairOutput act = {floats ? b->mlp_act : nullptr, b->mlp_stride, act_split};
  gemm_group(&b->device, w.gate_up, b->normed, b->hidden_stride, normed_split(b, w.gate_up),
             outputs, &act, b->batch.n, owed_norm(b));
  if (!pair)
    mlp_act(&b->device, b->mlp_gate, b->mlp_up, b->mlp_act, b->mlp_stride, b->spec->intermediate,
            act_split, b->batch.n);
}

// The end of a layer also makes the norm that reads it.
void stage_mlp_down(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LayerWeights &w = b->layers[layer];
  const ModelSpec *s = b->spec;
  const float *gain = b->final_norm;
  float *out = b->final;
  Split split = kNoSplit;
  const bool inner = layer + 1 < s->layers;
  const Group *reader = nullptr;
  if (!inner && b->head_direct) split = head_split_of(b, b->batch.n);
  if (layer == s->layers) {
    gain = b->mtp_norm;
    out = b->chain;
  } else if (inner) {
    gain = b->layers[layer + 1].in_norm;
    out = in_floats(b, layer + 1);
    split = in_split(b, layer + 1);
    reader = in_group(b, layer + 1);
  }
  out_and_norm(b, w.down, b->mlp_act, b->mlp_stride, b->mlp_split, gain, out, split,
               layer == s->layers, reader);
  b->normed_ready = inner;
}

void nothing(void *, int) {}

void stage_head(void *context, int) {
  run_head(static_cast<Backend *>(context));
}

void stage_mtp_input(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  JoinArgs a = {};
  a.columns = b->batch;
  a.embedding = b->embedding;
  a.final = b->final;
  a.stride = b->hidden_stride;
  a.width = b->spec->hidden;
  if (b->hidden_of == kOfSlabs) {
    a.hidden = b->slabs.data + b->hidden_offset;
    a.hidden_stride = b->slabs.stride;
  } else {
    a.hidden = b->hidden_of == kOfChain ? b->chain : b->waiting_hidden;
    a.hidden_stride = b->hidden_stride;
  }
  a.norm_embedding = b->mtp_norm_embedding;
  a.norm_hidden = b->mtp_norm_hidden;
  a.eps = b->spec->norm_eps;
  a.out = b->mtp_in;
  a.out_stride = b->mtp_stride;
  a.split = split_for(b->mtp_fc, b->mtp_split);
  mtp_join(&b->device, a);
  const Output output = {b->x, b->hidden_stride, 0};
  gemm_group(&b->device, b->mtp_fc, b->mtp_in, b->mtp_stride, b->mtp_split, &output, nullptr,
             b->batch.n);
  b->normed_ready = b->norm_owed = false;
}

void stage_mtp_head(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  if (wants_tap(b->wave, "mtp_logits", false)) tap_logits(b, b->chain, kTapMtpLogits);
}

const StageSpan kInputSpans[] = {{0, 0, stage_embed}};
const StageSpan kLinearSpans[] = {
    {0, 0, stage_in_norm},    {1, 1, stage_gdn_project}, {2, 4, stage_gdn_conv},
    {5, 6, stage_gdn_scan},   {7, 9, stage_gdn_out},     {10, 11, stage_mlp},
    {12, 13, stage_mlp_down},
};
const StageSpan kFullSpans[] = {
    {0, 0, stage_in_norm},    {1, 1, stage_attn_project}, {2, 3, stage_attn_heads},
    {4, 5, stage_attn_core},  {6, 8, stage_attn_out},     {9, 10, stage_mlp},
    {11, 12, stage_mlp_down},
};
// The norms at both ends are made with the layer before them.
const StageSpan kOutputSpans[] = {{0, 0, nothing}, {1, 1, stage_head}};
const StageSpan kMtpInputSpans[] = {{0, 0, stage_mtp_input}};
const StageSpan kMtpOutputSpans[] = {{0, 0, nothing}, {1, 1, stage_mtp_head}};

#define KSL_TABLE(spans) {spans, static_cast<int>(sizeof(spans) / sizeof(spans[0]))}
const StageTable kTables[kListCount] = {KSL_TABLE(kInputSpans),    KSL_TABLE(kLinearSpans),
                                        KSL_TABLE(kFullSpans),     KSL_TABLE(kOutputSpans),
                                        KSL_TABLE(kMtpInputSpans), KSL_TABLE(kMtpOutputSpans)};
#undef KSL_TABLE

// Copies a tap's columns out of the buffer that it is in after its span. `out` of a layer and `mid`
// share x, but not a span.
void copy_tap(void *context, Tap tap, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const ModelSpec *s = b->spec;
  const int key_width = s->lin_key_heads * s->lin_key_dim;
  const struct {
    Tap tap;
    const float *data;
    int64_t stride;
  } places[] = {
      {kTapEmbed, b->x, b->hidden_stride},
      {kTapMid, b->x, b->hidden_stride},
      {kTapOut, b->x, b->hidden_stride},
      {kTapMtpInput, b->x, b->hidden_stride},
      {kTapInNorm, b->normed, b->hidden_stride},
      {kTapPostNorm, b->normed, b->hidden_stride},
      {kTapMixerOut, b->mixed, b->hidden_stride},
      {kTapMlpOut, b->mixed, b->hidden_stride},
      {kTapGdnQkv, b->qkv, b->conv_stride},
      {kTapGdnConvSilu, b->conv_silu, b->conv_stride},
      {kTapGdnQ, b->conv, b->conv_stride},
      {kTapGdnK, b->conv + key_width, b->conv_stride},
      {kTapGdnV, b->conv + 2 * key_width, b->conv_stride},
      {kTapGdnZ, b->z, b->value_stride},
      {kTapGdnCore, b->core, b->value_stride},
      {kTapGdnNormed, b->gated, b->value_stride},
      {kTapGdnA, b->gate_a, b->head_stride},
      {kTapGdnB, b->gate_b, b->head_stride},
      {kTapGdnG, b->g, b->head_stride},
      {kTapGdnBeta, b->beta, b->head_stride},
      {kTapAttnQ, b->q, b->query_stride},
      {kTapAttnK, b->k, b->kv_stride},
      {kTapAttnV, b->v, b->kv_stride},
      {kTapAttnPregate, b->pregate, b->query_stride},
      {kTapAttnGated, b->attn_gated, b->query_stride},
      {kTapMlpGate, b->mlp_gate, b->mlp_stride},
      {kTapMlpUp, b->mlp_up, b->mlp_stride},
      {kTapMlpAct, b->mlp_act, b->mlp_stride},
      {kTapFinalNorm, b->final, b->hidden_stride},
      {kTapMtpHidden, b->chain, b->hidden_stride},
  };
  if (tap == kTapAttnGate) {
    tap_append(b, tap, layer,
               {b->query_gate + s->head_dim, b->query_gate_stride, b->batch.n, s->heads,
                s->head_dim, 2 * s->head_dim});
    return;
  }
  for (const auto &place : places) {
    if (place.tap == tap) {
      tap_append(b, tap, layer, {place.data, place.stride, b->batch.n, 1, tap_width(s, tap), 0});
      return;
    }
  }
}

}  // namespace

const StageTable *stage_table(StageList list) {
  return &kTables[list];
}

void walk(Backend *b, StageList list, int layer) {
  program_walk(list, &kTables[list], b, layer, b->taps && b->trunk ? copy_tap : nullptr);
}

void tap_append(Backend *b, Tap tap, int layer, const TapColumns &from) {
  append_to_taps(b->wave, b->spec, tap, layer, from, [b](float *to, const float *data, size_t n) {
    keep_error(&b->device,
               cudaMemcpyAsync(to, data, n * sizeof *to, cudaMemcpyDeviceToHost, b->device.stream),
               "copying a tap");
  });
}

void form_splits(Backend *b) {
  const bool wide = b->wide && b->batch.n > kWideTokens;
  Split *const splits[] = {&b->hidden_split, &b->value_split, &b->query_split, &b->mlp_split,
                           &b->mtp_split};
  for (Split *split : splits) {
    split->groups = wide ? divide_up(b->column_capacity, kPanelTokens) : 0;
    split->rows = quads_take(b->major, b->batch.n);
  }
}

void head_logits(Backend *b, const float *in, int n, int vocab) {
  const Output output = {b->logits, b->vocab_stride, 0};
  Group head = b->head;  // the first rows of it
  if (head.n_packed > 0 && vocab < head.packed[0].parts[0].rows) {
    head.packed[0].tiles = head.packed[0].parts[0].tiles = divide_up(vocab, 16);
    head.packed[0].parts[0].rows = vocab;
  }
  if (head.n_plain > 0 && vocab < head.plain[0].rows) head.plain[0].rows = vocab;
  gemm_group(&b->device, head, in, b->hidden_stride, head_split_of(b, n), &output, nullptr, n);
}

void norm_columns(Backend *b, const float *gain, float *out, const Split &split, bool residual,
                  bool zero_first) {
  NormArgs a = {};
  a.x = b->x;
  a.stride = b->hidden_stride;
  a.width = b->spec->hidden;
  a.add = residual ? b->partials : nullptr;
  a.slices = {1, false};
  a.gain = gain;
  a.eps = b->spec->norm_eps;
  a.out = out;
  a.out_stride = b->hidden_stride;
  a.split = split;
  a.zero_at = zero_first ? b->batch.position : nullptr;
  run_norm(b, a);
}

void commit_kept(Backend *b) {
  const ModelSpec *s = b->spec;
  if (b->gdn_fused) {
    StepArgs a = step_args(b, 0);
    int n = 0;
    for (int layer = 0; layer < s->layers; layer++) {
      const LayerWeights &w = b->layers[layer];
      if (w.kind != KSL_LAYER_LINEAR) continue;
      a.taps[n++] = w.linear.taps;
      if (n < kStepLayers && w.index + 1 < s->linear_layers) continue;
      gdn_replay(&b->device, a, n);
      a = step_args(b, w.index + 1);
      n = 0;
    }
    return;
  }
  for (int layer = 0; layer < s->layers; layer++) {
    const LayerWeights &w = b->layers[layer];
    if (w.kind != KSL_LAYER_LINEAR) continue;
    float *kept = kept_layer(b, w.index);
    ConvArgs c = conv_args(b, w.linear, w.index);
    c.row_of = b->d_columns + kKeptRow * b->column_capacity;
    c.qkv = kept;
    c.qkv_stride = static_cast<int>(b->keep_floats);
    c.conv_silu = nullptr;
    c.gates = false;
    c.history = false;
    c.keep = true;
    gdn_conv(&b->device, c, b->n_kept);
    ScanArgs a = scan_args(b, w.index);
    a.decay = kept + b->conv_stride;
    a.beta = kept + b->conv_stride + b->head_stride;
    a.head_stride = static_cast<int>(b->keep_floats);
    a.keep = true;
    gdn_scan(&b->device, a, b->n_rows);
    const HistoryArgs h = {s->conv_channels,
                           b->d_rows,
                           slabs_of(b, w.index),
                           kept,
                           static_cast<int>(b->keep_floats),
                           true,
                           false};
    gdn_history(&b->device, h, b->n_rows);
  }
}

}  // namespace ksl
