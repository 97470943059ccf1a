// Products of 17 to 64 tokens by groups of four warps.
#include "quads.cuh"
#include "stream_run.cuh"

namespace ksl {

namespace {

template <int kEncoding, int kEights>
bool run_quads(Device *device, StreamArgs a) {
  const Shares shares = shares_of(a);
  const int64_t most = stream_most(device->room);
  const auto bytes = [&](int stages) {
    return stream_quads_bytes(shares, a.pitch, stages, a.x_stages, kEights);
  };
  // A third stage of weights is worth more than a fourth of activations.
  a.x_stages = 4;
  while (a.x_stages > 2 && bytes(3) > most) a.x_stages--;
  if (bytes(3) > most) a.x_stages = 4;
  while (a.x_stages > 2 && bytes(2) > most) a.x_stages--;
  if (bytes(2) > most) return false;
  choose_pitch<kEncoding>(device, &a, most, bytes);
  const auto kernel = stream_quads<kEncoding, kEights>;
  static const bool raised = raise_shared(device, kernel, most);
  (void)raised;  // per instance; the engine has one thread
  const int warps = quad_slots(a.set_tiles) * a.ways;
  const int left = kQuadThreads / 32 - warps - 2;
  if (a.plain_warps > left) a.plain_warps = left;
  launch_stream(device, kernel, a, warps + 2, divide_up(a.tokens, 8 * kEights), most, bytes,
                plain_round_bytes(a.plain_warps));
  return true;
}

template <int kEncoding>
void run_quads(Device *device, const StreamArgs &a) {
  // Blocks of so many bytes of weights that there is no room for 32 tokens take 16.
  if (!run_quads<kEncoding, 4>(device, a)) run_quads<kEncoding, 2>(device, a);
}

}  // namespace

void stream_quads(Device *device, const Packed &m, const Split &x, const Output *outputs,
                  const PairOutput *pair, const PlainArgs &plain, int tokens) {
  const StreamArgs a = stream_args(m, x, outputs, pair, plain, tokens, nullptr);
  if (m.encoding == KSL_ENC_E2M3)
    run_quads<KSL_ENC_E2M3>(device, a);
  else if (m.encoding == KSL_ENC_BF16)
    run_quads<KSL_ENC_BF16>(device, a);
  else
    run_quads<KSL_ENC_NVFP4>(device, a);
}

}  // namespace ksl
