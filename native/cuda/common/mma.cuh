// Tensor-core products of one warp and asynchronous copies into shared memory.
#pragma once
#include "device.cuh"

namespace ksl {

// c += a b of m16n8k16. Lane (g, t) = (lane / 4, lane % 4) holds: a rows g, g + 8 and slots 2 t,
// 2 t + 1 in a[0], a[1], slots 2 t + 8, 2 t + 9 in a[2], a[3]; b the same slots of column g in b0,
// b1; c rows g (c[0], c[1]) and g + 8 (c[2], c[3]) of columns 2 t, 2 t + 1.
template <bool kBf16>
__device__ inline void mma16(float (&c)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
  if (kBf16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// c = a b of halves.
__device__ inline void mma16_first(float (&c)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(0.0f));
}

__device__ inline uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// kBytes from global to shared memory, zeros where `there` is false.
template <int kBytes>
__device__ inline void copy_async(void *to, const void *from, bool there) {
  if (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                 "l"(from), "n"(kBytes), "r"(there ? kBytes : 0)
                 : "memory");
}
__device__ inline void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// From global to shared memory, a multiple of 16 bytes; `barrier` counts one arrival and the bytes.
// What threads of the block have read at `to` before needs a block barrier in between.
__device__ inline void copy_bulk(void *to, const void *from, int bytes, uint64_t *barrier) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ inline void barrier_init(uint64_t *barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}
__device__ inline void barrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ inline void barrier_wait(uint64_t *barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Byte of the 16 bytes `chunk` of a row of a panel: rows of 64 halves, in an order that keeps
// columns of eight rows in different banks. A panel begins at a multiple of 1024 bytes.
__device__ inline int swizzled(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Four 8 x 8 matrices of halves; lanes 8 i to 8 i + 7 name the rows of matrix i. Lane (g, t) gets
// row g, columns 2 t, 2 t + 1; transposed: rows 2 t, 2 t + 1 of column g.
__device__ inline uint4 load_matrices(const void *row) {
  uint4 out;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "r"(shared_address(row))
               : "memory");
  return out;
}
__device__ inline uint4 load_transposed(const void *row) {
  uint4 out;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "r"(shared_address(row))
               : "memory");
  return out;
}

// Two e4m3 bytes as halves, exactly.
__device__ inline uint32_t e4m3_halves(uint32_t two) {
  uint32_t out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(static_cast<uint16_t>(two)));
  return out;
}

// Two bf16 as halves, the nearest and at most the largest.
__device__ inline uint32_t bf16_halves(uint32_t two) {
  uint32_t out;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;"
      : "=r"(out)
      : "f"(__uint_as_float(two & 0xffff0000u)), "f"(__uint_as_float(two << 16)));
  return out;
}

// (a & mask) | bits in one instruction: the compiler would make two of it.
__device__ inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "r"(mask), "r"(bits));
  return out;
}

// Eight 4-bit codes as halves: codes (0, 4), (1, 5), (2, 6), (3, 7).
__device__ inline void unpack_codes(uint32_t w, uint32_t (&out)[4]) {
  const uint32_t w8 = w >> 8;
  const __half2 thousand = __half2half2(__ushort_as_half(0x6400));  // 1024
  const __half2 sixteenth = __half2half2(__ushort_as_half(0x2c00)),
                minus64 = __half2half2(__ushort_as_half(0xd400));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t bits = and_or(i < 2 ? w : w8, i & 1 ? 0x00f000f0u : 0x000f000fu, 0x64006400u);
    const __half2 x = reinterpret_cast<const __half2 &>(bits);
    const __half2 y = i & 1 ? __hfma2(x, sixteenth, minus64) : __hsub2(x, thousand);
    out[i] = reinterpret_cast<const uint32_t &>(y);
  }
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ksl
