// Keys and values of tile.cu in shared memory: where they lie, and their way there.
#pragma once
#include "../common/mma.cuh"
#include "attn.cuh"

namespace ksl {

namespace {

constexpr int kKeys = kTileKeys;
constexpr int kKeySteps = kKeys / 16;  // of products of values
constexpr int kStages = 2;

// Shared memory. The pitches keep the rows that a warp reads at one time in different banks.
template <int kWarps, int kFormat, int kDim, int kTiles>
struct Layout {
  static constexpr int kThreads = kWarps * 32;
  // Of a warp: keys, in products of eight; and, of a lane, scores of a query.
  static constexpr int kEights = kKeys / kWarps / 8, kScores = 2 * kEights;
  static_assert(kEights > 0 && 2 % kEights == 0, "the keys of a warp lie in one block");
  static constexpr int kHeadDim = kDim;
  static constexpr bool kQ4 = kFormat == KSL_KV_Q4, kBf16 = kFormat == KSL_KV_BF16;
  static constexpr int kKBytes = kQ4 ? kDim / 2 : (kBf16 ? kDim * 2 : kDim);
  static constexpr int kKScale = kQ4 ? kDim / 8 : 4;  // bf16: not there
  static constexpr int kVBytes = kBf16 ? kDim * 2 : kDim;
  static constexpr int kKPitch = kKBytes + (kBf16 ? 32 : 16);
  static constexpr int kVPitch = kVBytes + 16;
  static constexpr int kScales = kKeys * kKPitch, kV = kScales + (kBf16 ? 0 : kKeys * kKScale);
  static constexpr int kVScales = kV + kKeys * kVPitch;
  static constexpr int kStage = kVScales + (kBf16 ? 0 : kKeys * 4);
  static constexpr int kQuery = 0;  // fragments of a: [tiles][steps][lanes]
  static constexpr int kWeights =
      kQuery + kTiles * kDim * 32;  // fragments: [tiles][key steps][lanes]
  static constexpr int kHighs = kWeights + kTiles * kKeySteps * 512;  // [tiles][8][warps]
  static constexpr int kHighScales = kHighs + kTiles * 8 * kWarps * 4;
  static constexpr int kTotals = kHighScales + kTiles * 8 * kWarps * 4;
  // [tiles][8][eights of keys]
  static constexpr int kSums = kTotals + kTiles * 8 * (kKeys / 8) * 4;  // q4: of 32 channels
  // Of a block that makes its heads: what is stored of the column's own key and value, one behind
  // the other; and before they are fragments, queries, with a pitch that spreads them over banks.
  static constexpr int kNew = kSums + (kQ4 ? kTiles * 8 * (kDim / 32) * 4 : 0);
  static constexpr int kNewV = kKBytes + (kBf16 ? 0 : kKScale);
  static constexpr int kNewBytes = kNewV + kVBytes + (kBf16 ? 0 : 4);
  static constexpr int kPitch = kDim + 4;
  static constexpr bool kMakesFragments = kDim == 256;  // at once
  static constexpr int kFirst = kNew + (kTiles == 1 ? (kNewBytes + 15) / 16 * 16 : 0);
  static constexpr int kAll = kFirst + kStages * kStage;
  static_assert(kStage % 16 == 0 && kV % 16 == 0 && kNew % 16 == 0, "16-byte copies");
  static_assert(kQuery + 8 * kPitch * 4 <= kHighs, "queries lie where nothing is yet");
};

// An sm_120 runs the packed formats; bf16 keys of 256 dims are left to core.cu there.
static_assert(Layout<8, KSL_KV_Q4, 256, 3>::kAll <= kSmallRoom, "q4");
static_assert(Layout<8, KSL_KV_FP8, 256, 2>::kAll <= kSmallRoom, "fp8");
static_assert(Layout<8, KSL_KV_BF16, 128, 2>::kAll <= kSmallRoom, "bf16");

// Copies chunks of keys, one after the other. A block holds whole groups of 16 keys.
template <int kWarps, int kFormat, int kDim, int kTiles>
struct Loader {
  typedef Layout<kWarps, kFormat, kDim, kTiles> L;
  static constexpr int kThreads = L::kThreads;
  static constexpr int kGroups = kKeys / 16;
  const KvLayer &kv;
  const int32_t *table;
  int head, keys, last;     // last: block with keys
  int position, index, at;  // of the next group that is looked up
  uint32_t block[kGroups];  // of the groups of the next chunk
  int row[kGroups];

