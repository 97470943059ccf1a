// Products of activations with weights, y[token][row] = sum_k x[token][k] w[row][k].
//
// Five kinds. `stream` takes FP6, NVFP4 and bf16 weights in fragment order through tensor cores;
// `wide` does the same for waves of many tokens on sm_90a, with activations in halves or e4m3;
// `block_scaled` on sm_120a, with activations in e4m3 or in two NVFP4 terms; `plain` decodes any
// encoding and multiplies in float32; `dense` does bf16 as stored for many tokens, equally exact.
// In each an output element has one order of additions, whatever else is computed beside it.
#pragma once
#include "../common/raw.cuh"
#include "../common/split.cuh"
#include "shares.cuh"

namespace ksl {

constexpr int kGroupParts = 4;
// Waves of more tokens are multiplied by the wide kernels, where the device has them.
constexpr int kWideTokens = 64;
// Whether four warps multiply together, whose splits have rows: on sm_90a, of so many tokens that
// it pays.
inline bool quads_take(int major, int tokens) {
  return major == 9 && tokens > 2 * kTileTokens && tokens <= kWideTokens;
}

struct Output {
  float *y;
  int stride;
  int64_t slice_stride;  // from the sums of one slice to those of the next
  bool add = false;  // to what is there, without slices: by kernels of many tokens, or takes_sum
};

// Rows of one matrix inside a packed group: tiles [first, first + tiles) of 16 rows.
struct PackedPart {
  int matrix;  // which of the stage's outputs
  int first, tiles, rows;
};

// Matrices of one encoding that read one input.
struct Packed {
  int encoding;
  int cols, supers, tiles;
  uint8_t *data;  // [tiles][supers][packed_block_bytes]
  float *scale;   // [tiles][16], multiplies a row's sum
  int n_parts;
  PackedPart parts[kGroupParts];
  bool pair;  // gate and up: a tile holds 8 rows of each
  // How the product is divided, see stream.cuh. ways and slices of `shares` are part of the
  // numerics.
  Shares shares, joined;  // joined: for up to kFewTokens
};

// The slices that a wave leaves for its reader, who adds them in order; pairs: two by two first.
struct Slices {
  int n;
  bool pairs;
};
inline Slices slices_of(const Packed &m, int tokens) {
  if (tokens <= kFewTokens) return {m.joined.slices, false};
  return {m.shares.slices, m.joined.slices < m.shares.slices};
}

// All matrices of a stage.
struct Group {
  Packed packed[kGroupParts];
  int n_packed;
  Raw plain[kGroupParts];
  int plain_matrix[kGroupParts];
  int n_plain;
  Packed halves;  // plain bf16 rows beside packed ones again, for the wide kernels; no tiles: none
};

// Activations of many tokens for block-scaled products, in the memory behind a panel; see
// lanes.cuh.
struct Scaled {
  uint8_t *data;    // [pieces][tokens][64]
  uint8_t *scales;  // [stages of two pieces][tokens][bytes of the encoding]
  float *factors;   // by token, NVFP4
  int tokens;       // that there is room for
};
inline Scaled scaled_of(const Split &split) {
  const int64_t panel = static_cast<int64_t>(split.pieces) * split.groups * 1024;
  uint8_t *data = reinterpret_cast<uint8_t *>(split.data) + panel, *scales = data + panel / 2;
  return {data, scales, reinterpret_cast<float *>(scales + panel / 16),
          split.groups * kPanelTokens};
}
// Whether the device has them.
bool block_scaled_runs(const Device &device, int major);

// The norm of a residual. Every block of the product that reads it makes it for itself, which takes
// less than a kernel between the two.
struct InputNorm {
  const float *x;  // [tokens][stride]
  int stride, width;
  const float *gain;  // null: there is none
  float eps;
};

// What a pair writes beside gate and up.
struct PairOutput {
  float *act;  // null: not wanted
  int stride;
  Split split;
};

constexpr int kBlockE2m3 = 2048 + 1024 + 16;
constexpr int kBlockNvfp4 = 2048 + 256;
inline int packed_block_bytes(int encoding) {
  return encoding == KSL_ENC_E2M3 ? kBlockE2m3
                                  : (encoding == KSL_ENC_NVFP4 ? kBlockNvfp4 : kPackedBf16Bytes);
}
// Of what sums carry that no row's scale takes away: FP6 has 2^14 in its scales, 2^-6 in its bytes.
inline float packed_inverse(int encoding) {
  return encoding == KSL_ENC_E2M3 ? 0x1p-8f : 1.0f;
}

// Runs every matrix of the group. x: float32 input of the plain ones; split: of the packed ones.
// outputs: by matrix, of a group with slices one behind the other. pair: where the act of a gate
// and up group goes. norm: null, or made of the residual instead of reading x and split.
void gemm_group(Device *device, const Group &group, const float *x, int x_stride,
                const Split &split, const Output *outputs, const PairOutput *pair, int tokens,
                const InputNorm *norm = nullptr);
// Whether the product of so few tokens can be added to what is there.
bool takes_sum(const Device &device, const Group &group, int tokens);
// Whether the norm can be made.
bool takes_norm(const Device &device, const Group &group, int width, int tokens);

// Whether the product leaves registers and shared memory for a block of 256 threads of the kernel
// behind it, see stream_many.
inline bool leaves_room(const Device &device, const Group &group, int tokens) {
  return device.room.block_bytes > kSmallRoom && group.n_packed == 1 &&
         group.packed[0].encoding == KSL_ENC_NVFP4 && tokens <= 16;
}

// Whether x is read for such a split.
bool plain_reads_floats(const Group &group, const Split &split);

// Puts rows [row0, row0 + rows) of `raw` (which holds just these) into a zeroed packed group. mode
// 0: rows in order from tile `first`; 1, 2: the lower and upper halves of a pair's tiles. unit: the
// matrix's largest E8M0 exponent byte, see packed_unit.
void pack_rows(Device *device, const Raw &raw, int64_t row0, int rows, Packed *to, int first,
               int mode, int unit);

}  // namespace ksl
