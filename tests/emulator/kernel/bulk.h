// Barriers in shared memory, bulk copies and clusters: what is new with compute capability 9.0.
#pragma once

struct alignas(64) TensorMap {
  unsigned long long words[16];
};

__forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) { simt::mbarrier_init(barrier, arrivals); }
__forceinline__ void fence_mbarrier_init() { simt::fence_mbarrier_init(); }
__forceinline__ void mbarrier_arrive(unsigned barrier) { simt::mbarrier_arrive(barrier, 0); }
__forceinline__ void mbarrier_arrive_expect(unsigned barrier, unsigned bytes) { simt::mbarrier_arrive(barrier, bytes); }
__forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) { simt::mbarrier_wait(barrier, parity); }
__forceinline__ void copy_async_arrive(unsigned barrier) { simt::copy_async_arrive(barrier); }

__forceinline__ void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  simt::copy_bulk(to, from, bytes, barrier, simt::AS_ADDRESSED);
}

__forceinline__ void copy_bulk_multicast(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                                         unsigned short blocks) {
  simt::copy_bulk(to, from, bytes, barrier, blocks);
}

namespace simt {

template <typename... Corner>
struct Coordinates {
  static constexpr int COUNT = sizeof...(Corner);
  static_assert(COUNT == 3 || COUNT == 4, "box.j2 has boxes of three and of four dimensions");
};

}  // namespace simt

template <typename... Corner>
__forceinline__ void load_box(unsigned to, const TensorMap& map, unsigned barrier, Corner... corner) {
  const int at[] = {int(corner)...};
  simt::load_box(to, &map, at, simt::Coordinates<Corner...>::COUNT, barrier, simt::AS_ADDRESSED);
}

template <typename... Corner>
__forceinline__ void load_box_multicast(unsigned to, const TensorMap& map, unsigned barrier, unsigned short blocks,
                                        Corner... corner) {
  const int at[] = {int(corner)...};
  simt::load_box(to, &map, at, simt::Coordinates<Corner...>::COUNT, barrier, blocks);
}

template <typename... Corner>
__forceinline__ void store_box(const TensorMap& map, unsigned from, Corner... corner) {
  const int at[] = {int(corner)...};
  simt::store_box(&map, at, simt::Coordinates<Corner...>::COUNT, from);
}

__forceinline__ void prefetch_map(const TensorMap&) {}
__forceinline__ void bulk_commit() { simt::bulk_commit(); }

template <int PENDING>
__forceinline__ void bulk_wait() {
  simt::bulk_wait(PENDING, false);
}

template <int PENDING>
__forceinline__ void bulk_wait_read() {
  simt::bulk_wait(PENDING, true);
}

__forceinline__ void fence_proxy_async() { simt::fence_proxy_async(); }

__forceinline__ unsigned cluster_rank() { return simt::cluster_rank(); }
__forceinline__ void cluster_sync_relaxed() { simt::cluster_sync_relaxed(); }
__forceinline__ unsigned cluster_address(unsigned address, unsigned rank) { return simt::cluster_address(address, rank); }
__forceinline__ void mbarrier_arrive_cluster(unsigned barrier) { simt::mbarrier_arrive_cluster(barrier); }

__forceinline__ void wait_for_previous_grid() { simt::wait_for_previous_grid(); }
__forceinline__ void allow_next_grid() {}  // the next grid runs when this one has ended, which is never wrong
