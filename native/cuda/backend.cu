// The run of one wave.
#include <stdio.h>
#include <string.h>

#include "../common/error.h"
#include "../common/rows.h"
#include "embed/embed.cuh"
#include "head/gather.cuh"
#include "mtp/input.cuh"
#include "state.cuh"

namespace ksl {

void upload(Backend *b, void *to, const void *from, size_t bytes) {
  if (bytes)
    keep_error(&b->device,
               cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, b->device.stream),
               "uploading a plan");
}

void upload_columns(Backend *b, int n) {
  const size_t pitch = sizeof(int32_t) * b->column_capacity;
  keep_error(&b->device,
             cudaMemcpy2DAsync(b->d_columns, pitch, b->columns, pitch, n * sizeof(int32_t),
                               kColumnArrays, cudaMemcpyHostToDevice, b->device.stream),
             "uploading a plan");
}

bool synchronize(Backend *b, const char *what) {
  return keep_error(&b->device, cudaStreamSynchronize(b->device.stream), what);
}

int shape_columns(int n) {
  if (n <= 4) return n == 3 ? 4 : n;
  return divide_up(n, kTileTokens) * kTileTokens;
}

void blank_column(Backend *b, int column) {
  int32_t *const at = b->columns + column;
  const int capacity = b->column_capacity;
  at[kToken * capacity] = at[kPosition * capacity] = 0;
  at[kSlotOf * capacity] = at[kRowOf * capacity] = -1;
  at[kSource * capacity] = kSourceZero;
}

namespace {

__global__ void fault_kernel() {
  asm volatile("trap;");
}

float *slab_at(const Backend *b, int index) {
  return b->slabs.data + index * b->slabs.stride;
}

void copy(Backend *b, void *to, const void *from, size_t bytes) {
  keep_error(&b->device, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, b->device.stream),
             "a state operation");
}

void mark(Backend *b, int slot, const int32_t *ids, int n, bool counted) {
  if (n <= 0) return;
  if (n > b->marks_capacity) {
    synchronize(b, "configuring a slot");
    cudaFree(b->d_marks);
    b->marks_capacity = 0;
    b->d_marks = nullptr;
    if (!keep_error(&b->device, cudaMalloc(&b->d_marks, n * sizeof(int32_t)), "configuring a slot"))
      return;
    b->marks_capacity = n;
  }
  upload(b, b->d_marks, ids, n * sizeof(int32_t));
  mark_ids(&b->device, b->slot_arrays, slot, b->d_marks, n, counted);
}

void upload_params(Backend *b, int index, const ksl_sampling *s) {
  const Slot *slot = &b->slots[index];
  const SlotParams params = {s->seed,     s->temperature,   s->top_p,      s->min_p,
                             s->presence, s->frequency,     s->repetition, s->top_k,
                             s->n_bias,   slot->use_counts, slot->has_mask};
  upload(b, b->slot_arrays.params + index, &params, sizeof params);
}

void configure(Backend *b, int index, const ksl_sampling *s) {
  Slot *slot = &b->slots[index];
  const SlotArrays &arrays = b->slot_arrays;
  cudaStream_t stream = b->device.stream;
  if (slot->use_counts) {
    keep_error(&b->device,
               cudaMemsetAsync(arrays.counts + static_cast<int64_t>(index) * arrays.vocab, 0,
                               arrays.vocab * sizeof(int32_t), stream),
               "configuring a slot");
    keep_error(&b->device,
               cudaMemsetAsync(arrays.seen + static_cast<int64_t>(index) * arrays.words, 0,
                               arrays.words * sizeof(uint32_t), stream),
               "configuring a slot");
  }
  slot->use_counts = s->presence != 0 || s->frequency != 0 || s->repetition != 1;
  slot->has_mask = false;
  slot->latched = false;
  slot->last_token = -1;
  slot->forced_n = slot->forced_at = 0;
  slot->n_drafts = 0;
  slot->n_stop = s->n_stop;
  for (int i = 0; i < s->n_stop; i++) slot->stop_ids[i] = s->stop_ids[i];
  upload_params(b, index, s);
  upload(b, arrays.bias_ids + index * KSL_MAX_BIAS, s->bias_ids, s->n_bias * sizeof(int32_t));
  upload(b, arrays.bias + index * KSL_MAX_BIAS, s->bias, s->n_bias * sizeof(float));
  if (s->repetition != 1) mark(b, index, s->prompt_ids, s->n_prompt, false);
  if (slot->use_counts) mark(b, index, s->output_ids, s->n_output, true);
}

