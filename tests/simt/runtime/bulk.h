// Bulk copies: byte ranges and boxes of arrays, to shared memory with an mbarrier, from there in groups that the thread
// waits for. The memory that one writes is NaN until it lands, and what one reads is read as late as it may be.
#pragma once

#include <string>
#include <vector>

#include "calls.h"
#include "mbarrier.h"

namespace simt {

// Where a copy goes in one block of the cluster, and the barrier that counts it.
struct BulkTarget {
  SharedMemory* shared;
  unsigned char* to;
  Mbarrier* barrier;
};

inline BulkTarget find_target(const char* what, const Block& block, unsigned to, unsigned barrier, size_t bytes,
                              unsigned alignment) {
  const unsigned window = (block.rank + 1) * CLUSTER_WINDOW;
  unsigned char* pointer = shared_bytes_at(what, window + to % CLUSTER_WINDOW, bytes, alignment);
  if (!block.shared->holds(pointer, bytes)) fail("out-of-bounds", "%s goes to dynamic shared memory alone", what);
  Mbarrier& counter = find_mbarrier(what, window + barrier % CLUSTER_WINDOW);
  if (!counter.is_fenced) {
    fail("mbarrier", "%s on a barrier that no fence_mbarrier_init has shown to the asynchronous proxy", what);
  }
  return {block.shared, pointer, &counter};
}

// Starts one copy for each block of the mask; the calling block's own for mask 0. `read` fills the bytes when it lands.
template <typename Read>
void start_bulk(const char* what, unsigned to, unsigned barrier, unsigned mask, size_t bytes, unsigned alignment,
                const Read& read) {
  Thread& thread = *scheduler.current();
  const unsigned blocks = mask != 0 ? mask : 1u << scheduler.block().rank;
  if (blocks >> scheduler.blocks().size() != 0) {
    fail("cluster", "%s for blocks 0x%x of a cluster of %zu", what, mask, scheduler.blocks().size());
  }
  for (const Block& block : scheduler.blocks()) {
    if (!(blocks >> block.rank & 1)) continue;
    const BulkTarget target = find_target(what, block, to, barrier, bytes, alignment);
    note_write(target.to, bytes, thread.code);
    target.shared->begin_async_write(target.to, bytes);
    engine.start(what, thread, [target, bytes, read] {
      std::vector<unsigned char> content(bytes);
      read(content.data(), address_in_window(*target.shared, target.to));
      note_write(target.to, bytes, scheduler.current()->code);
      target.shared->write_async(target.to, content.data(), bytes);
      complete_bytes(*target.barrier, bytes);
    });
  }
}

void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier, unsigned mask) {
  const Call call;
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    fail("misaligned", "copy_bulk of %u bytes from %s: both have to be multiples of 16", bytes, describe(from).c_str());
  }
  if (!is_in_a_buffer(from, bytes)) {
    fail("out-of-bounds", "copy_bulk of %u bytes from %s", bytes, describe(from).c_str());
  }
  const auto source = static_cast<const unsigned char*>(from);
  start_bulk("copy_bulk", to, barrier, mask, bytes, 16, [source, bytes](unsigned char* content, unsigned) {
    note_read(source, bytes, scheduler.current()->code);
    for (unsigned i = 0; i < bytes; ++i) content[i] = source[i];
  });
}

inline TensorMap read_map(const char* what, const void* map, int dimensions) {
  TensorMap result;
  copy_bytes(&result, map, sizeof(result));
  if (result.magic != TensorMap::MAGIC) fail("tensor-map", "%s: the map is not one that the host encoded", what);
  if (result.dimensions != dimensions) {
    fail("tensor-map", "%s: %d coordinates for a map of %d dimensions", what, dimensions, result.dimensions);
  }
  return result;
}

