// Products of few tokens, gemm/stream.cuh, lane by lane on the host: stored matrices of every
// packed encoding go through pack.cu and the kernels of a large and of a small device, against
// plain sums. Two matrices of one input and rows beside them, or a pair; ragged sizes, slices,
// sets, two chains of an element, joined slices.
#include <emulated.h>

#include "../cuda/gemm/plain.cuh"
#include "../cuda/norm/run.cuh"

namespace ksl {
namespace {

constexpr int kPlainRows = 5;
struct Sizes {
  int rows, more, cols;  // more: of the second matrix; a pair's has as many as the first
};

struct Stored {
  std::vector<uint8_t> codes, scales;
  std::vector<float> globals;
  Raw raw = {};
};

Stored make_stored(int encoding, int rows, int cols, emulated::Random *random) {
  Stored m;
  const int across = (cols + 127) / 128, down = (rows + 127) / 128;
  if (encoding == KSL_ENC_BF16) {
    m.codes.resize(static_cast<size_t>(2 * rows * cols));
    for (int i = 0; i < rows * cols; i++) {
      const uint16_t bits = f32_to_bf16(random->normal());
      memcpy(&m.codes[static_cast<size_t>(2 * i)], &bits, 2);
    }
  } else {
    const bool nvfp4 = encoding == KSL_ENC_NVFP4;
    m.codes.resize(static_cast<size_t>(rows * cols * (nvfp4 ? 2 : 3) / 4));
    for (uint8_t &byte : m.codes) byte = static_cast<uint8_t>(random->below(256));
    m.scales.resize(static_cast<size_t>(nvfp4 ? rows * cols / 16 : down * across));
    for (uint8_t &byte : m.scales)
      byte = static_cast<uint8_t>(nvfp4 ? 40 + random->below(40) : 118 + random->below(6));
    for (int i = 0; nvfp4 && i < down; i++) m.globals.push_back(random->uniform(0.01f, 0.02f));
  }
  m.raw = {encoding, rows, cols, m.codes.data(), m.scales.data(), m.globals.data()};
  return m;
}

int unit_of(const Stored &m) {
  int unit = 0;
  for (const uint8_t byte : m.scales) unit = byte > unit ? byte : unit;
  return unit;
}

struct Product {
  std::vector<uint8_t> data;
  std::vector<float> scale;
  Packed packed = {};
};

// kLoneKind: without plain rows.
enum Kind { kPlainKind, kPairKind, kNormedKind, kAddedKind, kLoneKind };

// Both matrices one behind the other, or as a pair of equal ones; the first alone if it is added.
Product pack(const Stored &first, const Stored &second, Kind kind, const Room &room) {
  const bool pair = kind == kPairKind, alone = kind == kAddedKind;
  const bool sliced = kind == kPlainKind || alone;
  Product p;
  Packed &m = p.packed;
  m.encoding = first.raw.encoding;
  m.cols = first.raw.cols;
  m.supers = (first.raw.cols + kSuper - 1) / kSuper;
  m.pair = pair;
  const int tiles = pair ? (first.raw.rows + 7) / 8 : (first.raw.rows + 15) / 16,
            more = (second.raw.rows + 15) / 16;
  m.tiles = tiles + (pair || alone ? 0 : more);
  m.n_parts = alone ? 1 : 2;
  m.parts[0] = {0, 0, tiles, first.raw.rows};
  m.parts[1] = {1, pair ? 0 : tiles, pair ? tiles : more, second.raw.rows};
  const int bytes = packed_block_bytes(m.encoding);
  m.shares = choose_shares(m.tiles, m.supers, bytes, sliced, room);
  m.joined = join_slices(m.shares, m.tiles, bytes, room);
  p.data.resize(static_cast<size_t>(m.tiles * m.supers * bytes) + 16);
  p.scale.resize(static_cast<size_t>(m.tiles * 16));
  m.data = p.data.data() + (-reinterpret_cast<uintptr_t>(p.data.data()) & 15);
  m.scale = p.scale.data();
  Device device = {};
  pack_rows(&device, first.raw, 0, first.raw.rows, &m, 0, pair ? 1 : 0, unit_of(first));
  if (alone) return p;
  pack_rows(&device, second.raw, 0, second.raw.rows, &m, pair ? 0 : tiles, pair ? 2 : 0,
            unit_of(second));
  return p;
}

// A residual and its norm.
struct Norm {
  std::vector<float> residual, gain, normed;
  InputNorm args = {};
};

Norm make_norm_of(int tokens, int cols, emulated::Random *random) {
  Norm n;
  const size_t all = static_cast<size_t>(tokens * cols);
  for (size_t i = 0; i < all; i++) n.residual.push_back(random->normal());
  for (int i = 0; i < cols; i++) n.gain.push_back(random->uniform(0.5f, 1.5f));
  n.normed.resize(all);
  n.args = {n.residual.data(), cols, cols, n.gain.data(), 1e-6f};
  for (size_t row = 0; row < all; row += static_cast<size_t>(cols)) {
    double squares = 0;
    for (int i = 0; i < cols; i++)
      squares += static_cast<double>(n.residual[row + i]) * n.residual[row + i];
    for (int i = 0; i < cols; i++)
      n.normed[row + i] =
          static_cast<float>(n.residual[row + i] / sqrt(squares / cols + 1e-6) * n.gain[i]);
  }
  return n;
}

bool compare(int encoding, const char *name, const Sizes &sizes, Kind kind, int tokens,
             const Room &room, emulated::Random *random) {
  const bool pair = kind == kPairKind, norm = kind == kNormedKind, added = kind == kAddedKind;
  const Stored first = make_stored(encoding, sizes.rows, sizes.cols, random),
               second = make_stored(encoding, pair ? sizes.rows : sizes.more, sizes.cols, random),
               beside = make_stored(KSL_ENC_BF16, kPlainRows, sizes.cols, random);
  const Product product = pack(first, second, kind, room);
  const Packed &m = product.packed;

  const Norm made = make_norm_of(tokens, sizes.cols, random);
  std::vector<float> x(static_cast<size_t>(tokens * sizes.cols)), rounded = x;
  Split split = {};
  split.pieces = m.supers * (kSuper / kPiece);
  split.scale = 0.5f;
  const int groups = (tokens + 7) / 8;
  std::vector<__half> halves(static_cast<size_t>(groups * 8 * split.pieces * kPiece) + 8);
  split.data = halves.data() + (-reinterpret_cast<uintptr_t>(halves.data()) & 15) / 2;
  for (int t = 0; t < tokens; t++)
    for (int k = 0; k < sizes.cols; k++) {
      const size_t at = static_cast<size_t>(t * sizes.cols + k);
      x[at] = norm ? made.normed[at] : f16_to_f32(f32_to_f16(random->normal()));
      rounded[at] = f16_to_f32(f32_to_f16(x[at] * split.scale)) / split.scale;
      if (!norm) split_store(split, t, k, x[at]);
    }

  const int slices = added ? 1 : slices_of(m, tokens).n;
  const int bytes = packed_block_bytes(encoding);
  if (added && !stream_adds(m.joined, m.tiles, m.supers, bytes, room)) exit(2);
  std::vector<float> y[3];
  Output outputs[kGroupParts] = {};
  const Raw *raws[] = {&first.raw, &second.raw, &beside.raw};
  for (int i = 0; i < 3; i++) {
    y[i].assign(static_cast<size_t>(slices * tokens * raws[i]->rows), NAN);
    outputs[i] = {y[i].data(), raws[i]->rows, static_cast<int64_t>(tokens) * raws[i]->rows};
  }
  std::vector<float> before;
  if (added) {
    for (float &v : y[0]) before.push_back(v = random->normal());
    outputs[0].add = true;
  }
  std::vector<float> act(static_cast<size_t>(tokens * sizes.rows), NAN);
  PairOutput to = {};
  to.act = act.data();
  to.stride = sizes.rows;
  PlainArgs plain = {};
  plain.n = kind == kLoneKind ? 0 : 1;
  plain.matrices[0] = beside.raw;
  plain.outputs[0] = outputs[2];
  plain.first_row[1] = kPlainRows;
  plain.x = norm ? nullptr : x.data();
  plain.x_stride = sizes.cols;
  plain.tokens = tokens;
  Device device = {};
  device.room = room;
  const auto run = encoding == KSL_ENC_NVFP4
                       ? stream_nvfp4
                       : (encoding == KSL_ENC_E2M3 ? stream_e2m3 : stream_bf16);
  run(&device, m, split, outputs, pair ? &to : nullptr, plain, tokens, norm ? &made.args : nullptr);

  std::vector<float> found;
  std::vector<double> right;
  for (int i = 0; i < 2 + plain.n; i++)
    for (int t = 0; t < tokens && !(added && i == 1); t++)
      for (int r = 0; r < raws[i]->rows; r++) {
        double sum = 0;
        for (int k = 0; k < sizes.cols; k++)
          sum += static_cast<double>(raw_any(*raws[i], r, k)) *
                 (i < 2 ? rounded : x)[static_cast<size_t>(t * sizes.cols + k)];
        right.push_back(sum + (added && i == 0 ? before[right.size()] : 0));
        float total = 0;
        for (int s = 0; s < (i < 2 ? slices : 1); s++)
          total += y[i][static_cast<size_t>((s * tokens + t) * raws[i]->rows + r)];
        found.push_back(total);
      }
  const size_t up = static_cast<size_t>(tokens * sizes.rows);
  for (size_t i = 0; pair && i < up; i++) {
    found.push_back(act[i]);
    right.push_back(right[i] / (1 + exp(-right[i])) * right[up + i]);
  }
  char what[80];
  snprintf(what, sizeof what, "%s, %d tokens%s, %d slices of %d, %d ways, sets of %d", name, tokens,
           pair ? ", a pair" : (norm ? ", normed" : (added ? ", added" : "")), slices,
           m.shares.slices, m.shares.ways, m.shares.set_tiles);
  return emulated::near(what, found, right, norm ? 1e-4 : 1e-5);  // some round the other way
}

}  // namespace
}  // namespace ksl

