// Penalties, bias, mask, filters and the choice.
//
// Filters are selections on the order "higher logit, then lower id", top_k by
// counts, top_p by mass in fixed point, whose sums do not depend on the order of
// additions. A top_k that is not large leaves a list of the few that can be among
// them: the greatest logits of groups of ids, k of them, bound the k-th of all
// from below. A list is sorted; all ids are selected from by radix passes over
// the bits of the logit.
#include "../../common/noise.h"
#include "sample.cuh"

namespace ksl {

namespace {

constexpr int kThreads = 1024;
constexpr float kNone = -INFINITY;
constexpr int kListed = 1024;     // most candidates of a list
constexpr int kMostSorted = 256;  // of which top_k leaves no more

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

// Logits of the ids [0, n).
struct Candidates {
  const float *logits;
  int n;
};

// Bits whose unsigned order is that of the float; zeros of both signs are equal.
__device__ inline unsigned order_of(float v) {
  const unsigned bits = __float_as_uint(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float value_of(unsigned order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Greatest of a block by (order, lower id). Every thread gets it.
__device__ void greatest_of_block(unsigned &order, int &id) {
  __shared__ unsigned orders[kThreads / 32];
  __shared__ int ids[kThreads / 32];
  static_assert(kThreads == 32 * 32, "a lane has a warp");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const auto of_warp = [&] {
    const unsigned most = __reduce_max_sync(kAll, order);
    id = __reduce_min_sync(kAll, order == most ? id : INT_MAX);
    order = most;
  };
  of_warp();
  if (lane == 0) {
    orders[warp] = order;
    ids[warp] = id;
  }
  __syncthreads();
  order = orders[lane];
  id = ids[lane];
  of_warp();
}

// The best by (score, lower id) and, with kLead, the score of the second best.
template <bool kLead>
struct Chosen {
  double score = kNone, second = kNone;
  int id = -1;
  __device__ void take(double other, int other_id, double other_second) {
    if (other_id < 0 || other_id == id) return;
    if (id < 0 || other > score || (other == score && other_id < id)) {
      if (kLead) second = id < 0 || other_second > score ? other_second : score;
      score = other;
      id = other_id;
    } else if (kLead && other > second) {
      second = other;
    }
  }
  // Every lane gets the warp's.
  __device__ void take_warp() {
    for (int i = 16; i > 0; i >>= 1) {
      const double other = __shfl_xor_sync(kAll, score, i);
      const int other_id = __shfl_xor_sync(kAll, id, i);
      take(other, other_id, kLead ? __shfl_xor_sync(kAll, second, i) : 0.0);
    }
  }
  // Every thread gets the block's.
  __device__ void take_block() {
    __shared__ double scores[kThreads / 32], seconds[kThreads / 32];
    __shared__ int ids[kThreads / 32];
    const int warp = threadIdx.x >> 5;
    take_warp();
    if ((threadIdx.x & 31) == 0) {
      scores[warp] = score;
      ids[warp] = id;
      if (kLead) seconds[warp] = second;
    }
    __syncthreads();
    for (int w = 0; w < kThreads / 32; w++) take(scores[w], ids[w], kLead ? seconds[w] : 0.0);
  }
};

// The candidates that the filters have left: order > cut, and of order == cut the ids up to last.
struct Cut {
  unsigned order;
  int last;
  __device__ bool takes(unsigned candidate, int id) const {
    return candidate > order || (candidate == order && id <= last);
  }
};

struct Selection {
  // Sums of 64 bits in two words, since there are adders of 32 bits only.
  unsigned low[256], high[256];
  unsigned long long before;
  unsigned digit;
  __device__ void add(unsigned bin, unsigned long long w) {
    const unsigned part = static_cast<unsigned>(w),
                   carry = atomicAdd(&low[bin], part) + part < part;
    const unsigned rest = static_cast<unsigned>(w >> 32) + carry;
    if (rest) atomicAdd(&high[bin], rest);
  }
  __device__ unsigned long long bin(int i) const {
    return static_cast<unsigned long long>(high[i]) << 32 | low[i];
  }
};

// Finds where the weights of the candidates of `from`, best first, reach `target` (above 0 and at
// most their sum): the order there in cut.order; returns the weight before that order.
template <class Weight>
__device__ unsigned long long select(Selection *shared, const Candidates &all, const Cut &from,
                                     double target, Weight weight, unsigned *order) {
  unsigned prefix = 0;
  unsigned long long before = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += kThreads) shared->low[i] = shared->high[i] = 0;
    __syncthreads();
    const unsigned mask = shift == 24 ? 0u : ~0u << (shift + 8);
    for (int i = threadIdx.x; i < all.n; i += kThreads) {
      const float v = all.logits[i];
      if (!(v > kNone)) continue;
      const unsigned o = order_of(v);
      if ((o & mask) != prefix || !from.takes(o, i)) continue;
      const unsigned long long w = weight(v);
      if (w) shared->add(o >> shift & 255u, w);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      // A lane has eight bins; the last one with any weight is taken if rounding leaves the target
      // unreached.
      const int lane = threadIdx.x, first = lane * (256 / 32);
      unsigned long long own = 0;
#pragma unroll
      for (int i = 0; i < 256 / 32; i++) own += shared->bin(first + i);
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
          if (!shared->bin(digit)) continue;
          last = digit;
          if (static_cast<double>(sum + shared->bin(digit)) >= target) break;
          sum += shared->bin(digit);
        }
        if (digit < first) sum -= shared->bin(last);
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
           from.takes(order, i);
  };
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

// A candidate of a list; the better one is the greater.
__device__ inline uint64_t listed(unsigned order, int id) {
  return static_cast<uint64_t>(order) << 32 | ~static_cast<unsigned>(id);
}

// Lists the candidates that can be among the best k, in any order, for all threads; false if they
// are too many. own, most: the greatest order of the group of this thread's number (0: the group is
// empty), and of all. scored: ids that the groups are made of.
__device__ bool list_best(const Candidates &all, int scored, unsigned own, unsigned most, int k,
                          uint64_t *list, int *n) {
  __shared__ int count, groups, chosen[kGroups];
  if (threadIdx.x == 0) count = groups = 0;
  if (__syncthreads_count(own > 0) < k) return false;
  // A bound that k groups reach, and few more: further and further down, then back by halves.
  unsigned over = most, bound;
  int reach;
  for (unsigned step = 1u << 20;; step *= 2) {
    bound = over > step ? over - step : 1;
    reach = __syncthreads_count(own >= bound);
    if (reach >= k) break;
    over = bound;
  }
  constexpr int kAtOnce = kThreads / kGroupThreads;  // as many threads read a group as made it
  while (reach > (k + kAtOnce - 1) / kAtOnce * kAtOnce && over - bound > 1) {
    const unsigned middle = bound + (over - bound) / 2;
    const int some = __syncthreads_count(own >= middle);
    if (some < k) {
      over = middle;
      continue;
    }
    bound = middle;
    reach = some;
  }
  if (own >= bound) chosen[atomicAdd(&groups, 1)] = threadIdx.x;
  __syncthreads();
  for (int i = threadIdx.x / kGroupThreads; i < groups; i += kAtOnce) {
    const int group = chosen[i];
    const Part part(group / kPartGroups, scored);
    for (int f = part.first + group % kPartGroups * kGroupThreads + threadIdx.x % kGroupThreads;
         f < part.end; f += 2 * kScanThreads) {
      const int other = f + kScanThreads < part.end ? f + kScanThreads : f;
      const float4 fours[2] = {reinterpret_cast<const float4 *>(all.logits)[f],
                               reinterpret_cast<const float4 *>(all.logits)[other]};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (half && other == f) break;
        const float values[4] = {fours[half].x, fours[half].y, fours[half].z, fours[half].w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int id = (half ? other : f) * 4 + e;
          if (id >= all.n || !(values[e] > kNone) || order_of(values[e]) < bound) continue;
          const int to = atomicAdd(&count, 1);
          if (to < kListed) list[to] = listed(order_of(values[e]), id);
        }
      }
    }
  }
  __syncthreads();
  *n = count;
  return count <= kListed;
}

// Scaled logits, what filters ask of them, and scores.
struct Scale {
  float most, temperature, min_p;
  uint64_t key;
  __device__ float of(float v) const { return (v - most) / temperature; }
  __device__ unsigned long long mass(float v) const {
    return static_cast<unsigned long long>(static_cast<double>(exp_f32(of(v))) * 0x1p40);
  }
  __device__ bool rare(float scaled) const { return min_p > 0 && exp_f32(scaled) < min_p; }
};

// The choice among the best `most_kept` of a list, which those of top_p are the first of; of the
// first warp.
template <bool kLead>
__device__ Chosen<kLead> choose_listed(const uint64_t *list, int n, int most_kept, float top_p,
                                       const Scale &scale) {
  __shared__ uint64_t sorted[kMostSorted];
  __shared__ unsigned long long sums[kMostSorted];  // of the mass up to each
  const int lane = threadIdx.x & 31;
  for (int i = threadIdx.x >> 5; i < n; i += kThreads / 32) {
    int better = 0;
    for (int other = lane; other - lane < n; other += 32)
      better += __popc(__ballot_sync(kAll, other < n && list[other] > list[i]));
    if (better < most_kept) sorted[better] = list[i];
  }
  __syncthreads();
  Chosen<kLead> chosen;
  if (threadIdx.x >= 32) return chosen;
  const int kept = min(n, most_kept);
  double target = 0;
  if (top_p < 1.0f) {
    unsigned long long before = 0;
    for (int first = 0; first < kept; first += 32) {
      const int i = first + lane;
      unsigned long long sum =
          i < kept ? scale.mass(value_of(static_cast<unsigned>(sorted[i] >> 32))) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const unsigned long long other = __shfl_up_sync(kAll, sum, step);
        if (lane >= step) sum += other;
      }
      sum += before;
      if (i < kept) sums[i] = sum;
      before = __shfl_sync(kAll, sum, 31);
    }
    target = static_cast<double>(top_p) * static_cast<double>(before);
    __syncwarp();
  }
  for (int i = lane; i < kept; i += 32) {
    if (top_p < 1.0f && i > 0 && !(static_cast<double>(sums[i - 1]) < target)) break;
    const int id = static_cast<int>(~static_cast<unsigned>(sorted[i]));
    const float scaled = scale.of(value_of(static_cast<unsigned>(sorted[i] >> 32)));
    if (scale.rare(scaled)) continue;
    const double noise = noise_of(hash_at(scale.key, static_cast<uint64_t>(id)));
    chosen.take(static_cast<double>(scaled) + noise, id, kNone);
  }
  chosen.take_warp();
  return chosen;
}

__device__ inline float noise_bound(uint64_t word) {
  const uint64_t rest = ~word >> 12;
  const int k = rest == 0 ? 52 : __clzll(static_cast<long long>(rest)) - 12;
  return static_cast<float>(k + 1) * 0.6931472f + 1e-3f;
}

// Penalties of the logits of four ids, drafts counted as output.
__device__ inline void penalize(const SlotArrays &slots, const SlotParams &p, const SampleJob &job,
                                int first, float (&v)[4]) {
  const int32_t *counts = slots.counts + static_cast<int64_t>(job.slot) * slots.vocab;
  const uint32_t *seen = slots.seen + static_cast<int64_t>(job.slot) * slots.words;
  const unsigned known = seen[first >> 5] >> (first & 31) & 15u;
  unsigned drafted = 0;
  int count[4] = {};
  for (int d = 0; d < job.n_drafts; d++) {
    const unsigned at = static_cast<unsigned>(job.drafts[d] - first);
    if (at >= 4) continue;
    drafted |= 1u << at;
#pragma unroll
    for (int e = 0; e < 4; e++) count[e] += at == static_cast<unsigned>(e);
  }
#pragma unroll
  for (int e = 0; e < 4; e++) {
    if (!((known | drafted) >> e & 1u)) continue;
    if (known >> e & 1u) count[e] += counts[first + e];
    v[e] = v[e] > 0 ? v[e] / p.repetition : v[e] * p.repetition;
    if (count[e] > 0) v[e] -= p.presence + p.frequency * static_cast<float>(count[e]);
  }
}

// Adds the bias of ids [begin, end), of a block.
__device__ void add_bias(const SlotArrays &slots, const SlotParams &p, int slot, float *logits,
                         int begin, int end) {
  const int32_t *ids = slots.bias_ids + slot * KSL_MAX_BIAS;
  const float *bias = slots.bias + slot * KSL_MAX_BIAS;
  for (int i = threadIdx.x; i < p.n_bias; i += kScanThreads) {
    if (ids[i] < begin || ids[i] >= end) continue;
    // The first entry of an id adds all of that id in their order.
    bool first = true;
    for (int j = 0; j < i && first; j++) first = ids[j] != ids[i];
    if (!first) continue;
    float v = logits[ids[i]];
    for (int j = i; j < p.n_bias; j++)
      if (ids[j] == ids[i]) v += bias[j];
    logits[ids[i]] = v;
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
  const int end = min(limit, scored);
  const auto see = [&](float v, int i) {
    if (i >= end) return;
    if (v > most) {
      next = most;
      most = v;
      best = i;
    } else if (kLead && v > next) {
      next = v;
    }
  };
  // Rows are padded to whole fours.
  const auto four_of = [](const float *from, int f, float (&v)[4]) {
    const float4 four = reinterpret_cast<const float4 *>(from)[f];
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  };
  const auto check = [&](int f, const float (&v)[4], int n) {
#pragma unroll
    for (int e = 0; e < 4; e++) bad |= f * 4 + e < n && !(v[e] < INFINITY);
  };
  const auto see_four = [&](int f, const float (&v)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) see(v[e], f * 4 + e);
  };
  const int from = part.first + threadIdx.x;
  if (!changes(p)) {
#pragma unroll 2
    for (int f = from; f < part.end; f += kScanThreads) {
      float v[4];
      four_of(raw, f, v);
      check(f, v, scored);
      see_four(f, v);
    }
  } else {
    float *changed = adjusted + column * stride;
    const uint32_t *mask = slots.mask + static_cast<int64_t>(job.slot) * slots.words;
    const auto keep = [&](int f, const float (&v)[4]) {
      reinterpret_cast<float4 *>(changed)[f] = make_float4(v[0], v[1], v[2], v[3]);
    };
    const auto finish = [&](int f, float (&v)[4]) {
      const unsigned allowed = p.has_mask ? mask[f * 4 >> 5] >> (f * 4 & 31) : ~0u;
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (!(allowed >> e & 1u)) v[e] = kNone;
      check(f, v, end);
      see_four(f, v);
      keep(f, v);
    };
    const bool biased = p.n_bias > 0;
#pragma unroll 1
    for (int f = from; f < part.end; f += kScanThreads) {
      float v[4];
      four_of(raw, f, v);
      check(f, v, scored);
      if (p.use_counts) penalize(slots, p, job, f * 4, v);
      if (biased)
        keep(f, v);
      else
        finish(f, v);
    }
    if (biased) {
      __syncthreads();
      add_bias(slots, p, job.slot, changed, part.first * 4, min(part.end * 4, scored));
      __syncthreads();
#pragma unroll 1
      for (int f = from; f < part.end; f += kScanThreads) {
        float v[4];
        four_of(changed, f, v);
        finish(f, v);
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
__global__ void __launch_bounds__(kThreads, 1)
    sample_kernel(SlotArrays slots, const SampleJob *jobs, const float *all_logits,
                  const float *adjusted, int64_t stride, const Greatest *greatest, float margin,
                  int32_t *ids) {
  allow_next();
  const SampleJob &job = jobs[blockIdx.x];
  const SlotParams p = slots.params[job.slot];
  wait_before();
  const int limit = slots.token_limit;
  const Candidates all = {(changes(p) ? adjusted : all_logits) + blockIdx.x * stride, limit};
  const Greatest group = greatest[blockIdx.x * kGroups + threadIdx.x];
  constexpr unsigned kBad = ~0u;  // no logit's order
  const unsigned own = group.best == -2 ? kBad : group.best < 0 ? 0 : order_of(group.most);
  unsigned top = own;
  int best = group.best;
  greatest_of_block(top, best);
  if (top == kBad || top == 0) {
    if (threadIdx.x == 0) ids[blockIdx.x] = -1;
    return;
  }
  const float most = value_of(top);
  if (p.temperature == 0) {
    bool leads = true;
    if (kLead) {
      unsigned second = group.best == best ? order_of(group.next) : own;
      int none = 0;
      __syncthreads();
      greatest_of_block(second, none);
      const float next = second == 0 ? kNone : value_of(second);
      leads = !(static_cast<double>(most) - static_cast<double>(next) < margin);
    }
    if (threadIdx.x == 0) ids[blockIdx.x] = leads ? best : -2;
    return;
  }

  __shared__ uint64_t list[kListed];
  __shared__ Selection selection;
  __shared__ float scratch[32];
  const Scale scale = {most, p.temperature, p.min_p, noise_key(p.seed, job.position)};
  Cut cut = {0, limit};
  if (p.top_k > 0 && p.top_k < limit) {
    int n;
    if (p.top_k <= kMostSorted && list_best(all, slots.scored, own, top, p.top_k, list, &n)) {
      const Chosen<kLead> chosen = choose_listed<kLead>(list, n, p.top_k, p.top_p, scale);
      if (threadIdx.x == 0)
        ids[blockIdx.x] = kLead && chosen.score - chosen.second < margin ? -2 : chosen.id;
      return;
    }
    int mine = 0;
    for (int i = threadIdx.x; i < limit; i += kThreads) mine += all.logits[i] > kNone;
    if (static_cast<int>(block_sum(static_cast<float>(mine), scratch)) > p.top_k) {
      const auto one = [](float) { return 1ull; };
      unsigned order;
      const unsigned long long before =
          select(&selection, all, cut, static_cast<double>(p.top_k), one, &order);
      const int last = nth_of_order(all, cut, order, p.top_k - static_cast<int>(before), limit);
      cut = {order, last};
    }
  }
  if (p.top_p < 1.0f) {
    const auto mass = [&](float v) { return scale.mass(v); };
    __shared__ unsigned long long total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    unsigned long long mine = 0;
    for (int i = threadIdx.x; i < limit; i += kThreads)
      if (all.logits[i] > kNone && cut.takes(order_of(all.logits[i]), i))
        mine += mass(all.logits[i]);
    for (int i = 16; i > 0; i >>= 1) mine += __shfl_xor_sync(kAll, mine, i);
    if ((threadIdx.x & 31) == 0) atomicAdd(&total, mine);
    __syncthreads();
    const double target = static_cast<double>(p.top_p) * static_cast<double>(total);
    unsigned order;
    const unsigned long long before = select(&selection, all, cut, target, mass, &order);
    // Of equal logits, as many as it takes to reach the target, at least one of all.
    const unsigned long long each = mass(value_of(order));
    int m = 1;
    unsigned long long sum = before + each;
    while (static_cast<double>(sum) < target && m < limit) {
      sum += each;
      m++;
    }
    const int last = nth_of_order(all, cut, order, m, limit);
    cut = {order, last < limit ? last : limit};
  }

  const float min_scaled =
      p.min_p >= 0x1p-100f ? static_cast<float>(log_f64(p.min_p)) - 1e-3f : kNone;
  Chosen<kLead> chosen;
  for (int i = threadIdx.x; i < limit; i += kThreads) {
    const float v = all.logits[i];
    if (!(v > kNone) || !cut.takes(order_of(v), i)) continue;
    const float scaled = scale.of(v);
    if (scaled < min_scaled) continue;
    const uint64_t word = hash_at(scale.key, static_cast<uint64_t>(i));
    if (static_cast<double>(scaled + noise_bound(word)) < (kLead ? chosen.second : chosen.score))
      continue;
    if (!scale.rare(scaled)) chosen.take(static_cast<double>(scaled) + noise_of(word), i, kNone);
  }
  chosen.take_block();
  if (threadIdx.x == 0)
    ids[blockIdx.x] = kLead && chosen.score - chosen.second < margin ? -2 : chosen.id;
}

// ids: null for `one`.
__global__ void mark_kernel(uint32_t *seen, int32_t *counts, const int32_t *ids, int32_t one, int n,
                            bool counted) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int32_t id = ids != nullptr ? ids[i] : one;
  atomicOr(seen + (id >> 5), 1u << (id & 31));
  if (counted) atomicAdd(counts + id, 1);
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

namespace {

void mark(Device *device, const SlotArrays &slots, int slot, const int32_t *ids, int32_t one, int n,
          bool counted) {
  KSL_LAUNCH(device, "mark", mark_kernel, divide_up(n, 256), n < 256 ? n : 256,
             slots.seen + static_cast<int64_t>(slot) * slots.words,
             slots.counts + static_cast<int64_t>(slot) * slots.vocab, ids, one, n, counted);
}

}  // namespace

void mark_ids(Device *device, const SlotArrays &slots, int slot, const int32_t *ids, int n,
              bool counted) {
  if (n > 0) mark(device, slots, slot, ids, 0, n, counted);
}

void mark_output(Device *device, const SlotArrays &slots, int slot, int32_t id) {
  mark(device, slots, slot, nullptr, id, 1, true);
}

}  // namespace ksl
