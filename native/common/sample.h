// The sampler and what a slot remembers between waves. Every buffer is allocated at open.
#pragma once
#include "abi.h"
#include "alloc.h"
#include "noise.h"

namespace ksl {

struct SlotState {
  // set by CONFIGURE
  uint64_t seed;
  float temperature, top_p, min_p, presence, frequency, repetition;
  int top_k;
  int n_stop, n_bias;
  int32_t stop_ids[KSL_MAX_STOP];
  int32_t *bias_ids;  // [KSL_MAX_BIAS]
  float *bias;        // [KSL_MAX_BIAS]
  int32_t *counts;    // [vocab] output counts; valid while use_counts
  uint32_t *seen;     // [ceil(vocab/32)] ids of output, of prompt too if repetition != 1
  bool use_counts;    // any penalty is on
  uint32_t *mask;     // [ceil(vocab/32)]
  bool has_mask;
  int32_t *forced;  // [forced_capacity]
  int forced_n, forced_at, forced_capacity;
  // running
  bool latched;
  int32_t last_token;  // last sampled id, -1 before the first
  int n_drafts;        // MTP drafts held for a VERIFY row with DRAFT_OWN
  int32_t drafts[KSL_MAX_DRAFT];
};

// Allocates the buffers of one slot (greedy, no stop ids); false when memory is out.
bool slot_init(SlotState *slot, int vocab, int forced_capacity, Alloc *alloc);
void slot_free(SlotState *slot);
// Bytes of one slot, its buffers included.
uint64_t slot_state_bytes(int vocab, int forced_capacity);
void slot_configure(SlotState *slot, int vocab, const ksl_sampling *sampling);
// Checks every field and range; error text names the field.
int sampling_check(const ksl_sampling *sampling, int vocab, ksl_error *error);

// Gumbel noise for one candidate: the same bits in every backend, for only exact integer and
// float64 operations (+ - * /, no fused multiply-add) are used.
//   h = mix64(mix64(mix64(seed) + position) + (id + 1) * 0x9e3779b97f4a7c15)      see hash.h
//   u = ((h >> 12) + 0.5) * 2^-52, in (0, 1)
//   G = -log_f64(-log_f64(u))
double gumbel(uint64_t seed, int64_t position, int32_t id);

// Scratch for one sampling call: [vocab] floats and [vocab] ids.
struct SampleScratch {
  float *logits;
  int32_t *ids;
};
bool scratch_init(SampleScratch *scratch, int vocab, Alloc *alloc);
void scratch_free(SampleScratch *scratch);

// Samples the id at `position` from raw logits [vocab]. `drafts[0..n_drafts)` are ids sampled after
// the slot's committed output and before this position (penalties count them). Does not change the
// slot except for the cursor of forced ids. adjusted: null or [vocab].
// Returns false for bad logits: a NaN or +inf anywhere in [0, vocab), or no candidate left. A
// forced id is returned without looking at the logits.
bool sample_token(SlotState *slot, const float *logits, int vocab, int token_limit,
                  int64_t position, const int32_t *drafts, int n_drafts, SampleScratch *scratch,
                  float *adjusted, int32_t *id);

// The same for a draft head, after the drafts that the slot holds: forced ids are neither used nor
// consumed. id is -1 where the score of the best id leads that of the second best one by less than
// `margin`.
bool sample_draft(SlotState *slot, const float *logits, int vocab, int token_limit,
                  int64_t position, float margin, SampleScratch *scratch, int32_t *id);

// Counts a committed output id (penalties), sets last_token, latches on a stop id; true if it
// stops.
bool slot_commit(SlotState *slot, int32_t id);

// out[0] = (id, log p(id)), out[1..top_n] the most probable ids of softmax(raw logits), best first,
// ties to the lower id. id < 0: out[0] = (-1, 0).
void logprobs_of(const float *logits, int vocab, int32_t id, int top_n, ksl_logprob *out);

}  // namespace ksl
