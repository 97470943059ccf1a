// Tensors that the backend makes itself, encoded by the rules of common/codec.cc.
#include "../../common/codec.h"
#include "fill.cuh"

namespace ksl {

namespace {

__device__ inline float value_at(const FillArgs &a, int row, int col) {
  return fill_value(a.kind, a.seed, a.scale, static_cast<uint64_t>((a.row0 + row) * a.cols + col));
}

__global__ void plain_kernel(const __grid_constant__ FillArgs a) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= static_cast<int64_t>(a.rows) * a.cols) return;
  const float v = value_at(a, static_cast<int>(i / a.cols), static_cast<int>(i % a.cols));
  if (a.encoding == KSL_ENC_F32)
    reinterpret_cast<float *>(a.codes)[i] = v;
  else
    reinterpret_cast<uint16_t *>(a.codes)[i] = f32_to_bf16(v);
}

__device__ inline int scale_exponent(float most, double limit, int low, int high) {
  if (most == 0) return 0;
  int e = 0;
  const double fraction = frexp(static_cast<double>(most) / limit, &e);
  if (fraction == 0.5) e--;
  return e < low ? low : (e > high ? high : e);
}

// A block makes 128 x 128 values with one scale.
__global__ void block_kernel(const __grid_constant__ FillArgs a) {
  __shared__ float scratch[32];
  const int r0 = blockIdx.y * 128, c0 = blockIdx.x * 128;
  const int height = min(128, a.rows - r0), width = min(128, a.cols - c0);
  float most = 0;
  for (int i = threadIdx.x; i < height * width; i += blockDim.x)
    most = fmaxf(most, fabsf(value_at(a, r0 + i / width, c0 + i % width)));
  most = block_max(most, scratch);
  const int64_t at = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (a.encoding == KSL_ENC_FP8) {
    const int e = scale_exponent(most, 448.0, -126, 127);
    const double inverse = ldexp(1.0, -e);
    if (threadIdx.x == 0) static_cast<float *>(a.scales)[at] = static_cast<float>(ldexp(1.0, e));
    for (int i = threadIdx.x; i < height * width; i += blockDim.x) {
      const int r = r0 + i / width, c = c0 + i % width;
      a.codes[static_cast<int64_t>(r) * a.cols + c] =
          f32_to_e4m3(static_cast<float>(value_at(a, r, c) * inverse));
    }
    return;
  }
  const int e = scale_exponent(most, 7.5, -127, 127);
  const double inverse = ldexp(1.0, -e);
  if (threadIdx.x == 0) static_cast<uint8_t *>(a.scales)[at] = static_cast<uint8_t>(e + 127);
  const int fours = width / 4;
  for (int i = threadIdx.x; i < height * fours; i += blockDim.x) {
    const int r = r0 + i / fours, c = c0 + i % fours * 4;
    uint32_t word = 0;
    for (int j = 0; j < 4; j++)
      word |=
          static_cast<uint32_t>(f32_to_e2m3(static_cast<float>(value_at(a, r, c + j) * inverse)))
          << (6 * j);
    uint8_t *out = a.codes + (static_cast<int64_t>(r) * a.cols + c) / 4 * 3;
    out[0] = static_cast<uint8_t>(word);
    out[1] = static_cast<uint8_t>(word >> 8);
    out[2] = static_cast<uint8_t>(word >> 16);
  }
}

// Largest magnitude of each 128 rows.
__global__ void most_kernel(const __grid_constant__ FillArgs a) {
  __shared__ float scratch[32];
  const int r0 = blockIdx.y * 128, c0 = blockIdx.x * 128;
  const int height = min(128, a.rows - r0), width = min(128, a.cols - c0);
  float most = 0;
  for (int i = threadIdx.x; i < height * width; i += blockDim.x)
    most = fmaxf(most, fabsf(value_at(a, r0 + i / width, c0 + i % width)));
  most = block_max(most, scratch);
  if (threadIdx.x == 0) atomicMax(a.most + blockIdx.y, __float_as_uint(most));
}

// A thread makes 16 values with one scale.
__global__ void nvfp4_kernel(const __grid_constant__ FillArgs a) {
  const int groups = a.cols / 16;
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= static_cast<int64_t>(a.rows) * groups) return;
  const int row = static_cast<int>(i / groups), c = static_cast<int>(i % groups) * 16;
  float global = __uint_as_float(a.most[row >> 7]) / 6.0f;
  if (global == 0) global = 1.0f;
  if (c == 0 && (row & 127) == 0) a.globals[row >> 7] = global;
  float values[16], most = 0;
  for (int j = 0; j < 16; j++) {
    values[j] = value_at(a, row, c + j);
    most = fmaxf(most, fabsf(values[j]));
  }
  const uint8_t scale = f32_to_ue4m3(most / 6.0f / global);
  static_cast<uint8_t *>(a.scales)[i] = scale;
  const float unit = ue4m3_to_f32(scale) * global;
  for (int j = 0; j < 16; j += 2) {
    const uint8_t low = unit == 0 ? 0 : f32_to_e2m1(values[j] / unit);
    const uint8_t high = unit == 0 ? 0 : f32_to_e2m1(values[j + 1] / unit);
    a.codes[(static_cast<int64_t>(row) * a.cols + c + j) / 2] =
        static_cast<uint8_t>(low | high << 4);
  }
}

__global__ void decode_kernel(Raw raw, float offset, float *out) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= static_cast<int64_t>(raw.rows) * raw.cols) return;
  out[i] = raw_any(raw, i / raw.cols, static_cast<int>(i % raw.cols)) + offset;
}

__global__ void negative_exp_kernel(float *values, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) values[i] = static_cast<float>(-exp(static_cast<double>(values[i])));
}

__global__ void transpose_kernel(const float *from, float *to, int channels, int taps) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < channels * taps) to[i % taps * channels + i / taps] = from[i];
}

}  // namespace

void fill_rows(Device *device, const FillArgs &a) {
  const int64_t n = static_cast<int64_t>(a.rows) * a.cols;
  const dim3 blocks(divide_up(a.cols, 128), divide_up(a.rows, 128));
  switch (a.encoding) {
    case KSL_ENC_F32:
    case KSL_ENC_BF16:
      KSL_LAUNCH(device, "fill", plain_kernel, divide_up(n, 256), 256, a);
      return;
    case KSL_ENC_NVFP4:
      keep_error(device, cudaMemsetAsync(a.most, 0, blocks.y * sizeof(unsigned), device->stream),
                 "fill");
      KSL_LAUNCH(device, "fill", most_kernel, blocks, 256, a);
      KSL_LAUNCH(device, "fill", nvfp4_kernel, divide_up(n / 16, 256), 256, a);
      return;
    default:
      KSL_LAUNCH(device, "fill", block_kernel, blocks, 256, a);
  }
}

void decode_values(Device *device, const Raw &raw, float offset, float *out) {
  const int64_t n = static_cast<int64_t>(raw.rows) * raw.cols;
  KSL_LAUNCH(device, "decode", decode_kernel, divide_up(n, 256), 256, raw, offset, out);
}

void negative_exp(Device *device, float *values, int n) {
  KSL_LAUNCH(device, "negative_exp", negative_exp_kernel, divide_up(n, 128), 128, values, n);
}

void transpose_taps(Device *device, const float *from, float *to, int channels, int taps) {
  KSL_LAUNCH(device, "transpose", transpose_kernel, divide_up(channels * taps, 256), 256, from, to,
             channels, taps);
}

}  // namespace ksl