void set_mask(Backend *b, int index, const void *mask) {
  Slot *slot = &b->slots[index];
  const SlotArrays &arrays = b->slot_arrays;
  slot->has_mask = mask != nullptr;
  if (mask)
    upload(b, arrays.mask + static_cast<int64_t>(index) * arrays.words, mask,
           arrays.words * sizeof(uint32_t));
  const int32_t flag = slot->has_mask;
  upload(b, reinterpret_cast<uint8_t *>(arrays.params + index) + offsetof(SlotParams, has_mask),
         &flag, sizeof flag);
}

// Where the image, or the part of it, of a SAVE or LOAD op begins.
uint8_t *image_place(const Backend *b, const ksl_op *op) {
  const bool slab = op->kind == KSL_OP_SAVE_SLAB || op->kind == KSL_OP_LOAD_SLAB;
  uint8_t *first =
      slab ? reinterpret_cast<uint8_t *>(slab_at(b, op->a)) : b->blocks + op->a * b->block_bytes;
  return first + op->b;
}

// Begins all LOADs of a wave: their images are on their way to the device while its rows run.
// Where there is no memory to note them they are copied when it is their turn.
void fetch_images(Backend *b, const Wave *wave) {
  const int n = wave->n_before + wave->n_after;
  mover_begin(&b->mover);
  if (n > b->fetched_capacity) {
    alloc_free(b->fetched);
    b->fetched = alloc_many<int>(b->alloc, n);
    b->fetched_capacity = b->fetched ? n : 0;
    if (!b->fetched) {
      fprintf(stderr, "kslserve: no memory for %d state operations; their wave waits for them\n",
              n);
      return;
    }
  }
  for (int i = 0; i < n; i++) {
    const ksl_op *op = i < wave->n_before ? &wave->before[i] : &wave->after[i - wave->n_before];
    const bool load = op->kind == KSL_OP_LOAD_SLAB || op->kind == KSL_OP_LOAD_BLOCK;
    b->fetched[i] = load ? mover_fetch(&b->mover, op->data, op->n) : -1;
  }
}

// index: among all operations of the wave.
void run_op(Backend *b, const ksl_op *op, int index) {
  const int fetched = b->fetched ? b->fetched[index] : -1;
  const size_t slab_bytes = b->image_floats * sizeof(float);
  switch (op->kind) {
    case KSL_OP_ZERO_SLAB:
      keep_error(&b->device, cudaMemsetAsync(slab_at(b, op->a), 0, slab_bytes, b->device.stream),
                 "a state operation");
      break;
    case KSL_OP_COPY_SLAB:
      if (op->a != op->b) copy(b, slab_at(b, op->b), slab_at(b, op->a), slab_bytes);
      break;
    case KSL_OP_COPY_BLOCK:
      if (op->a != op->b)
        copy(b, b->blocks + op->b * b->block_bytes, b->blocks + op->a * b->block_bytes,
             b->block_bytes);
      break;
    case KSL_OP_SAVE_SLAB:
    case KSL_OP_SAVE_BLOCK:
      if (!mover_save(&b->mover, &b->device, image_place(b, op), op->data, op->n))
        copy(b, op->data, image_place(b, op), op->n);
      break;
    case KSL_OP_LOAD_SLAB:
    case KSL_OP_LOAD_BLOCK:
      if (fetched >= 0)
        mover_place(&b->mover, &b->device, fetched, image_place(b, op));
      else
        copy(b, image_place(b, op), op->data, op->n);
      break;
    case KSL_OP_CONFIGURE:
      configure(b, op->a, static_cast<const ksl_sampling *>(op->data));
      break;
    case KSL_OP_MASK:
      set_mask(b, op->a, op->data);
      break;
    case KSL_OP_FORCE: {
      Slot *slot = &b->slots[op->a];
      const int n = op->n < slot->forced_capacity ? op->n : slot->forced_capacity;
      if (n > 0) memcpy(slot->forced, op->data, n * sizeof(int32_t));
      slot->forced_n = n > 0 ? n : 0;
      slot->forced_at = 0;
      break;
    }
    case KSL_OP_DROP_SLABS:  // device memory is this process's own as long as it is open
    case KSL_OP_DROP_BLOCKS:
    case KSL_OP_TOUCH_SLABS:
    case KSL_OP_TOUCH_BLOCKS:
      break;
    case KSL_OP_FAULT:
      KSL_LAUNCH(&b->device, "a fault that was asked for", fault_kernel, 1, 1);
      break;
  }
}

