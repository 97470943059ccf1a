// The attention of prompts by single warps, attn/prompt.cu, lane by lane on the host, against plain
// sums over the decoded keys and values: every format and head size, several blocks and tiles, with
// an end inside a tile of keys and rows that a tile of queries does not fill.
#include <cache.h>

namespace ksl {

void attn_join_parts(Device *, const FlashArgs &) {
  abort();  // no tile has parts
}

namespace {

bool compare(int format, const char *name, int d, emulated::Random *random) {
  const Cache cache = make_cache(format, d, random);
  const FlashTile tiles[] = {{0, 20, 37, 0, 0, 1, 0, 1}, {20, 21, 120, 1, 0, 3, 0, 1}};
  constexpr int kColumns = 41, kWidth = kHeads;
  std::vector<float> q(static_cast<size_t>(kColumns * kWidth * d)), gates(2 * q.size());
  std::vector<float> pregate(q.size(), NAN), gated(q.size(), NAN);
  for (float &x : q) x = random->normal() * 0.7f;
  for (float &x : gates) x = random->normal();
  FlashArgs a = {};
  a.kv = cache.kv;
  a.format = format;
  a.q = q.data();
  a.q_stride = a.gate.stride = kWidth * d;
  a.heads = kHeads;
  a.tiles = tiles;
  a.n_tiles = 2;
  a.gate.query_gate = gates.data();
  a.gate.query_gate_stride = 2 * kWidth * d;
  a.gate.pregate = pregate.data();
  a.gate.gated = gated.data();
  Device device = {};
  attn_prompt(&device, a);

  std::vector<double> right(q.size()), right_gated(q.size());
  for (const FlashTile &tile : tiles)
    for (int row = 0; row < tile.columns * kHeads; row++) {
      const int column = tile.column + row / kHeads, query = row % kHeads;
      const size_t first = static_cast<size_t>((column * kWidth + query) * d);
      const std::vector<double> values = attend(cache, format, tile.slot, query / kGroup, &q[first],
                                                tile.position + row / kHeads + 1);
      for (int i = 0; i < d; i++) {
        const double gate = gates[static_cast<size_t>((column * kWidth + query) * 2 + 1) * d + i];
        right[first + i] = values[i];
        right_gated[first + i] = values[i] / (1 + exp(-gate));
      }
    }
  char what[64];
  snprintf(what, sizeof what, "%s %d", name, d);
  return emulated::near(what, pregate, right, 3e-3) &&
         emulated::near(what, gated, right_gated, 3e-3);
}

}  // namespace
}  // namespace ksl

int main(int argc, char **argv) {
  emulated::Random random(emulated::begin(argc, argv));
  bool right = true;
  for (const int d : {64, 128, 256}) {
    right &= ksl::compare(KSL_KV_Q4, "q4", d, &random);
    right &= ksl::compare(KSL_KV_FP8, "fp8", d, &random);
    right &= ksl::compare(KSL_KV_BF16, "bf16", d, &random);
  }
  return right ? 0 : 1;
}
