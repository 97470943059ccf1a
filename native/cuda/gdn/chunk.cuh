// Long pieces of prompts in chunks of 64 tokens: what a chunk adds to the state is a few products.
// With G the running sum of g in a chunk, D_ij = exp(G_i - G_j) for i >= j and S the state before:
//
//   A = strictly lower (beta_i (k_i k_j) D_ij)
//   (I + A) [V' | W] = [beta V | beta e^G K]           prepare: needs no state
//   U = V' - W S,   O = (e^G Q) S + ((Q K^T) D) U,   S := e^{G_C} S + (e^{G_C - G} K)^T U
//
// Tokens behind the end of a chunk have beta = g = k = v = 0 and change nothing.
#pragma once
#include "gdn.cuh"

namespace ksl {

constexpr int kChunk = 64;
constexpr int kChunkDim = 128;  // of keys and values

// A chunk lies in one row and ends at its cuts. offset: of its first token in the row.
struct ChunkInfo {
  int32_t column, n, offset, row, cut_slab;  // cut_slab: gets the state after it, or -1
};
// Chunks of a row, one behind the other.
struct ChunkRun {
  int32_t first, n, slab;
};

// What a chunk and value head needs besides V', as halves: panels of 64 halves a row, see
// common/mma.cuh.
struct ChunkOperands {
  uint8_t w[2][kChunk * 128];     // W
  uint8_t q[2][kChunk * 128];     // e^G Q
  uint8_t keys[kChunkDim * 128];  // (e^{G_C - G} K)^T
  uint8_t scores[kChunk * 128];   // (Q K^T) D
};

struct ChunkArgs {
  GdnShape shape;
  const ChunkInfo *chunks;
  const ChunkRun *runs;
  int first, n, n_runs;  // chunks and runs of this launch
  SlabPool slabs;
  const float *conv;
  int conv_stride;
  const float *g, *beta;
  int head_stride;
  float *core;  // V' on the way
  int core_stride;
  ChunkOperands *operands;  // [n][value heads]
  float *decays;            // [n][value heads]: e^{G_C}
};
void gdn_chunk_prepare(Device *device, const ChunkArgs &a);
void gdn_chunk_scan(Device *device, const ChunkArgs &a);

// The convolution of chunks, as gdn_conv.
void gdn_chunk_conv(Device *device, const ConvArgs &a, const ChunkInfo *chunks, int n);

// The gated norm of their outputs.
struct ChunkNormArgs {
  const ChunkInfo *chunks;
  int heads;
  const float *core, *z, *norm;
  int stride;
  float *gated;  // null: not wanted
  Split split;
  float eps;
};
void gdn_chunk_norm(Device *device, const ChunkNormArgs &a, int n);

// Whether the device has the shared memory that they take.
bool gdn_chunks_run(const GdnShape &shape);

}  // namespace ksl