// Tiles of attention of a long row. Those with most keys come first, so that no late one is alone.
void add_tiles(Backend *b, const RowInfo *row, int n) {
  if (b->spec->kv_layers == 0) return;
  const int columns = kFlashRows / (b->spec->heads / b->spec->kv_heads);
  for (int first = (n - 1) / columns * columns; first >= 0; first -= columns) {
    const int left = n - first;
    const int here = left < columns ? left : columns, position = row->start + first;
    const int keys = divide_up(position + here, kFlashKeys);
    b->tiles[b->n_tiles++] = {row->column + first, here, position, row->slot, 0, keys, 0, 1};
  }
}

// Divides the keys of tiles that are too few for the device.
void divide_tiles(Backend *b) {
  const ModelSpec *s = b->spec;
  const int n = b->n_tiles;
  b->tiles_divided = false;
  if (n == 0) return;
  const int64_t part = static_cast<int64_t>(s->kv_heads) * kFlashRows * (s->head_dim + 2);
  const int64_t room = b->attn_partial_floats / part;
  const int most = room < b->tile_capacity ? static_cast<int>(room) : b->tile_capacity;
  const int length = flash_parts(b->tiles, n, s->kv_heads, b->device.room.processors, most);
  int all = 0;
  for (int i = 0; i < n; i++) all += divide_up(b->tiles[i].last, length);
  if (all == n) return;
  b->tiles_divided = true;
  b->n_tiles = all;
  for (int i = n - 1; i >= 0; i--) {
    const FlashTile tile = b->tiles[i];
    const int parts = divide_up(tile.last, length);
    for (int p = parts - 1; p >= 0; p--) {
      FlashTile *to = &b->tiles[--all];
      *to = tile;
      to->first = tile.last * p / parts;
      to->last = tile.last * (p + 1) / parts;
      to->part = p;
      to->parts = parts;
    }
  }
}

// Chunks of a long row, which end at its cuts, and its runs: one in every batch.
void add_chunks(Backend *b, const RowInfo *row, int index) {
  for (int at = 0, cut = 0; at < row->n;) {
    const int end = cut < row->n_cuts ? row->cut_offset[cut] : row->n;
    const int n = end - at < kChunk ? end - at : static_cast<int>(kChunk);
    const bool cuts = cut < row->n_cuts && at + n == end;
    const bool opens = b->n_batches == 0 || b->batches[b->n_batches - 1].n == kChunkBatch;
    if (opens) b->batches[b->n_batches++] = {b->n_chunks, 0, b->n_runs, 0};
    ChunkBatch *batch = &b->batches[b->n_batches - 1];
    if (opens || at == 0) {
      b->runs[b->n_runs++] = {b->n_chunks, 0, row->slab};
      batch->n_runs++;
    }
    b->chunks[b->n_chunks++] = {row->column + at, n, at, index, cuts ? row->cut_slab[cut] : -1};
    b->runs[b->n_runs - 1].n++;
    batch->n++;
    at += n;
    cut += cuts;
  }
}