int main(int argc, char **argv) {
  emulated::Random random(emulated::begin(argc, argv));
  // Slices that few tokens join; longer chains than rings; sets of tiles whose elements have two
  // chains; 99 KiB of shared memory; a norm, which bf16 does without; slices that are added, two
  // and joined ones, or whole products; sets whose last warp has one tile of its two.
  const ksl::Sizes flat = {24, 36, 3088}, tall = {24, 330, 784}, few = {24, 36, 784},
                   four = {155, 16, 1296}, odd = {176, 176, 272};
  const ksl::Room eight = {8, 233472, 232448}, large = {4, 233472, 232448},
                  one = {1, 147456, 147456}, whole = {1, 233472, 232448},
                  small = {1, 102400, ksl::kSmallRoom};
  const struct {
    ksl::Room room;
    ksl::Sizes sizes;
    std::vector<int> tokens;
    ksl::Kind kind;
  } devices[] = {
      {large, flat, {1, 4, 8}, ksl::kPlainKind}, {one, flat, {1, 4, 13, 27}, ksl::kPairKind},
      {whole, tall, {2, 8}, ksl::kPlainKind},    {small, flat, {1, 8, 27}, ksl::kPlainKind},
      {large, few, {1, 2}, ksl::kNormedKind},    {large, flat, {1, 2}, ksl::kAddedKind},
      {eight, four, {1, 2}, ksl::kAddedKind},    {whole, few, {2}, ksl::kAddedKind},
      {whole, odd, {8}, ksl::kLoneKind}};
  const struct {
    int encoding;
    const char *name;
  } encodings[] = {{KSL_ENC_NVFP4, "nvfp4"}, {KSL_ENC_E2M3, "e2m3"}, {KSL_ENC_BF16, "bf16"}};
  bool right = true;
  for (const auto &e : encodings)
    for (const auto &of : devices)
      for (const int tokens : of.tokens)
        if (of.kind != ksl::kNormedKind || e.encoding != KSL_ENC_BF16)
          right &= ksl::compare(e.encoding, e.name, of.sizes, of.kind, tokens, of.room, &random);
  return right ? 0 : 1;
}
