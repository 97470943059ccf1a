// Penalties, bias, mask, filters and the choice.
//
// Filters are selections on the order "higher logit, then lower id", made by
// radix passes over the bits of the logit: top_k by counts, top_p by mass in
// fixed point, whose sums do not depend on the order of additions. top_k first
// leaves the few that can be among them: the greatest logits of groups of ids, k
// of them, bound the k-th of all from below.
#include "../../common/noise.h"
#include "sample.cuh"

namespace ksl {

namespace {

constexpr int kThreads = 1024;
constexpr float kNone = -INFINITY;
constexpr int kListed = 1024;  // most candidates of a list

// A column is scanned in parts, one block each. Of a part, its fours are dealt out to the threads,
// and neighbouring threads make a group, whose greatest logit is kept.
constexpr int kParts = 128;
constexpr int kScanThreads = 256, kGroupThreads = 32;
constexpr int kPartGroups = kScanThreads / kGroupThreads;
constexpr int kGroups = kGreatest;
static_assert(kGroups == kParts * kPartGroups && kGroups == kThreads, "a thread has a group");

struct Part {
  int first, end;  // fours
  __device__ Part(int part, int n) {
    const int fours = (n + 3) / 4, each = (fours + kParts - 1) / kParts;
    first = part * each;
    end = min(fours, first + each);
  }
};

// Logits by index, of the ids themselves (`ids` is null) or of a list.
struct Candidates {
  const float *logits;
  const int *ids;
  int n;
  __device__ int id(int i) const { return ids != nullptr ? ids[i] : i; }
};

// Bits whose unsigned order is that of the float; zeros of both signs are equal.
__device__ inline unsigned order_of(float v) {
  const unsigned bits = __float_as_uint(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Best of a block by (score, lower id), and with kLead the score of the second best. Every thread
// gets them.
template <bool kLead>
__device__ void best_of_block(double &score, int &id, double &second) {
  __shared__ double scores[32], seconds[32];
  __shared__ int ids[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const auto take = [&](double other, int other_id, double other_second) {
    if (other_id < 0 || other_id == id) return;
    if (id < 0 || other > score || (other == score && other_id < id)) {
      if (kLead) second = id < 0 || other_second > score ? other_second : score;
      score = other;
      id = other_id;
    } else if (kLead && other > second) {
      second = other;
    }
  };
  for (int i = 16; i > 0; i >>= 1) {
    const double other = __shfl_xor_sync(kAll, score, i);
    const int other_id = __shfl_xor_sync(kAll, id, i);
    take(other, other_id, kLead ? __shfl_xor_sync(kAll, second, i) : 0.0);
  }
  __syncthreads();
  if (lane == 0) {
    scores[warp] = score;
    ids[warp] = id;
    if (kLead) seconds[warp] = second;
  }
  __syncthreads();
  for (int w = 0; w < kThreads / 32; w++) take(scores[w], ids[w], kLead ? seconds[w] : 0.0);
}

// The candidates that the filters have left: order > cut, and of order == cut the ids up to last.
struct Cut {
  unsigned order;
  int last;
  __device__ bool takes(unsigned candidate, int id) const {
    return candidate > order || (candidate == order && id <= last);
  }
};

struct Selection {
  unsigned long long bins[256];
  unsigned long long before;
  unsigned digit;
};

// Finds where the weights of the candidates of `from`, best first, reach `target` (above 0 and at
// most their sum): the order there in cut.order; returns the weight before that order.
template <class Weight>
__device__ unsigned long long select(Selection *shared, const Candidates &all, const Cut &from,
                                     double target, Weight weight, unsigned *order) {
  unsigned prefix = 0;
  unsigned long long before = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += kThreads) shared->bins[i] = 0;
    __syncthreads();
    const unsigned mask = shift == 24 ? 0u : ~0u << (shift + 8);
    for (int i = threadIdx.x; i < all.n; i += kThreads) {
      const float v = all.logits[i];
      if (!(v > kNone)) continue;
      const unsigned o = order_of(v);
      if ((o & mask) != prefix || !from.takes(o, all.id(i))) continue;
      const unsigned long long w = weight(v);
      if (w) atomicAdd(&shared->bins[o >> shift & 255u], w);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      // A lane has eight bins; the last one with any weight is taken if rounding leaves the target
      // unreached.
      const int lane = threadIdx.x, first = lane * (256 / 32);
      unsigned long long own = 0;
#pragma unroll
      for (int i = 0; i < 256 / 32; i++) own += shared->bins[first + i];
      unsigned long long sum = own;  // of the bins from this lane's on
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const unsigned long long other = __shfl_down_sync(kAll, sum, step);
        if (lane + step < 32) sum += other;
      }
      const unsigned some = __ballot_sync(kAll, own > 0);
      const unsigned there =
          __ballot_sync(kAll, own > 0 && static_cast<double>(before + sum) >= target);
      if (lane == (there ? 31 - __clz(there) : __ffs(some) - 1)) {
        sum += before - own;
        int digit = first + 256 / 32 - 1, last = digit;
        for (; digit >= first; digit--) {
          if (!shared->bins[digit]) continue;
          last = digit;
          if (static_cast<double>(sum + shared->bins[digit]) >= target) break;
          sum += shared->bins[digit];
        }
        if (digit < first) sum -= shared->bins[last];
        shared->digit = static_cast<unsigned>(last);
        shared->before = sum;
      }
    }
    __syncthreads();
    prefix |= shared->digit << shift;
    before = shared->before;
    __syncthreads();
  }
  *order = prefix;
  return before;
}

// The id of the m-th (1-based) candidate of that order, by ascending ids; `none` if there is none.
__device__ int nth_of_order(const Candidates &all, const Cut &from, unsigned order, int m,
                            int none) {
  __shared__ int found;
  const auto is = [&](int i) {
    return i < all.n && all.logits[i] > kNone && order_of(all.logits[i]) == order &&
           from.takes(order, all.id(i));
  };
  if (threadIdx.x == 0) found = none;
  __syncthreads();
  if (all.ids != nullptr) {
    for (int i = threadIdx.x; i < all.n; i += kThreads) {
      if (!is(i)) continue;
      int rank = 1;
      for (int k = 0; k < all.n; k++) rank += is(k) && all.ids[k] < all.ids[i];
      if (rank == m) found = all.ids[i];
    }
    __syncthreads();
    return found;
  }
  int seen = 0;
  for (int base = 0; base < all.n; base += kThreads) {
    const int count = __syncthreads_count(is(base + threadIdx.x));
    if (seen + count >= m) {
      if (threadIdx.x == 0) {
        for (int k = base; k < all.n && k < base + kThreads; k++) {
          if (is(k) && ++seen == m) {
            found = k;
            break;
          }
        }
      }
      __syncthreads();
      return found;
    }
    seen += count;
  }
  return none;
}

// Lists the candidates that can be among the best k; false if they are too many. own: the greatest
// logit of the group of this thread's number. scored: ids that the groups are made of.
__device__ bool list_best(Selection *selection, const Candidates &all, int scored, float own, int k,
                          float *logits, int *ids, int *n) {
  __shared__ int count, groups, chosen[kGroups];
  // `logits` holds the greatest of each group first.
  logits[threadIdx.x] = own;
  if (__syncthreads_count(own > kNone) < k) return false;
  const Candidates greatest = {logits, nullptr, kGroups};
  unsigned order;
  select(
      selection, greatest, {0, kGroups}, static_cast<double>(k), [](float) { return 1ull; },
      &order);
  if (threadIdx.x == 0) count = groups = 0;
  __syncthreads();
  if (own > kNone && order_of(own) >= order) chosen[atomicAdd(&groups, 1)] = threadIdx.x;
  __syncthreads();
  // As many threads read a group as made it.
  constexpr int kAtOnce = kThreads / kGroupThreads;
  for (int i = threadIdx.x / kGroupThreads; i < groups; i += kAtOnce) {
    const int group = chosen[i];
    const Part part(group / kPartGroups, scored);
    for (int f = part.first + group % kPartGroups * kGroupThreads + threadIdx.x % kGroupThreads;
         f < part.end; f += kScanThreads) {
      for (int at = f * 4; at < f * 4 + 4 && at < all.n; at++) {
        const float v = all.logits[at];
        if (!(v > kNone) || order_of(v) < order) continue;
        const int to = atomicAdd(&count, 1);
        if (to >= kListed) continue;
        logits[to] = v;
        ids[to] = at;
      }
    }
  }
  __syncthreads();
  *n = count;
  return count <= kListed;
}

__device__ inline float noise_bound(uint64_t word) {
  const uint64_t rest = ~word >> 12;
  const int k = rest == 0 ? 52 : __clzll(static_cast<long long>(rest)) - 12;
  return static_cast<float>(k + 1) * 0.6931472f + 1e-3f;
}

// Penalties and bias of ids [first, end), drafts counted as output. Sets bad for a raw logit that
// cannot be used.
__device__ void adjust(const SlotArrays &slots, const SlotParams &p, const SampleJob &job,
                       const float *raw, float *logits, int begin, int end, bool *bad) {
  const int vocab = slots.vocab;
  const int32_t *counts = slots.counts + static_cast<int64_t>(job.slot) * vocab;
  const uint32_t *seen = slots.seen + static_cast<int64_t>(job.slot) * slots.words;
  for (int i = begin + threadIdx.x; i < end; i += kScanThreads) {
    float v = raw[i];
    *bad |= !(v < INFINITY);
    if (p.use_counts) {
      bool known = seen[i >> 5] >> (i & 31) & 1u;
      int count = known ? counts[i] : 0;
      for (int d = 0; d < job.n_drafts; d++) {
        if (job.drafts[d] != i) continue;
        known = true;
        count++;
      }
      if (known) {
        v = v > 0 ? v / p.repetition : v * p.repetition;
        if (count > 0) v -= p.presence + p.frequency * static_cast<float>(count);
      }
    }
    logits[i] = v;
  }
  __syncthreads();
  if (p.n_bias > 0) {
    const int32_t *bias_ids = slots.bias_ids + job.slot * KSL_MAX_BIAS;
    const float *bias = slots.bias + job.slot * KSL_MAX_BIAS;
    for (int i = threadIdx.x; i < p.n_bias; i += kScanThreads) {
      if (bias_ids[i] < begin || bias_ids[i] >= end) continue;
      // The first entry of an id adds all of that id in their order.
      bool first = true;
      for (int j = 0; j < i && first; j++) first = bias_ids[j] != bias_ids[i];
      if (!first) continue;
      float v = logits[bias_ids[i]];
      for (int j = i; j < p.n_bias; j++)
        if (bias_ids[j] == bias_ids[i]) v += bias[j];
      logits[bias_ids[i]] = v;
    }
    __syncthreads();
  }
}

__device__ inline bool changes(const SlotParams &p) {
  return p.use_counts || p.n_bias > 0 || p.has_mask;
}

// The greatest logits of a part's groups. kLead: the second greatest are wanted too.
template <bool kLead>
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(SlotArrays slots, const SampleJob *jobs, const float *all_logits, float *adjusted,
                int64_t stride, Greatest *out) {
  allow_next();
  const int column = blockIdx.y;
  const SampleJob &job = jobs[column];
  const SlotParams p = slots.params[job.slot];
  wait_before();
  const int scored = slots.scored, limit = slots.token_limit;
  const Part part(blockIdx.x, scored);
  const float *raw = all_logits + column * stride;
  bool bad = false;
  float most = kNone, next = kNone;
  int best = -1;
  const auto see = [&](float v, int i) {
    if (i >= limit) return;
    if (v > most) {
      next = most;
      most = v;
      best = i;
    } else if (kLead && v > next) {
      next = v;
    }
  };
  if (!changes(p)) {
    // Rows are padded to whole fours.
#pragma unroll 8
    for (int f = part.first + threadIdx.x; f < part.end; f += kScanThreads) {
      const float4 four = reinterpret_cast<const float4 *>(raw)[f];
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (f * 4 + k >= scored) break;
        bad |= !(values[k] < INFINITY);
        see(values[k], f * 4 + k);
      }
    }
  } else {
    float *changed = adjusted + column * stride;
    const uint32_t *mask = slots.mask + static_cast<int64_t>(job.slot) * slots.words;
    adjust(slots, p, job, raw, changed, part.first * 4, min(part.end * 4, scored), &bad);
    for (int f = part.first + threadIdx.x; f < part.end; f += kScanThreads) {
      for (int i = f * 4; i < f * 4 + 4 && i < limit && i < scored; i++) {
        float v = changed[i];
        if (p.has_mask && !(mask[i >> 5] >> (i & 31) & 1u)) v = changed[i] = kNone;
        bad |= !(v < INFINITY);
        see(v, i);
      }
    }
  }
#pragma unroll
  for (int step = 1; step < kGroupThreads; step *= 2) {
    const float other = __shfl_xor_sync(kAll, most, step);
    const float other_next = kLead ? __shfl_xor_sync(kAll, next, step) : 0.0f;
    const int other_best = __shfl_xor_sync(kAll, best, step);
    if (kLead) next = fmaxf(fminf(most, other), fmaxf(next, other_next));
    if (other > most || (other == most && other_best >= 0 && (best < 0 || other_best < best)))
      best = other_best;
    most = fmaxf(most, other);
  }
  bad = __syncthreads_or(bad);
  if (threadIdx.x % kGroupThreads == 0)
    out[column * kGroups + blockIdx.x * kPartGroups + threadIdx.x / kGroupThreads] = {
        most, next, bad ? -2 : best};
}

// kLead: a draft is wanted, -2 where it leads by less than `margin`.
template <bool kLead>
__global__ void __launch_bounds__(kThreads)
    sample_kernel(SlotArrays slots, const SampleJob *jobs, const float *all_logits,
                  const float *adjusted, int64_t stride, const Greatest *greatest, float margin,
                  int32_t *ids) {
  allow_next();
  __shared__ Selection selection;
  __shared__ float scratch[32];
  const SampleJob &job = jobs[blockIdx.x];
  const SlotParams p = slots.params[job.slot];
  wait_before();
  const int limit = slots.token_limit;
  const float *const logits = (changes(p) ? adjusted : all_logits) + blockIdx.x * stride;
  const Greatest group = greatest[blockIdx.x * kGroups + threadIdx.x];
  float most = group.most;
  int best = group.best;
  const bool bad = __syncthreads_or(best == -2);
  const float own = most;
  double top = most, second = group.next;
  best_of_block<kLead>(top, best, second);
  most = static_cast<float>(top);
  if (bad || best < 0) {
    if (threadIdx.x == 0) ids[blockIdx.x] = -1;
    return;
  }
  if (p.temperature == 0) {
    if (threadIdx.x == 0) ids[blockIdx.x] = kLead && top - second < margin ? -2 : best;
    return;
  }

  __shared__ float list_logits[kListed];
  __shared__ int list_ids[kListed];
  Candidates left = {logits, nullptr, limit};
  Cut cut = {0, limit};
  if (p.top_k > 0 && p.top_k < limit) {
    int listed = 0;
    if (p.top_k <= kThreads / 4 &&
        list_best(&selection, left, slots.scored, own, p.top_k, list_logits, list_ids, &listed))
      left = {list_logits, list_ids, listed};
    int mine = 0;
    for (int i = threadIdx.x; i < left.n; i += kThreads) mine += left.logits[i] > kNone;
    const int all = static_cast<int>(block_sum(static_cast<float>(mine), scratch));
    if (all > p.top_k) {
      const auto one = [](float) { return 1ull; };
      unsigned order;
      const unsigned long long before =
          select(&selection, left, cut, static_cast<double>(p.top_k), one, &order);
      const int last = nth_of_order(left, cut, order, p.top_k - static_cast<int>(before), limit);
      cut = {order, last};
    }
  }
  if (p.top_p < 1.0f) {
    const auto mass = [&](float v) {
      return static_cast<unsigned long long>(
          static_cast<double>(exp_f32((v - most) / p.temperature)) * 0x1p40);
    };
    __shared__ unsigned long long total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    unsigned long long mine = 0;
    for (int i = threadIdx.x; i < left.n; i += kThreads)
      if (left.logits[i] > kNone && cut.takes(order_of(left.logits[i]), left.id(i)))
        mine += mass(left.logits[i]);
    for (int i = 16; i > 0; i >>= 1) mine += __shfl_xor_sync(kAll, mine, i);
    if ((threadIdx.x & 31) == 0) atomicAdd(&total, mine);
    __syncthreads();
    const double target = static_cast<double>(p.top_p) * static_cast<double>(total);
    unsigned order;
    const unsigned long long before = select(&selection, left, cut, target, mass, &order);
    // Of equal logits, as many as it takes to reach the target, at least one of all.
    const float value = __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
    const unsigned long long each = mass(value);
    int m = 1;
    unsigned long long sum = before + each;
    while (static_cast<double>(sum) < target && m < limit) {
      sum += each;
      m++;
    }
    const int last = nth_of_order(left, cut, order, m, limit);
    cut = {order, last < limit ? last : limit};
  }

  const float min_scaled =
      p.min_p >= 0x1p-100f ? static_cast<float>(log_f64(p.min_p)) - 1e-3f : kNone;
  const uint64_t key = noise_key(p.seed, job.position);
  double score = kNone;
  int id = -1;
  second = kNone;
  for (int at = threadIdx.x; at < left.n; at += kThreads) {
    const float v = left.logits[at];
    const int i = left.id(at);
    if (!(v > kNone) || !cut.takes(order_of(v), i)) continue;
    const float scaled = (v - most) / p.temperature;
    if (scaled < min_scaled) continue;
    const uint64_t word = hash_at(key, static_cast<uint64_t>(i));
    if (static_cast<double>(scaled + noise_bound(word)) < (kLead ? second : score)) continue;
    if (p.min_p > 0 && exp_f32(scaled) < p.min_p) continue;
    const double mine = static_cast<double>(scaled) + noise_of(word);
    if (mine > score || id < 0 || (mine == score && i < id)) {
      second = score;
      score = mine;
      id = i;
    } else if (kLead && mine > second) {
      second = mine;
    }
  }
  best_of_block<kLead>(score, id, second);
  if (threadIdx.x == 0) ids[blockIdx.x] = kLead && score - second < margin ? -2 : id;
}

__global__ void mark_kernel(uint32_t *seen, int32_t *counts, const int32_t *ids, int n,
                            bool counted) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  atomicOr(seen + (ids[i] >> 5), 1u << (ids[i] & 31));
  if (counted) atomicAdd(counts + ids[i], 1);
}

}  // namespace