int plan_rows(Backend *b, const Wave *wave, ksl_done *done, ksl_error *error) {
  const int capacity = b->column_capacity;
  int32_t *token = b->columns + kToken * capacity, *position = b->columns + kPosition * capacity;
  int32_t *slot_of = b->columns + kSlotOf * capacity, *row_of = b->columns + kRowOf * capacity;
  int32_t *source = b->columns + kSource * capacity, *kept_row = b->columns + kKeptRow * capacity;
  int32_t *shorts = b->columns + kShort * capacity;
  int columns = 0, kept = 0;
  b->n_short = b->n_tiles = 0;
  b->n_chunks = b->n_runs = b->n_batches = 0;
  b->n_rows = b->shape_rows = wave->n_rows;
  b->multi = false;
  b->shaped = !b->no_graphs && !b->taps;
  b->most_position = 0;
  for (int i = 0; i < wave->n_rows; i++) {
    const ksl_row *row = &wave->rows[i];
    RowPlan *plan = &b->rows[i];
    RowInfo *info = &b->row_info[i];
    *plan = RowPlan{};
    *info = RowInfo{};
    plan->row = row;
    plan->done = &done[i];
    plan->slot = &b->slots[row->slot];
    plan->column = info->column = columns;
    plan->keep = info->keep = -1;
    info->slot = row->slot;
    info->slab = row->slab;
    info->start = row->start;
    plan->done->position = row->start;
    Slot *slot = plan->slot;
    const RowTokens tokens = row_tokens(wave, row, slot);
    const int n = tokens.n;
    if (n == 0) {
      plan->done->flags = KSL_DONE_LATCHED;
      plan->ended = true;
      continue;
    }
    if (row->kind == KSL_ROW_VERIFY && n > 1) {
      plan->keep = info->keep = kept;
      for (int j = 0; j < n && kept + j < b->keep_columns; j++) kept_row[kept + j] = i;
      kept += n;
    }
    if (columns + n > b->config->wave_columns || kept > b->keep_columns)
      return fail(error, KSL_FATAL, "Wave %llu has more columns than the engine was opened with.",
                  static_cast<unsigned long long>(wave->id));
    for (int j = 0; j < n; j++) {
      const int c = columns + j;
      token[c] = j ? tokens.rest[j - 1] : tokens.first;
      position[c] = row->start + j;
      slot_of[c] = row->slot;
      row_of[c] = i;
      source[c] = j ? static_cast<int32_t>(kSourceColumn)
                    : (row->start ? row->slab : static_cast<int32_t>(kSourceZero));
      if (b->plain) source[c] = backlog_add(b, {token[c], position[c], row->slot});
    }
    info->tiled = b->long_rows && row->kind != KSL_ROW_VERIFY && n >= kLongRow;
    if (info->tiled)
      add_tiles(b, info, n);
    else
      for (int j = 0; j < n; j++) shorts[b->n_short++] = columns + j;
    if (!info->tiled && row->start + n - 1 > b->most_position)
      b->most_position = row->start + n - 1;
    if (n > 1) b->multi = true;
    if ((n > 1 && row->kind != KSL_ROW_VERIFY) || row->logprobs) b->shaped = false;
    slot->n_drafts = 0;
    plan->n = plan->committed = info->n = info->committed = n;
    info->n_cuts = row->n_cuts;
    for (int j = 0; j < row->n_cuts; j++) {
      info->cut_offset[j] = row->cuts[j].offset;
      info->cut_slab[j] = row->cuts[j].slab;
    }
    if (info->tiled) add_chunks(b, info, i);
    columns += n;
  }
  divide_tiles(b);
  b->n_kept = kept;
  b->batch.n = columns;
  b->batch.token = b->d_columns + kToken * capacity;
  b->batch.position = b->d_columns + kPosition * capacity;
  b->batch.slot = b->d_columns + kSlotOf * capacity;
  b->batch.row = b->d_columns + kRowOf * capacity;
  b->batch.source = b->d_columns + kSource * capacity;
  form_splits(b);
  return KSL_OK;
}

