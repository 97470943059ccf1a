// The CPU backend's state and what its files share. Strides and sizes are in floats unless named
// bytes.
#pragma once
#include "../common/backend.h"
#include "../common/kv_row.h"
#include "../common/pool.h"
#include "../common/program.h"
#include "../common/sample.h"
#include "../common/taps.h"
#include "kernels.h"

namespace ksl {

enum {
  kConvChannels = 512,  // channels of one convolution task
  kHeadBatch = 32,      // columns whose logits exist at one time
  // Columns whose MTP keys and values are made later: most of a wave, and of those that are then
  // made at a time; how many more than need be are made where there is no room for others; rows
  // and bytes that the backlog may have.
  kMtpWaiting = 128,
  kMtpBatch = 64,
  kBacklogLeast = 2 * kMtpWaiting,
  kBacklogMost = 4096,
  kBacklogBytes = 16 << 20,
  kConvTaps = 4,
  // Of an element, in the unit of parallel(): a sixteenth of a cycle.
  kRoundCost = 4,
  kGateCost = 24,
  kConvCost = 48,
  kHistory = kConvTaps - 1,
  kSpareBytes = 64 << 20,  // most that spare slabs take
  kKvPlanes = 4,           // K values, K scales, V values, V scales
  kMinBlockTokens = 16,    // the smallest block (budget.cc)
};

struct LinearWeights {
  Matrix qkv, z, b, a, out;
  float *taps;     // [4][channels]
  float *decay;    // [value heads], -exp(A_log)
  float *dt_bias;  // [value heads]
  float *norm;     // [value dim], a plain gain
};

struct FullWeights {
  Matrix q, k, v, out;
  float *q_norm, *k_norm;  // [head_dim], 1 + w
};

struct LayerWeights {
  int kind;
  int index;                   // among the layers of its kind (full: KV layer number)
  float *in_norm, *post_norm;  // [hidden], 1 + w
  Matrix gate, up, down;
  LinearWeights linear;
  FullWeights full;
};

// Columns that run through the layers together. A column is one position of one sequence.
struct Batch {
  int n;
  int32_t *token, *position, *slot;
  int32_t *row;          // index into Backend.rows
  int32_t *block;        // of the pool, where keys and values go; null: by the table of the slot
  float *cos, *sin;      // [n][rotary_dims / 2]
  const float **hidden;  // MTP: the hidden state before this position
};

// Committed columns without MTP keys and values (mtp_backlog.cc): a ring of `n` entries from
// `first` on, those that were dealt with in between included.
struct Backlog {
  int room, first, n;
  int32_t *token, *position, *block, *next;  // [room]; block -1: dealt with
  float *hidden;                             // [room][hidden_stride]
  int32_t *of_block;                         // [blocks]
};

// One row of the wave being run.
struct RowPlan {
  const ksl_row *row;
  ksl_done *done;
  SlotState *slot;
  float *slab;
  int column;     // its first column
  int n;          // columns, fewer than asked where drafts are missing; 0: it does nothing
  int keep;       // first of its kept columns, -1: the state is committed as it is computed
  int spare;      // its spare slab, -1: none
  int committed;  // columns whose state the slab has in the end
  bool ended;     // no more of its columns are sampled
  int n_cuts;     // ascending offsets; VERIFY rows have none
  int cut_offset[KSL_MAX_CUTS];
  float *cut_slab[KSL_MAX_CUTS];
};

struct HeadJob {
  int row;     // index into rows
  int offset;  // column within the row; drafting: the step
};

// Per worker.
struct WorkerScratch {
  SampleScratch sample;
  float *query, *acc;  // [kMaxQueries][head_dim]: heads of one or more columns
  float *m, *l;        // [kMaxQueries]
  uint8_t *tile;       // attn_scratch_bytes
};

struct Backend {
  const ModelSpec *spec;
  const ksl_config *config;
  Alloc *alloc;
  const Kernels *kernels;
  const Bf16Kernels *bf16;  // null: not here, or not wanted
  const AttnKernels *attn;
  Pool *pool;
  int threads;
  int64_t inline_cost;  // see parallel()
  void **owned;
  int n_owned, owned_capacity;

