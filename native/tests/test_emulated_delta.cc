// The delta rule of prompts in chunks, gdn/chunk_prepare.cu and gdn/chunk_scan.cu, lane by lane on
// the host, against the recurrence token by token: whole chunks and parts of one, a state that is
// taken from the middle, two value heads of a key head.
#include <emulated.h>

#include "../cuda/gdn/chunk.cuh"

namespace ksl {
namespace {

constexpr int kHeads = 2, kD = kChunkDim, kTokens = 150, kSlabs = 3;
constexpr int kChannels = 2 * kD + kHeads * kD, kState = kD * kD;

typedef std::vector<double> State;  // [heads][key][value]

bool compare(unsigned seed) {
  emulated::Random random(seed);
  std::vector<float> conv(kTokens * kChannels), g(kTokens * kHeads), beta(g.size());
  for (int token = 0; token < kTokens; token++)
    for (int part = 0; part < kChannels / kD; part++) {
      float *const x = conv.data() + token * kChannels + part * kD;
      float norm = 0;
      for (int i = 0; i < kD; i++) {
        x[i] = random.normal();
        norm += x[i] * x[i];
      }
      for (int i = 0; i < kD && part < 2; i++) x[i] /= sqrtf(norm);  // queries and keys
    }
  for (float &x : g) x = -random.uniform(0.001f, 0.1f);
  for (float &x : beta) x = random.uniform(0.1f, 1.0f);
  std::vector<float> slabs(kSlabs * kHeads * kState);
  for (float &x : slabs) x = 0.2f * random.normal();

  // The second slab gets the state after 104 tokens; the third is nobody's.
  const ChunkInfo chunks[] = {{0, 64, 0, 0, -1}, {64, 40, 64, 0, 1}, {104, 46, 104, 0, -1}};
  const ChunkRun run = {0, 3, 0};
  std::vector<float> core(kTokens * kHeads * kD, NAN), decays(3 * kHeads);
  std::vector<ChunkOperands> operands(3 * kHeads);
  ChunkArgs a = {};
  a.shape = {1, kHeads, kD, kD, kChannels};
  a.chunks = chunks;
  a.runs = &run;
  a.n = 3;
  a.n_runs = 1;
  const std::vector<float> before = slabs;
  a.slabs = {slabs.data(), kHeads * kState, 0, 0};
  a.conv = conv.data();
  a.conv_stride = kChannels;
  a.g = g.data();
  a.beta = beta.data();
  a.head_stride = kHeads;
  a.core = core.data();
  a.core_stride = kHeads * kD;
  a.operands = operands.data();
  a.decays = decays.data();
  Device device = {};
  gdn_chunk_prepare(&device, a);
  gdn_chunk_scan(&device, a);

  State state(before.begin(), before.begin() + kHeads * kState), cut;
  std::vector<double> right(core.size());
  for (int token = 0; token < kTokens; token++) {
    const float *const q = conv.data() + token * kChannels, *const k = q + kD, *const v = k + kD;
    for (int head = 0; head < kHeads; head++) {
      double *const s = state.data() + head * kState;
      const double decay = exp(g[token * kHeads + head]), rate = beta[token * kHeads + head];
      for (int i = 0; i < kState; i++) s[i] *= decay;
      for (int j = 0; j < kD; j++) {
        double known = 0, out = 0;
        for (int i = 0; i < kD; i++) known += s[i * kD + j] * k[i];
        const double add = rate * (v[head * kD + j] - known);
        for (int i = 0; i < kD; i++) {
          s[i * kD + j] += k[i] * add;
          out += s[i * kD + j] * q[i];
        }
        right[(token * kHeads + head) * kD + j] = out;
      }
    }
    if (token == 103) cut = state;
  }
  const auto slab = [&](int index) {
    const auto first = slabs.begin() + index * kHeads * kState;
    return std::vector<float>(first, first + kHeads * kState);
  };
  bool same = emulated::near("outputs", core, right, 2e-3);
  same &= emulated::near("state", slab(0), state, 1e-3);
  same &= emulated::near("state of the cut", slab(1), cut, 1e-3);
  same &= emulated::near("another's state", slab(2),
                         State(before.end() - kHeads * kState, before.end()), 0);
  return same;
}

}  // namespace
}  // namespace ksl

int main(int argc, char **argv) {
  return ksl::compare(emulated::begin(argc, argv)) ? 0 : 1;
}
