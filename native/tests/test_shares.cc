// The division of products of few tokens and the shared memory of their blocks, for the matrices of
// models on an H200 and on an RTX 5090.
#include <stdio.h>

#include <algorithm>
#include <initializer_list>

#include "../cuda/gemm/shares.cuh"

namespace {

using ksl::Room;
using ksl::Shares;

struct Matrix {
  int rows, cols;
  bool summed;
};
// Groups of the 27B and of the 0.8B, the bundled model, and sizes that fit nothing.
const Matrix kMatrices[] = {
    {16384, 5120, false}, {5120, 6144, true},    {14336, 5120, false}, {34816, 5120, false},
    {5120, 17408, true},  {248320, 5120, false}, {5120, 10240, false}, {8192, 1024, false},
    {1024, 2048, true},   {7168, 1024, false},   {1024, 3584, true},   {248320, 1024, false},
    {768, 256, false},    {256, 512, true},      {203, 80, false},     {80, 144, true},
    {17, 100000, false},  {17, 100000, true},
};
const int kBlocks[] = {2048 + 1024 + 16, 2048 + 256, 8192};  // FP6, NVFP4, bf16

int failures = 0;

void check(bool right, const char *what, const Matrix &m, const Room &room) {
  if (right) return;
  failures++;
  fprintf(stderr, "%d x %d on %d processors: %s\n", m.rows, m.cols, room.processors, what);
}

// Of the four schedulers, that take warps in turn.
int most_tiles(const Shares &s, int pairs) {
  int tiles[4] = {};
  for (int row = 0; row < s.set_tiles - pairs; row++)
    for (int way = 0; way < s.ways; way++) tiles[(row * s.ways + way) % 4] += row < pairs ? 2 : 1;
  return *std::max_element(tiles, tiles + 4);
}

void go_through(const Room &room, int most_warps, bool *any_joined) {
  const int64_t most = ksl::stream_most(room);
  for (const Matrix &m : kMatrices) {
    for (const int weights : kBlocks) {
      const int tiles = (m.rows + 15) / 16, supers = (m.cols + 255) / 256;
      const Shares s = ksl::choose_shares(tiles, supers, weights, m.summed, room);
      check(s.shares * s.slices <= room.processors, "more blocks than processors", m, room);
      check(s.slices >= 1 && s.slices <= (m.summed ? ksl::kMaxSlices : 1), "slices", m, room);
      check(s.ways >= 1 && s.ways <= ksl::kMaxStreamWays, "ways", m, room);
      check(s.set_tiles >= 1 && s.set_tiles * s.ways <= most_warps, "warps of a block", m, room);
      // Every form of stream_many has two stages: one is fetched while one is used.
      for (const bool few : {false, true}) {
        const int pairs = ksl::stream_pairs(s, few), rows = s.set_tiles - pairs;
        for (int groups = 1; groups <= (few ? 4 : 2); groups *= 2)
          check(ksl::stream_many_bytes(s, weights, 2, rows, 2, groups) <= most, "stream_many", m,
                room);
        check(pairs >= 0 && 2 * pairs <= s.set_tiles, "pairs of tiles", m, room);
        check(
            few ? pairs == s.set_tiles / 2 : most_tiles(s, pairs) <= most_tiles(s, s.set_tiles / 2),
            "tiles of a scheduler", m, room);
      }
      for (int groups = 1; groups <= 4; groups *= 2)
        check(ksl::stream_many_bytes(s, weights, 2, s.set_tiles, 1, groups) <= most, "stream_many",
              m, room);
      // Of stream_quads that of the fewest tokens, which takes what no other does.
      check(ksl::stream_quads_bytes(s, weights, 2, 2, 2) <= most, "stream_quads", m, room);
      const int range = (supers + s.slices - 1) / s.slices;
      if (m.cols <= 17408)
        check(ksl::stream_few_bytes(s, weights, 2, range, 1) <= most, "stream_few", m, room);
      const Shares joined = ksl::join_slices(s, tiles, weights, room);
      if (joined.slices == s.slices) continue;
      *any_joined = true;
      check(2 * joined.slices == s.slices && joined.ways == 2 * s.ways, "chains", m, room);
      check(joined.shares * joined.slices <= room.processors, "joined blocks", m, room);
      check(joined.shares * joined.set_tiles >= tiles, "one set", m, room);
      check(joined.set_tiles * joined.ways <= most_warps, "warps that join", m, room);
      check(ksl::stream_many_bytes(joined, weights, 2, joined.set_tiles, 1, 1) <= most, "joined", m,
            room);
    }
  }
}

// Rows of the most slices that any matrix has: what the plan of memory counts, see
// kslserve/engine/device_budget.py.
void go_through_slices(const Room &room) {
  for (const int tokens : {1, 40, 64, 65, 160, 512, 2048}) {
    for (const bool wide : {false, true}) {
      int most = 1;
      for (const Matrix &m : kMatrices)
        for (const int weights : kBlocks) {
          const bool summed = m.summed && ksl::slices_pay(tokens, wide);
          const Shares s =
              ksl::choose_shares((m.rows + 15) / 16, (m.cols + 255) / 256, weights, summed, room);
          if (s.slices > most) most = s.slices;
        }
      const int64_t few = tokens < 64 ? tokens : 64, planned = 8 * few > tokens ? 8 * few : tokens;
      if (most == 1 && wide) failures++;  // there are slices
      if (ksl::partial_rows(tokens, most) > planned) failures++;
      // A wave that is not made of whole products has all of its tokens in every slice.
      const int64_t written = wide ? few : tokens;
      if (ksl::partial_rows(tokens, most) < most * written) failures++;
    }
  }
}

}  // namespace

