// Parts of the keys of tiles of a prompt (flash.cu, prompt.cu): how many there are, and their sum.
#include "attn.cuh"

namespace ksl {

namespace {

constexpr int kRows = kFlashRows;

// The parts of a tile in ascending order of keys, then the gate. A block has kJoinRows rows of the
// tile whose first part is block x, a thread two dims of one row; other parts have nothing to do.
constexpr int kThreads = 256;
constexpr int kJoinRows = 8;
__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ FlashArgs a) {
  const FlashTile tile = a.tiles[blockIdx.x];
  if (tile.part != 0 || tile.parts == 1) return;
  const int head = blockIdx.y, group = a.heads / a.kv.kv_heads, d = a.kv.head_dim;
  const int i = 2 * threadIdx.x % d, together = 2 * kThreads / d;
  const int64_t step = static_cast<int64_t>(a.kv.kv_heads) * kRows;
  begin_chained();
  for (int row = blockIdx.z * kJoinRows + 2 * threadIdx.x / d;
       row < (blockIdx.z + 1) * kJoinRows && row < tile.columns * group; row += together) {
    int64_t at = flash_partial(a, blockIdx.x, head) + row;
    float most = -INFINITY, total = 0;
    float2 sum = make_float2(0, 0);
    for (int p = 0; p < tile.parts; p++, at += step) {
      const float2 other = a.partial_sums[at];
      const float2 v = *reinterpret_cast<const float2 *>(a.partial + at * d + i);
      const Join join(most, other.x);
      total = join.add(total, other.y);
      sum = make_float2(join.add(sum.x, v.x), join.add(sum.y, v.y));
      most = join.most;
    }
    const float scale = total > 0 ? 1.0f / total : 0.0f;
    const int column = tile.column + row / group, query_head = head * group + row % group;
    gate_store2(a.gate, column, query_head, i, d, sum.x * scale, sum.y * scale,
                gate_of2(a.gate, column, query_head, i, d));
  }
}

}  // namespace

void attn_join_parts(Device *device, const FlashArgs &a) {
  KSL_CHAIN(device, "attn_join_parts", join_kernel,
            dim3(a.n_tiles, a.kv.kv_heads, kRows / kJoinRows), kThreads, a);
}

int flash_parts(const FlashTile *tiles, int n, int kv_heads, int processors, int most) {
  // What a block does before and after its keys, and joining, in tiles of keys.
  constexpr int kOpening = 4, kJoining = 4, kMostParts = 64;
  int longest = 0, best = 1, before = 0;
  for (int i = 0; i < n; i++)
    if (tiles[i].last > longest) longest = tiles[i].last;
  int64_t least = 0;
  for (int parts = 1; parts <= kMostParts && parts <= longest; parts++) {
    const int length = divide_up(longest, parts);
    if (length == before) continue;
    before = length;
    int64_t blocks = 0;
    for (int i = 0; i < n; i++) blocks += divide_up(tiles[i].last, length);
    if (parts > 1 && blocks > most) break;
    const int64_t cost =
        divide_up(blocks * kv_heads, processors) * static_cast<int64_t>(length + kOpening) +
        (parts > 1 ? kJoining : 0);
    if (parts > 1 && cost >= least) continue;
    least = cost;
    best = length;
  }
  return best;
}

}  // namespace ksl
