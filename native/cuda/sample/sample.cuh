// Sampling on the device: the rules and the noise of common/sample.h, one block a column.
#pragma once
#include "../common/device.cuh"

namespace ksl {

// What the kernels know of a slot.
struct SlotParams {
  uint64_t seed;
  float temperature, top_p, min_p, presence, frequency, repetition;
  int32_t top_k, n_bias, use_counts, has_mask;
};

struct SlotArrays {
  SlotParams *params;  // [slots]
  int32_t *counts;     // [slots][vocab]
  uint32_t *seen;      // [slots][words]
  uint32_t *mask;      // [slots][words]
  int32_t *bias_ids;   // [slots][KSL_MAX_BIAS]
  float *bias;
  int vocab, words, token_limit;
  int scored;  // ids that have logits, the first ones
};

struct SampleJob {
  int32_t slot, n_drafts;
  int64_t position;
  int32_t drafts[KSL_MAX_DRAFT];
};

// The greatest logit of a group of ids and the second greatest one. best: -1 if there is none, -2
// for bad logits.
struct Greatest {
  float most, next;
  int32_t best;
};
constexpr int kGreatest = 1024;  // of a column
struct SampleScratch {
  float *adjusted;     // [n][stride]
  Greatest *greatest;  // [n][kGreatest]
};

// ids[i]: the id sampled from row i of logits, -1 for bad logits.
void sample_columns(Device *device, const SlotArrays &slots, const SampleJob *jobs, int n,
                    const float *logits, const SampleScratch &scratch, int64_t stride,
                    int32_t *ids);
// The same for a draft head of which only the first `vocab` rows count. ids[i] is -2 where the
// score of the best id leads that of the second best one by less than `margin`.
void sample_drafts(Device *device, const SlotArrays &slots, const SampleJob *jobs, int n, int vocab,
                   float margin, const float *logits, const SampleScratch &scratch, int64_t stride,
                   int32_t *ids);

// Marks prompt or output ids of a slot, which are on the device. counted: output ids.
void mark_ids(Device *device, const SlotArrays &slots, int slot, const int32_t *ids, int n,
              bool counted);
// Marks one output id.
void mark_output(Device *device, const SlotArrays &slots, int slot, int32_t id);

struct LogprobJob {
  int32_t row;      // of logits
  int32_t sampled;  // index into ids, or -1: `id`
  int32_t id, top_n;
  int32_t out;  // index of its first entry
};
void logprobs(Device *device, const LogprobJob *jobs, int n, const float *logits, int64_t stride,
              int vocab, const int32_t *ids, ksl_logprob *out);

}  // namespace ksl
