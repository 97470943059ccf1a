// Opening the CPU backend: pools, activations, facts; and freeing all of it.
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../common/budget.h"
#include "../common/error.h"
#include "state.h"

namespace ksl {

// Work below this many multiply-adds is done by the engine thread alone. Test hooks make it 0, so
// that tests split the stages of small models too.
static const int64_t kInlineCost = 100000;
// Slabs, which every decode step reads and writes from end to end, are on huge pages. Below this
// size the C library may hand out memory that it has used before, and none that is taken only when
// it is written.
static const size_t kHugeFrom = static_cast<size_t>(32) << 20;

void *own_bytes(Backend *b, size_t bytes) {
  if (b->n_owned == b->owned_capacity) return nullptr;
  void *memory = bytes < kHugeFrom ? alloc_bytes(b->alloc, bytes) : alloc_huge(b->alloc, bytes);
  if (memory) b->owned[b->n_owned++] = memory;
  return memory;
}

float *own_floats(Backend *b, size_t count) {
  return static_cast<float *>(own_bytes(b, count * sizeof(float)));
}

namespace {

size_t padded(size_t floats) {
  return (floats + 15) / 16 * 16;
}

int no_memory(ksl_error *error, const char *what) {
  return fail(error, KSL_NOMEM, "There is not enough memory for %s.", what);
}

int thread_count(int wanted) {
  if (wanted > 0) return wanted;
#ifdef __linux__
  cpu_set_t set;
  if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  return cores > 0 ? static_cast<int>(cores) : 1;
}

bool make_batch(Backend *b, Batch *batch, int columns) {
  const size_t half = b->spec->kv_layers ? b->spec->rotary_dims / 2 : 0;
  batch->token = static_cast<int32_t *>(own_bytes(b, columns * sizeof(int32_t)));
  batch->position = static_cast<int32_t *>(own_bytes(b, columns * sizeof(int32_t)));
  batch->slot = static_cast<int32_t *>(own_bytes(b, columns * sizeof(int32_t)));
  batch->row = static_cast<int32_t *>(own_bytes(b, columns * sizeof(int32_t)));
  batch->cos = own_floats(b, columns * half);
  batch->sin = own_floats(b, columns * half);
  batch->hidden = static_cast<const float **>(own_bytes(b, columns * sizeof(float *)));
  return batch->token && batch->position && batch->slot && batch->row && batch->cos && batch->sin &&
         batch->hidden;
}

bool make_backlog(Backend *b) {
  if (!b->spec->mtp_layers) return true;
  Backlog *log = &b->backlog;
  log->room = backlog_rows(b);
  const size_t list = log->room * sizeof(int32_t);
  log->token = static_cast<int32_t *>(own_bytes(b, list));
  log->position = static_cast<int32_t *>(own_bytes(b, list));
  log->block = static_cast<int32_t *>(own_bytes(b, list));
  log->next = static_cast<int32_t *>(own_bytes(b, list));
  log->hidden = own_floats(b, log->room * b->hidden_stride);
  log->of_block = static_cast<int32_t *>(own_bytes(b, b->config->blocks * sizeof(int32_t)));
  b->waiting.block = static_cast<int32_t *>(own_bytes(b, b->mtp_room * sizeof(int32_t)));
  return log->token && log->position && log->block && log->next && log->hidden && log->of_block &&
         b->waiting.block && make_batch(b, &b->waiting, b->mtp_room);
}

int make_pools(Backend *b, ksl_error *error) {
  const ModelSpec *spec = b->spec;
  const ksl_config *config = b->config;
  const uint64_t before = b->alloc->bytes;
  Budget budget;
  int code = budget_init(&budget, spec, config, error);
  if (code) return code;
  if (spec->linear_layers) {
    b->state_layer = budget.delta_floats / spec->linear_layers;
    b->conv_layer = budget.conv_floats / spec->linear_layers;
  }
  b->conv_offset = budget.delta_floats;
  b->hidden_offset = budget.delta_floats + budget.conv_floats;
  ring_init(b);
  b->ring_offset = b->hidden_offset + budget.hidden_floats;
  b->image_floats = b->ring_offset + budget.ring_bytes / sizeof(float);
  b->slab_floats = padded(b->image_floats);
  float *slabs = own_floats(b, b->slab_floats * config->slabs);
  b->places = static_cast<float **>(own_bytes(b, config->slabs * sizeof(float *)));

  const KvRow row = kv_row(config->kv_format, spec->head_dim);
  const int row_bytes[kKvPlanes] = {row.k, row.k_scale, row.v, row.v_scale};
  for (int p = 0; p < kKvPlanes; p++) {
    b->kv_bytes[p] = row_bytes[p];
    b->kv_offset[p] = b->kv_layer_bytes;
    b->kv_layer_bytes += static_cast<size_t>(config->block_tokens) * spec->kv_heads * row_bytes[p];
  }
  b->block_bytes = budget.block_bytes;
  b->blocks = static_cast<uint8_t *>(alloc_huge(b->alloc, b->block_bytes * config->blocks));
  codes_init(b);
  if (b->code_block_bytes) {
    b->codes = static_cast<uint8_t *>(alloc_huge(b->alloc, b->code_block_bytes * config->blocks));
    b->stale = static_cast<uint8_t *>(own_bytes(b, config->blocks));
    b->refresh = static_cast<int32_t *>(own_bytes(b, config->blocks * sizeof(int32_t)));
    if (!b->codes || !b->stale || !b->refresh) return no_memory(error, "the slabs and KV blocks");
  }

  const size_t entries = static_cast<size_t>(config->slots) * config->max_blocks_per_slot;
  b->tables = static_cast<int32_t *>(own_bytes(b, entries * sizeof(int32_t)));
  b->slots = static_cast<SlotState *>(own_bytes(b, config->slots * sizeof(SlotState)));
  if (!slabs || !b->places || !b->blocks || !b->tables || !b->slots) {
    return no_memory(error, "the slabs and KV blocks");
  }
  for (int i = 0; i < config->slabs; i++) b->places[i] = slabs + i * b->slab_floats;
  memset(b->tables, 0xff, entries * sizeof(int32_t));
  for (int i = 0; i < config->slots; i++) {
    if (!slot_init(&b->slots[i], spec->vocab, budget.forced_capacity, b->alloc)) {
      return no_memory(error, "the slots");
    }
  }
  b->pool_bytes = b->alloc->bytes - before;
  return KSL_OK;
}

bool has_int_weights(const Backend *b) {
  return b->encodings & (1u << KSL_ENC_E2M3 | 1u << KSL_ENC_NVFP4);
}

// Most columns of a matrix: what any product reads.
int widest_input(const ModelSpec *spec) {
  int most = spec->mtp_layers ? 2 * spec->hidden : spec->hidden;
  if (spec->intermediate > most) most = spec->intermediate;
  if (spec->linear_layers && spec->v_width > most) most = spec->v_width;
  if (spec->kv_layers && spec->q_width > most) most = spec->q_width;
  return most;
}

int make_scratch(Backend *b, ksl_error *error) {
  const ModelSpec *spec = b->spec;
  const size_t columns = b->config->wave_columns;
  const uint64_t before = b->alloc->bytes;
  b->hidden_stride = padded(spec->hidden);
  b->mtp_stride = padded(2 * static_cast<size_t>(spec->hidden));
  b->conv_stride = padded(spec->conv_channels);
  b->value_stride = padded(spec->v_width);
  b->head_stride = spec->linear_layers ? padded(spec->lin_value_heads) : 0;
  b->key_stride = spec->linear_layers ? padded(spec->lin_key_heads * spec->lin_key_dim) : 0;
  b->query_stride = padded(spec->q_width);
  b->query_gate_stride = padded(2 * static_cast<size_t>(spec->q_width));
  b->kv_stride = padded(spec->kv_width);
  b->mlp_stride = padded(spec->intermediate);
  b->vocab_stride = padded(spec->vocab);

  // Mixers, MLP and the MTP join never live at the same time: one region holds each in turn.
  const size_t linear = 2 * b->conv_stride + 2 * b->value_stride + 5 * b->head_stride;
  const size_t full = b->query_gate_stride + 2 * b->kv_stride + 2 * b->query_stride;
  const size_t mlp = 2 * b->mlp_stride;
  size_t most = linear > full ? linear : full;
  if (mlp > most) most = mlp;
  if (b->mtp_stride > most) most = b->mtp_stride;
  float *region = own_floats(b, columns * most);
  const bool floats = b->config->activations == KSL_ACT_FLOAT;
  if (!floats) {
    const size_t blocks = columns * quantized_blocks(widest_input(spec));
    b->quantized = static_cast<QuantizedBlock *>(own_bytes(b, blocks * sizeof(QuantizedBlock)));
    b->rounded = static_cast<RoundedBlock *>(own_bytes(b, blocks * sizeof(RoundedBlock)));
  }

  b->x = own_floats(b, columns * b->hidden_stride);
  b->normed = own_floats(b, columns * b->hidden_stride);
  b->mixed = own_floats(b, columns * b->hidden_stride);
  b->final = own_floats(b, columns * b->hidden_stride);
  b->chain = own_floats(b, columns * b->hidden_stride);
  b->mtp_room = b->config->wave_columns < kMtpWaiting ? b->config->wave_columns : kMtpWaiting;
  b->head_in = own_floats(b, kHeadBatch * b->hidden_stride);
  b->logits = own_floats(b, kHeadBatch * b->vocab_stride);
  b->zero_hidden = own_floats(b, b->hidden_stride);
  b->rows = static_cast<RowPlan *>(own_bytes(b, b->config->slots * sizeof(RowPlan)));
  b->jobs = static_cast<HeadJob *>(own_bytes(b, (columns + b->config->slots) * sizeof(HeadJob)));

  const size_t most_kept = static_cast<size_t>(b->config->slots) * (1 + KSL_MAX_DRAFT);
  b->keep_columns = static_cast<int>(most_kept < columns ? most_kept : columns);
  b->keep_floats = b->conv_stride + b->head_stride + b->key_stride + b->value_stride;
  b->keep = own_floats(b, b->keep_floats * b->keep_columns * spec->linear_layers);

  // The recent rows of a ring move on behind the layers, so a slab that has one stays.
  const size_t slab_bytes = b->slab_floats * sizeof(float);
  if (spec->linear_layers && !b->ring_tokens) {
    const size_t fit = kSpareBytes / slab_bytes, slots = b->config->slots;
    b->n_spares = static_cast<int>(fit < slots ? fit : slots);
  }
  float *spares = own_floats(b, b->slab_floats * b->n_spares);
  b->spares = static_cast<float **>(own_bytes(b, b->n_spares * sizeof(float *)));
  if (!spares || !b->spares) return no_memory(error, "the spare slabs");
  for (int i = 0; i < b->n_spares; i++) b->spares[i] = spares + i * b->slab_floats;
  // What waves with drafts take is measured: the first one is not to wait for pages.
  if (b->n_spares) alloc_touch(spares, slab_bytes);

  const int group = spec->kv_layers ? spec->heads / spec->kv_heads : 1;
  const size_t query = spec->kv_layers ? static_cast<size_t>(group) * spec->head_dim : 0;
  b->partial_tiles = 32 * b->threads;
  b->partials = own_floats(b, padded(query + 2 * group) * b->partial_tiles);
  b->workers = static_cast<WorkerScratch *>(own_bytes(b, b->threads * sizeof(WorkerScratch)));
  if (!region || (!floats && (!b->quantized || !b->rounded)) || !b->x || !b->normed || !b->mixed ||
      !b->final || !b->chain || !b->head_in || !b->logits || !b->zero_hidden || !b->rows ||
      !b->jobs || !b->keep || !ring_scratch(b) || !b->partials || !b->workers ||
      !make_batch(b, &b->trunk, b->config->wave_columns) ||
      !make_batch(b, &b->drafts, b->config->slots) || !make_backlog(b)) {
    return no_memory(error, "the activations");
  }
  for (int i = 0; i < b->threads; i++) {
    WorkerScratch *w = &b->workers[i];
    const bool sampler = scratch_init(&w->sample, spec->vocab, b->alloc);
    const size_t queries = spec->kv_layers ? kMaxQueries : 0;
    w->query = own_floats(b, 2 * queries * spec->head_dim);
    w->m = own_floats(b, 2 * kMaxQueries);
    w->tile =
        static_cast<uint8_t *>(own_bytes(b, queries ? attn_scratch_bytes(spec->head_dim) : 0));
    if (!sampler || !w->query || !w->m || !w->tile) {
      return no_memory(error, "the activations");
    }
    w->acc = w->query + queries * spec->head_dim;
    w->l = w->m + kMaxQueries;
  }

  b->qkv = region;
  b->gated = region;  // the pre-conv columns are spent when the gated norm writes
  b->conv = b->qkv + columns * b->conv_stride;
  b->z = b->conv + columns * b->conv_stride;
  b->core = b->z + columns * b->value_stride;
  b->gate_a = b->core + columns * b->value_stride;
  b->gate_b = b->gate_a + columns * b->head_stride;
  b->g = b->gate_b + columns * b->head_stride;
  b->decay = b->g + columns * b->head_stride;
  b->beta = b->decay + columns * b->head_stride;
  b->query_gate = region;
  b->k = b->query_gate + columns * b->query_gate_stride;
  b->v = b->k + columns * b->kv_stride;
  b->q = b->v + columns * b->kv_stride;
  b->o = b->q + columns * b->query_stride;
  b->mlp_gate = region;
  b->mlp_up = region + columns * b->mlp_stride;
  b->mtp_in = region;
  b->scratch_bytes = b->alloc->bytes - before;
  return KSL_OK;
}

int fill_backend(Backend *b, const TensorTable *tensors, ksl_error *error) {
  const ModelSpec *spec = b->spec;
  const ksl_config *config = b->config;
  for (int list = 0; list < kListCount; list++) {
    const StageList stages = static_cast<StageList>(list);
    int code = program_check(stages, stage_table(stages), error);
    if (code) return code;
  }
  if (spec->kv_layers &&
      (spec->head_dim > kMaxHeadDim || spec->heads / spec->kv_heads > kMaxGroup)) {
    return fail(
        error, KSL_INVALID,
        "The CPU backend takes attention heads of at most %d dims and %d query heads per KV "
        "head, not %d and %d.",
        int(kMaxHeadDim), int(kMaxGroup), spec->head_dim, spec->heads / spec->kv_heads);
  }
  if (spec->linear_layers && spec->lin_key_dim > kMaxKeyDim) {
    return fail(error, KSL_INVALID,
                "The CPU backend takes linear key heads of at most %d dims, not %d.",
                int(kMaxKeyDim), spec->lin_key_dim);
  }
  b->kernels = kernels_for(config->isa);
  if (!b->kernels) {
    return fail(error, KSL_INVALID,
                "This machine or build has no instruction set path %d (has: %s).", config->isa,
                kernels_list());
  }
  b->bf16 = config->activations == KSL_ACT_FLOAT ? nullptr : bf16_for(b->kernels);
  b->attn = b->bf16 ? &b->bf16->attn : &b->kernels->attn;
  b->threads = thread_count(config->threads);
  b->inline_cost = config->test_hooks ? 0 : kInlineCost;
  b->owned_capacity = 24 * (spec->layers + spec->mtp_layers) + 8 * b->threads + 80;
  b->owned = alloc_many<void *>(b->alloc, b->owned_capacity);
  if (!b->owned) return no_memory(error, "the engine");

  const int half = spec->kv_layers ? spec->rotary_dims / 2 : 0;
  b->frequency = static_cast<double *>(own_bytes(b, half * sizeof(double)));
  if (!b->frequency) return no_memory(error, "the engine");
  for (int j = 0; j < half; j++) {
    b->frequency[j] = pow(spec->rope_theta, -2.0 * j / spec->rotary_dims);
  }
  int code = load_weights(b, tensors, error);
  b->draft_head = b->head;
  if (config->draft_vocab > 0 && config->draft_vocab < spec->vocab) {
    b->draft_head.rows = config->draft_vocab;
  }
  b->draft_vocab = b->draft_head.rows;
  b->draft_limit = b->draft_vocab < spec->token_limit ? b->draft_vocab : spec->token_limit;
  if (!code) code = make_pools(b, error);
  if (!code) code = make_scratch(b, error);
  if (code) return code;
  b->pool = pool_create(b->threads, config->nice, b->alloc, error);
  return b->pool ? KSL_OK : (error && error->code ? error->code : KSL_NOMEM);
}

}  // namespace

void cpu_close(Backend *b) {
  if (!b) return;
  if (b->pool) pool_destroy(b->pool);
  if (b->slots) {
    for (int i = 0; i < b->config->slots; i++) slot_free(&b->slots[i]);
  }
  for (int i = 0; b->workers && i < b->threads; i++) scratch_free(&b->workers[i].sample);
  for (int i = b->n_owned; i-- > 0;) alloc_free(b->owned[i]);
  alloc_free(b->matrices);
  alloc_free(b->blocks);
  alloc_free(b->codes);
  alloc_free(b->owned);
  alloc_free(b);
}

int cpu_open(const ModelSpec *spec, const ksl_config *config, const TensorTable *tensors,
             Alloc *alloc, Backend **out, ksl_error *error) {
  Backend *b = alloc_many<Backend>(alloc, 1);
  if (!b) return no_memory(error, "the engine");
  b->spec = spec;
  b->config = config;
  b->alloc = alloc;
  int code = fill_backend(b, tensors, error);
  if (code) {
    cpu_close(b);
    return code;
  }
  *out = b;
  return KSL_OK;
}

void cpu_info(Backend *b, ksl_info *info) {
  static const char *const kEncodings[] = {"f32", "bf16", "fp8", "e2m3", "nvfp4"};
  const ModelSpec *spec = b->spec;
  const ksl_config *config = b->config;
  info->vocab = spec->vocab;
  info->hidden = spec->hidden;
  info->layers = spec->layers;
  info->mtp_layers = spec->mtp_layers;
  info->slots = config->slots;
  info->slabs = config->slabs;
  info->blocks = config->blocks;
  info->block_tokens = config->block_tokens;
  info->threads = b->threads;
  info->has_mtp = spec->mtp_layers > 0;
  info->weight_bytes = b->weight_bytes;
  info->token_bytes = b->token_bytes;
  info->slab_bytes = b->image_floats * sizeof(float);
  info->block_bytes = b->block_bytes;
  info->kv_token_bytes = b->block_bytes / config->block_tokens;
  info->kv_code_bytes = b->code_block_bytes / config->block_tokens;
  info->pool_bytes = b->pool_bytes;
  info->scratch_bytes = b->scratch_bytes;
  snprintf(info->isa, sizeof info->isa, "%s", b->kernels->name);
  const bool integers = b->quantized && has_int_weights(b);
  const bool rounded = b->bf16 && b->has_bf16_products;
  const char *activation = integers ? rounded ? "int8+bf16" : "int8" : rounded ? "bf16" : "float";
  snprintf(info->activation, sizeof info->activation, "%s", activation);
  char ring[16] = "";
  if (b->ring_tokens) snprintf(ring, sizeof ring, "/%d", b->ring_tokens);
  int at = snprintf(info->numerics, sizeof info->numerics,
                    "cpu %.16s %s/%s kv=%s%s %s weights=", ksl_source_digest(), b->kernels->name,
                    b->codes ? "codes" : b->attn->name, kv_format_name(config->kv_format), ring,
                    activation);
  const char *separator = "";
  for (int e = 0; e < 5; e++) {
    if (!(b->encodings >> e & 1) || at >= static_cast<int>(sizeof info->numerics)) continue;
    at +=
        snprintf(info->numerics + at, sizeof info->numerics - at, "%s%s", separator, kEncodings[e]);
    separator = "+";
  }
}

}  // namespace ksl
