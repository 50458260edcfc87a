// The functions that code compiled with -fsanitize=thread calls at each of its accesses: ThreadSanitizer's, in the
// build that counts.
#pragma once

#include "counts.h"

extern "C" {
#define SIMT_PLACE __builtin_return_address(0)
#define SIMT_HOOKS(bytes)                                                                                         \
  void __tsan_read##bytes(void* at) { simt::count_access(at, bytes, simt::Request::LOAD, SIMT_PLACE); }           \
  void __tsan_write##bytes(void* at) { simt::count_access(at, bytes, simt::Request::STORE, SIMT_PLACE); }         \
  void __tsan_unaligned_read##bytes(void* at) { simt::count_access(at, bytes, simt::Request::LOAD, SIMT_PLACE); } \
  void __tsan_unaligned_write##bytes(void* at) { simt::count_access(at, bytes, simt::Request::STORE, SIMT_PLACE); }

SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
#undef SIMT_HOOKS

void __tsan_init() {}
void __tsan_read_range(void* at, unsigned long bytes) { simt::count_range(at, bytes, simt::Request::LOAD, SIMT_PLACE); }
void __tsan_write_range(void* at, unsigned long bytes) {
  simt::count_range(at, bytes, simt::Request::STORE, SIMT_PLACE);
}

// An atomic addition is a load and an exchange here, of which the exchange counts.
#define SIMT_ATOMICS(bits, type)                                                                                    \
  type __tsan_atomic##bits##_load(const volatile type* at, int) { return *at; }                                     \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* at, type* expected, type wanted, int, int) {     \
    simt::count_access(const_cast<type*>(at), bits / 8, simt::Request::ATOMIC, SIMT_PLACE);                         \
    return __atomic_compare_exchange_n(at, expected, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);            \
  }

SIMT_ATOMICS(32, unsigned)
SIMT_ATOMICS(64, unsigned long)
#undef SIMT_ATOMICS
#undef SIMT_PLACE
}
