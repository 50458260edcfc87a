// Bulk copies of byte ranges and boxes of arrays to shared memory, where an mbarrier counts them. The memory that one
// writes is NaN until it lands, and what one reads is read only then.
#pragma once

#include <string>
#include <vector>

#include "calls.h"
#include "counting.h"
#include "mbarrier.h"

namespace simt {

// Where a copy goes in shared memory, and the barrier that counts it, by their addresses.
struct BulkTarget {
  unsigned to, barrier;
  size_t bytes;
  unsigned alignment;
};

// The same, found in one block of the cluster.
struct BlockTarget {
  const Block* block;
  unsigned char* to;
  Mbarrier* barrier;
};

inline BlockTarget find_target(const char* what, const Block& block, const BulkTarget& target) {
  check_is_running(what, block);
  const unsigned window = (block.rank + 1) * CLUSTER_WINDOW;
  unsigned char* to = cluster_bytes_at(what, window + target.to % CLUSTER_WINDOW, target.bytes, target.alignment);
  refuse_static(what, to);
  Mbarrier& barrier = find_mbarrier(what, cluster_bytes_at(what, window + target.barrier % CLUSTER_WINDOW, 8, 8));
  if (!barrier.is_fenced) {
    fail("mbarrier",
         "%s on a barrier that no fence_mbarrier_init has shown to the asynchronous proxy, and no fence_proxy_async",
         what);
  }
  if (const unsigned char* written = block.shared->find_unpublished(to, target.bytes)) {
    fail("proxy", "%s writes over %s, which a thread wrote with no fence_proxy_async since", what,
         describe(written).c_str());
  }
  return {&block, to, &barrier};
}

// One bit for each block of the cluster that a copy goes to.
inline unsigned find_blocks(const char* what, const BulkTarget& target, int mask) {
  if (mask == AS_ADDRESSED) {
    const Block& block = block_at(target.to);
    if (&block != &block_at(target.barrier)) {
      fail("cluster", "%s to cluster block %d with a barrier of block %d: both have to lie in one", what, block.rank,
           block_at(target.barrier).rank);
    }
    return 1u << block.rank;
  }
  if (mask == 0 || mask >> scheduler.blocks().size() != 0) {
    fail("cluster", "%s for blocks 0x%x of a cluster of %zu", what, mask, scheduler.blocks().size());
  }
  return mask;
}

// Starts one copy for each block. `read` fills the bytes when it lands.
template <typename Read>
void start_bulk(const char* what, const BulkTarget& target, int mask, const Read& read) {
  Thread& thread = *scheduler.current();
  const unsigned blocks = find_blocks(what, target, mask);
  for (const Block& block : scheduler.blocks()) {
    if (!(blocks >> block.rank & 1)) continue;
    const BlockTarget there = find_target(what, block, target);
    const size_t bytes = target.bytes;
    note_write(there.to, bytes, thread.code);
    block.shared->begin_async_write(there.to, bytes);
    count_bulk_start(block, bytes);
    engine.start(what, thread, [what, there, bytes, read] {
      check_is_running(what, *there.block);
      count_bulk_end(*there.block, bytes);
      SharedMemory& shared = *there.block->shared;
      std::vector<unsigned char> content(bytes);
      read(content.data(), address_in_window(shared, there.to));
      note_write(there.to, bytes, scheduler.current()->code);
      shared.write_async(there.to, content.data(), bytes);
      complete_bytes(*there.barrier, bytes);
    });
  }
}

// The running work reads shared memory: what the asynchronous proxy wrote, and what threads wrote and fenced.
inline void note_async_read(const SharedMemory& shared, const unsigned char* from, size_t bytes, const void* code) {
  if (!SIMT_RACE) return;
  for (size_t done = 0, count; done < bytes; done += count) {
    count = shared.count_of_one_writer(from + done, bytes - done);
    if (shared.is_written_async(from + done)) {
      note_read(from + done, count, code);
    } else {
      note_read_by_proxy(from + done, count, code);
    }
  }
}

void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier, int mask) {
  const Call call;
  check_has_waited("copy_bulk");
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    fail("misaligned", "copy_bulk of %u bytes from %s: both have to be multiples of 16", bytes, describe(from).c_str());
  }
  if (!is_in_a_buffer(from, bytes)) {
    fail("out-of-bounds", "copy_bulk of %u bytes from %s", bytes, describe(from).c_str());
  }
  const auto source = static_cast<const unsigned char*>(from);
  count_bulk_copy(from, bytes);
  start_bulk("copy_bulk", {to, barrier, bytes, 16}, mask, [source, bytes](unsigned char* content, unsigned) {
    note_read(source, bytes, scheduler.current()->code);
    for (unsigned i = 0; i < bytes; ++i) content[i] = source[i];
  });
}

