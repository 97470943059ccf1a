#include "sample.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "error.h"

namespace ksl {
namespace {

constexpr float kNone = -HUGE_VALF;  // a logit that cannot be sampled
constexpr int kHeapMax = 1024;       // largest top_k that is selected with a heap
constexpr int kBins = 512;           // of the mass histogram of top_p
constexpr float kBinsPerUnit = 16.0f;

size_t words_of(int vocab) {
  return (static_cast<size_t>(vocab) + 31) / 32;
}

bool bit(const uint32_t *set, int32_t i) {
  return set[i >> 5] >> (i & 31) & 1u;
}
void set_bit(uint32_t *set, int32_t i) {
  set[i >> 5] |= 1u << (i & 31);
}
void clear_bit(uint32_t *set, int32_t i) {
  set[i >> 5] &= ~(1u << (i & 31));
}

// Best first: higher logit, then lower id.
struct Better {
  const float *logits;
  bool operator()(int32_t a, int32_t b) const {
    if (logits[a] != logits[b]) return logits[a] > logits[b];
    return a < b;
  }
};

// The upper bounds of G by the number of leading ones of u: -log(u) >= 1 - u >= 2^-(k+1), so
// G <= (k + 1) ln 2; a little more covers the rounding.
struct NoiseBounds {
  float at[53];
  constexpr NoiseBounds() : at() {
    for (int k = 0; k < 53; k++) at[k] = static_cast<float>(k + 1) * 0.6931472f + 1e-3f;
  }
};
constexpr NoiseBounds kNoiseBounds;

float noise_bound(uint64_t word) {
  const uint64_t rest = ~word >> 12;  // (1 - u) * 2^52, rounded down
  return kNoiseBounds.at[rest == 0 ? 52 : __builtin_clzll(rest) - 12];
}

// Loops over the vocabulary, as vectors of every machine.
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t QuadMask __attribute__((vector_size(16)));
constexpr int kQuad = 4, kStep = 4 * kQuad;

// The greatest of n values without a NaN; kNone for none.
float greatest(const float *values, int n) {
  Quad most[4];
  for (Quad &lanes : most) lanes = Quad{kNone, kNone, kNone, kNone};
  int i = 0;
  for (; i + kStep <= n; i += kStep) {
    for (int j = 0; j < 4; j++) {
      const Quad next = *reinterpret_cast<const Quad *>(values + i + kQuad * j);
      most[j] = next > most[j] ? next : most[j];
    }
  }
  float found = kNone;
  for (; i < n; i++) found = values[i] > found ? values[i] : found;
  for (const Quad &lanes : most)
    for (int j = 0; j < kQuad; j++) found = lanes[j] > found ? lanes[j] : found;
  return found;
}

// True if every value is finite or -inf.
bool usable(const float *values, int n) {
  const Quad limit = {HUGE_VALF, HUGE_VALF, HUGE_VALF, HUGE_VALF};
  QuadMask good = {-1, -1, -1, -1};
  int i = 0;
  for (; i + kStep <= n; i += kStep)
    for (int j = 0; j < 4; j++)
      good &= *reinterpret_cast<const Quad *>(values + i + kQuad * j) < limit;
  bool all = (good[0] & good[1] & good[2] & good[3]) != 0;
  for (; i < n; i++) all &= values[i] < HUGE_VALF;
  return all;
}

// Whether one of kStep values is above `limit`.
bool any_above(const float *values, float limit) {
  const Quad most = {limit, limit, limit, limit};
  QuadMask hits = {};
  for (int j = 0; j < 4; j++) hits |= *reinterpret_cast<const Quad *>(values + kQuad * j) > most;
  return (hits[0] | hits[1] | hits[2] | hits[3]) != 0;
}

// The first place of a value that is among them.
int first_of(const float *values, int n, float value) {
  const Quad wanted = {value, value, value, value};
  int i = 0;
  for (; i + kStep <= n; i += kStep) {
    QuadMask hits = {};
    for (int j = 0; j < 4; j++)
      hits |= *reinterpret_cast<const Quad *>(values + i + kQuad * j) == wanted;
    if ((hits[0] | hits[1] | hits[2] | hits[3]) != 0) break;
  }
  while (values[i] != value) i++;
  return i;
}

// Counts one more output of `id`, as a draft; true if the id was not seen before.
bool count_draft(SlotState *slot, int32_t id) {
  const bool fresh = !bit(slot->seen, id);
  set_bit(slot->seen, id);
  slot->counts[id]++;
  return fresh;
}

void apply_penalties(const SlotState *slot, float *logits, int vocab) {
  const size_t words = words_of(vocab);
  for (size_t w = 0; w < words; w++)
    for (uint32_t rest = slot->seen[w]; rest != 0; rest &= rest - 1) {
      const size_t id = w * 32 + static_cast<size_t>(__builtin_ctz(rest));
      float v = logits[id];
      v = v > 0 ? v / slot->repetition : v * slot->repetition;
      const int32_t count = slot->counts[id];
      if (count > 0) v -= slot->presence + slot->frequency * static_cast<float>(count);
      logits[id] = v;
    }
}

// Penalties and bias into scratch->logits, drafts counted as output.
void adjust(SlotState *slot, const float *raw, int vocab, const int32_t *drafts, int n_drafts,
            float *logits) {
  memcpy(logits, raw, static_cast<size_t>(vocab) * sizeof(float));
  if (slot->use_counts) {
    bool fresh[KSL_MAX_DRAFT + 1];
    for (int i = 0; i < n_drafts; i++) fresh[i] = count_draft(slot, drafts[i]);
    apply_penalties(slot, logits, vocab);
    for (int i = n_drafts - 1; i >= 0; i--) {
      slot->counts[drafts[i]]--;
      if (fresh[i]) clear_bit(slot->seen, drafts[i]);
    }
  }
  for (int i = 0; i < slot->n_bias; i++) logits[slot->bias_ids[i]] += slot->bias[i];
}

void apply_mask(const uint32_t *mask, float *logits, int vocab) {
  const size_t words = words_of(vocab);
  for (size_t w = 0; w < words; w++) {
    const size_t first = w * 32;
    const size_t last = std::min(first + 32, static_cast<size_t>(vocab));
    if (mask[w] == 0xffffffffu) continue;
    for (size_t i = first; i < last; i++)
      if (!(mask[w] >> (i - first) & 1u)) logits[i] = kNone;
  }
}

// The k best of all candidates into ids, best first; their number. `k` < vocab.
int select_top(const float *logits, int vocab, int k, int32_t *ids) {
  const Better better{logits};
  int n = 0;
  if (k <= kHeapMax) {
    // A heap whose root is the worst kept. A later id never displaces an equal earlier one.
    float worst = kNone;
    for (int32_t i = 0; i < vocab; i++) {
      if (i % kStep == 0 && i + kStep <= vocab && !any_above(logits + i, worst)) {
        i += kStep - 1;
        continue;
      }
      if (!(logits[i] > worst)) continue;
      if (n == k) {
        std::pop_heap(ids, ids + n, better);
        n--;
      }
      ids[n++] = i;
      std::push_heap(ids, ids + n, better);
      if (n == k) worst = logits[ids[0]];
    }
  } else {
    for (int32_t i = 0; i < vocab; i++)
      if (logits[i] > kNone) ids[n++] = i;
    if (n > k) {
      std::nth_element(ids, ids + k, ids + n, better);
      n = k;
    }
    return n;
  }
  std::sort(ids, ids + n, better);
  return n;
}

float scaled_of(float logit, float most, float temperature) {
  return (logit - most) / temperature;
}

// How many of the sorted ids reach the mass `target` together with `mass` before them: at least
// `minimum`.
int take_mass(const float *logits, const int32_t *ids, int n, float most, float temperature,
              double mass, double target, int minimum) {
  int kept = 0;
  while (kept < n && (kept < minimum || mass < target)) {
    mass += static_cast<double>(exp_f32(scaled_of(logits[ids[kept]], most, temperature)));
    kept++;
  }
  return kept;
}

// The smallest set of the n candidates, best first, whose probability reaches p. Reorders ids so
// that the set comes first; its size. Large sets are cut by a histogram of mass over the logits, so
// that only the candidates of one bin are sorted.
int filter_top_p(const float *logits, int32_t *ids, int n, float most, float temperature, float p) {
  const Better better{logits};
  double mass[kBins] = {};
  const auto bin_of = [&](int32_t id) {
    const float depth = -scaled_of(logits[id], most, temperature) * kBinsPerUnit;
    return depth < static_cast<float>(kBins - 1) ? static_cast<int>(depth) : kBins - 1;
  };
  for (int i = 0; i < n; i++)
    mass[bin_of(ids[i])] +=
        static_cast<double>(exp_f32(scaled_of(logits[ids[i]], most, temperature)));
  double total = 0;
  for (int b = 0; b < kBins; b++) total += mass[b];
  const double target = static_cast<double>(p) * total;
  double before = 0;
  int cut = 0;
  while (cut < kBins - 1 && before + mass[cut] < target) before += mass[cut++];
  int32_t *middle = std::partition(ids, ids + n, [&](int32_t id) { return bin_of(id) < cut; });
  int32_t *end = std::partition(middle, ids + n, [&](int32_t id) { return bin_of(id) == cut; });
  std::sort(middle, end, better);
  const int sure = static_cast<int>(middle - ids);
  return sure + take_mass(logits, middle, static_cast<int>(end - middle), most, temperature, before,
                          target, sure == 0 ? 1 : 0);
}

// argmax(scaled + G) over the candidates that min_p leaves. Noise is computed only where its bound
// could still win, or be second where that is wanted, which changes nothing in the result.
struct Chooser {
  const float *logits;
  float most, temperature;
  float min_p, min_scaled;  // min_scaled: a little below log(min_p), -inf when off
  uint64_t key;
  bool wants_second;
  double best, second;
  int32_t id;

