/* kslserve engine: the public C ABI.
 *
 * This header holds declarations only (no macros, no includes, no guard), so that the same text is
 * compiled by the native sources (through common/abi.h) and read by the Python binding generator.
 *
 * Ownership and threads
 *   The caller owns every index (slots, slabs, blocks); the engine owns every byte and has no
 *   policy. One thread at a time may call into an engine; ksl_progress may be called from any.
 *   ksl_submit copies all it is given, except the buffers named by SAVE_*, LOAD_* ops, by row
 *   outputs (logprobs) and by taps: those stay valid until the wave's end record was polled.
 *
 * Waves
 *   Waves run in submission order. Inside a wave: edits, before ops, rows, after ops. Rows of a
 *   wave are independent: no two rows share a slot or a slab, no two rows write one block. After a
 *   wave the slab of each row equals processing exactly the committed tokens of that slot.
 *
 * A slab is one sequence's state besides KV: delta-rule state, the last 3 pre-conv columns of each
 * linear layer, and the post-norm trunk hidden of the last computed position.
 */
/* Return codes. */
enum {
  KSL_OK = 0,
  KSL_AGAIN = 1,   /* ring_depth waves wait for their end record to be polled: poll, then again */
  KSL_INVALID = 2, /* the argument breaks a documented rule; nothing was changed */
  KSL_NOMEM = 3,   /* an allocation failed; nothing was changed */
  KSL_FATAL = 4,   /* the engine is poisoned: every later submit fails with this code */
  KSL_CLOSED = 5
};

/* Documented limits. */
enum {
  KSL_MAX_DRAFT = 16, /* drafts of a VERIFY row */
  KSL_MAX_CUTS = 4,   /* cuts of a row */
  KSL_MAX_TOP = 20,   /* top log-probabilities per position */
  KSL_MAX_STOP = 32,  /* stop ids of a slot */
  KSL_MAX_BIAS = 1024 /* logit biases of a slot */
};

/* Weight encodings. codes row-major; element k of a row first in the low bits. */
enum {
  KSL_ENC_F32 = 0,
  KSL_ENC_BF16 = 1,
  KSL_ENC_FP8 = 2,  /* e4m3fn byte; scales: float32 [ceil(rows/128), ceil(cols/128)], multiplied */
  KSL_ENC_E2M3 = 3, /* 4 codes in 3 bytes; scales: E8M0 byte [ceil(rows/128), ceil(cols/128)],
                       value = code * 2^(byte-127) */
  KSL_ENC_NVFP4 = 4 /* 2 codes in a byte; scales: ue4m3 byte [rows, cols/16]; global: float32
                       [ceil(rows/128)]; value = code * scale * global */
};

/* KV formats, as common/kv_row.h defines them; a backend refuses those that it does not have. */
enum {
  KSL_KV_F32 = 0,
  KSL_KV_BF16 = 1,
  KSL_KV_FP8 = 2, /* e4m3 K and V, a power-of-two float32 scale per position and KV head each */
  KSL_KV_Q4 = 3,  /* rotated int4 K with a half scale and zero point per 32 channels; V as in FP8;
                     head_dim 32, 64, 128 or 256 */
  KSL_KV_INT8_G64 = 4,     /* int8, a half scale per 64 channels */
  KSL_KV_INT4_G32 = 5,     /* int4, a half scale per 32 channels */
  KSL_KV_INT8RING_INT4 = 6 /* INT4_G32, and the last kv_ring positions also in INT8_G64 in the slab:
                              a query at p reads the int8 row of key j if p - j < kv_ring. The MTP
                              layer has INT4_G32 alone. */
};

/* Layer kinds. */
enum { KSL_LAYER_LINEAR = 0, KSL_LAYER_FULL = 1 };

/* Tensors the backend makes itself (data is null). UNIFORM: value(i) = scale * (2 u(seed, i) - 1),
   CONSTANT: value(i) = scale; then encoded in the tensor's encoding. */
enum { KSL_FILL_NONE = 0, KSL_FILL_UNIFORM = 1, KSL_FILL_CONSTANT = 2 };

enum { KSL_ISA_AUTO = 0, KSL_ISA_SCALAR = 1, KSL_ISA_AVX2 = 2, KSL_ISA_AVX512 = 3 };

/* Arithmetic of matrix products. AUTO: the backend's own (CPU: int8 activations beside E2M3 and
   NVFP4 weights, bf16 ones beside bf16 weights where the machine multiplies them); FLOAT:
   activations are not rounded. */