inline TensorMap read_map(const char* what, const void* map) {
  TensorMap result;
  copy_bytes(&result, map, sizeof(result));
  if (result.magic != TensorMap::MAGIC) fail("tensor-map", "%s: the map is not one that the host encoded", what);
  return result;
}

inline TensorMap read_map(const char* what, const void* map, int dimensions) {
  const TensorMap result = read_map(what, map);
  if (result.dimensions != dimensions) {
    fail("tensor-map", "%s: %d coordinates for a map of %d dimensions", what, dimensions, result.dimensions);
  }
  return result;
}

// An H100 stops with an illegal instruction where a box begins within 16 bytes of a row.
inline void check_corner(const char* what, const TensorMap& map, const int* corner) {
  if (corner[0] * map.element_bytes % 16 == 0) return;
  fail("misaligned", "%s at element %d of a row: a box begins at a multiple of 16 bytes", what, corner[0]);
}

void prefetch_map(const void* map) {  // it may do nothing; but it takes a map
  const Call call;
  read_map("prefetch_map", map);
}

// Calls visit(element in the box, its bytes in the array or null where it lies outside) for a whole box, a row after
// the other.
template <typename Visit>
void for_each_element(const TensorMap& map, const int* corner, const Visit& visit) {
  size_t rows = 1;
  for (int i = 1; i < map.dimensions; ++i) rows *= map.box[i];
  for (size_t row = 0; row < rows; ++row) {
    size_t rest = row;
    unsigned char* begin = map.base;
    for (int i = 1; i < map.dimensions; ++i) {
      const long long at = corner[i] + (long long)(rest % map.box[i]);
      rest /= map.box[i];
      if (at < 0 || at >= (long long)map.size[i]) begin = nullptr;
      if (begin != nullptr) begin += at * map.stride[i - 1];
    }
    for (size_t i = 0; i < map.box[0]; ++i) {
      const long long at = corner[0] + (long long)i;
      const bool is_outside = begin == nullptr || at < 0 || at >= (long long)map.size[0];
      visit(row * map.box[0] + i, is_outside ? nullptr : begin + at * map.element_bytes);
    }
  }
}

// Where an element of a box lies in its image, which begins at `start` in the window.
inline size_t place_in_image(const TensorMap& map, size_t element, unsigned start) {
  const unsigned address = start + unsigned(element * map.element_bytes);
  return TensorMap::swizzled(address, map.swizzle) - start;
}

inline unsigned image_alignment(const TensorMap& map) {
  return map.swizzle == TensorMap::NONE ? 128 : 8 * TensorMap::span(map.swizzle);
}

void load_box(unsigned to, const void* given, const int* corner, int dimensions, unsigned barrier, int mask) {
  const Call call;
  check_has_waited("load_box");
  const TensorMap map = read_map("load_box", given, dimensions);
  check_corner("load_box", map, corner);
  const std::vector<int> at(corner, corner + dimensions);
  const BulkTarget target = {to, barrier, map.box_bytes(), image_alignment(map)};
  count_box(map, corner, false);
  start_bulk("load_box", target, mask, [map, at](unsigned char* content, unsigned start) {
    for_each_element(map, at.data(), [&](size_t element, const unsigned char* from) {
      if (from != nullptr) note_read(from, map.element_bytes, scheduler.current()->code);
      unsigned char* place = content + place_in_image(map, element, start);
      for (int i = 0; i < map.element_bytes; ++i) place[i] = from != nullptr ? from[i] : 0;
    });
  });
}

}  // namespace simt
