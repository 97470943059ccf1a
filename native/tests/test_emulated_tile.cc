// The attention of short rows, attn/tile.cu and attn/tile_join.cu, lane by lane on the host,
// against plain sums over the decoded keys and values: every format and head size, columns that are
// rows of their own, rows with drafts, columns of no row, keys joined by chunks and by spans; and
// with heads that are made there, from what a product leaves.
#include <cache.h>

namespace ksl {
namespace {

struct Case {
  std::vector<int32_t> slot, position, row;
  std::vector<RowInfo> rows;  // none: every column is one
};

// Both kernels over a cache. Of the caller are the gates, a's queries or the heads that make them.
// Spans are units where a launch has many of them; then there is room for more keys than there are.
struct Launch {
  int width, most_position;
  int64_t room;
  std::vector<float> gates, pregate, gated, partial;
  TileArgs a = {};
  GateArgs gate = {};

  Launch(const Cache &cache, int format, const Case &of, bool spans)
      : width(kHeads * cache.kv.head_dim),
        most_position(spans ? 64 * 4 * kManySpans : kTable * kTokens - 1) {
    const int n = static_cast<int>(of.slot.size());
    room = static_cast<int64_t>(n) * kHeads * (most_position / 64 + 1);
    gates.resize(static_cast<size_t>(2 * n * width));
    pregate.assign(static_cast<size_t>(n * width), NAN);
    gated = pregate;
    partial.assign(static_cast<size_t>(room * (cache.kv.head_dim + 2)), NAN);
    a.columns = {nullptr, of.position.data(), of.slot.data(), of.row.data(), nullptr, n};
    a.kv = cache.kv;
    a.format = format;
    a.heads = kHeads;
    a.rows = of.rows.empty() ? nullptr : of.rows.data();
    a.n_rows = static_cast<int>(of.rows.size());
    a.n = n;
    a.partial = partial.data();
    gate.query_gate = gates.data();
    gate.query_gate_stride = 2 * width;
    gate.stride = width;
    gate.pregate = pregate.data();
    gate.gated = gated.data();
  }
  Launch(const Launch &) = delete;
  void run(const HeadsArgs *heads) {
    Device device = {};
    attn_tile(&device, a, heads, gate, most_position, room);
  }
};

bool compare(const Cache &cache, int format, const char *name, const Case &of, bool spans,
             emulated::Random *random) {
  const int d = cache.kv.head_dim, n = static_cast<int>(of.slot.size());
  Launch launch(cache, format, of, spans);
  const int width = launch.width;
  std::vector<float> q(static_cast<size_t>(n * width));
  for (float &x : q) x = random->normal() * 0.7f;
  for (float &x : launch.gates) x = random->normal();
  launch.a.q = q.data();
  launch.a.q_stride = width;
  launch.run(nullptr);

  std::vector<float> found, found_gated;
  std::vector<double> right, right_gated;
  for (int column = 0; column < n; column++)
    for (int head = 0; head < kHeads && of.slot[column] >= 0; head++) {
      const size_t first = static_cast<size_t>(column * width + head * d);
      const std::vector<double> values =
          attend(cache, format, of.slot[column], head / kGroup, &q[first], of.position[column] + 1);
      for (int i = 0; i < d; i++) {
        const double g =
            launch.gates[static_cast<size_t>((column * kHeads + head) * 2 + 1) * d + i];
        found.push_back(launch.pregate[first + i]);
        found_gated.push_back(launch.gated[first + i]);
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

typedef std::vector<double> Head;

// As the model says: norm, rotary, and for q4 the rotation.
Head made_head(const float *x, const std::vector<float> &gain, double angle, int half, bool q4) {
  const int d = static_cast<int>(gain.size());
  double square = 0;
  for (int i = 0; i < d; i++) square += x[i] * x[i];
  Head y(gain.size());
  for (int i = 0; i < d; i++) y[i] = x[i] / sqrt(square / d + 1e-6) * gain[i];
  for (int i = 0; i < half; i++) {
    const double a = y[i], b = y[i + half], turn = angle * (i + 1);
    y[i] = a * cos(turn) - b * sin(turn);
    y[i + half] = b * cos(turn) + a * sin(turn);
  }
  for (int stride = 1; q4 && stride < d; stride *= 2)
    for (int i = 0; i < d; i++) {
      if (i & stride) continue;
      const double a = y[i], b = y[i + stride];
      y[i] = (a + b) / sqrt(2);
      y[i + stride] = (a - b) / sqrt(2);
    }
  return y;
}

// Columns that are rows of their own, each of a slot of its own.
bool compare_heads(Cache cache, int format, const char *name, const Case &of, bool spans,
                   emulated::Random *random) {
  cache.kv.blocks = cache.data.data();
  cache.kv.tables = cache.tables.data();
  const int d = cache.kv.head_dim, n = static_cast<int>(of.slot.size()), half = d / 4;
  const int kv_width = kKvHeads * d;
  Launch launch(cache, format, of, spans);
  const int width = launch.width;
  const auto normals = [&](int count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float &x : values) x = random->normal();
    return values;
  };
  for (float &x : launch.gates) x = random->normal();
  std::vector<float> k = normals(n * kv_width), v = normals(n * kv_width), q_norm = normals(d),
                     k_norm = normals(d), cosines, sines;
  for (int column = 0; column < n; column++)
    for (int i = 0; i < half; i++) {
      cosines.push_back(static_cast<float>(cos(0.1 * (column + 1) * (i + 1))));
      sines.push_back(static_cast<float>(sin(0.1 * (column + 1) * (i + 1))));
    }
  HeadsArgs h = {};
  h.columns = launch.a.columns;
  h.kv = launch.a.kv;
  h.format = format;
  h.query_gate = launch.gates.data();
  h.query_gate_stride = 2 * width;
  h.k = k.data();
  h.v = v.data();
  h.kv_stride = kv_width;
  h.q_norm = q_norm.data();
  h.k_norm = k_norm.data();
  h.cos = cosines.data();
  h.sin = sines.data();
  h.heads = kHeads;
  h.half = half;
  h.eps = 1e-6f;
  launch.run(&h);

  const bool q4 = format == KSL_KV_Q4;
  std::vector<float> found, stored;
  std::vector<double> right, rows;
  for (int column = 0; column < n; column++) {
    if (of.slot[column] < 0) continue;
    const double angle = 0.1 * (column + 1);
    for (int head = 0; head < kKvHeads; head++) {
      const int at = column * kv_width + head * d;
      Head key(d), value(d);
      decode(cache, format, of.slot[column], of.position[column], head, &key, &value);
      const Head made = made_head(&k[at], k_norm, angle, half, q4);
      stored.insert(stored.end(), key.begin(), key.end());
      rows.insert(rows.end(), made.begin(), made.end());
      stored.insert(stored.end(), value.begin(), value.end());
      rows.insert(rows.end(), v.begin() + at, v.begin() + at + d);
    }
    for (int head = 0; head < kHeads; head++) {
      const Head made =
          made_head(&launch.gates[static_cast<size_t>((column * kHeads + head) * 2) * d], q_norm,
                    angle, half, q4);
      const std::vector<float> query(made.begin(), made.end());
      const std::vector<double> values = attend(cache, format, of.slot[column], head / kGroup,
                                                query.data(), of.position[column] + 1);
      const float *const from = &launch.pregate[static_cast<size_t>(column * width + head * d)];
      found.insert(found.end(), from, from + d);
      right.insert(right.end(), values.begin(), values.end());
    }
  }
  char what[64];
  snprintf(what, sizeof what, "%s %d, heads, %s", name, d, spans ? "spans" : "chunks");
  const double step = q4 ? 0.12 : (format == KSL_KV_FP8 ? 0.04 : 0.004);
  return emulated::near(what, found, right, format == KSL_KV_BF16 ? 2e-4 : 1e-5) &&
         emulated::near(what, stored, rows, step);
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
  // The own key is the last of a chunk, and alone in one.
  const ksl::Case alone = {{0, -1, 1}, {256, 0, 63}, {0, -1, 1}, {}};
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
        right &= compare_heads(cache, f.format, f.name, alone, spans, &random);
      }
    }
  return right ? 0 : 1;
}