bool move_state(const ksl_op *ops, int n) {
  for (int i = 0; i < n; i++) {
    const int kind = ops[i].kind;
    if (kind != KSL_OP_CONFIGURE && kind != KSL_OP_MASK && kind != KSL_OP_FORCE) return true;
  }
  return false;
}

bool abandoned(const Backend *b) {
  return b->wave->abandon && b->wave->abandon->load();
}

void keep_hidden(Backend *b) {
  commit_hidden(&b->device, b->d_rows, b->final, b->hidden_stride, b->spec->hidden, b->slabs.data,
                b->slabs.stride, b->hidden_offset, b->shape_rows);
}

// All launches of a wave up to its samples, and what does not depend on these.
int forward(Backend *b, bool stoppable) {
  const ModelSpec *s = b->spec;
  if (b->shaped) {
    const auto words = [](size_t bytes) { return static_cast<int>(bytes / sizeof(int32_t)); };
    const int jobs = b->head_jobs;
    const PlanArgs plan = {
        {{b->row_info, b->d_rows, words(b->shape_rows * sizeof(RowInfo)), 1, 0},
         {b->columns, b->d_columns, b->batch.n, kColumnArrays, b->column_capacity},
         {b->job_columns, b->d_head_columns, jobs, 1, 0},
         {b->sample_jobs, b->d_sample_jobs, words(jobs * sizeof(SampleJob)), 1, 0}},
        jobs > 0 ? 4 : 2};
    fetch_plan(&b->device, plan);
  }
  walk(b, kListInput, 0);
  for (int layer = 0; layer < s->layers; layer++) {
    if (stoppable && abandoned(b)) return KSL_CLOSED;
    walk(b, b->layers[layer].kind == KSL_LAYER_FULL ? kListFull : kListLinear, layer);
  }
  walk(b, kListOutput, 0);
  if (b->plain) return KSL_OK;
  if (s->mtp_layers) mtp_follow(b);
  // Without drafts it is known what rows keep.
  if (b->n_kept == 0) keep_hidden(b);
  return KSL_OK;
}

// Chunks of keys that a shape has: two steps an octave. Chunks that are not there do nothing.
int shape_chunks(int n) {
  int step = 4;
  while (step + step / 2 < n) step *= 2;
  return n <= step ? step : step + step / 2;
}

Graph *find_graph(Backend *b, const GraphShape &shape) {
  for (int i = 0; i < b->n_graphs; i++)
    if (!memcmp(&b->graphs[i].shape, &shape, sizeof shape)) return &b->graphs[i];
  return nullptr;
}

// Whether a shape came before. Remembers it, in the place of the one that came first.
bool seen_before(Backend *b, const GraphShape &shape) {
  for (int i = 0; i < b->n_seen; i++)
    if (!memcmp(&b->seen[i], &shape, sizeof shape)) return true;
  b->seen[b->next_seen] = shape;
  b->next_seen = (b->next_seen + 1) % kShapesSeen;
  if (b->n_seen < kShapesSeen) b->n_seen++;
  return false;
}

// Where a new graph is kept: in the place of the one unused longest.
Graph *graph_place(Backend *b) {
  if (b->n_graphs < kGraphs) return &b->graphs[b->n_graphs++];
  Graph *place = &b->graphs[0];
  for (int i = 1; i < b->n_graphs; i++)
    if (b->graphs[i].used < place->used) place = &b->graphs[i];
  cudaGraphExecDestroy(place->run);
  if (!b->graphs_full)
    fprintf(stderr,
            "kslserve: waves have more shapes than the %d CUDA graphs that are kept; some take "
            "longer to launch\n",
            kGraphs);
  b->graphs_full = true;
  return place;
}