  void offer(int32_t i) {
    if (!(logits[i] > kNone)) return;
    const float scaled = scaled_of(logits[i], most, temperature);
    if (scaled < min_scaled) return;
    const uint64_t word = hash_at(key, static_cast<uint64_t>(i));
    if (static_cast<double>(scaled + noise_bound(word)) < (wants_second ? second : best)) return;
    if (min_p > 0 && exp_f32(scaled) < min_p) return;
    const double score = static_cast<double>(scaled) + noise_of(word);
    if (score > best || (score == best && i < id) || id < 0) {
      second = best;
      best = score;
      id = i;
    } else if (score > second) {
      second = score;
    }
  }
};

// lead: null, or by how much the score of the chosen id leads the second best one.
int32_t choose(const SlotState *slot, const float *logits, int vocab, float most, int64_t position,
               int32_t *ids, double *lead) {
  const float temperature = slot->temperature;
  int n = -1;  // all
  if (slot->top_k > 0 && slot->top_k < vocab) n = select_top(logits, vocab, slot->top_k, ids);
  if (slot->top_p < 1.0f) {
    if (n < 0) {
      n = 0;
      for (int32_t i = 0; i < vocab; i++)
        if (logits[i] > kNone) ids[n++] = i;
    }
    n = filter_top_p(logits, ids, n, most, temperature, slot->top_p);
  }
  Chooser chooser;
  chooser.logits = logits;
  chooser.most = most;
  chooser.temperature = temperature;
  chooser.min_p = slot->min_p;
  chooser.min_scaled =
      slot->min_p >= 0x1p-100f ? static_cast<float>(log_f64(slot->min_p)) - 1e-3f : kNone;
  chooser.key = noise_key(slot->seed, position);
  chooser.wants_second = lead != nullptr;
  chooser.best = chooser.second = static_cast<double>(kNone);
  chooser.id = -1;
  if (n < 0) {
    for (int32_t i = 0; i < vocab; i++) chooser.offer(i);
  } else {
    for (int i = 0; i < n; i++) chooser.offer(ids[i]);
  }
  if (lead != nullptr) *lead = chooser.best - chooser.second;
  return chooser.id;
}

// The logits that are sampled from: the raw ones where nothing changes them, else a copy in
// `scratch`; null for bad ones. Only [0, token_limit) counts.
const float *adjusted_logits(SlotState *slot, const float *raw, int vocab, int token_limit,
                             const int32_t *drafts, int n_drafts, SampleScratch *scratch,
                             float *adjusted) {
  if (!usable(raw, vocab)) return nullptr;
  if (!slot->use_counts && slot->n_bias == 0 && !slot->has_mask && adjusted == nullptr) return raw;
  float *logits = scratch->logits;
  adjust(slot, raw, vocab, drafts, n_drafts, logits);
  if (adjusted != nullptr) memcpy(adjusted, logits, static_cast<size_t>(vocab) * sizeof(float));
  if (slot->has_mask) apply_mask(slot->mask, logits, vocab);
  // Penalties can push a finite logit to an infinity.
  return usable(logits, token_limit) ? logits : nullptr;
}

bool sample_logits(SlotState *slot, const float *raw, int vocab, int token_limit, int64_t position,
                   const int32_t *drafts, int n_drafts, SampleScratch *scratch, float *adjusted,
                   int32_t *id, double *lead) {
  const float *logits =
      adjusted_logits(slot, raw, vocab, token_limit, drafts, n_drafts, scratch, adjusted);
  if (logits == nullptr) return false;
  const float most = greatest(logits, token_limit);
  if (!(most > kNone)) return false;
  if (slot->temperature == 0) {
    const int32_t first = first_of(logits, token_limit, most);
    *id = first;
    if (lead != nullptr) {
      const float second =
          std::max(greatest(logits, first), greatest(logits + first + 1, token_limit - first - 1));
      *lead = static_cast<double>(most) - static_cast<double>(second);
    }
    return true;
  }
  *id = choose(slot, logits, token_limit, most, position, scratch->ids, lead);
  return true;
}

int bad_field(ksl_error *error, const char *field, double value, const char *rule) {
  return fail(error, KSL_INVALID, "sampling: %s is %g, must be %s", field, value, rule);
}

int check_ids(const char *field, const int32_t *ids, int n, int most, int vocab, ksl_error *error) {
  if (n < 0 || n > most)
    return fail(error, KSL_INVALID, "sampling: n_%s is %d, must be 0 to %d", field, n, most);
  if (n > 0 && ids == nullptr)
    return fail(error, KSL_INVALID, "sampling: %s is null with n_%s %d", field, field, n);
  for (int i = 0; i < n; i++)
    if (ids[i] < 0 || ids[i] >= vocab)
      return fail(error, KSL_INVALID, "sampling: %s[%d] is %d, must be 0 to %d", field, i, ids[i],
                  vocab - 1);
  return KSL_OK;
}

}  // namespace

double gumbel(uint64_t seed, int64_t position, int32_t id) {
  return noise_of(hash_at(noise_key(seed, position), static_cast<uint64_t>(id)));
}

uint64_t slot_state_bytes(int vocab, int forced_capacity) {
  return sizeof(SlotState) + static_cast<uint64_t>(vocab) * sizeof(int32_t) +
         2 * words_of(vocab) * sizeof(uint32_t) + KSL_MAX_BIAS * (sizeof(int32_t) + sizeof(float)) +
         static_cast<uint64_t>(forced_capacity) * sizeof(int32_t);
}

bool slot_init(SlotState *slot, int vocab, int forced_capacity, Alloc *alloc) {
  *slot = SlotState{};
  slot->top_p = 1.0f;
  slot->repetition = 1.0f;
  slot->last_token = -1;
  slot->forced_capacity = forced_capacity;
  slot->bias_ids = alloc_many<int32_t>(alloc, KSL_MAX_BIAS);
  slot->bias = alloc_many<float>(alloc, KSL_MAX_BIAS);
  slot->counts = alloc_many<int32_t>(alloc, static_cast<size_t>(vocab));
  slot->seen = alloc_many<uint32_t>(alloc, words_of(vocab));
  slot->mask = alloc_many<uint32_t>(alloc, words_of(vocab));
  slot->forced = alloc_many<int32_t>(alloc, static_cast<size_t>(forced_capacity));
  if (slot->bias_ids && slot->bias && slot->counts && slot->seen && slot->mask && slot->forced)
    return true;
  slot_free(slot);
  return false;
}

void slot_free(SlotState *slot) {
  alloc_free(slot->bias_ids);
  alloc_free(slot->bias);
  alloc_free(slot->counts);
  alloc_free(slot->seen);
  alloc_free(slot->mask);
  alloc_free(slot->forced);
  *slot = SlotState{};
}

void slot_configure(SlotState *slot, int vocab, const ksl_sampling *sampling) {
  if (slot->use_counts) {
    // Only ids that were seen have a count.
    const size_t words = words_of(vocab);
    for (size_t w = 0; w < words; w++) {
      for (uint32_t rest = slot->seen[w]; rest != 0; rest &= rest - 1)
        slot->counts[w * 32 + static_cast<size_t>(__builtin_ctz(rest))] = 0;
      slot->seen[w] = 0;
    }
  }
  slot->seed = sampling->seed;
  slot->temperature = sampling->temperature;
  slot->top_p = sampling->top_p;
  slot->min_p = sampling->min_p;
  slot->presence = sampling->presence;
  slot->frequency = sampling->frequency;
  slot->repetition = sampling->repetition;
  slot->top_k = sampling->top_k;
  slot->n_stop = sampling->n_stop;
  slot->n_bias = sampling->n_bias;
  for (int i = 0; i < sampling->n_stop; i++) slot->stop_ids[i] = sampling->stop_ids[i];
  for (int i = 0; i < sampling->n_bias; i++) {
    slot->bias_ids[i] = sampling->bias_ids[i];
    slot->bias[i] = sampling->bias[i];
  }
  slot->use_counts =
      sampling->presence != 0 || sampling->frequency != 0 || sampling->repetition != 1;
  if (sampling->repetition != 1)
    for (int i = 0; i < sampling->n_prompt; i++) set_bit(slot->seen, sampling->prompt_ids[i]);
  if (slot->use_counts)
    for (int i = 0; i < sampling->n_output; i++) {
      set_bit(slot->seen, sampling->output_ids[i]);
      slot->counts[sampling->output_ids[i]]++;
    }
  slot->has_mask = false;
  slot->forced_n = slot->forced_at = 0;
  slot->latched = false;
  slot->last_token = -1;
  slot->n_drafts = 0;
}

int sampling_check(const ksl_sampling *s, int vocab, ksl_error *error) {
  if (!(s->temperature >= 0) || !isfinite(s->temperature))
    return bad_field(error, "temperature", s->temperature, "0 or more and finite");
  if (!(s->top_p > 0 && s->top_p <= 1)) return bad_field(error, "top_p", s->top_p, "in (0, 1]");
  if (!(s->min_p >= 0 && s->min_p <= 1)) return bad_field(error, "min_p", s->min_p, "in [0, 1]");
  if (!isfinite(s->presence)) return bad_field(error, "presence", s->presence, "finite");
  if (!isfinite(s->frequency)) return bad_field(error, "frequency", s->frequency, "finite");
  if (!(s->repetition > 0) || !isfinite(s->repetition))
    return bad_field(error, "repetition", s->repetition, "above 0 and finite");
  if (s->top_k < 0) return bad_field(error, "top_k", s->top_k, "0 or more");
  int rc = check_ids("stop_ids", s->stop_ids, s->n_stop, KSL_MAX_STOP, vocab, error);
  if (rc == KSL_OK) rc = check_ids("bias_ids", s->bias_ids, s->n_bias, KSL_MAX_BIAS, vocab, error);
  if (rc == KSL_OK)
    rc = check_ids("prompt_ids", s->prompt_ids, s->n_prompt, INT32_MAX, vocab, error);
  if (rc == KSL_OK)
    rc = check_ids("output_ids", s->output_ids, s->n_output, INT32_MAX, vocab, error);
  if (rc != KSL_OK) return rc;
  if (s->n_bias > 0 && s->bias == nullptr)
    return fail(error, KSL_INVALID, "sampling: bias is null with n_bias %d", s->n_bias);
  for (int i = 0; i < s->n_bias; i++)
    if (!isfinite(s->bias[i]))
      return fail(error, KSL_INVALID, "sampling: bias[%d] is %g, must be finite", i,
                  static_cast<double>(s->bias[i]));
  return KSL_OK;
}

bool scratch_init(SampleScratch *scratch, int vocab, Alloc *alloc) {
  scratch->logits = alloc_many<float>(alloc, static_cast<size_t>(vocab));
  scratch->ids = alloc_many<int32_t>(alloc, static_cast<size_t>(vocab));
  if (scratch->logits != nullptr && scratch->ids != nullptr) return true;
  scratch_free(scratch);
  return false;
}

void scratch_free(SampleScratch *scratch) {
  alloc_free(scratch->logits);
  alloc_free(scratch->ids);
  *scratch = SampleScratch{};
}

bool sample_token(SlotState *slot, const float *logits, int vocab, int token_limit,
                  int64_t position, const int32_t *drafts, int n_drafts, SampleScratch *scratch,
                  float *adjusted, int32_t *id) {
  if (slot->forced_at < slot->forced_n) {
    *id = slot->forced[slot->forced_at++];
    return true;
  }
  return sample_logits(slot, logits, vocab, token_limit, position, drafts, n_drafts, scratch,
                       adjusted, id, nullptr);
}

bool sample_draft(SlotState *slot, const float *logits, int vocab, int token_limit,
                  int64_t position, float margin, SampleScratch *scratch, int32_t *id) {
  double lead = 0;
  if (!sample_logits(slot, logits, vocab, token_limit, position, slot->drafts, slot->n_drafts,
                     scratch, nullptr, id, margin > 0 ? &lead : nullptr))
    return false;
  if (margin > 0 && lead < static_cast<double>(margin)) *id = -1;
  return true;
}

bool slot_commit(SlotState *slot, int32_t id) {
  if (slot->use_counts) count_draft(slot, id);
  slot->last_token = id;
  for (int i = 0; i < slot->n_stop; i++)
    if (slot->stop_ids[i] == id) slot->latched = true;
  return slot->latched;
}

void logprobs_of(const float *logits, int vocab, int32_t id, int top_n, ksl_logprob *out) {
  const float most = greatest(logits, vocab);
  // Four partial sums in a fixed order: the same bits on every machine, and no long chain of adds.
  double sums[4] = {0, 0, 0, 0};
  for (int i = 0; i < vocab; i++) sums[i & 3] += static_cast<double>(exp_f32(logits[i] - most));
  const double total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const double base = static_cast<double>(most) + log_f64(total);
  const auto entry = [&](int32_t i) {
    return ksl_logprob{i, static_cast<float>(static_cast<double>(logits[i]) - base)};
  };
  out[0] = id < 0 ? ksl_logprob{-1, 0.0f} : entry(id);
  int n = 0;
  const Better better{logits};
  for (int32_t i = 0; i < vocab && top_n > 0; i++) {
    if (n == top_n && !better(i, out[n].id)) continue;
    int at = n < top_n ? ++n : n;
    while (at > 1 && better(i, out[at - 1].id)) {
      out[at] = out[at - 1];
      at--;
    }
    out[at].id = i;
  }
  for (int i = 1; i <= n; i++) out[i] = entry(out[i].id);
  for (int i = n + 1; i <= top_n; i++) out[i] = ksl_logprob{-1, kNone};
}

}  // namespace ksl
