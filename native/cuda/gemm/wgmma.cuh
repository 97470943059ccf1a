// Instructions of sm_90a: products of a group of four warps with operand A in registers, the
// barriers of shared memory and the bulk copies that complete on them.
#pragma once
#include "../common/bulk.cuh"

namespace ksl {
namespace {

// clang-format off
#define KSL_SUMS(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
  "+f"(d[i + 6]), "+f"(d[i + 7])
#define KSL_LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KSL_SUMS_8 KSL_SUMS(0)
#define KSL_LIST_16 KSL_LIST_8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define KSL_SUMS_16 KSL_SUMS_8, KSL_SUMS(8)
#define KSL_LIST_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KSL_SUMS_32 KSL_SUMS(0), KSL_SUMS(8), KSL_SUMS(16), KSL_SUMS(24)
#define KSL_LIST_48 KSL_LIST_32 ", " "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define KSL_SUMS_48 KSL_SUMS_32, KSL_SUMS(32), KSL_SUMS(40)
#define KSL_LIST_64 KSL_LIST_48 ", " "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KSL_SUMS_64 KSL_SUMS_48, KSL_SUMS(48), KSL_SUMS(56)
#define KSL_LIST_80 KSL_LIST_64 ", " "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define KSL_SUMS_80 KSL_SUMS_64, KSL_SUMS(64), KSL_SUMS(72)
#define KSL_LIST_96 KSL_LIST_80 ", " "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define KSL_SUMS_96 KSL_SUMS_80, KSL_SUMS(80), KSL_SUMS(88)
#define KSL_LIST_112 KSL_LIST_96 ", " "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define KSL_SUMS_112 KSL_SUMS_96, KSL_SUMS(96), KSL_SUMS(104)
#define KSL_LIST_128 KSL_LIST_112 ", " "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define KSL_SUMS_128 KSL_SUMS_112, KSL_SUMS(112), KSL_SUMS(120)
#define KSL_WGMMA(shape, list, a_list, b_name, add_name, tail, ...)                          \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add_name ", 0;\n"                            \
               "wgmma.mma_async.sync.aligned." shape " {" list "}, " a_list ", " b_name       \
               ", p, 1, 1" tail ";}"                                                         \
               : __VA_ARGS__                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
// clang-format on

// d[64 rows][kColumns] (+)= a b. A lane's a: its fragment of an m16n8k16 (halves) or m16n8k32
// (e4m3) product of its warp's 16 rows. b: descriptor of [kColumns][32 bytes of input elements].
// d: for every eight columns the four values of such a product.
template <int kColumns>
struct Wgmma;
// clang-format off
template <>
struct Wgmma<16> {
  template <bool kHalf>
  __device__ static void run(float (&d)[8], const unsigned (&a)[4], uint64_t b, int add) {
    static_assert(kHalf, "few columns are halves");
    KSL_WGMMA("m64n16k16.f32.f16.f16", KSL_LIST_8, "{%8, %9, %10, %11}", "%12", "%13", ", 0", KSL_SUMS_8);
  }
};
template <>
struct Wgmma<32> {
  template <bool kHalf>
  __device__ static void run(float (&d)[16], const unsigned (&a)[4], uint64_t b, int add) {
    static_assert(kHalf, "few columns are halves");
    KSL_WGMMA("m64n32k16.f32.f16.f16", KSL_LIST_16, "{%16, %17, %18, %19}", "%20", "%21", ", 0", KSL_SUMS_16);
  }
};
template <>
struct Wgmma<64> {
  template <bool kHalf>
  __device__ static void run(float (&d)[32], const unsigned (&a)[4], uint64_t b, int add) {
    if (kHalf) {
      KSL_WGMMA("m64n64k16.f32.f16.f16", KSL_LIST_32, "{%32, %33, %34, %35}", "%36", "%37", ", 0", KSL_SUMS_32);
    } else {
      KSL_WGMMA("m64n64k32.f32.e4m3.e4m3", KSL_LIST_32, "{%32, %33, %34, %35}", "%36", "%37", "", KSL_SUMS_32);
    }
  }
};
template <>
struct Wgmma<96> {
  template <bool kHalf>
  __device__ static void run(float (&d)[48], const unsigned (&a)[4], uint64_t b, int add) {
    if (kHalf) {
      KSL_WGMMA("m64n96k16.f32.f16.f16", KSL_LIST_48, "{%48, %49, %50, %51}", "%52", "%53", ", 0", KSL_SUMS_48);
    } else {
      KSL_WGMMA("m64n96k32.f32.e4m3.e4m3", KSL_LIST_48, "{%48, %49, %50, %51}", "%52", "%53", "", KSL_SUMS_48);
    }
  }
};
template <>
struct Wgmma<128> {
  template <bool kHalf>
  __device__ static void run(float (&d)[64], const unsigned (&a)[4], uint64_t b, int add) {
    if (kHalf) {
      KSL_WGMMA("m64n128k16.f32.f16.f16", KSL_LIST_64, "{%64, %65, %66, %67}", "%68", "%69", ", 0", KSL_SUMS_64);
    } else {
      KSL_WGMMA("m64n128k32.f32.e4m3.e4m3", KSL_LIST_64, "{%64, %65, %66, %67}", "%68", "%69", "", KSL_SUMS_64);
    }
  }
};
template <>
struct Wgmma<160> {
  template <bool kHalf>
  __device__ static void run(float (&d)[80], const unsigned (&a)[4], uint64_t b, int add) {
    if (kHalf) {
      KSL_WGMMA("m64n160k16.f32.f16.f16", KSL_LIST_80, "{%80, %81, %82, %83}", "%84", "%85", ", 0", KSL_SUMS_80);
    } else {
      KSL_WGMMA("m64n160k32.f32.e4m3.e4m3", KSL_LIST_80, "{%80, %81, %82, %83}", "%84", "%85", "", KSL_SUMS_80);
    }
  }
};
template <>
struct Wgmma<192> {
  template <bool kHalf>
  __device__ static void run(float (&d)[96], const unsigned (&a)[4], uint64_t b, int add) {
    if (kHalf) {
      KSL_WGMMA("m64n192k16.f32.f16.f16", KSL_LIST_96, "{%96, %97, %98, %99}", "%100", "%101", ", 0", KSL_SUMS_96);
    } else {
      KSL_WGMMA("m64n192k32.f32.e4m3.e4m3", KSL_LIST_96, "{%96, %97, %98, %99}", "%100", "%101", "", KSL_SUMS_96);
    }
  }
};
template <>
struct Wgmma<224> {
  template <bool kHalf>
  __device__ static void run(float (&d)[112], const unsigned (&a)[4], uint64_t b, int add) {
    if (kHalf) {
      KSL_WGMMA("m64n224k16.f32.f16.f16", KSL_LIST_112, "{%112, %113, %114, %115}", "%116", "%117", ", 0", KSL_SUMS_112);
    } else {
      KSL_WGMMA("m64n224k32.f32.e4m3.e4m3", KSL_LIST_112, "{%112, %113, %114, %115}", "%116", "%117", "", KSL_SUMS_112);
    }
  }
};
template <>
struct Wgmma<256> {
  template <bool kHalf>
  __device__ static void run(float (&d)[128], const unsigned (&a)[4], uint64_t b, int add) {
    if (kHalf) {
      KSL_WGMMA("m64n256k16.f32.f16.f16", KSL_LIST_128, "{%128, %129, %130, %131}", "%132", "%133", ", 0", KSL_SUMS_128);
    } else {
      KSL_WGMMA("m64n256k32.f32.e4m3.e4m3", KSL_LIST_128, "{%128, %129, %130, %131}", "%132", "%133", "", KSL_SUMS_128);
    }
  }
};
// clang-format on

// Between what a group's warps did to registers of its products and the first product.
__device__ inline void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kLeft committed groups are unfinished.
template <int kLeft>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

__device__ inline unsigned shared_address(const void *p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Rows of 128 bytes with swizzled chunks, eight of them 1024 bytes; `address` may lie 32, 64 or 96
// bytes behind the start of such a group.
// apart: bytes from eight rows to the next.
__device__ inline uint64_t panel_descriptor(unsigned address, int apart = 1024) {
  return static_cast<uint64_t>(address >> 4 & 0x3fff) | uint64_t{1} << 16 |
         static_cast<uint64_t>(apart >> 4) << 32 | uint64_t{1} << 62;
}

__device__ inline void barrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ inline void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives and announces that `bytes` are on their way.
__device__ inline void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// At the same place of another block of the cluster.
__device__ inline void barrier_arrive(unsigned barrier, unsigned rank) {
  asm volatile(
      "{.reg .b32 r;\n mapa.shared::cluster.u32 r, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [r];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Until the phase of this parity has ended.
__device__ inline void barrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// To the same place of every block in `mask`.
__device__ inline void bulk_load_all(unsigned to, const void *from, unsigned bytes,
                                     unsigned barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
      : "memory");
}
__device__ inline void bulk_store(void *to, unsigned from, unsigned bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::
          "l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
// Until stored bytes have been read.
__device__ inline void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Before the copy engine or the matrix units read what this thread wrote to shared memory.
__device__ inline void shared_written() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace
}  // namespace ksl
