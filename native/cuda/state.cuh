// The CUDA backend's state and what its files share. Strides are in floats unless named bytes.
#pragma once
#include "../common/backend.h"
#include "../common/budget.h"
#include "../common/program.h"
#include "../common/taps.h"
#include "attn/attn.cuh"
#include "gdn/chunk.cuh"
#include "gemm/gemm.cuh"
#include "sample/sample.cuh"
#include "state/mover.cuh"
#include "state/plan.cuh"

namespace ksl {

enum { kLongRow = 64 };
enum { kHeadBatch = 32 };  // columns whose logits exist at one time

struct Rotary;

struct LinearWeights {
  Group in;  // qkv, z, b, a
  Group out;
  float *taps;  // [4][channels]
  float *decay_rate, *dt_bias, *norm;
};

struct FullWeights {
  Group in;  // q, k, v
  Group kv;  // k, v: rows of the MTP layer that only store
  Group out;
  float *q_norm, *k_norm;  // 1 + w
};

struct LayerWeights {
  int kind, index;  // among the layers of its kind (full: KV layer)
  float *in_norm, *post_norm;
  Group gate_up, down;
  LinearWeights linear;
  FullWeights full;
};

// What the host remembers of a slot.
struct Slot {
  bool latched, use_counts, has_mask;
  int32_t last_token;
  int n_stop, n_drafts;
  int waits_until;  // the position behind the last one whose MTP keys wait; 0: none do
  int32_t stop_ids[KSL_MAX_STOP];
  int32_t drafts[KSL_MAX_DRAFT];
  int32_t *forced;
  int forced_n, forced_at, forced_capacity;
};

// One row of the running wave.
struct RowPlan {
  const ksl_row *row;
  ksl_done *done;
  Slot *slot;
  int column, n, keep, committed;
  bool ended;
};

// Chunks that are prepared at one time, and their runs.
struct ChunkBatch {
  int first, n, first_run, n_runs;
};
enum { kChunkBatch = 40 };

struct HeadJob {
  int row, offset;
};

// A column whose MTP keys and values are to be made, see mtp_backlog.cu.
struct WaitingColumn {
  int32_t token, position, slot;
};
enum { kMostWaiting = kWideTokens };

// Where the hidden states lie that `source` of columns tells.
enum { kOfSlabs = 0, kOfChain, kOfWaiting };

// Launches as one. Those of equal shape are the same kernels, which read everything else from
// device memory, but for the chunks of keys that attention is launched for: a graph has enough of
// them, and others when it is updated.
struct GraphShape {
  int part, columns, rows, jobs, multi, plain, head_direct, makes_heads;
};
enum { kWavePart, kDraftPart, kBacklogPart };
struct Graph {
  GraphShape shape;
  cudaGraphExec_t run;
  size_t kernels;
  uint64_t used;
  int chunks;
  int fewer;  // launches in a row that needed fewer chunks
};
// Shapes that came once are remembered apart: they do not take the places of graphs.
enum { kGraphs = 64, kShapesSeen = 256 };
// So many launches with chunks to spare are worth an update.
enum { kSpareLaunches = 32 };

struct Backend {
  const ModelSpec *spec;
  const ksl_config *config;
  Alloc *alloc;
  Device device;
  void **owned;  // device memory
  int n_owned, owned_capacity;
  void *pinned[8];  // host memory that kernels read and write
  int n_pinned;
  uint64_t device_bytes;  // given out by own_device
  uint8_t *arena;         // what own_device gives out parts of; null: it allocates each
  bool measuring;         // own_device only counts
  int major;              // compute capability
  char name[16];

  LayerWeights *layers;
  Raw embedding;
  Group head, mtp_fc;
  float *final_norm, *mtp_norm_embedding, *mtp_norm_hidden, *mtp_norm;
  double *frequency;
  uint64_t weight_bytes, token_bytes, pool_bytes, scratch_bytes;
  uint32_t encodings;

  // pools
  SlabPool slabs;
  int64_t conv_offset, hidden_offset, state_layer, conv_layer, image_floats;
  uint8_t *blocks;
  int64_t block_bytes, kv_layer_bytes;
  KvLayer kv;  // of KV layer 0
  int32_t *tables;
  SlotArrays slot_arrays;
  Slot *slots;

