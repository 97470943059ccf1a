// The attention of short rows, attn/tile.cu and attn/tile_join.cu, lane by lane on the host,
// against plain sums over the decoded keys and values: every format and head size, columns that are
// rows of their own, rows with drafts, columns of no row, keys joined by chunks and by spans.
#include <cache.h>

namespace ksl {
namespace {

struct Case {
  std::vector<int32_t> slot, position, row;
  std::vector<RowInfo> rows;  // none: every column is one
};

// Spans are units where a launch has many of them; then there is room for more keys than there are.
bool compare(const Cache &cache, int format, const char *name, const Case &of, bool spans,
             emulated::Random *random) {
  const int d = cache.kv.head_dim, n = static_cast<int>(of.slot.size()), width = kHeads * d;
  const int most_position = spans ? 64 * 4 * kManySpans : kTable * kTokens - 1;
  std::vector<float> q(static_cast<size_t>(n * width)), gates(2 * q.size());
  std::vector<float> pregate(q.size(), NAN), gated(q.size(), NAN);
  for (float &x : q) x = random->normal() * 0.7f;
  for (float &x : gates) x = random->normal();
  const int64_t room = static_cast<int64_t>(n) * kHeads * (most_position / 64 + 1);
  std::vector<float> partial(static_cast<size_t>(room * (d + 2)), NAN);
  TileArgs a = {};
  a.columns = {nullptr, of.position.data(), of.slot.data(), of.row.data(), nullptr, n};
  a.kv = cache.kv;
  a.format = format;
  a.q = q.data();
  a.q_stride = width;
  a.heads = kHeads;
  a.rows = of.rows.empty() ? nullptr : of.rows.data();
  a.n = n;
  a.partial = partial.data();
  GateArgs gate = {};
  gate.query_gate = gates.data();
  gate.query_gate_stride = 2 * width;
  gate.stride = width;
  gate.pregate = pregate.data();
  gate.gated = gated.data();
  Device device = {};
  attn_tile(&device, a, gate, most_position, room);

  std::vector<float> found, found_gated;
  std::vector<double> right, right_gated;
  for (int column = 0; column < n; column++)
    for (int head = 0; head < kHeads && of.slot[column] >= 0; head++) {
      const size_t first = static_cast<size_t>(column * width + head * d);
      const std::vector<double> values =
          attend(cache, format, of.slot[column], head / kGroup, &q[first], of.position[column] + 1);
      for (int i = 0; i < d; i++) {
        const double g = gates[static_cast<size_t>((column * kHeads + head) * 2 + 1) * d + i];
        found.push_back(pregate[first + i]);
        found_gated.push_back(gated[first + i]);
        right.push_back(values[i]);
        right_gated.push_back(values[i] / (1 + exp(-g)));
      }
    }
  char what[64];
  snprintf(what, sizeof what, "%s %d, %s, %s", name, d, of.rows.empty() ? "decode" : "drafts",
           spans ? "spans" : "chunks");
  // bf16 queries and probabilities are two parts of 8 bits each, the others of 11.
  const double limit = format == KSL_KV_BF16 ? 2e-4 : 1e-5;
  return emulated::near(what, found, right, limit) &&
         emulated::near(what, found_gated, right_gated, limit);
}

RowInfo row_of(int column, int n, int slot, int start) {
  RowInfo row = {};
  row.column = column;
  row.n = n;
  row.slot = slot;
  row.start = start;
  return row;
}

}  // namespace
}  // namespace ksl

int main(int argc, char **argv) {
  emulated::Random random(emulated::begin(argc, argv));
  const ksl::Case decode = {{0, 1, -1, 1}, {300, 63, 0, 130}, {0, 1, -1, 2}, {}};
  // Five drafts and one, in launches of as many columns as a block's tiles hold and fewer.
  const ksl::Case drafts = {{0, 0, 0, 0, 0, 0, 1, 1, -1},
                            {251, 252, 253, 254, 255, 256, 17, 18, 0},
                            {0, 0, 0, 0, 0, 0, 1, 1, -1},
                            {ksl::row_of(0, 6, 0, 251), ksl::row_of(6, 2, 1, 17)}};
  const struct {
    int format;
    const char *name;
  } formats[] = {{KSL_KV_Q4, "q4"}, {KSL_KV_FP8, "fp8"}, {KSL_KV_BF16, "bf16"}};
  bool right = true;
  for (const int d : {64, 128, 256})
    for (const auto &f : formats) {
      const ksl::Cache cache = ksl::make_cache(f.format, d, &random);
      for (const bool spans : {false, true}) {
        right &= compare(cache, f.format, f.name, decode, spans, &random);
        right &= compare(cache, f.format, f.name, drafts, spans, &random);
      }
    }
  return right ? 0 : 1;
}