  __device__ Loader(const KvLayer &layer, int slot, int h, int n, int chunk)
      : kv(layer),
        table(layer.tables + static_cast<int64_t>(slot) * layer.table_blocks),
        head(h),
        keys(n),
        last((n - 1) / layer.block_tokens),
        position(chunk * kKeys) {
    index = position / kv.block_tokens;
    at = position - index * kv.block_tokens;
    look_up();
  }

  __device__ void look_up() {
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
      // Behind the last key any block of the row does: its bytes are not copied.
      block[i] = table[min(index, last)];
      row[i] = at * kv.kv_heads + head;
      at += 16;
      const bool over = at == kv.block_tokens;
      at = over ? 0 : at;
      index += over;
    }
    position += kKeys;
  }

  // The chunk that was looked up; looks up the one after it.
  __device__ void load(uint8_t *stage) {
    const int left = keys - (position - kKeys);
    const uint8_t *base[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; i++)
      base[i] = kv.blocks + kv.layer_offset +
                static_cast<uint64_t>(block[i]) * static_cast<uint32_t>(kv.block_bytes);
    plane<L::kKBytes, L::kKPitch>(stage, base, kv.k_offset, left);
    plane<L::kVBytes, L::kVPitch>(stage + L::kV, base, kv.v_offset, left);
    if (!L::kBf16) {
      plane<L::kKScale, L::kKScale>(stage + L::kScales, base, kv.k_scale_offset, left);
      plane<4, 4>(stage + L::kVScales, base, kv.v_scale_offset, left);
    }
    look_up();
  }

  // Selections that leave the array in registers.
  template <class T>
  __device__ static T of_group(const T (&values)[kGroups], int group) {
    return group & 2 ? (group & 1 ? values[3] : values[2]) : (group & 1 ? values[1] : values[0]);
  }

  template <int kBytes, int kPitch>
  __device__ void plane(uint8_t *to, const uint8_t *const (&base)[kGroups], int offset,
                        int left) const {
    constexpr int kUnit = kBytes < 16 ? kBytes : 16, kParts = kBytes / kUnit;
    constexpr int kRound = kThreads / kParts;  // keys that are copied at one time
    static_assert(kThreads % kParts == 0 && kGroups == 4, "whole keys");
    const int part = threadIdx.x % kParts, mine = threadIdx.x / kParts;
    uint8_t *const place = to + mine * kPitch + part * kUnit;
    const int own = offset + part * kUnit;
    if constexpr (kRound <= 16) {
      const int first_at = own + mine * kv.kv_heads * kBytes;
#pragma unroll
      for (int first = 0; first < kKeys; first += kRound) {
        const int group = first >> 4, here = (first & 15) * kv.kv_heads * kBytes;
        copy_async<kUnit>(place + first * kPitch,
                          base[group] + (row[group] * kBytes + first_at + here),
                          first + mine < left);
      }
    } else {
#pragma unroll
      for (int first = 0; first < kKeys; first += kRound) {
        const int key = first + mine;
        if (kRound > kKeys && key >= kKeys) break;
        const int r = of_group(row, key >> 4) + (key & 15) * kv.kv_heads;
        copy_async<kUnit>(place + first * kPitch, of_group(base, key >> 4) + (own + r * kBytes),
                          key < left);
      }
    }
  }
};

}  // namespace
}  // namespace ksl