  // the running wave, on the host; upload copies it, or fetch_plan what is pinned
  const Wave *wave;
  RowPlan *rows;
  RowInfo *row_info;   // [slots], pinned
  RowInfo *committed;  // [slots], pinned: the rows once it is known what they keep
  int n_rows, n_kept;
  int shape_rows;  // n_rows, and rows without a column that fill up a shape
  int n_short;     // columns of rows that are not tiled
  FlashTile *tiles;
  int n_tiles, tile_capacity;
  bool tiles_divided;  // some have parts
  ChunkInfo *chunks;
  ChunkRun *runs;
  ChunkBatch *batches;
  int n_chunks, n_runs, n_batches;
  int32_t *columns;  // [kColumnArrays][wave_columns + slots], pinned
  HeadJob *jobs;
  int n_jobs, head_jobs;   // head_jobs: with those that fill up a shape
  int32_t *job_columns;    // pinned
  SampleJob *sample_jobs;  // pinned
  LogprobJob *logprob_jobs;
  int n_logprob_jobs, logprob_entries;
  int32_t *ids;          // sampled, by job; pinned
  ksl_logprob *entries;  // grows
  int entries_capacity;

  // the same on the device
  RowInfo *d_rows;
  FlashTile *d_tiles;
  ChunkInfo *d_chunks;
  ChunkRun *d_runs;
  int32_t *d_columns;
  int32_t *d_job_columns, *d_head_columns;
  SampleJob *d_sample_jobs;
  LogprobJob *d_logprob_jobs;
  ksl_logprob *d_entries;
  int32_t *d_marks;
  int marks_capacity;

  Mover mover;
  int *fetched;  // [ops of the wave] moves of its LOADs; grows
  int fetched_capacity;

  Graph graphs[kGraphs];
  int n_graphs;
  GraphShape seen[kShapesSeen];  // a ring
  int n_seen, next_seen;
  uint64_t graph_clock, graphs_made;
  bool scaled;       // packed products of many tokens are block-scaled
  bool wide;         // they have kernels of their own, which leave whole products
  bool attn_tiles;   // attention of short rows runs on tensor cores
  bool gdn_fused;    // a linear layer of short rows is one kernel between its projections
  bool flash;        // attention of prompt rows has warpgroup products
  bool long_rows;    // prompt rows of kLongRow columns and more have kernels of their own
  bool graphs_full;  // one has lost its place
  bool no_graphs;    // capturing failed: waves are launched kernel by kernel

  Columns batch;
  bool trunk;  // the batch is the wave's columns, not drafts
  bool kv_only;
  int hidden_of;      // kOfSlabs and so on
  bool head_direct;   // the head reads columns as they lie: the norm before it makes its input
  bool normed_ready;  // the layer before has made this layer's in_norm, or left it to the product
  bool norm_owed;     // `norm` is left to the next product
  InputNorm norm;
  bool multi;  // a row has more than one column
  // The wave is rows of one column, and does nothing else to state that is not their own: the last
  // norm keeps hidden states, and MTP keys wait.
  bool plain;
  bool awaited;  // samples are awaited where they arrive, not with all that was launched
  bool shaped;   // the wave is decode and VERIFY rows, filled up to one of few shapes
  bool taps;
  int most_position;
  int column_capacity;

  WaitingColumn waiting[kMostWaiting];
  int n_waiting, slots_waiting;
  float *waiting_hidden;  // [kMostWaiting][hidden_stride], before each column