int main() {
  // An H200 and an RTX 5090.
  const Room rooms[] = {{132, 228 * 1024, 227 * 1024}, {170, 100 * 1024, 99 * 1024}};
  bool joins[2] = {};
  go_through(rooms[0], ksl::kMaxStreamWarps, &joins[0]);
  go_through(rooms[1], ksl::kSmallStreamWarps, &joins[1]);
  if (!joins[0]) failures++;
  for (const Room &room : rooms) go_through_slices(room);
  // One block on a processor at a time, and room for small ones beside it.
  for (const Room &room : rooms) {
    if (2 * (ksl::stream_least(room) + 1024) <= room.processor_bytes) failures++;
    if (ksl::stream_most(room) >= room.block_bytes) failures++;
    if (ksl::stream_least(room) > ksl::stream_most(room)) failures++;
  }
  // Beside a block of stream_few_beside one of step_kernel's, which is the largest of those behind
  // products: 41 KiB, and 1 KiB that the system takes of each block.
  const int64_t beside = ksl::stream_most_beside(rooms[0]);
  if (beside + (41 + 2) * 1024 > rooms[0].processor_bytes) failures++;
  if (beside < ksl::stream_least(rooms[0])) failures++;
  if (ksl::stream_most_beside(rooms[1]) != 0) failures++;
  // Of the 27B model whatever reads a norm makes it, and what is cut into slices does not; nothing
  // does where blocks have no room beside them.
  for (const Matrix &m : {Matrix{16384, 5120, false}, Matrix{14336, 5120, false},
                          Matrix{34816, 5120, false}, Matrix{5120, 17408, true}}) {
    for (const int weights : {kBlocks[0], kBlocks[1]}) {
      for (int tokens = 1; tokens <= ksl::kNormTokens; tokens++) {
        for (const Room &room : rooms) {
          const int supers = m.cols / 256;
          const Shares s = ksl::choose_shares(m.rows / 16, supers, weights, m.summed, room);
          for (const bool floats : {false, true}) {
            const bool made = ksl::stream_makes_norm(s, weights, supers, floats, tokens, room);
            check(made == (!m.summed && &room == &rooms[0]), "makes its norm", m, room);
          }
        }
      }
    }
  }
  // What is added to the residual of the 27B model are two slices, added by clusters where a block
  // has room; none has of more slices, or of tiles in sets.
  for (const Matrix &m : {Matrix{5120, 6144, true}, Matrix{5120, 17408, true}}) {
    for (const int weights : {kBlocks[0], kBlocks[1]}) {
      for (const Room &room : rooms) {
        const int tiles = m.rows / 16, supers = m.cols / 256;
        const Shares s = ksl::join_slices(ksl::choose_shares(tiles, supers, weights, true, room),
                                          tiles, weights, room);
        check(ksl::stream_adds(s, tiles, supers, weights, room) == (&room == &rooms[0]), "adds", m,
              room);
      }
    }
  }
  if (!ksl::stream_adds({2, 1, 2, 4}, 8, 4, kBlocks[1], rooms[0])) failures++;
  if (ksl::stream_adds({2, 1, 2, 4}, 9, 4, kBlocks[1], rooms[0])) failures++;
  if (ksl::stream_adds({2, 1, 3, 4}, 8, 4, kBlocks[1], rooms[0])) failures++;
  if (failures > 0) fprintf(stderr, "%d failures\n", failures);
  return failures > 0 ? 1 : 0;
}
