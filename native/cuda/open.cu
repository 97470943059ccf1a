// Opening the CUDA backend: the device, pools, activations, facts; and freeing all of it.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../common/error.h"
#include "norm/norm.cuh"
#include "state.cuh"

#ifndef KSL_CUDA_DIGEST
#error "the build passes KSL_CUDA_DIGEST"
#endif

namespace ksl {

void *own_device(Backend *b, size_t bytes) {
  const size_t size = bytes ? (bytes + 255) / 256 * 256 : 256;
  const uint64_t at = b->device_bytes;
  if (b->measuring) {
    b->device_bytes += size;
    return b;
  }
  void *memory = nullptr;
  if (b->arena) {
    memory = b->arena + at;
  } else {
    if (alloc_refused(b->alloc) || b->n_owned == b->owned_capacity) return nullptr;
    if (cudaMalloc(&memory, size) != cudaSuccess) {
      cudaGetLastError();  // not a fault of the device
      return nullptr;
    }
    b->owned[b->n_owned++] = memory;
  }
  b->device_bytes += size;
  keep_error(&b->device, cudaMemsetAsync(memory, 0, size, b->device.stream), "clearing memory");
  return memory;
}

namespace {

// Zeroed host memory that the device reads and writes; null when memory is out.
template <typename T>
T *pinned_many(Backend *b, size_t count) {
  if (b->measuring) return reinterpret_cast<T *>(b);
  void *memory = nullptr;
  if (alloc_refused(b->alloc)) return nullptr;
  if (cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocDefault) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  b->pinned[b->n_pinned++] = memory;
  memset(memory, 0, count * sizeof(T));
  return static_cast<T *>(memory);
}

static_assert(kSlicedTokens == kWideTokens, "larger waves have whole products");

// What the driver takes beside our memory: code of kernels; and graphs, by their kernels, of which
// a layer launches about eight.
constexpr uint64_t kRuntimeBytes = 192 << 20, kKernelBytes = 3 << 10;
uint64_t driver_bytes(const ModelSpec *s) {
  return kRuntimeBytes + kGraphs * kKernelBytes * (8 * (s->layers + s->mtp_layers) + 16);
}

int padded(int64_t floats) {
  return static_cast<int>((floats + 15) / 16 * 16);
}

int no_memory(Backend *b, ksl_error *error, const char *what) {
  size_t free_bytes = 0, total = 0;
  cudaMemGetInfo(&free_bytes, &total);
  return fail(error, KSL_NOMEM,
              "There is not enough device memory for %s: %.1f GiB of %.1f GiB are free with %.1f "
              "GiB taken.",
              what, free_bytes / 1073741824.0, total / 1073741824.0,
              b->device_bytes / 1073741824.0);
}

int open_device(Backend *b, ksl_error *error) {
  int count = 0;
  cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess && count == 0) code = cudaErrorNoDevice;
  if (code == cudaSuccess) code = cudaSetDevice(0);
  cudaDeviceProp properties = {};
  if (code == cudaSuccess) code = cudaGetDeviceProperties(&properties, 0);
  if (code == cudaSuccess)
    code = cudaStreamCreateWithFlags(&b->device.stream, cudaStreamNonBlocking);
  if (code != cudaSuccess) {
    cudaGetLastError();
    return fail(error, KSL_INVALID, "The CUDA device cannot be used: %s.",
                cudaGetErrorString(code));
  }
  b->major = properties.major;
  snprintf(b->name, sizeof b->name, "sm_%d%d", properties.major, properties.minor);
  b->device.room = {properties.multiProcessorCount,
                    static_cast<int>(properties.sharedMemPerMultiprocessor),
                    static_cast<int>(properties.sharedMemPerBlockOptin)};
  b->most_slices = 1;
  b->scaled = b->config->activations == KSL_ACT_AUTO && block_scaled_runs(b->device, b->major);
  b->wide = b->major == 9 || b->scaled;
  return KSL_OK;
}

int check_shape(const ModelSpec *s, ksl_error *error) {
  if (s->hidden > kMaxHidden)
    return fail(error, KSL_INVALID, "The CUDA backend takes a hidden size of at most %d, not %d.",
                kMaxHidden, s->hidden);
  if (s->kv_layers && (s->head_dim > kMaxHeadDim || s->heads / s->kv_heads > kMaxGroup))
    return fail(error, KSL_INVALID,
                "The CUDA backend takes attention heads of at most %d dims and %d query heads per "
                "KV head, not %d and %d.",
                kMaxHeadDim, kMaxGroup, s->head_dim, s->heads / s->kv_heads);
  if (s->linear_layers && (s->lin_key_dim > kMaxKeyDim || s->lin_value_dim > kMaxValueDim))
    return fail(error, KSL_INVALID,
                "The CUDA backend takes linear heads of at most %d key and %d value dims, not %d "
                "and %d.",
                kMaxKeyDim, kMaxValueDim, s->lin_key_dim, s->lin_value_dim);
  return KSL_OK;
}

int check_kv(const ksl_config *config, ksl_error *error) {
  if (config->kv_format <= KSL_KV_Q4) return KSL_OK;
  return fail(error, KSL_INVALID,
              "The CUDA backend has the KV formats f32, bf16, fp8 and q4, not %s.",
              kv_format_name(config->kv_format));
}

int make_pools(Backend *b, ksl_error *error) {
  const ModelSpec *spec = b->spec;
  const ksl_config *config = b->config;
  const uint64_t before = b->device_bytes;
  Budget budget;
  const int code = budget_init(&budget, spec, config, error);
  if (code) return code;
  if (spec->linear_layers) {
    b->state_layer = budget.delta_floats / spec->linear_layers;
    b->conv_layer = budget.conv_floats / spec->linear_layers;
  }
  b->conv_offset = budget.delta_floats;
  b->hidden_offset = budget.delta_floats + budget.conv_floats;
  b->image_floats = b->hidden_offset + budget.hidden_floats;
  b->slabs.stride = (b->image_floats + 63) / 64 * 64;
  b->slabs.data = own_many<float>(b, b->slabs.stride * config->slabs);

  const KvRow row = kv_row(config->kv_format, spec->head_dim);
  KvLayer *kv = &b->kv;
  const int rows = config->block_tokens * spec->kv_heads;
  kv->k_bytes = row.k;
  kv->k_scale_bytes = row.k_scale;
  kv->v_bytes = row.v;
  kv->v_scale_bytes = row.v_scale;
  kv->k_offset = 0;
  kv->k_scale_offset = rows * row.k;
  kv->v_offset = kv->k_scale_offset + rows * row.k_scale;
  kv->v_scale_offset = kv->v_offset + rows * row.v;
  b->kv_layer_bytes = kv->v_scale_offset + static_cast<int64_t>(rows) * row.v_scale;
  b->block_bytes = budget.block_bytes;
  b->blocks = static_cast<uint8_t *>(own_device(b, b->block_bytes * config->blocks));
  const size_t entries = static_cast<size_t>(config->slots) * config->max_blocks_per_slot;
  b->tables = own_many<int32_t>(b, entries);
  kv->blocks = b->blocks;
  kv->tables = b->tables;
  kv->block_bytes = b->block_bytes;
  kv->table_blocks = config->max_blocks_per_slot;
  kv->block_tokens = config->block_tokens;
  kv->kv_heads = spec->kv_heads;
  kv->head_dim = spec->head_dim;

  SlotArrays *slots = &b->slot_arrays;
  const size_t n = config->slots;
  slots->vocab = spec->vocab;
  slots->words = (spec->vocab + 31) / 32;
  slots->token_limit = spec->token_limit;
  slots->scored = spec->vocab;
  slots->params = own_many<SlotParams>(b, n);
  slots->counts = own_many<int32_t>(b, n * spec->vocab);
  slots->seen = own_many<uint32_t>(b, n * slots->words);
  slots->mask = own_many<uint32_t>(b, n * slots->words);
  slots->bias_ids = own_many<int32_t>(b, n * KSL_MAX_BIAS);
  slots->bias = own_many<float>(b, n * KSL_MAX_BIAS);
  b->slots = alloc_many<Slot>(b->alloc, n);
  if (!b->slabs.data || !b->blocks || !b->tables || !slots->params || !slots->counts ||
      !slots->seen || !slots->mask || !slots->bias_ids || !slots->bias || !b->slots)
    return no_memory(b, error, "the slabs and KV blocks");
  for (size_t i = 0; i < n; i++) {
    Slot *slot = &b->slots[i];
    *slot = Slot{};
    slot->last_token = -1;
    slot->forced_capacity = budget.forced_capacity;
    slot->forced = alloc_many<int32_t>(b->alloc, budget.forced_capacity);
    if (!slot->forced) return no_memory(b, error, "the slots");
  }
  b->pool_bytes = b->device_bytes - before;
  return KSL_OK;
}

Split make_split(Backend *b, int columns, int width, float scale) {
  const bool e4m3 = b->config->activations == KSL_ACT_AUTO && !b->scaled && width <= kPanel8Width;
  Split split = {nullptr,  divide_up(width, kSuper) * (kSuper / kPiece), scale, 0, e4m3, false,
                 b->scaled};
  const size_t groups = divide_up(columns, kTileTokens);
  // A panel of the same tokens, one of e4m3 behind it, and what a kernel reads behind the last.
  split.data =
      own_many<__half>(b, 2 * groups * split.pieces * kPiece * kTileTokens + kPanelSlack * kPiece);
  return split;
}

// Mixers, MLP and the MTP join never live at the same time: one region holds each in turn.
float *make_region(Backend *b, int64_t columns) {
  struct Part {
    float **buffer;
    int stride;
  };
  float *unused = nullptr;
  float **const stored_q = b->config->kv_format == KSL_KV_Q4 ? &b->stored_q : &unused;
  const Part parts[4][11] = {
      {{&b->qkv, b->conv_stride},
       {&b->conv, b->conv_stride},
       {&b->conv_silu, b->conv_stride},
       {&b->z, b->value_stride},
       {&b->core, b->value_stride},
       {&b->gated, b->value_stride},
       {&b->gate_a, b->head_stride},
       {&b->gate_b, b->head_stride},
       {&b->g, b->head_stride},
       {&b->decay, b->head_stride},
       {&b->beta, b->head_stride}},
      {{&b->query_gate, b->query_gate_stride},
       {&b->k, b->kv_stride},
       {&b->v, b->kv_stride},
       {&b->q, b->query_stride},
       {&b->pregate, b->query_stride},
       {&b->attn_gated, b->query_stride},
       {stored_q, stored_q == &unused ? 0 : b->query_stride}},
      {{&b->mlp_gate, b->mlp_stride}, {&b->mlp_up, b->mlp_stride}, {&b->mlp_act, b->mlp_stride}},
      {{&b->mtp_in, b->spec->mtp_layers ? b->mtp_stride : 0}}};
  int64_t most = 0;
  for (const auto &list : parts) {
    int64_t floats = 0;
    for (const Part &part : list) floats += (columns * part.stride + 63) / 64 * 64;
    if (floats > most) most = floats;
  }
  float *region = own_many<float>(b, most);
  if (!region || b->measuring) return region;
  for (const auto &list : parts) {
    float *at = region;
    for (const Part &part : list) {
      if (part.buffer) *part.buffer = at;
      at += (columns * part.stride + 63) / 64 * 64;
    }
  }
  if (stored_q == &unused) b->stored_q = b->q;
  return region;
}

int make_scratch(Backend *b, ksl_error *error) {
  const ModelSpec *s = b->spec;
  const ksl_config *config = b->config;
  const int64_t columns = config->wave_columns, slots = config->slots;
  const int64_t most = columns > slots ? columns : slots;
  const uint64_t before = b->device_bytes;
  b->column_capacity = static_cast<int>(most);
  b->hidden_stride = padded(s->hidden);
  b->mtp_stride = padded(2 * static_cast<int64_t>(s->hidden));
  b->conv_stride = padded(s->conv_channels);
  b->value_stride = padded(s->v_width);
  b->head_stride = s->linear_layers ? padded(s->lin_value_heads) : 0;
  b->query_stride = padded(s->q_width);
  b->query_gate_stride = padded(2 * static_cast<int64_t>(s->q_width));
  b->kv_stride = padded(s->kv_width);
  b->mlp_stride = padded(s->intermediate);
  b->vocab_stride = padded(s->vocab);
  float **const hidden[] = {&b->x, &b->normed, &b->mixed, &b->final, &b->chain};
  for (float **buffer : hidden) *buffer = own_many<float>(b, most * b->hidden_stride);
  b->partial_stride = (most < kSlicedTokens ? most : kSlicedTokens) * b->hidden_stride;
  b->partials = own_many<float>(b, partial_rows(most, b->most_slices) * b->hidden_stride);
  float *region = make_region(b, most);
  b->head_in = own_many<float>(b, static_cast<size_t>(kHeadBatch) * b->hidden_stride);
  b->logits = own_many<float>(b, static_cast<size_t>(kHeadBatch) * b->vocab_stride);
  b->sampling.adjusted = own_many<float>(b, static_cast<size_t>(kHeadBatch) * b->vocab_stride);
  b->sampling.greatest = own_many<Greatest>(b, kHeadBatch * kGreatest);
  const int half = s->kv_layers ? s->rotary_dims / 2 : 0;
  b->cos = own_many<float>(b, most * half);
  b->sin = own_many<float>(b, most * half);
  b->hidden_split = make_split(b, most, s->hidden, 1.0f);
  b->value_split = make_split(b, most, s->v_width > 0 ? s->v_width : 1, 1.0f);
  b->query_split = make_split(b, most, s->q_width > 0 ? s->q_width : 1, 1.0f);
  // Products of gates and values reach further than what was normed.
  b->mlp_split = make_split(b, most, s->intermediate, 0x1p-4f);
  b->mtp_split = make_split(b, s->mtp_layers ? most : 1, 2 * s->hidden, 1.0f);
  b->head_split = make_split(b, kHeadBatch, s->hidden, 1.0f);

  // One unit for every column, and room for small waves to be divided.
  const int64_t unit = s->kv_layers ? static_cast<int64_t>(s->heads) * (s->head_dim + 2) : 1;
  int64_t units = 16384 > most ? 16384 : most;
  const int64_t longest = divide_up(
      static_cast<int64_t>(config->max_blocks_per_slot) * config->block_tokens, kTileKeys);
  if (units > longest * most) units = longest * most;
  b->attn_partial_floats = unit * units;
  b->attn_partial = own_many<float>(b, b->attn_partial_floats);
  b->attn_tiles = s->kv_layers > 0 && attn_tile_runs(&b->device, config->kv_format, s->head_dim);

  const int64_t most_kept = slots * (1 + KSL_MAX_DRAFT);
  b->keep_columns = static_cast<int>(most_kept < columns ? most_kept : columns);
  b->waiting_hidden =
      own_many<float>(b, s->mtp_layers ? static_cast<size_t>(kMostWaiting) * b->hidden_stride : 1);
  b->keep_floats = b->conv_stride + 2 * b->head_stride;
  b->keep = own_many<float>(b, b->keep_floats * b->keep_columns * s->linear_layers);
  b->gdn_fused =
      s->linear_layers > 0 && gdn_step_runs({s->lin_key_heads, s->lin_value_heads, s->lin_key_dim,
                                             s->lin_value_dim, s->conv_channels});
  b->gdn_arrived =
      own_many<unsigned>(b, b->gdn_fused ? slots * s->linear_layers * s->lin_key_heads : 1);

  const size_t jobs = most + slots;
  b->d_rows = own_many<RowInfo>(b, slots);
  b->d_columns = own_many<int32_t>(b, kColumnArrays * most);
  b->d_job_columns = own_many<int32_t>(b, jobs);
  b->d_head_columns = own_many<int32_t>(b, jobs);
  b->d_sample_jobs = own_many<SampleJob>(b, jobs);
  b->d_logprob_jobs = own_many<LogprobJob>(b, jobs);
  b->rows = alloc_many<RowPlan>(b->alloc, slots);
  b->row_info = pinned_many<RowInfo>(b, slots);
  b->committed = pinned_many<RowInfo>(b, slots);
  b->columns = pinned_many<int32_t>(b, kColumnArrays * most);
  b->jobs = alloc_many<HeadJob>(b->alloc, jobs);
  b->job_columns = pinned_many<int32_t>(b, jobs);
  b->sample_jobs = pinned_many<SampleJob>(b, jobs);
  b->logprob_jobs = alloc_many<LogprobJob>(b->alloc, jobs);
  b->ids = pinned_many<int32_t>(b, jobs);
  const void *const made[] = {b->x,
                              b->normed,
                              b->mixed,
                              b->final,
                              b->chain,
                              b->partials,
                              region,
                              b->head_in,
                              b->logits,
                              b->sampling.adjusted,
                              b->sampling.greatest,
                              b->cos,
                              b->sin,
                              b->hidden_split.data,
                              b->value_split.data,
                              b->query_split.data,
                              b->mlp_split.data,
                              b->mtp_split.data,
                              b->head_split.data,
                              b->attn_partial,
                              b->keep,
                              b->waiting_hidden,
                              b->gdn_arrived,
                              b->d_rows,
                              b->d_columns,
                              b->d_job_columns,
                              b->d_head_columns,
                              b->d_sample_jobs,
                              b->d_logprob_jobs,
                              b->rows,
                              b->row_info,
                              b->committed,
                              b->columns,
                              b->jobs,
                              b->job_columns,
                              b->sample_jobs,
                              b->logprob_jobs,
                              b->ids};
  for (const void *memory : made)
    if (memory == nullptr) return no_memory(b, error, "the activations");
  b->scratch_bytes = b->device_bytes - before;
  return KSL_OK;
}

// What the kernels of long prompt rows need, where they run.
int make_long_rows(Backend *b, ksl_error *error) {
  const ModelSpec *s = b->spec;
  const ksl_config *config = b->config;
  const uint64_t before = b->device_bytes;
  const int group = s->kv_layers ? s->heads / s->kv_heads : 1;
  const GdnShape shape = {s->lin_key_heads, s->lin_value_heads, s->lin_key_dim, s->lin_value_dim,
                          s->conv_channels};
  const int kv = config->kv_format;
  b->flash = !(config->test_hooks & KSL_HOOK_PORTABLE) &&
             attn_flash_runs(b->major, kv, s->head_dim, group);
  b->long_rows = kv != KSL_KV_F32 && config->wave_columns >= kLongRow &&
                 (s->kv_layers == 0 || b->flash || attn_prompt_runs(kv, s->head_dim, group)) &&
                 (s->linear_layers == 0 || gdn_chunks_run(shape));
  if (!b->long_rows) return KSL_OK;
  const int columns = config->wave_columns, rows = columns / kLongRow;
  // With as many parts again as the device takes at two times.
  const size_t tiles =
      divide_up(columns, kFlashRows / group) + rows + 2 * b->device.room.processors;
  const size_t chunks = divide_up(columns, kChunk) + (1 + KSL_MAX_CUTS) * rows;
  const size_t together = kChunkBatch;
  const size_t batch = (chunks < together ? chunks : together) * s->lin_value_heads;
  b->tile_capacity = static_cast<int>(tiles);
  b->tiles = alloc_many<FlashTile>(b->alloc, tiles);
  b->chunks = alloc_many<ChunkInfo>(b->alloc, chunks);
  b->runs = alloc_many<ChunkRun>(b->alloc, chunks);
  b->batches = alloc_many<ChunkBatch>(b->alloc, chunks);
  b->d_tiles = own_many<FlashTile>(b, tiles);
  b->d_chunks = own_many<ChunkInfo>(b, chunks);
  b->d_runs = own_many<ChunkRun>(b, chunks);
  b->chunk_operands = own_many<ChunkOperands>(b, batch);
  b->chunk_decays = own_many<float>(b, batch);
  b->scratch_bytes += b->device_bytes - before;
  const void *const made[] = {b->tiles,    b->chunks, b->runs,           b->batches,     b->d_tiles,
                              b->d_chunks, b->d_runs, b->chunk_operands, b->chunk_decays};
  for (const void *memory : made)
    if (memory == nullptr) return no_memory(b, error, "the work on long prompts");
  return KSL_OK;
}

int make_frequencies(Backend *b, ksl_error *error) {
  const ModelSpec *spec = b->spec;
  const int half = spec->kv_layers ? spec->rotary_dims / 2 : 0;
  b->frequency = own_many<double>(b, half);
  if (b->measuring) return KSL_OK;
  double *frequency = alloc_many<double>(b->alloc, half);
  if (!frequency || !b->frequency) {
    alloc_free(frequency);
    return no_memory(b, error, "the engine");
  }
  for (int j = 0; j < half; j++) frequency[j] = pow(spec->rope_theta, -2.0 * j / spec->rotary_dims);
  // On the stream, behind the clearing of that memory.
  upload(b, b->frequency, frequency, half * sizeof(double));
  synchronize(b, "copying frequencies");
  alloc_free(frequency);
  return KSL_OK;
}

// Staging of state on its way; without its thread the waves copy it themselves.
int make_mover(Backend *b, ksl_error *error) {
  const uint64_t before = b->device_bytes;
  uint8_t *staging = static_cast<uint8_t *>(own_device(b, kMoveBytes));
  if (!staging) return no_memory(b, error, "moving state");
  b->scratch_bytes += b->device_bytes - before;
  if (!b->measuring && !mover_open(&b->mover, staging, b->alloc))
    fprintf(stderr, "kslserve: no pinned memory or thread to move state with; waves will wait\n");
  return KSL_OK;
}

int make_all(Backend *b, const TensorTable *tensors, uint64_t *staging, ksl_error *error) {
  int code = make_frequencies(b, error);
  if (!code) code = load_weights(b, tensors, staging, error);
  if (!code) code = make_pools(b, error);
  if (!code) code = make_scratch(b, error);
  if (!code) code = make_long_rows(b, error);
  if (!code) code = make_mover(b, error);
  return code;
}

void free_host(Backend *b) {
  for (int i = 0; b->slots && i < b->config->slots; i++) alloc_free(b->slots[i].forced);
  void *const host[] = {b->slots, b->rows,         b->tiles,   b->chunks, b->runs,  b->batches,
                        b->jobs,  b->logprob_jobs, b->entries, b->layers, b->owned, b->fetched};
  for (void *memory : host) alloc_free(memory);
}

// Counts what everything takes, and takes it in one piece: before a weight is read it is known
// whether it fits, and nothing is lost between allocations. With test hooks every buffer is an
// allocation of its own, whose bounds tools can see and whose failure a test can ask for.
int reserve_all(Backend *b, const TensorTable *tensors, ksl_error *error) {
  Backend trial = *b;
  trial.measuring = true;
  uint64_t staging = 0;
  const int code = make_all(&trial, tensors, &staging, error);
  free_host(&trial);
  if (code) return code;
  size_t free_bytes = 0, total = 0;
  cudaMemGetInfo(&free_bytes, &total);
  const uint64_t beside = staging + driver_bytes(b->spec), needed = trial.device_bytes + beside;
  constexpr double kGiB = 1073741824.0;
  if (needed > free_bytes)
    return fail(
        error, KSL_NOMEM,
        "The device has %.2f GiB free of %.2f, and %.2f are needed: weights %.2f, KV, "
        "slabs and slots %.2f, activations of the widest wave %.2f, loading and graphs %.2f. Fewer "
        "blocks, slabs, slots or wave columns need less.",
        free_bytes / kGiB, total / kGiB, needed / kGiB, trial.weight_bytes / kGiB,
        trial.pool_bytes / kGiB, trial.scratch_bytes / kGiB, beside / kGiB);
  if (b->config->test_hooks & KSL_HOOK_OPS) return KSL_OK;
  if (cudaMalloc(&b->arena, trial.device_bytes) == cudaSuccess) return KSL_OK;
  cudaGetLastError();
  return no_memory(b, error, "weights, pools and activations");
}

int fill_backend(Backend *b, const TensorTable *tensors, ksl_error *error) {
  const ModelSpec *spec = b->spec;
  for (int list = 0; list < kListCount; list++) {
    const StageList stages = static_cast<StageList>(list);
    const int code = program_check(stages, stage_table(stages), error);
    if (code) return code;
  }
  int code = check_shape(spec, error);
  if (!code) code = check_kv(b->config, error);
  if (!code) code = open_device(b, error);
  if (code) return code;
  code = reserve_all(b, tensors, error);
  if (code) return code;
  b->owned_capacity = 64 * (spec->layers + spec->mtp_layers) + 256;
  b->owned = alloc_many<void *>(b->alloc, b->owned_capacity);
  if (!b->owned) return no_memory(b, error, "the engine");
  uint64_t staging = 0;
  code = make_all(b, tensors, &staging, error);
  if (code) return code;
  keep_error(&b->device, cudaStreamSynchronize(b->device.stream), "opening");
  if (b->device.error != cudaSuccess)
    return fail(error, KSL_NOMEM, "The CUDA backend failed while %s: %s.", b->device.what,
                cudaGetErrorString(b->device.error));
  return KSL_OK;
}

}  // namespace

