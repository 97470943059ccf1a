// How products of few tokens are divided among the processors of a device, and the shared memory
// that their blocks take. No device code: a host test goes through the shapes of models and
// devices.
#pragma once
#include <stdint.h>

#include "../common/room.cuh"

namespace ksl {

constexpr int kMaxSlices = 8;
constexpr int kSlicedTokens = 64;  // of a wave whose products may be slices that a reader adds
constexpr int kMaxStreamWarps = 20, kMaxPlainWarps = 4;  // of a block
constexpr int kMaxStreamWays = 2;
constexpr int kFewTokens = 2;  // of a wave whose blocks may join two slices
// Of a block of a device that has less than the 227 KiB of sm_90 for one.
constexpr int kSmallStreamWarps = 12;
constexpr int kSuperBytes = 4096;  // the activations of eight tokens beside a block of weights

constexpr int kNormTokens = 2;  // of a wave whose products make the norms that they read

// How a stream kernel's block is cut, see stream.cuh. ways and slices are part of the numerics.
struct Shares {
  int set_tiles, ways, slices, shares;
};

// A stream kernel takes so much that a processor has one block at a time, since two on one would
// end last, and not all, so that small kernels come up beside it.
constexpr int64_t stream_least(const Room &room) {
  return room.processor_bytes / 2 + 4096;
}
constexpr int64_t stream_most(const Room &room) {
  const int64_t most = room.processor_bytes - 16384;
  return most < room.block_bytes ? most : room.block_bytes;
}

// What blocks that leave room for others take at most, of a device with as much as sm_90 has; of
// other devices nothing.
constexpr int64_t stream_most_beside(const Room &room) {
  return room.block_bytes > kSmallRoom ? room.processor_bytes - 48 * 1024 : 0;
}

// From a block's place in a ring to the next. Copies are fast where both their ends lie in lines of
// 128 bytes alike, which takes room to move blocks that are not whole lines.
constexpr int line_pitch(int weights) {
  return weights % 128 == 0 ? weights : (weights + 112 + 127) / 128 * 128;
}

// Bytes of stream_few and stream_many. weights: bytes of a block of them, or its pitch; range:
// blocks of a slice.
constexpr int64_t stream_few_bytes(const Shares &s, int weights, int stages, int range,
                                   int tokens) {
  return stages * (static_cast<int64_t>(s.set_tiles) * s.ways * weights + 16) +
         static_cast<int64_t>(range) * tokens * 512 + s.set_tiles * (s.ways - 1) * 512;
}
// Beside them, what the last of two slices is given of the first, if its block adds them.
constexpr int64_t stream_given_bytes(const Shares &s, int tokens) {
  return static_cast<int64_t>(s.set_tiles) * tokens * 64;
}
// rows: of warps, each with room for the sums of so many tiles.
constexpr int64_t stream_many_bytes(const Shares &s, int weights, int stages, int rows, int tiles,
                                    int groups) {
  const int64_t part = s.set_tiles * weights + groups * kSuperBytes;
  return stages * (s.ways * part + 16) +
         static_cast<int64_t>(rows) * (s.ways - 1) * tiles * groups * 512;
}

// How many rows of warps of stream_many have two tiles, where the others have one: as many as leave
// none of a processor's schedulers, which take warps in turn, with more tiles than need be. few:
// registers allow no more rows than there must be.
inline int stream_pairs(const Shares &s, bool few) {
  constexpr int kSchedulers = 4, kMost = 12;
  int best = s.set_tiles / 2, least = 1 << 30;
  for (int pairs = best; pairs >= 0; pairs--) {
    const int warps = (s.set_tiles - pairs) * s.ways;
    if (least < 1 << 30 && (few || warps > kMost)) break;
    int tiles[kSchedulers] = {}, most = 0;
    for (int i = 0; i < warps; i++) {
      int &own = tiles[i % kSchedulers];
      own += i / s.ways < pairs ? 2 : 1;
      if (own > most) most = own;
    }
    if (most >= least) continue;
    least = most;
    best = pairs;
  }
  return best;
}

// Bytes of stream_quads, whose tiles fill up fours of warps: so many stages of weights, and of
// activations, each of half a block's elements.
constexpr int kQuad = 4, kHalfBytes = kSuperBytes / 2;
constexpr int64_t stream_quads_bytes(const Shares &s, int weights, int stages, int x_stages,
                                     int eights) {
  return stages * (static_cast<int64_t>(s.ways) * s.set_tiles * weights + 16) +
         x_stages * (static_cast<int64_t>(s.ways) * eights * kHalfBytes + 16) +
         static_cast<int64_t>((s.set_tiles + kQuad - 1) / kQuad * kQuad) * (s.ways - 1) * eights *
             512;
}

// Whether a product of up to kFewTokens is added to what is there by its own blocks: those of two
// slices are a cluster.
constexpr bool stream_adds(const Shares &s, int tiles, int supers, int weights, const Room &room) {
  const int range = (supers + s.slices - 1) / s.slices;
  return room.block_bytes > kSmallRoom && s.slices <= 2 && s.shares * s.set_tiles >= tiles &&
         stream_few_bytes(s, weights, 2, range, kFewTokens) + stream_given_bytes(s, kFewTokens) <=
             stream_most(room);
}

// Whether the blocks of a product make the norm of what it reads, `runs` times 256 elements of each
// token: a warp has a run, and all but one, which fetches, take part. floats: plain rows read it,
// and their place holds the weights of the norm before; else the last of three stages does until it
// is fetched.
constexpr int64_t stream_normed_bytes(const Shares &s, int weights, int stages, int runs,
                                      bool floats, int tokens) {
  return stream_few_bytes(s, weights, stages, runs, tokens) +
         (floats ? static_cast<int64_t>(runs) * tokens * 1024 : 0);
}
constexpr bool stream_makes_norm(const Shares &s, int weights, int runs, bool floats, int tokens,
                                 const Room &room) {
  const int stages = floats ? 2 : 3;
  return s.slices == 1 && runs <= kMaxStreamWarps + 1 &&
         (floats || runs * 1024 <= s.set_tiles * s.ways * weights) &&
         stream_normed_bytes(s, weights, stages, runs, floats, tokens) <= stream_most_beside(room);
}

// Whether the largest of them has two stages.
constexpr bool stream_fits(const Shares &s, int weights, const Room &room) {
  return stream_many_bytes(s, weights, 2, (s.set_tiles + 1) / 2, 2, 4) <= stream_most(room);
}

// Divides a product among the processors, with enough warps on each. summed: its reader adds
// slices, of which there are as many as leave a block with few but equal tiles. Depends on the
// shape and the device alone.
inline Shares choose_shares(int all_tiles, int supers, int weights, bool summed, const Room &room) {
  Shares best = {1, 1, 1, 1};
  double least = 1e30;
  for (int slices = 1; slices <= (summed ? kMaxSlices : 1) && slices <= supers; slices++) {
    int shares = room.processors / slices;
    if (shares > all_tiles) shares = all_tiles;
    if (shares < 1) break;
    const int tiles = (all_tiles + shares - 1) / shares, range = (supers + slices - 1) / slices;
    // Slices have a price at the reader, few warps another.
    const double few = tiles * kMaxStreamWays < kMaxStreamWarps * 2 / 3 ? 1.1 : 1.0;
    const double cost = tiles * range * few * (1 + 0.02 * slices);
    if (cost >= least) continue;
    least = cost;
    best = {tiles, 1, slices, shares};
    if (tiles > kMaxStreamWarps) {
      best.set_tiles = kMaxStreamWarps / kMaxStreamWays;
      best.ways = kMaxStreamWays;
    } else {
      best.ways = kMaxStreamWarps / tiles;
      if (best.ways > kMaxStreamWays) best.ways = kMaxStreamWays;
      if (best.ways > range) best.ways = range;
    }
    if (stream_fits(best, weights, room)) continue;
    // Little shared memory: sets as equal as they come, of as many tiles as fit.
    best.ways = 1;
    best.set_tiles = tiles < kSmallStreamWarps ? tiles : kSmallStreamWarps;
    while (best.set_tiles > 1 && !stream_fits(best, weights, room)) best.set_tiles--;
    const int sets = (tiles + best.set_tiles - 1) / best.set_tiles;
    best.set_tiles = (tiles + sets - 1) / sets;
  }
  return best;
}

// Another division of the same sums, for waves of few tokens: a block has two slices, and twice as
// many ways, which leaves the reader half as much. What it joins is added two by two everywhere
// else as well. `s` itself where that does not come out, or with fewer blocks.
inline Shares join_slices(const Shares &s, int all_tiles, int weights, const Room &room) {
  if (s.slices % 2 != 0) return s;
  Shares joined = {1, 2 * s.ways, s.slices / 2, 1};
  joined.shares = room.processors / joined.slices;
  if (joined.shares > all_tiles) joined.shares = all_tiles;
  joined.set_tiles = (all_tiles + joined.shares - 1) / joined.shares;
  const int warps = joined.set_tiles * joined.ways;
  const int most = s.set_tiles * s.ways > kSmallStreamWarps ? kMaxStreamWarps : kSmallStreamWarps;
  const bool fits =
      warps <= most && joined.shares * joined.slices >= s.shares * s.slices &&
      stream_many_bytes(joined, weights, 2, joined.set_tiles, 1, 1) <= stream_most(room);
  return fits ? joined : s;
}

// Whether products of an engine's waves may be slices: no wave has more tokens, or kernels that
// leave whole products take those that have.
constexpr bool slices_pay(int64_t most_tokens, bool wide) {
  return wide || most_tokens <= kSlicedTokens;
}
// Rows of products that lie there for a reader to add, of waves of up to most_tokens.
constexpr int64_t partial_rows(int64_t most_tokens, int most_slices) {
  const int64_t sliced =
      most_slices * (most_tokens < kSlicedTokens ? most_tokens : int64_t{kSlicedTokens});
  return sliced > most_tokens ? sliced : most_tokens;
}

}  // namespace ksl