// What `work` launches, for `chunks` of keys. A graph of that shape that is kept (null: none) gets
// its launches, which takes a fraction of the time that a new one does and no memory. A graph is a
// cache: without one (null), the same is launched kernel by kernel.
Graph *capture(Backend *b, Graph *kept, const GraphShape &shape, int chunks,
               void (*work)(Backend *)) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  size_t kernels = 0;
  cudaError_t code = cudaStreamBeginCapture(b->device.stream, cudaStreamCaptureModeThreadLocal);
  if (code == cudaSuccess) {
    work(b);
    code = cudaStreamEndCapture(b->device.stream, &graph);
  }
  if (code == cudaSuccess && alloc_refused(b->alloc)) code = cudaErrorMemoryAllocation;
  if (code == cudaSuccess) code = cudaGraphGetNodes(graph, nullptr, &kernels);
  bool updated = false;
  if (code == cudaSuccess && kept) {
    cudaGraphExecUpdateResultInfo said = {};
    updated = cudaGraphExecUpdate(kept->run, graph, &said) == cudaSuccess;
    if (!updated) cudaGetLastError();  // other kernels, or more of them
  }
  if (code == cudaSuccess && !updated) code = cudaGraphInstantiate(&run, graph, 0);
  if (graph) cudaGraphDestroy(graph);
  if (code != cudaSuccess) {
    cudaGetLastError();
    b->no_graphs = true;
    fprintf(stderr, "kslserve: no CUDA graph could be made (%s); waves take longer to launch\n",
            cudaGetErrorString(code));
    return nullptr;
  }
  if (updated) {
    run = kept->run;
  } else {
    if (kept)
      cudaGraphExecDestroy(kept->run);
    else
      kept = graph_place(b);
    b->graphs_made++;
  }
  *kept = {shape, run, kernels, 0, chunks, 0};
  return kept;
}

// Fills the wave up to a shape: waves of drafts have any number of columns.
void fill_shape(Backend *b) {
  const int columns = shape_columns(b->batch.n), jobs = shape_columns(b->n_jobs);
  if (columns > b->column_capacity || columns > kWideTokens) {
    b->shaped = !b->multi;
    return;
  }
  for (; b->batch.n < columns; b->batch.n++) blank_column(b, b->batch.n);
  for (; b->head_jobs < jobs; b->head_jobs++) {
    b->job_columns[b->head_jobs] = 0;
    b->sample_jobs[b->head_jobs] = SampleJob{};
  }
  // Rows without a column, beside the last one: what kernels fetch ahead for them is there already.
  const int rows = shape_columns(b->n_rows), most = b->config->slots;
  b->shape_rows = rows < most ? rows : most;
  for (int r = b->n_rows; r < b->shape_rows; r++) {
    b->row_info[r] = RowInfo{};
    b->row_info[r].keep = -1;
    b->row_info[r].slab = b->row_info[b->n_rows - 1].slab;
  }
}

int launch(Backend *b) {
  if (!b->shaped) return forward(b, true);
  const GraphShape shape = {kWavePart, b->batch.n, b->shape_rows,  b->head_jobs,
                            b->multi,  b->plain,   b->head_direct, 0};
  run_shaped(b, shape, [](Backend *of) { forward(of, false); });
  return KSL_OK;
}

int run_columns(Backend *b) {
  const ModelSpec *s = b->spec;
  b->trunk = true;
  b->kv_only = false;
  b->hidden_of = kOfSlabs;
  plan_head(b);
  if (b->shaped) fill_shape(b);
  if (!b->shaped) upload(b, b->d_rows, b->row_info, b->n_rows * sizeof(RowInfo));
  upload(b, b->d_tiles, b->tiles, b->n_tiles * sizeof(FlashTile));
  upload(b, b->d_chunks, b->chunks, b->n_chunks * sizeof(ChunkInfo));
  upload(b, b->d_runs, b->runs, b->n_runs * sizeof(ChunkRun));
  if (!b->shaped) upload_columns(b, b->batch.n);
  upload_head(b);
  // The kernels of a shape fetch what is planned, so it is theirs no more when samples arrive.
  expect_samples(b, b->shaped, b->head_jobs);
  const int code = launch(b);
  if (code) return code;
  finish_head(b);
  if (b->device.error != cudaSuccess) return KSL_FATAL;
  if (b->n_kept > 0) {
    // Not where the next wave's plan will be, which may be made before this is fetched.
    for (int r = 0; r < b->n_rows; r++) {
      b->committed[r] = b->row_info[r];
      b->committed[r].committed = b->rows[r].committed;
    }
    upload(b, b->d_rows, b->committed, b->n_rows * sizeof(RowInfo));
    if (s->linear_layers) commit_kept(b);
    keep_hidden(b);
  }
  if (s->mtp_layers) mtp_propose(b);
  return KSL_OK;
}