void cuda_close(Backend *b) {
  if (!b) return;
  if (b->device.stream) {
    cudaStreamSynchronize(b->device.stream);
    mover_close(&b->mover);
    for (int i = 0; i < b->n_graphs; i++) cudaGraphExecDestroy(b->graphs[i].run);
    for (int i = b->n_owned; i-- > 0;) cudaFree(b->owned[i]);
    cudaFree(b->arena);
    for (int i = b->n_pinned; i-- > 0;) cudaFreeHost(b->pinned[i]);
    cudaFree(b->d_entries);
    cudaFree(b->d_marks);
    cudaStreamDestroy(b->device.stream);
  }
  free_host(b);
  alloc_free(b);
}

int cuda_open(const ModelSpec *spec, const ksl_config *config, const TensorTable *tensors,
              Alloc *alloc, Backend **out, ksl_error *error) {
  Backend *b = alloc_many<Backend>(alloc, 1);
  if (!b) return fail(error, KSL_NOMEM, "There is not enough memory for the engine.");
  b->spec = spec;
  b->config = config;
  b->alloc = alloc;
  const int code = fill_backend(b, tensors, error);
  if (code) {
    cuda_close(b);
    return code;
  }
  *out = b;
  return KSL_OK;
}

// What large waves and long rows differ by from small ones, on a trained model, whatever the KV
// format: tests/device/test_equality.py. Of terms of e2m1 less is known than of e4m3, which rounds
// more.
constexpr ksl_closeness kFarHalves = {5e-3f, 5e-5f}, kFarE4m3 = {6e-2f, 6e-3f};