enum { KSL_ACT_AUTO = 0, KSL_ACT_FLOAT = 1 };

/* OPS: FORCE and FAULT, refused without. PORTABLE: a device's backend takes kernels that other
   devices need in place of those made for it, so that they can be tried where they were not meant
   to run. */
enum { KSL_HOOK_OPS = 1, KSL_HOOK_PORTABLE = 2 };

typedef struct ksl_error {
  int32_t code;
  char text[508];
} ksl_error;

/* Fills the buffers with rows [row, row + rows) of a tensor as a matrix of its own. row is a
   multiple of 128; rows is one too, or reaches the end. Returns 0, or anything else to make
   ksl_open fail with KSL_INVALID. Called only inside ksl_open, in the caller's thread, for
   ascending rows of one tensor after the other. */
typedef int (*ksl_read_rows)(void *context, int64_t row, int64_t rows, void *data, void *scales,
                             float *globals);

/* One named tensor. Names are canonical: model.embed_tokens.weight, model.layers.N.*,
   model.norm.weight, lm_head.weight (absent: the head is the embedding), mtp.*. rank 1 tensors have
   cols = 1 and their length in rows; conv1d is [channels, taps]. Its values are in buffers, whose
   sizes are in bytes and checked; or come from `read`; or are a fill. */
typedef struct ksl_tensor {
  const char *name;
  int32_t encoding;
  int32_t fill_kind;
  int64_t rows, cols;
  const void *data;
  const void *scales;
  const float *globals;
  uint64_t data_bytes, scales_bytes, globals_bytes;
  uint64_t fill_seed;
  float fill_scale;
  int32_t reserved;
  ksl_read_rows read; /* null unless the values come from it: then data, scales, globals are null */
  void *context;
} ksl_tensor;

typedef struct ksl_config {
  /* model dimensions */
  int32_t vocab, hidden, intermediate, layers;
  const uint8_t *layer_kinds; /* [layers] KSL_LAYER_* */
  int32_t heads, kv_heads, head_dim, rotary_dims;
  int32_t lin_key_heads, lin_value_heads, lin_key_dim, lin_value_dim, conv_taps;
  int32_t mtp_layers;  /* 0 or 1 */
  int32_t token_limit; /* ids >= this are never sampled (padding rows of the vocabulary) */
  double rope_theta;
  float norm_eps;
  /* pools */
  int32_t slots, slabs, blocks, block_tokens; /* block_tokens: a multiple of 16 */
  int32_t max_blocks_per_slot;                /* length of a slot's block table */
  int32_t wave_columns;                       /* most columns of a wave, decode rows included */
  int32_t ring_depth;                         /* waves that may be submitted and not yet done */
  int32_t kv_format;
  int32_t kv_ring; /* of INT8RING_INT4: a multiple of 64; unused by the others */
  /* execution */
  int32_t activations;        /* KSL_ACT_* */
  int32_t isa, threads, nice; /* threads 0: one per core */
  int32_t test_hooks;         /* KSL_HOOK_*, added up */
  int64_t fail_alloc_at;      /* test hook: the n-th allocation of open fails; 0 never */
  /* MTP drafts. draft_margin: a chain ends before a draft whose score leads the second best one by
     less, in units of logit / temperature (of logits at temperature 0), noise included; 0: never.
     draft_vocab: ids from this on are not drafted, and their part of the head is not read;
     0: all. */
  float draft_margin;
  int32_t draft_vocab;
} ksl_config;

/* Properties of the determinism contract: a position's logits do not depend on how the rows of a
   prompt were cut, on what else its waves held, on whether the state before it came from a
   checkpoint of a prompt, or of a generation, or on drafts. */
enum {
  KSL_CHUNKED = 0,
  KSL_BATCH = 1,
  KSL_ADOPTED_PROMPT = 2,
  KSL_ADOPTED_GENERATION = 3,
  KSL_SPECULATION = 4,
  KSL_PROPERTIES = 5
};

/* How far a property holds: the logits of the two ways on a trained model. All 0: equal bits. */
typedef struct ksl_closeness {
  float distance;   /* relative L2 distance, at most */
  float divergence; /* mean KL divergence in nats, at most */
} ksl_closeness;

