// Memory at a shared address, as PTX defines it. Each block of a cluster has a window of its own. Another window shows
// each block its own memory.
#pragma once

#include "scheduler.h"

namespace simt {

constexpr unsigned CLUSTER_WINDOW = 1 << 24;

inline unsigned address_in_window(const SharedMemory& shared, const unsigned char* byte) {
  return dynamic_window() + (byte - shared.data());
}

// In a cluster its upper bits name the block, as an H100's do: what takes an address in fewer bits has to drop them.
inline unsigned address_of(const void* pointer) {
  const auto byte = static_cast<const unsigned char*>(pointer);
  const Block& block = scheduler.block();
  const unsigned window = scheduler.blocks().size() > 1 ? (block.rank + 1) * CLUSTER_WINDOW : 0;
  if (static_shared_bytes() > 0 && is_static_shared(pointer, 0)) {
    return window + SHARED_WINDOW + (byte - __start_simt_shared);
  }
  if (!block.shared->holds(pointer, 0))
    fail("out-of-bounds", "%s is not this block's shared memory", describe(pointer).c_str());
  return window + address_in_window(*block.shared, byte);
}

inline const Block& block_at(unsigned address) {
  const unsigned window = address / CLUSTER_WINDOW;
  if (window > scheduler.blocks().size()) fail("out-of-bounds", "0x%x is not shared memory", address);
  return window == 0 ? scheduler.block() : scheduler.blocks()[window - 1];
}

inline unsigned char* pointer_to(unsigned address) {
  const unsigned offset = address % CLUSTER_WINDOW;
  if (offset >= SHARED_WINDOW && offset - SHARED_WINDOW < static_shared_bytes()) {
    return __start_simt_shared + (offset - SHARED_WINDOW);
  }
  return block_at(address).shared->data() + (long(offset) - dynamic_window());
}

// `bytes` of shared memory at an address, aligned, in any block of the cluster.
inline unsigned char* cluster_bytes_at(const char* what, unsigned address, size_t bytes, unsigned alignment) {
  unsigned char* pointer = pointer_to(address);
  if (address % alignment != 0) {
    fail("misaligned", "%s at %s, address 0x%x: it has to be a multiple of %u", what, describe(pointer).c_str(),
         address, alignment);
  }
  if (!is_shared(pointer, bytes)) {
    fail("out-of-bounds", "%s of %zu bytes at %s", what, bytes, describe(pointer).c_str());
  }
  return pointer;
}

inline bool is_own(unsigned address) { return &block_at(address) == &scheduler.block(); }

// The same for what takes addresses of the calling block alone.
inline unsigned char* own_bytes_at(const char* what, unsigned address, size_t bytes, unsigned alignment) {
  if (!is_own(address)) {
    fail("cluster", "%s at %s, by an address of the cluster's: it takes the block's own ones alone", what,
         describe(pointer_to(address)).c_str());
  }
  return cluster_bytes_at(what, address, bytes, alignment);
}

inline void refuse_static(const char* what, const void* pointer) {
  if (!is_static_shared(pointer, 1)) return;
  fail("static-shared", "%s at %s: the asynchronous proxy reaches dynamic shared memory alone, in the emulator", what,
       describe(pointer).c_str());
}

// No thread may reach into a block that has ended: its shared memory may belong to another one.
inline void check_is_running(const char* what, const Block& block) {
  if (block.running > 0) return;
  fail("cluster", "%s reaches cluster block %d, whose threads have all exited", what, block.rank);
}

}  // namespace simt