void cuda_info(Backend *b, ksl_info *info) {
  static const char *const kEncodings[] = {"f32", "bf16", "fp8", "e2m3", "nvfp4"};
  info->threads = 1;
  info->weight_bytes = b->weight_bytes;
  info->token_bytes = b->token_bytes;
  info->pool_bytes = b->pool_bytes;
  info->scratch_bytes = b->scratch_bytes;
  snprintf(info->isa, sizeof info->isa, "%s", b->name);
  // Activations of packed products are halves, or e4m3 for FP6 weights in waves of many tokens; all
  // else is float32. Bits depend on what a token's wave held beside it where waves may have more
  // than kWideTokens columns, and on the length of its row where prompt rows may have kLongRow.
  const bool bf16 = b->encodings & 1u << KSL_ENC_BF16;
  const bool halves = bf16 && b->major == 9 && b->config->activations == KSL_ACT_AUTO;
  const bool packed = halves || b->encodings & (1u << KSL_ENC_E2M3 | 1u << KSL_ENC_NVFP4);
  const bool large = b->config->wave_columns > kWideTokens;
  const bool both = packed && b->wide && large;
  const bool dense = large && bf16;
  const bool e4m3 = b->encodings & 1u << KSL_ENC_E2M3 && b->config->activations == KSL_ACT_AUTO;
  const bool terms = b->scaled && b->encodings & 1u << KSL_ENC_NVFP4;
  snprintf(info->activation, sizeof info->activation, "%s%s%s", packed ? "f16" : "float",
           both && e4m3 ? ", e4m3" : "", both && terms ? ", 2xe2m1" : "");
  if (b->major == 12)
    snprintf(info->note, sizeof info->note,
             "the kernels for %s have been compiled and emulated, not run: "
             "`kslserve selftest --device cuda` checks them on this card",
             b->name);
  const bool wide = both || dense;
  info->equal_columns = wide ? kWideTokens : 0;
  info->equal_row = b->long_rows ? kLongRow - 1 : 0;
  const ksl_closeness far = both && (e4m3 || terms) ? kFarE4m3 : kFarHalves;
  for (int p = 0; p < KSL_PROPERTIES; p++)  // rows with drafts are short ones
    if (wide || (b->long_rows && p != KSL_SPECULATION)) info->equality[p] = far;
  int at = snprintf(info->numerics, sizeof info->numerics,
                    "cuda %.16s %.12s %s kv=%s %s weights=", ksl_source_digest(), KSL_CUDA_DIGEST,
                    b->name, kv_format_name(b->config->kv_format), info->activation);
  const char *separator = "";
  for (int e = 0; e < 5; e++) {
    if (!(b->encodings >> e & 1) || at >= static_cast<int>(sizeof info->numerics)) continue;
    at +=
        snprintf(info->numerics + at, sizeof info->numerics - at, "%s%s", separator, kEncodings[e]);
    separator = "+";
  }
}

}  // namespace ksl