// Calls visit(element in the box, its bytes in the array or null where it lies outside) for a whole box.
template <typename Visit>
void for_each_element(const TensorMap& map, const int* corner, const Visit& visit) {
  size_t count = 1;
  for (int i = 0; i < map.dimensions; ++i) count *= map.box[i];
  for (size_t element = 0; element < count; ++element) {
    size_t rest = element;
    unsigned char* place = map.base;
    for (int i = 0; i < map.dimensions; ++i) {
      const long long at = corner[i] + (long long)(rest % map.box[i]);
      rest /= map.box[i];
      if (at < 0 || at >= (long long)map.size[i]) place = nullptr;
      if (place != nullptr) place += at * (i == 0 ? map.element_bytes : map.stride[i - 1]);
    }
    visit(element, place);
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

void load_box(unsigned to, const void* given, const int* corner, int dimensions, unsigned barrier, unsigned mask) {
  const Call call;
  const TensorMap map = read_map("load_box", given, dimensions);
  const std::vector<int> at(corner, corner + dimensions);
  start_bulk("load_box", to, barrier, mask, map.box_bytes(), image_alignment(map),
             [map, at](unsigned char* content, unsigned start) {
    for_each_element(map, at.data(), [&](size_t element, const unsigned char* from) {
      if (from != nullptr) note_read(from, map.element_bytes, scheduler.current()->code);
      unsigned char* place = content + place_in_image(map, element, start);
      for (int i = 0; i < map.element_bytes; ++i) place[i] = from != nullptr ? from[i] : 0;
    });
  });
}

void store_box(const void* given, const int* corner, int dimensions, unsigned from) {
  const Call call;
  Thread& thread = *scheduler.current();
  BoxStore store = {};
  store.map = read_map("store_box", given, dimensions);
  for (int i = 0; i < dimensions; ++i) store.corner[i] = corner[i];
  store.from = shared_bytes_at("store_box", from, store.map.box_bytes(), image_alignment(store.map));
  store.code = thread.code;
  store.group = thread.stores_committed;
  note_read(store.from, store.map.box_bytes(), thread.code);
  store.issued = std::make_shared<char>();
  signal_order(store.issued.get());
  thread.stores.push_back(store);
}

void bulk_commit() { ++scheduler.current()->stores_committed; }

inline void read_for_store(BoxStore& store) {
  if (store.is_read) return;
  const size_t bytes = store.map.box_bytes();
  const SharedMemory& shared = *scheduler.block().shared;
  if (const unsigned char* missing = shared.find_unpublished(store.from, bytes)) {
    fail("proxy", "store_box at %s reads %s, which was written with no fence_proxy_async since",
         place(store.code).c_str(), describe(missing).c_str());
  }
  store.content.assign(store.from, store.from + bytes);
  Thread& thread = *scheduler.current();
  run_as_engine([&] {
    observe_order(store.issued.get());
    note_read(store.from, bytes, store.code);
    signal_order(&thread.stores_read);
  });
  observe_order(&thread.stores_read);
  store.is_read = true;
}

inline void write_for_store(const BoxStore& store) {
  const unsigned start = address_in_window(*scheduler.block().shared, store.from);
  for_each_element(store.map, store.corner, [&](size_t element, unsigned char* to) {
    if (to == nullptr) return;
    const unsigned char* place = store.content.data() + place_in_image(store.map, element, start);
    note_write(to, store.map.element_bytes, store.code);
    for (int i = 0; i < store.map.element_bytes; ++i) to[i] = place[i];
  });
}

// `reads_only`: until shared memory may be used again. Otherwise until the array holds the boxes, too.
void bulk_wait(int pending, bool reads_only) {
  const Call call;
  Thread& thread = *scheduler.current();
  std::vector<BoxStore> left;
  for (BoxStore& store : thread.stores) {
    const bool is_due = store.group < thread.stores_committed - pending;
    if (is_due) read_for_store(store);
    if (is_due && !reads_only) write_for_store(store);
    if (!is_due || reads_only) left.push_back(std::move(store));
  }
  thread.stores = std::move(left);
}

// A thread ends: what it has stored arrives, if it waited for the reads.
void leave_block(Thread& thread) {
  for (BoxStore& store : thread.stores) {
    if (!store.is_read) {
      thread.code = store.code;
      fail("async", "the thread exits while store_box may still read shared memory; bulk_wait_read<0>() comes first");
    }
    write_for_store(store);
  }
  thread.stores.clear();
}

}  // namespace simt