typedef struct ksl_info {
  int32_t vocab, hidden, layers, mtp_layers;
  int32_t slots, slabs, blocks, block_tokens;
  int32_t threads;
  int32_t has_mtp;
  uint64_t weight_bytes;   /* all weights as held in memory */
  uint64_t token_bytes;    /* weight bytes read per decoded token */
  uint64_t slab_bytes;     /* of one SAVE_SLAB image */
  uint64_t block_bytes;    /* of one SAVE_BLOCK image: every KV layer, MTP included */
  uint64_t kv_token_bytes; /* KV bytes per token */
  uint64_t kv_code_bytes;  /* per token, of codes held beside them, which no image has; 0: none */
  uint64_t pool_bytes;     /* slabs, blocks, tables, slot state */
  uint64_t scratch_bytes;  /* activation arena */
  char isa[16];            /* "scalar", "avx2", "avx512" */
  char activation[24];     /* "float": no activation quantisation; "int8" */
  ksl_closeness equality[KSL_PROPERTIES];
  /* Where a property is no equality of bits it is one among waves of at most equal_columns columns
     whose rows have at most equal_row. 0: any. */
  int32_t equal_columns, equal_row;
  char numerics[128]; /* build, ISA path and formats: equal strings mean equal bits */
  char note[160];     /* a sentence for whoever starts this engine, or "" */
} ksl_info;

/* Sampling of one slot, set by CONFIGURE. Order of application: repetition penalty over prompt and
   output ids, then presence and frequency over output ids, then bias, mask, padding ids; then
   temperature and the filters top_k, top_p, min_p (each over what the one before left); then the
   token is argmax(logit / temperature + G(seed, position, id)) with Gumbel noise G. Temperature 0
   is argmax of the adjusted logits; ties go to the lower id. */
typedef struct ksl_sampling {
  uint64_t seed;
  float temperature; /* >= 0 */
  float top_p;       /* (0, 1]; 1 off */
  float min_p;       /* [0, 1]; 0 off */
  float presence, frequency;
  float repetition; /* > 0; 1 off */
  int32_t top_k;    /* 0 off */
  int32_t n_stop, n_bias, n_prompt, n_output;
  const int32_t *stop_ids;
  const int32_t *bias_ids;
  const float *bias;
  const int32_t *prompt_ids; /* counted by the repetition penalty only */
  const int32_t *output_ids; /* output so far (a resumed sequence) */
} ksl_sampling;

/* State operations. */
enum {
  KSL_OP_ZERO_SLAB = 0,  /* slab a := empty sequence */
  KSL_OP_COPY_SLAB = 1,  /* slab b := slab a */
  KSL_OP_COPY_BLOCK = 2, /* block b := block a */
  /* Images, or parts of them: data[n] := bytes [b, b + n) of slab a, and back. The engine reads and
     writes data until the end of the wave, beside its rows where it can: a LOAD after the rows
     holds nobody up. */
  KSL_OP_SAVE_SLAB = 3,
  KSL_OP_LOAD_SLAB = 4,
  KSL_OP_SAVE_BLOCK = 5,
  KSL_OP_LOAD_BLOCK = 6,
  KSL_OP_CONFIGURE = 7, /* slot a: data is a ksl_sampling; clears latch, last sampled id, counts,
                           mask, forced ids and drafts */
  KSL_OP_MASK = 8,  /* slot a: data is uint32 [ceil(vocab/32)], bit set = allowed; null clears */
  KSL_OP_FORCE = 9, /* slot a: the next n sampled ids are data (int32 [n]); test hook */
  /* Slabs, blocks [a, a + n): nobody needs what they hold, which is undefined from here on. Pools
     in the machine's own memory give the pages back to it until they are written again. */
  KSL_OP_DROP_SLABS = 10,
  KSL_OP_DROP_BLOCKS = 11,
  /* The same slabs, blocks, ahead of their use: pools that take pages of the machine's memory as
     they are written take them now. What they hold is undefined as well. */
  KSL_OP_TOUCH_SLABS = 12,
  KSL_OP_TOUCH_BLOCKS = 13,
  KSL_OP_FAULT = 14 /* the backend fails, a device with an error of its own; test hook */
};

typedef struct ksl_op {
  int32_t kind;
  int32_t a, b;
  int32_t n;
  void *data;
} ksl_op;

/* Row kinds. */
enum {
  KSL_ROW_PREFILL = 0, /* no output */
  KSL_ROW_LAST = 1,    /* sample after the last position */
  KSL_ROW_VERIFY = 2,  /* one known token and drafts: sample at each, commit the agreeing prefix */
  KSL_ROW_SCORE = 3    /* log-probabilities of given tokens, no sampling */
};

