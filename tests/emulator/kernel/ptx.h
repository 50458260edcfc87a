// The functions behind which emitted texts keep their inline PTX. A text that finds KSGEN_PTX leaves out its own.
#pragma once

#define KSGEN_PTX

__forceinline__ size_t __cvta_generic_to_shared(const void* pointer) {
  return simt::shared_address(pointer);
}

__forceinline__ void* __cvta_shared_to_generic(size_t address) {
  return simt::shared_pointer(unsigned(address));
}

__forceinline__ void copy_async_4(void* shared, const void* global, bool valid) {
  simt::copy_async(shared, global, 4, valid);
}

__forceinline__ void copy_async_8(void* shared, const void* global, bool valid) {
  simt::copy_async(shared, global, 8, valid);
}

__forceinline__ void copy_async_16(void* shared, const void* global, bool valid) {
  simt::copy_async(shared, global, 16, valid);
}

__forceinline__ void copy_async_commit() { simt::copy_async_commit(); }

template <int PENDING>
__forceinline__ void copy_async_wait() {
  simt::copy_async_wait(PENDING);
}

__forceinline__ void barrier_sync(int id, int threads) {
  simt::barrier("barrier_sync", id, threads, true);
}

__forceinline__ void barrier_arrive(int id, int threads) {
  simt::barrier("barrier_arrive", id, threads, false);
}
