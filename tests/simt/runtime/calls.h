// What every function that the kernel calls does first.
#pragma once

#include "scheduler.h"

namespace simt {

// Lives as long as the call. Always inlined: the address wanted is the one that the kernel's call returns to.
class Call {
 public:
  __attribute__((always_inline)) Call() { scheduler.current()->code = before(__builtin_return_address(0)); }

 private:
  Unseen unseen_;
};

// Shared memory's addresses, as PTX has them. The window starts above zero, so that a null address is no shared memory;
// static arrays follow the dynamic part, and each block of a cluster has a window of its own besides.
constexpr unsigned SHARED_WINDOW = 1024, STATIC_WINDOW = 1 << 20, CLUSTER_WINDOW = 1 << 24;

inline unsigned address_of(const void* pointer) {
  const auto byte = static_cast<const unsigned char*>(pointer);
  if (is_static_shared(pointer, 0)) return STATIC_WINDOW + (byte - __start_simt_shared);
  if (!scheduler.block().shared->holds(pointer, 0)) {
    fail("out-of-bounds", "%s is not this block's shared memory", describe(pointer).c_str());
  }
  return SHARED_WINDOW + (byte - scheduler.block().shared->data());
}

inline unsigned address_in_window(const SharedMemory& shared, const unsigned char* byte) {
  return SHARED_WINDOW + (byte - shared.data());
}

inline unsigned char* pointer_to(unsigned address) {
  const int rank = int(address / CLUSTER_WINDOW) - 1;
  const unsigned offset = address % CLUSTER_WINDOW;
  if (rank >= int(scheduler.blocks().size())) fail("out-of-bounds", "0x%x is not shared memory", address);
  const Block& block = rank < 0 ? scheduler.block() : scheduler.blocks()[rank];
  if (offset >= STATIC_WINDOW) return __start_simt_shared + (offset - STATIC_WINDOW);
  return block.shared->data() + (long(offset) - SHARED_WINDOW);
}

// `bytes` of shared memory at an address, aligned.
inline unsigned char* shared_bytes_at(const char* what, unsigned address, size_t bytes, unsigned alignment) {
  unsigned char* pointer = pointer_to(address);
  if (address % alignment != 0) {
    fail("misaligned", "%s at %s: its address has to be a multiple of %u", what, describe(pointer).c_str(), alignment);
  }
  if (!is_shared(pointer, bytes)) {
    fail("out-of-bounds", "%s of %zu bytes at %s", what, bytes, describe(pointer).c_str());
  }
  return pointer;
}

}  // namespace simt