int cuda_run(Backend *b, const Wave *wave, ksl_done *done, ksl_error *error) {
  b->wave = wave;
  b->taps = false;
  backlog_begin(b);
  b->taps = wave->n_taps > 0;
  for (int i = 0; i < wave->n_taps; i++) wave->taps[i].written = 0;
  for (int i = 0; i < wave->n_edits; i++) {
    const ksl_edit *edit = &wave->edits[i];
    upload(
        b,
        b->tables + static_cast<size_t>(edit->slot) * b->config->max_blocks_per_slot + edit->start,
        wave->block_ids + edit->offset, edit->n * sizeof(int32_t));
  }
  fetch_images(b, wave);
  for (int i = 0; i < wave->n_before; i++) run_op(b, &wave->before[i], i);
  b->awaited = false;
  int code = plan_rows(b, wave, done, error);
  if (code) return code;
  if (b->batch.n > 0) code = run_columns(b);
  for (int i = 0; i < b->n_rows && !code; i++) {
    RowPlan *plan = &b->rows[i];
    if (plan->n) plan->done->position = plan->row->start + plan->committed;
    plan->done->proposed = plan->slot->n_drafts;
    memcpy(plan->done->drafts, plan->slot->drafts, plan->slot->n_drafts * sizeof(int32_t));
  }
  for (int i = 0; i < wave->n_after && !code; i++) run_op(b, &wave->after[i], wave->n_before + i);
  // Images and taps are the caller's when the wave ends.
  if (!b->awaited || moves_state(wave)) synchronize(b, "running a wave");
  mover_finish(&b->mover, &b->device);
  b->wave = nullptr;
  if (b->device.error != cudaSuccess)
    return fail(error, KSL_FATAL, "The CUDA device failed while %s: %s.", b->device.what,
                cudaGetErrorString(b->device.error));
  return code;
}

void cuda_graphs(const Backend *b, Graphs *graphs) {
  graphs->kept = b->n_graphs;
  graphs->made = b->graphs_made;
  for (int i = 0; i < b->n_graphs; i++) graphs->kernels += b->graphs[i].kernels;
}

const BackendOps kCudaOps = {"cuda",  cuda_open,   cuda_info, cuda_run,
                             nullptr, cuda_graphs, cuda_close};

}  // namespace

void run_shaped(Backend *b, GraphShape shape, void (*work)(Backend *)) {
  const int needed = shape_chunks(b->most_position / kChunkKeys + 1);
  // No further than a table reaches, which is what scratch is made for.
  const int64_t most = static_cast<int64_t>(needed) * kChunkKeys,
                table =
                    static_cast<int64_t>(b->config->max_blocks_per_slot) * b->config->block_tokens;
  b->most_position = static_cast<int>(most < table ? most : table) - 1;
  shape.makes_heads = makes_heads(b);
  Graph *g = b->no_graphs ? nullptr : find_graph(b, shape);
  if (g) g->fewer = needed < g->chunks ? g->fewer + 1 : 0;
  const bool wanted =
      g ? needed > g->chunks || g->fewer >= kSpareLaunches : !b->no_graphs && seen_before(b, shape);
  if (wanted) g = capture(b, g, shape, needed, work);
  if (g) {
    g->used = ++b->graph_clock;
    keep_error(&b->device, cudaGraphLaunch(g->run, b->device.stream), "launching a wave");
  } else {
    work(b);
  }
}

bool moves_state(const Wave *wave) {
  return move_state(wave->before, wave->n_before) || move_state(wave->after, wave->n_after);
}

const BackendOps *default_backend(void) {
  return &kCudaOps;
}

const char *kernels_list(void) {
  return "cuda";
}
int kv_code_bytes(int, int, int, int) {
  return 0;
}

}  // namespace ksl