namespace {

template <bool kLead>
void sample(Device *device, const char *name, const SlotArrays &slots, const SampleJob *jobs, int n,
            const float *logits, const SampleScratch &scratch, int64_t stride, float margin,
            int32_t *ids) {
  KSL_CHAIN(device, name, scan_kernel<kLead>, dim3(kParts, n), kScanThreads, slots, jobs, logits,
            scratch.adjusted, stride, scratch.greatest);
  KSL_CHAIN(device, name, sample_kernel<kLead>, n, kThreads, slots, jobs, logits, scratch.adjusted,
            stride, scratch.greatest, margin, ids);
}

}  // namespace

void sample_columns(Device *device, const SlotArrays &slots, const SampleJob *jobs, int n,
                    const float *logits, const SampleScratch &scratch, int64_t stride,
                    int32_t *ids) {
  sample<false>(device, "sample", slots, jobs, n, logits, scratch, stride, 0.0f, ids);
}

void sample_drafts(Device *device, const SlotArrays &slots, const SampleJob *jobs, int n, int vocab,
                   float margin, const float *logits, const SampleScratch &scratch, int64_t stride,
                   int32_t *ids) {
  SlotArrays some = slots;
  if (vocab < some.token_limit) some.token_limit = vocab;
  some.scored = vocab;
  if (margin > 0)
    sample<true>(device, "draft", some, jobs, n, logits, scratch, stride, margin, ids);
  else
    sample<false>(device, "draft", some, jobs, n, logits, scratch, stride, 0.0f, ids);
}

void mark_ids(Device *device, const SlotArrays &slots, int slot, const int32_t *ids, int n,
              bool counted) {
  if (n == 0) return;
  KSL_LAUNCH(device, "mark", mark_kernel, divide_up(n, 256), 256,
             slots.seen + static_cast<int64_t>(slot) * slots.words,
             slots.counts + static_cast<int64_t>(slot) * slots.vocab, ids, n, counted);
}

}  // namespace ksl
