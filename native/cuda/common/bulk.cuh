// Bulk copies into shared memory and the barriers that they complete on.
#pragma once
#include <stdint.h>

namespace ksl {

__device__ inline unsigned shared_at(const void *p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ inline void bulk_barrier(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// After the barriers of this thread, before copies that complete on them.
__device__ inline void bulk_barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void bulk_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void bulk_wait(unsigned barrier, unsigned phase) {
  asm volatile(
      "{\n .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      " @!p bra again;\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
// bytes and both addresses: multiples of 16.
__device__ inline void bulk_load(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// The same with one of these policies. once: of what nobody asks for again, which L2 gives up
// before anything else.
__device__ inline uint64_t bulk_policy(bool once) {
  uint64_t policy;
  if (once)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void bulk_load(unsigned to, const void *from, unsigned bytes, unsigned barrier,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// Blocks of a cluster, which have begun, with all that came before this call, when
// cluster_began returns. All threads arrive once and wait once: the tools that instrument kernels
// wait for those that do not.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ inline void cluster_began() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// All threads of the cluster meet; what they stored in each other's shared memory is there.
__device__ inline void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Stores a value at the same place of another block of the cluster; it completes 4 bytes on that
// block's barrier.
__device__ inline void cluster_give(unsigned to, float value, unsigned barrier, unsigned rank) {
  asm volatile(
      "{\n .reg .b32 to, barrier;\n"
      " mapa.shared::cluster.u32 to, %0, %3;\n"
      " mapa.shared::cluster.u32 barrier, %2, %3;\n"
      " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %1, [barrier];\n}" ::
          "r"(to),
      "r"(__float_as_uint(value)), "r"(barrier), "r"(rank)
      : "memory");
}
// Into L2 alone.
__device__ inline void bulk_ahead(const void *from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace ksl
