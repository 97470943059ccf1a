// The choice of a stream kernel and its arguments.
#pragma once
#include "stream.cuh"

namespace ksl {
namespace {

inline StreamArgs stream_args(const Packed &m, const Split &x, const Output *outputs,
                              const PairOutput *pair, const PlainArgs &plain, int tokens,
                              const InputNorm *norm) {
  StreamArgs a = {};
  a.data = m.data;
  a.scale = m.scale;
  a.supers = m.supers;
  a.tiles = m.tiles;
  const Shares &s = tokens <= kFewTokens ? m.joined : m.shares;
  a.set_tiles = s.set_tiles;
  a.ways = s.ways;
  a.slices = s.slices;
  a.shares = s.shares;
  a.joins = m.shares.slices / s.slices;
  a.slice_ways = s.ways / a.joins;
  a.steps = divide_up(divide_up(m.supers, m.shares.slices), a.slice_ways);
  a.n_parts = m.n_parts;
  for (int i = 0; i < m.n_parts; i++) {
    a.parts[i] = m.parts[i];
    a.outputs[i] = outputs[m.parts[i].matrix];
  }
  a.x = reinterpret_cast<const uint8_t *>(x.data);
  a.group_bytes = static_cast<int64_t>(x.pieces) * kPiece * kTileTokens * sizeof(__half);
  a.x_inverse = packed_inverse(m.encoding) / x.scale;
  if (m.encoding == KSL_ENC_NVFP4) a.x_inverse *= 0x1p7f;  // scales of Expand are 2^-7 of others'
  a.x_scale = x.scale;
  a.pitch = packed_block_bytes(m.encoding);
  a.tokens = tokens;
  a.adds = outputs[0].add;
  a.paired = m.pair;
  if (m.pair) a.pair = *pair;
  a.plain = plain;
  if (plain.n > 0) {
    const int sets = divide_up(tokens, kPlainTokens);
    a.plain_warps = sets < kMaxPlainWarps ? sets : kMaxPlainWarps;
  }
  if (norm != nullptr) {
    a.norm = *norm;
    const int warps = a.set_tiles * a.ways;
    if (a.plain_warps < m.supers - warps) a.plain_warps = m.supers - warps;
    a.norm_warps = warps + a.plain_warps;
  }
  return a;
}

// As many stages as there is room for.
constexpr int kMostRing = 8;
template <class Bytes>
int ring_stages(int64_t most, Bytes bytes) {
  int stages = kMostRing;
  while (stages > 1 && bytes(stages) > most) stages--;
  return stages;
}
// Whether the kernels are those of sm_120a.
inline bool small_blocks(const Device *device) {
  return device->room.block_bytes <= kSmallRoom;
}
// Blocks lie as in memory if that takes no stage. bytes: of *a.
template <int kEncoding, class Bytes>
void choose_pitch(const Device *device, StreamArgs *a, int64_t most, Bytes bytes) {
  constexpr int kBytes = Expand<kEncoding>::kBytes;
  a->pitch = kBytes;
  const int stages = ring_stages(most, bytes);
  if (small_blocks(device)) return;
  a->pitch = line_pitch(kBytes);
  if (ring_stages(most, bytes) < stages) a->pitch = kBytes;
}

constexpr int kMostPlainHalf = 4;
// Launches with as many stages as there is room for in `most`; what is left, a ring for plain rows
// with rounds of so many bytes may have.
template <class Bytes>
void launch_stream(Device *device, void (*kernel)(StreamArgs), StreamArgs a, int warps, int sets,
                   int64_t most, Bytes bytes, int round = 0) {
  a.stages = ring_stages(most, bytes);
  const int64_t least = stream_least(device->room);
  int64_t needed = bytes(a.stages);
  if (round > 0 && plain_ring_takes(a.plain)) {
    // Plain rows without a ring would end last.
    if (a.stages > 2 && most - needed < 2 * round) needed = bytes(--a.stages);
    const int64_t half = (most - needed) / (2 * round);
    a.plain_half = static_cast<int>(half < kMostPlainHalf ? half : kMostPlainHalf);
    a.plain_at = static_cast<int>(needed);
    needed += 2 * a.plain_half * round;
  }
  launch_clusters(device, "stream", kernel, dim3(a.shares * a.slices, sets),
                  (warps + a.plain_warps) * 32, needed > least ? needed : least,
                  a.adds ? a.slices : 1, a);
}

inline Shares shares_of(const StreamArgs &a) {
  return {a.set_tiles, a.ways, a.slices, a.shares};
}

template <int kEncoding, int kTokens>
int64_t few_bytes(const StreamArgs &a, int stages) {
  if (a.norm.gain != nullptr)
    return stream_normed_bytes(shares_of(a), a.pitch, stages, a.supers, a.plain.n > 0, kTokens) +
           a.plain_bytes;
  return stream_few_bytes(shares_of(a), a.pitch, stages, divide_up(a.supers, a.slices), kTokens) +
         (a.adds ? stream_given_bytes(shares_of(a), kTokens) : 0);
}

template <int kEncoding, int kTokens>
void run_few_kernel(Device *device, void (*kernel)(StreamArgs), StreamArgs a, int64_t most,
                    int round = 0) {
  const auto bytes = [&](int stages) { return few_bytes<kEncoding, kTokens>(a, stages); };
  choose_pitch<kEncoding>(device, &a, most, bytes);
  launch_stream(device, kernel, a, a.set_tiles * a.ways + 1, 1, most, bytes, round);
}
template <int kEncoding, int kTokens>
void run_few(Device *device, const StreamArgs &a) {
  constexpr int kDeclared = 1024;  // at most, by a kernel for itself
  int64_t most = stream_most(device->room);
  // No small kernel follows products of chains longer than rings, and moved blocks take more room.
  const int64_t whole = device->room.block_bytes - kDeclared;
  constexpr bool kMoved = Expand<kEncoding>::kBytes % 128 != 0;
  if (kMoved && whole > most && few_bytes<kEncoding, kTokens>(a, a.steps) > most) most = whole;
  const auto kernel = stream_few<kEncoding, kTokens>;
  static const bool raised = raise_shared(device, kernel, whole > most ? whole : most);
  (void)raised;  // per instance; the engine has one thread
  run_few_kernel<kEncoding, kTokens>(device, kernel, a, most, plain_round_bytes(a.plain_warps));
}
// Whether it can.
template <int kTokens>
bool run_few_beside(Device *device, const StreamArgs &a) {
  const int64_t most = stream_most_beside(device->room);
  if (few_bytes<KSL_ENC_NVFP4, kTokens>(a, 2) > most) return false;
  const auto kernel = stream_few_beside<KSL_ENC_NVFP4, kTokens>;
  static const bool raised = raise_shared(device, kernel, most);
  (void)raised;
  run_few_kernel<KSL_ENC_NVFP4, kTokens>(device, kernel, a, most);
  return true;
}

template <int kEncoding, int kTiles, int kGroups>
void run_many(Device *device, StreamArgs a) {
  const auto kernel = stream_many<kEncoding, kTiles, kGroups>;
  static const bool raised =
      raise_shared(device, kernel, stream_most(device->room)) && prefer_shared(device, kernel);
  (void)raised;
  constexpr bool kMixed = kMixedRows<kEncoding, kTiles>;
  a.pairs = kTiles == 2 ? stream_pairs(shares_of(a), !kMixed || small_blocks(device)) : 0;
  const int rows = a.set_tiles - a.pairs, warps = rows * a.ways;
  // One less beside all the warps that a block of weights can have.
  const int all = small_blocks(device) ? kSmallStreamWarps : kMaxStreamWarps;
  if (a.plain_warps == kMaxPlainWarps && warps >= all / kTiles) a.plain_warps--;
  // Where the next kernel is to have registers, no more than what gives every block an equal part.
  const int plain_rows = a.plain.n > 0 ? a.plain.first_row[a.plain.n] : 0;
  const int sets = divide_up(a.tokens, kPlainTokens), blocks = a.shares * a.slices;
  while (kMixed && a.plain_warps > 1 && divide_up(plain_rows, a.plain_warps - 1) * sets <= blocks)
    a.plain_warps--;
  const auto bytes = [&](int stages) {
    return stream_many_bytes(shares_of(a), a.pitch, stages, rows, kTiles, kGroups);
  };
  const int64_t beside = stream_most_beside(device->room);
  const bool leaves =
      (kGroups == 1 || (kTiles == 2 && kGroups == 2)) && bytes(kStagesAhead + 1) <= beside;
  const int64_t most = leaves ? beside : stream_most(device->room);
  choose_pitch<kEncoding>(device, &a, most, bytes);
  launch_stream(device, kernel, a, warps + 1, divide_up(a.tokens, 8 * kGroups), most, bytes,
                plain_round_bytes(a.plain_warps));
}

// Where the activations of a whole slice do not fit beside the rings, stream_many takes few tokens
// too: both add in the same order.
template <int kEncoding, int kTokens>
void run_few_if(Device *device, const StreamArgs &a) {
  if (few_bytes<kEncoding, kTokens>(a, 2) <= stream_most(device->room))
    run_few<kEncoding, kTokens>(device, a);
  else
    run_many<kEncoding, 1, 1>(device, a);
}

// If stream_makes_norm.
template <int kEncoding, int kTokens>
void run_normed(Device *device, StreamArgs a) {
  const int64_t most = stream_most_beside(device->room);
  const int row = plain_fetch_bytes(a.plain);
  if (most + row <= stream_most(device->room)) a.plain_bytes = row;
  const auto kernel = stream_normed<kEncoding, kTokens>;
  static const bool raised = raise_shared(device, kernel, stream_most(device->room));
  (void)raised;
  run_few_kernel<kEncoding, kTokens>(device, kernel, a, most + a.plain_bytes);
}

template <int kEncoding>
void run_stream(Device *device, const StreamArgs &a) {
  if constexpr (kEncoding != KSL_ENC_BF16) {
    if (a.norm.gain != nullptr) {
      a.tokens == 1 ? run_normed<kEncoding, 1>(device, a) : run_normed<kEncoding, 2>(device, a);
      return;
    }
  }
  constexpr bool kFp6 = kEncoding == KSL_ENC_E2M3;
  if constexpr (kEncoding == KSL_ENC_NVFP4) {
    if (a.tokens <= 2 &&
        (a.tokens == 1 ? run_few_beside<1>(device, a) : run_few_beside<2>(device, a)))
      return;
  }
  if (a.tokens == 1) return run_few_if<kEncoding, 1>(device, a);
  if (a.tokens == 2) return run_few_if<kEncoding, 2>(device, a);
  // Warps of two tiles are few enough for the next kernel to come up beside them, which is worth
  // more than activations that stay in shared memory. Those of sm_120a would be too few, and so, at
  // 16 tokens in bf16, those of a product with one way.
  const bool small = small_blocks(device);
  if (a.tokens <= 8) {
    if (small) return run_many<kEncoding, 1, 1>(device, a);
    return run_many<kEncoding, 2, 1>(device, a);
  }
  if constexpr (kFp6) {
    if (small && a.tokens > 16) return run_many<kEncoding, 1, 4>(device, a);
  }
  if constexpr (kEncoding == KSL_ENC_BF16) {
    if (!small && a.tokens <= 16 && a.ways == 1) return run_many<kEncoding, 1, 2>(device, a);
  }
  if (a.tokens <= 16) return run_many<kEncoding, 2, 2>(device, a);
  run_many<kEncoding, 2, 4>(device, a);
}

}  // namespace
}  // namespace ksl