  // weights
  uint8_t *matrices;     // storage of all of them
  LayerWeights *layers;  // [layers + mtp_layers]
  Matrix embedding, head;
  Matrix draft_head;             // the first rows of the head: the ids that drafts may have
  int draft_vocab, draft_limit;  // its rows, and those of them that are sampled from
  float *final_norm;
  Matrix mtp_fc;
  float *mtp_norm_embedding, *mtp_norm_hidden, *mtp_norm;
  double *frequency;  // [rotary_dims / 2]
  uint64_t weight_bytes, token_bytes;
  uint32_t encodings;      // bit set per KSL_ENC_* in use
  bool has_bf16_products;  // some matrix takes the input rounded to bf16, where that exists

  // pools
  size_t state_layer, conv_layer;     // of one linear layer in a slab
  size_t conv_offset, hidden_offset;  // in a slab
  size_t image_floats, slab_floats;   // of its image (budget.h) and in the pool
  // Where slabs are: they change places with the spare ones that rows with drafts leave the state
  // in that follows if all are accepted.
  float **places, **spares;  // [slabs], [n_spares]
  int n_spares;
  uint8_t *blocks;
  // Of the planes of a layer in a block (budget.h), in bytes: where each begins, its rows.
  size_t kv_offset[kKvPlanes], kv_bytes[kKvPlanes];
  size_t kv_layer_bytes, block_bytes;
  // The ring of INT8RING_INT4 (kv_ring.cc): its positions, 0 where there is none; where it begins
  // in a slab, in floats; bytes of a head's row in each plane and in all planes before; bytes of a
  // layer.
  int ring_tokens;
  size_t ring_offset, ring_bytes[kKvPlanes], ring_before[kKvPlanes], ring_layer_bytes;
  // Codes beside bf16 rows (kv_codes.cc), null: none. Per block [KV layer][head][block_tokens /
  // kPieceKeys] pieces. Which blocks were loaded since they were last made, and how many; room for
  // a list of them.
  uint8_t *codes;
  size_t code_head_bytes, code_block_bytes;
  uint8_t *stale;
  int n_stale;
  int32_t *refresh;
  uint8_t *ring_stage;  // rows of the running layer, of all columns of the wave
  uint8_t *ring_keep;   // of rows with drafts, all layers: [layers][keep_columns]
  int32_t *tables;      // [slots][max_blocks_per_slot], -1: none
  SlotState *slots;
  uint64_t pool_bytes, scratch_bytes;

  // the running wave
  const Wave *wave;
  bool fault;     // a test asked for it
  RowPlan *rows;  // [slots]
  int n_rows;
  Batch trunk;    // the wave's columns
  Batch drafts;   // one column per drafting row
  Batch waiting;  // those of the backlog that are made together
  Batch *batch;   // which of them runs
  bool kv_only;   // attention stages stop at keys and values
  bool mtp_late;  // mtp_in has what the MTP layer is to be given of the last wave's columns
  int mtp_room;   // columns of a wave that can wait: kMtpWaiting, or all that it can have
  Backlog backlog;
  HeadJob *jobs;  // [wave_columns]