/* Drafts of a VERIFY row. OWN: the slot's MTP drafts; n may exceed 1 + what it holds: then fewer
   positions are computed. */
enum { KSL_DRAFT_NONE = 0, KSL_DRAFT_GIVEN = 1, KSL_DRAFT_OWN = 2 };

typedef struct ksl_logprob {
  int32_t id;
  float logprob; /* natural logarithm of softmax(raw logits) */
} ksl_logprob;

typedef struct ksl_cut {
  int32_t offset; /* 1 <= offset <= n: state after `offset` positions of this row */
  int32_t slab;   /* copied there */
} ksl_cut;

/* Positions [start, start+n) of one sequence.
 *   tokens  offset into the wave's tokens of n ids (SCORE: n + 1, the last may be -1 for unknown;
 *           DRAFT_OWN: one id). -1 at index 0 means the id this slot sampled last: there must be a
 *           LAST or VERIFY row of this slot since its CONFIGURE.
 *   n       VERIFY: 1 + drafts, at most 1 + KSL_MAX_DRAFT; 1 with DRAFT_NONE or under a mask.
 *   logprobs  null, or per sampled position [1 + top_n]: the sampled id, then the top_n by raw
 *           probability. Room: LAST [1][1+top_n], VERIFY [n][1+top_n], SCORE [n][1+top_n] where
 *           entry 0 is the given next token (id -1, logprob 0 when unknown).
 *   propose LAST, VERIFY: after this row, MTP drafts this many ids (0..KSL_MAX_DRAFT) and keeps
 * them in the slot. Needs MTP. cuts    ascending offsets; not in VERIFY rows. Their slabs are no
 * row's slab, each used once. The slot's table must cover start + n + propose tokens. A block that
 * a row writes is not in the part of any table that a row of this wave reads as finished. A row
 * whose slot is latched (its last sampled id was a stop id) does nothing and reports
 * KSL_DONE_LATCHED. */
typedef struct ksl_row {
  int32_t kind, slot, slab, draft;
  int32_t start, n, tokens;
  int32_t propose;
  int32_t n_cuts, top_n;
  ksl_cut cuts[4];
  ksl_logprob *logprobs;
} ksl_row;

/* table[slot][start .. start+n) := ids[offset ..] of the wave's block_ids. */
typedef struct ksl_edit {
  int32_t slot, start, n, offset;
} ksl_edit;

/* A named intermediate tensor of this wave, float32, in column order; see program.h for names.
   written: floats that the tap has (may exceed capacity; no more than capacity are stored). */
typedef struct ksl_tap {
  const char *name;
  float *data;
  uint64_t capacity;
  uint64_t written;
} ksl_tap;

typedef struct ksl_wave {
  uint64_t id; /* echoed in the done records */
  int32_t n_before, n_after, n_rows, n_tokens, n_edits, n_block_ids, n_taps;
  int32_t reserved;
  const ksl_op *before;
  const ksl_op *after;
  const ksl_row *rows;
  const int32_t *tokens;
  const ksl_edit *edits;
  const int32_t *block_ids;
  ksl_tap *taps;
} ksl_wave;

enum {
  KSL_DONE_STOP = 1,       /* the last id of `tokens` is a stop id; the slot is latched */
  KSL_DONE_LATCHED = 2,    /* the slot was latched before: nothing was computed */
  KSL_DONE_BAD_LOGITS = 4, /* NaN, or nothing left to sample from: the slot is latched */
  KSL_DONE_WAVE_END = 8,   /* the record that ends a wave: row = -1 */
  KSL_DONE_BAD_DRAFT = 16  /* the draft head gave logits that nothing can be drawn from: the chain
                              ended there, the row itself is good */
};

/* One record per row in row order, then one with WAVE_END. */
typedef struct ksl_done {
  uint64_t wave;
  int32_t row, slot;
  int32_t status; /* KSL_OK or KSL_FATAL (wave end only; rows of that wave have no records) */
  int32_t flags;
  int32_t position; /* positions computed and committed for this slot's sequence */
  int32_t accepted; /* drafts that were accepted */
  int32_t proposed; /* MTP drafts now held by the slot: drafts[0 .. proposed) */
  int32_t n_tokens;
  int32_t tokens[17]; /* sampled ids, oldest first */
  int32_t drafts[16];
  int32_t reserved;
  uint64_t queued_ns, started_ns, ended_ns; /* CLOCK_MONOTONIC; wave end only */
  uint64_t drafts_ns; /* of ended - started, what MTP drafting took; wave end only */
} ksl_done;

