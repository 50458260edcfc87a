// Boxes stored from shared memory to arrays, in groups that the thread waits for. What one reads is read as late as it
// may be; but what threads wrote must have been shown to the asynchronous proxy when it was issued.
#pragma once

#include <string>

#include "bulk.h"

namespace simt {

inline void check_published(const BoxStore& store) {
  const unsigned char* missing = scheduler.block().shared->find_unpublished(store.from, store.map.box_bytes());
  if (missing == nullptr) return;
  fail("proxy", "store_box at %s reads %s, which was written with no fence_proxy_async since",
       place(store.code).c_str(), describe(missing).c_str());
}

void store_box(const void* given, const int* corner, int dimensions, unsigned from) {
  const Call call;
  check_has_waited("store_box");
  Thread& thread = *scheduler.current();
  BoxStore store = {};
  store.map = read_map("store_box", given, dimensions);
  check_corner("store_box", store.map, corner);
  for (int i = 0; i < dimensions; ++i) {
    if (corner[i] < 0)
      fail("async", "store_box at a negative coordinate, %d; an H100 stops with an illegal instruction", corner[i]);
    store.corner[i] = corner[i];
  }
  store.from = own_bytes_at("store_box", from, store.map.box_bytes(), image_alignment(store.map));
  refuse_static("store_box", store.from);
  store.code = thread.code;
  store.group = thread.stores_committed;
  check_published(store);
  count_box(store.map, corner, true);
  store.issued = std::make_shared<Token>();
  signal_order(store.issued.get());
  thread.stores.push_back(store);
}

void bulk_commit() {
  const Call call;
  ++scheduler.current()->stores_committed;
}

inline void read_for_store(BoxStore& store) {
  if (store.is_read) return;
  const size_t bytes = store.map.box_bytes();
  check_published(store);
  store.content.assign(store.from, store.from + bytes);
  Thread& thread = *scheduler.current();
  run_as_work(thread.work_clocks, store.issued.get(), &thread.stores_read,
              [&] { note_async_read(*scheduler.block().shared, store.from, bytes, store.code); });
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

}  // namespace simt