  // activation arena; x_stride etc. are multiples of 16
  size_t hidden_stride, mtp_stride, conv_stride, value_stride, head_stride, query_stride,
      query_gate_stride, kv_stride, mlp_stride, vocab_stride, key_stride;
  float *x, *normed, *mixed, *final;          // [columns][hidden]
  float *qkv, *conv;                          // [columns][conv_channels]
  float *z, *core, *gated;                    // [columns][v_width]
  float *gate_a, *gate_b, *g, *decay, *beta;  // [columns][value heads]
  float *query_gate, *k, *v, *q, *o;
  float *mlp_gate, *mlp_up;
  QuantizedBlock *quantized;   // the input of a product; null: floats only
  RoundedBlock *rounded;       // the same where weights are bf16
  const float *rounded_input;  // whose columns they hold already; null: nobody's
  float *mtp_in;               // [columns][2 * hidden]
  float *chain;                // [columns][hidden], post-norm MTP hidden
  float *head_in;              // [kHeadBatch][hidden]
  float *logits;               // [kHeadBatch][vocab]
  float *partials;             // attention tiles of few columns over many keys
  int partial_tiles;
  float *zero_hidden;  // [hidden]
  // kept from VERIFY rows: [linear layers][keep_columns][keep_floats]: pre-conv column, decays,
  // keys, corrections
  float *keep;
  int keep_columns;
  size_t keep_floats;
  WorkerScratch *workers;
};

// ---- memory

// Zeroed, aligned, freed at close; null when memory is out.
void *own_bytes(Backend *b, size_t bytes);
float *own_floats(Backend *b, size_t count);

// ---- weights.cc

int load_weights(Backend *b, const TensorTable *tensors, ksl_error *error);

// ---- parallel work

// `cost` is about the multiply-adds of the whole, sixteen of which take a cycle; small work runs in
// the caller, since waking a worker costs more. Pieces are multiples of `grain`.
void parallel(Backend *b, int n, int64_t cost, PoolTask task, void *context, int grain = 1);

// ---- product.cc

// The rounding of an input's columns for the products that read it, by whoever makes them: a column
// is rounded while it is in the first level.
struct Rounding {
  const Backend *b;
  int width, columns;
  bool to_int8, to_bf16;  // forms that one of the matrices takes; neither: nothing is to be done
};
// The next product is that of `x` with some of `matrices`; it finds its input rounded.
Rounding begin_rounding(Backend *b, const float *x, int columns, const Matrix *const *matrices,
                        int n_matrices);
void round_column(const Rounding *rounding, const float *x, int column);
int64_t rounding_cost(const Rounding *rounding);

// y = x Wᵀ for up to four matrices that read the same input.
enum { kMaxProjections = 4 };
struct Projection {
  const Matrix *w;
  float *y;
  size_t stride;
};
void project(Backend *b, const Projection *projections, int n_projections, const float *x,
             size_t x_stride, int columns);

// ---- stages_embed.cc

// out[c] = rms(x[c]) * gain.
void norm_columns(Backend *b, float *x, const float *gain, float *out, int columns);

// ---- positions

inline float *slab_state(const Backend *b, float *slab, int linear) {
  return slab + linear * b->state_layer;
}
inline float *slab_history(const Backend *b, float *slab, int linear) {
  return slab + b->conv_offset + linear * b->conv_layer;
}
inline float *slab_hidden(const Backend *b, float *slab) {
  return slab + b->hidden_offset;
}
inline float *slab_at(const Backend *b, int index) {
  return b->places[index];
}

// Where a position is: a layer's part of its block, and the row of its first head there; that of
// the next head is block_tokens further. Attention reads one head at a time, and machines read
// memory well where it is one piece.
struct KvPlace {
  uint8_t *layer;
  size_t row;
};
inline int32_t block_of(const Backend *b, int slot, int position) {
  return b->tables[static_cast<size_t>(slot) * b->config->max_blocks_per_slot +
                   position / b->config->block_tokens];
}
inline KvPlace kv_place_in(const Backend *b, int32_t block, int layer, int position) {
  return {b->blocks + block * b->block_bytes + layer * b->kv_layer_bytes,
          static_cast<size_t>(position % b->config->block_tokens)};
}
inline KvPlace kv_place(const Backend *b, int slot, int layer, int position) {
  return kv_place_in(b, block_of(b, slot, position), layer, position);
}

// ---- kv_ring.cc

// Row `row` of its first head in a plane of a layer that holds `rows` rows.
inline uint8_t *ring_row(const Backend *b, uint8_t *layer, size_t rows, int plane, size_t row) {
  return layer + b->spec->kv_heads * (rows * b->ring_before[plane] + row * b->ring_bytes[plane]);
}
inline uint8_t *ring_layer(const Backend *b, float *slab, int kv) {
  return reinterpret_cast<uint8_t *>(slab + b->ring_offset) + kv * b->ring_layer_bytes;
}
// Fills the fields of the ring; the rest of the pools is laid out.
void ring_init(Backend *b);
// Memory for the wave; false when there is none.
bool ring_scratch(Backend *b);
// Encodes one column of a layer.
void ring_stage(Backend *b, int column);
// After attention of a trunk layer: what its columns leave in the rings of slabs and cuts.
void ring_advance(Backend *b, int kv);
// The same for the committed columns of rows with drafts, in all layers.
void ring_commit_kept(Backend *b);

// ---- kv_image.cc

// Copies `n` bytes from byte `from` of a block's image on.
void block_save(const Backend *b, int block, size_t from, size_t n, void *image);
void block_load(Backend *b, int block, size_t from, size_t n, const void *image);

// ---- kv_codes.cc

// The piece of a head that position `at` of a block is in.
inline uint8_t *code_piece_at(const Backend *b, int block, int layer, int head, int at) {
  const size_t of_head = static_cast<size_t>(layer) * b->spec->kv_heads + head;
  return b->codes + block * b->code_block_bytes + of_head * b->code_head_bytes +
         at / kPieceKeys * code_piece_bytes(b->spec->head_dim);
}
// Sizes; 0 where there are none.
void codes_init(Backend *b);
// What ops on blocks mean for their codes; without any, nothing.
void codes_mark(Backend *b, int block);  // its rows were loaded
void codes_copy(Backend *b, int from, int to);
void codes_drop(Backend *b, int first, int n);
void codes_touch(Backend *b, int first, int n);
// Makes those that the planned rows read.
void codes_refresh(Backend *b);

// ---- stages

void stage_embed(void *context, int layer);
void stage_in_norm(void *context, int layer);
// mixer_add and post_norm
void stage_mixer_join(void *context, int layer);

void stage_gdn_project(void *context, int layer);
void stage_gdn_conv(void *context, int layer);
void stage_gdn_unit(void *context, int layer);
void stage_gdn_gates(void *context, int layer);
void stage_gdn_scan(void *context, int layer);
void stage_gdn_gated_norm(void *context, int layer);
void stage_gdn_out(void *context, int layer);
// Brings the slabs of VERIFY rows from before the row to after its committed columns.
void gdn_commit_kept(Backend *b);

void stage_attn_project(void *context, int layer);
void stage_attn_heads(void *context, int layer);
void stage_attn_store(void *context, int layer);
void stage_attn_core(void *context, int layer);
void stage_attn_gate(void *context, int layer);
void stage_attn_out(void *context, int layer);

void stage_mlp_project(void *context, int layer);
void stage_mlp_act(void *context, int layer);
void stage_mlp_down(void *context, int layer);
void stage_mlp_add(void *context, int layer);

void stage_final_norm(void *context, int layer);
// Logits of the columns that need them; samples and scores.
void stage_head(void *context, int layer);
// Logits of given hidden states [n <= kHeadBatch] into b->logits.
void head_logits(Backend *b, int n);
// The same for the ids that may be drafted.
void draft_logits(Backend *b, int n);

void stage_mtp_input(void *context, int layer);
void stage_mtp_norm(void *context, int layer);
void stage_mtp_head(void *context, int layer);
// MTP keys and values of the wave's columns, or the whole layer where a tap asks for it. Before the
// hidden states of slabs move on. Where nothing in this wave reads them, a prompt's are made by
// mtp_finish; a few columns go into the backlog.
void mtp_follow(Backend *b);
bool mtp_finish(Backend *b, bool idle);
// Those of a batch with hidden states.
void mtp_make(Backend *b, Batch *batch);
// Drafts for the rows that ask for them.
void mtp_propose(Backend *b);

// ---- mtp_backlog.cc

// Entries that it has room for, from hidden_stride.
int backlog_rows(const Backend *b);
// There is room for mtp_room of them in every wave.
void backlog_add(Backend *b, const Batch *batch, int column);
// The positions of a block from `offset` on are written now, or lost.
void backlog_forget(Backend *b, int block, int offset);
// What waits of a slot's first positions is made by the next backlog_settle.
void backlog_gather(Backend *b, int slot, int positions);
void backlog_settle(Backend *b);
// Makes what waits of a block; and of the oldest, where there is no room for another wave.
void backlog_settle_block(Backend *b, int block);
void backlog_make_room(Backend *b);
// Makes some of the oldest; whether any are left.
bool backlog_shrink(Backend *b);

// ---- open.cc, backend.cc

int cpu_open(const ModelSpec *spec, const ksl_config *config, const TensorTable *tensors,
             Alloc *alloc, Backend **out, ksl_error *error);
void cpu_info(Backend *b, ksl_info *info);
void cpu_close(Backend *b);
// Fills cos and sin of a batch's columns from their positions.
void batch_rotary(Backend *b, Batch *batch);

// ---- stages.cc

const StageTable *stage_table(StageList list);
// Runs a stage list on the batch, with taps if it is the wave's.
void walk(Backend *b, StageList list, int layer);
void tap_append(Backend *b, Tap tap, int layer, const TapColumns &from);

}  // namespace ksl
