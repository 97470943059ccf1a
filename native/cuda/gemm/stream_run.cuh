// The choice of a stream kernel and its arguments.
#pragma once
#include "stream.cuh"

namespace ksl {
namespace {

// Shared memory of a block: so much that a processor has one at a time (two on one processor would
// end last), and not all, so that small kernels come up beside it.
constexpr size_t kLeastShared = 118 * 1024, kMostShared = 212 * 1024;

inline StreamArgs stream_args(const Packed &m, const Split &x, const Output *outputs,
                              const PairOutput *pair, const PlainArgs &plain, int tokens) {
  StreamArgs a = {};
  a.data = m.data;
  a.scale = m.scale;
  a.supers = m.supers;
  a.tiles = m.tiles;
  a.set_tiles = m.set_tiles;
  a.ways = m.ways;
  a.slices = m.slices;
  a.shares = m.shares;
  a.n_parts = m.n_parts;
  for (int i = 0; i < m.n_parts; i++) {
    a.parts[i] = m.parts[i];
    a.outputs[i] = outputs[m.parts[i].matrix];
  }
  a.x = reinterpret_cast<const uint8_t *>(x.data);
  a.group_bytes = static_cast<int64_t>(x.pieces) * kPiece * kTileTokens * sizeof(__half);
  a.x_inverse = 1.0f / x.scale;
  a.tokens = tokens;
  a.paired = m.pair;
  if (m.pair) a.pair = *pair;
  a.plain = plain;
  if (plain.n > 0) {
    const int sets = divide_up(tokens, kPlainTokens);
    a.plain_warps = sets < kMaxPlainWarps ? sets : kMaxPlainWarps;
  }
  return a;
}

template <int kEncoding>
size_t few_shared(const StreamArgs &a, int tokens) {
  return static_cast<size_t>(a.set_tiles) * a.ways * a.stages *
             (2 * Expand<kEncoding>::kBytes + 8) +
         16 + static_cast<size_t>(divide_up(a.supers, a.slices)) * tokens * 512 +
         a.set_tiles * (a.ways - 1) * 512;
}

template <int kEncoding>
size_t many_shared(const StreamArgs &a, int tiles, int groups) {
  const size_t part = a.set_tiles * Expand<kEncoding>::kBytes + groups * 4096;
  return a.stages * (a.ways * part + 16) +
         static_cast<size_t>(divide_up(a.set_tiles, tiles)) * (a.ways - 1) * tiles * groups * 512;
}

// Launches with as many stages as there is room for.
template <class Shared>
void launch_stream(Device *device, void (*kernel)(StreamArgs), StreamArgs a, int warps, int sets,
                   Shared shared) {
  a.stages = 8;
  while (a.stages > 1 && shared(a) > kMostShared) a.stages--;
  size_t bytes = shared(a);
  if (bytes < kLeastShared) bytes = kLeastShared;
  launch_chained(device, "stream", kernel, dim3(a.shares * a.slices, sets),
                 (warps + a.plain_warps) * 32, bytes, a);
}

template <int kEncoding, int kTokens>
void run_few(Device *device, const StreamArgs &a) {
  static const bool raised = raise_shared(device, stream_few<kEncoding, kTokens>, kMostShared);
  (void)raised;  // per instance; the engine has one thread
  launch_stream(device, stream_few<kEncoding, kTokens>, a, a.set_tiles * a.ways, 1,
                [](const StreamArgs &u) { return few_shared<kEncoding>(u, kTokens); });
}

template <int kEncoding, int kTiles, int kGroups>
void run_many(Device *device, const StreamArgs &a) {
  static const bool raised =
      raise_shared(device, stream_many<kEncoding, kTiles, kGroups>, kMostShared);
  (void)raised;
  launch_stream(device, stream_many<kEncoding, kTiles, kGroups>, a,
                divide_up(a.set_tiles, kTiles) * a.ways + 1, divide_up(a.tokens, 8 * kGroups),
                [](const StreamArgs &u) { return many_shared<kEncoding>(u, kTiles, kGroups); });
}

template <int kEncoding>
void run_stream(Device *device, const StreamArgs &a) {
  if (a.tokens == 1)
    run_few<kEncoding, 1>(device, a);
  else if (a.tokens == 2)
    run_few<kEncoding, 2>(device, a);
  else if (a.tokens <= 4)
    run_few<kEncoding, 4>(device, a);
  else if (a.tokens <= 8)
    run_many<kEncoding, 1, 1>(device, a);
  else if (a.tokens <= 16)
    run_many<kEncoding, 2, 2>(device, a);
  else
    run_many<kEncoding, 2, 4>(device, a);
}

}  // namespace
}  // namespace ksl