  // activations [columns][...]
  int hidden_stride, mtp_stride, conv_stride, value_stride, head_stride, query_stride,
      query_gate_stride, kv_stride, mlp_stride, vocab_stride;
  float *x, *normed, *mixed, *final, *chain;
  float *partials;         // [slices][columns][hidden], products on their way to x
  int64_t partial_stride;  // of a slice
  int most_slices;         // of any product
  float *qkv, *conv, *conv_silu, *z, *core, *gated, *gate_a, *gate_b, *g, *decay, *beta;
  float *query_gate, *k, *v, *q, *stored_q, *pregate, *attn_gated;
  float *mlp_gate, *mlp_up, *mlp_act;
  float *mtp_in, *head_in, *logits;
  SampleScratch sampling;
  float *cos, *sin;
  float *attn_partial;
  int64_t attn_partial_floats;
  Split hidden_split, value_split, query_split, mlp_split, mtp_split, head_split;
  ChunkOperands *chunk_operands;  // of kChunkBatch chunks
  float *chunk_decays;
  float *keep;  // [linear layers][keep_columns][keep_floats]
  int keep_columns;
  int64_t keep_floats;
  unsigned *gdn_arrived;  // [linear layers][slots][key heads], see StepArgs
};

enum ColumnArray {
  kToken = 0,
  kPosition,
  kSlotOf,
  kRowOf,
  kSource,
  kKeptRow,
  kShort,
  kColumnArrays
};

// Zeroed device memory that close frees; null when memory is out. While measuring, no memory: a
// pointer that is not null.
void *own_device(Backend *b, size_t bytes);
template <typename T>
inline T *own_many(Backend *b, size_t count) {
  return static_cast<T *>(own_device(b, count * sizeof(T)));
}

// ---- weights.cu
// While measuring, no values are read or written. staging: the most device memory that is taken for
// a while.
int load_weights(Backend *b, const TensorTable *tensors, uint64_t *staging, ksl_error *error);

// ---- dispatch.cu
const StageTable *stage_table(StageList list);
void walk(Backend *b, StageList list, int layer);
Rotary rotary_of(const Backend *b);
void tap_append(Backend *b, Tap tap, int layer, const TapColumns &from);
// Logits of the first `vocab` ids for the first n columns of head_split, of which `in` is the
// float32 form.
void head_logits(Backend *b, const float *in, int n, int vocab);
// Whether attention makes the heads that it reads: of few columns that are rows of their own, and
// few keys.
bool makes_heads(const Backend *b);
// Which form the splits have for the columns of `batch`.
void form_splits(Backend *b);
void norm_columns(Backend *b, const float *gain, float *out, const Split &split, bool residual,
                  bool zero_first);
// Replays the accepted columns of VERIFY rows.
void commit_kept(Backend *b);

// ---- backend.cu
// The columns that stand for `n` in shapes.
int shape_columns(int n);
// Makes a column of the plan one of no row.
void blank_column(Backend *b, int column);
// Runs `work`, which launches and does nothing else, as one launch where this shape was seen
// before. Rounds most_position up.
void run_shaped(Backend *b, GraphShape shape, void (*work)(Backend *));

// Whether its operations touch slabs, blocks or images.
bool moves_state(const Wave *wave);

// ---- head.cu
// Lists the columns of the head; uploads what it needs; run_head only launches.
void plan_head(Backend *b);
void upload_head(Backend *b);
// Before the launches that leave `n` samples in `ids`: whether these are awaited one by one.
void expect_samples(Backend *b, bool awaited, int n);
// Waits for them, or for all that was launched; false where that failed.
bool await_samples(Backend *b, int n, const char *what);
Split head_split_of(const Backend *b, int n);  // for n columns
void run_head(Backend *b);
// Logits of all columns of `from`, a tap.
void tap_logits(Backend *b, const float *from, Tap tap);
void finish_head(Backend *b);
void mtp_follow(Backend *b);
void mtp_propose(Backend *b);
void upload(Backend *b, void *to, const void *from, size_t bytes);
void upload_columns(Backend *b, int n);
bool synchronize(Backend *b, const char *what);

// ---- mtp_backlog.cu
// Before anything of a wave: whether it is plain; makes the MTP keys that wait where they have to
// be there, or would not be found behind it.
void backlog_begin(Backend *b);
// Has a column of a plain wave wait; returns its place in waiting_hidden.
int backlog_add(Backend *b, const WaitingColumn &column);

// ---- open.cu
int cuda_open(const ModelSpec *spec, const ksl_config *config, const TensorTable *tensors,
              Alloc *alloc, Backend **out, ksl_error *error);
void cuda_info(Backend *b, ksl_info *info);
void cuda_close(Backend *b);

}  // namespace ksl