typedef struct ksl_progress {
  uint64_t submitted, started, completed; /* waves */
  uint64_t graphs, graph_kernels;         /* launch sequences that a device keeps; their launches */
  uint64_t graphs_made;                   /* so far */
  int32_t phase;                          /* 0 idle, 1 running, 2 closed, 3 poisoned */
  int32_t last_error;
} ksl_progress;

typedef struct ksl_engine ksl_engine;

/* SHA-256 (hex) of this header's text and the package version the library was built for. */
const char *ksl_abi_hash(void);
const char *ksl_version(void);
/* SHA-256 (hex) over all native sources, as kslserve/engine/abi.py computes it. */
const char *ksl_source_digest(void);
/* Space-separated names of the ISA paths that this build has and this machine runs. */
const char *ksl_isa_list(void);
/* Bytes of a position and KV head that an engine of these settings (KSL_KV_*, KSL_ACT_*, KSL_ISA_*)
   holds in a block beside its rows, on this machine. */
int32_t ksl_kv_code_bytes(int32_t kv_format, int32_t activations, int32_t isa, int32_t head_dim);
/* sizeof of the named public struct, 0 for an unknown name. */
uint64_t ksl_sizeof(const char *name);

/* Makes all pools and repacks all weights; allocates here or fails here. Tensor data is not read
   after the call. */
int ksl_open(const ksl_config *config, const ksl_tensor *tensors, int32_t n, ksl_engine **out,
             ksl_error *error);
int ksl_get_info(ksl_engine *engine, ksl_info *info);
/* Readable while done records wait and the consumer has drained to empty since. */
int ksl_event_fd(ksl_engine *engine);
int ksl_submit(ksl_engine *engine, const ksl_wave *wave, ksl_error *error);
/* Copies up to cap records and returns their number; never blocks. Clears the descriptor when it
   leaves nothing behind. */
int ksl_poll(ksl_engine *engine, ksl_done *out, int32_t cap);
int ksl_get_progress(ksl_engine *engine, ksl_progress *progress);
/* Code and text of the failure that poisoned the engine; code KSL_OK when there was none. */
int ksl_last_error(ksl_engine *engine, ksl_error *error);
/* Finishes the submitted waves, or abandons them after deadline_ms; joins every thread, frees
   everything. */
int ksl_close(ksl_engine *engine, int32_t deadline_ms);

/* Codecs on whole matrices; sizes follow from rows, cols and the encoding. Scales are made with the
   power-of-two policy (E2M3, FP8) or as NVFP4 defines. cols: a multiple of 4 (E2M3), 16 (NVFP4). */
int ksl_encode(int32_t encoding, const float *src, int64_t rows, int64_t cols, void *codes,
               void *scales, float *globals, ksl_error *error);
int ksl_decode(int32_t encoding, const void *codes, const void *scales, const float *globals,
               int64_t rows, int64_t cols, float *dst, ksl_error *error);

/* Units of 3 or 4 bytes in another order: to[i] = from[order[i]], in each of `runs` runs of n. */
int ksl_reorder(const int32_t *order, int64_t n, int32_t unit_bytes, int64_t runs, const void *from,
                void *to, ksl_error *error);

/* KV rows of one head, [rows, head_dim], K (side 0) or V (side 1): what the engine stores for them
   and the values that it reads, those of a rotated K still rotated. Bytes of codes and scales per
   row are those of common/kv_row.h. INT8RING_INT4 is its int4 form. */
int ksl_kv_encode(int32_t kv_format, int32_t side, const float *src, int64_t rows, int32_t head_dim,
                  void *codes, void *scales, ksl_error *error);
int ksl_kv_decode(int32_t kv_format, int32_t side, const void *codes, const void *scales,
                  int64_t rows, int32_t head_dim, float *dst, ksl_error *error);

/* The reference sampler on one row of logits: what the engine does for a slot configured with
   `sampling`, the next id at `position`. adjusted: null or [vocab], logits after penalties and
   bias. mask: null or uint32 [ceil(vocab/32)]. Returns KSL_INVALID for bad logits. */
int ksl_sample(const float *logits, int32_t vocab, int32_t token_limit,
               const ksl_sampling *sampling, const uint32_t *mask, int32_t position, int32_t *id,
               float *adjusted, ksl_error *error);
