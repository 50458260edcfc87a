// Asynchronous copies, as late as they may be: the destination is NaN from the start of a copy until the copying
// thread's own wait, and the source is read only then.
#pragma once

#include <algorithm>
#include <cstdint>

#include "calls.h"
#include "counting.h"

namespace simt {

// If an mbarrier waits for the copy too, the later of the two waits finds it landed.
inline void land_copy(const std::shared_ptr<AsyncCopy>& copy, const void* code) {
  if (copy->is_landed) return observe_order(&copy->landed);
  if (copy->given > 0) note_read(copy->global, copy->given, code);
  note_write(copy->shared, copy->bytes, code);
  for (int i = 0; i < copy->bytes; ++i) copy->shared[i] = i < copy->given ? copy->global[i] : 0;
  copy->is_landed = true;
  if (copy.use_count() > 1) signal_order(&copy->landed);
}

void copy_async(unsigned shared, const void* source, int bytes, unsigned given) {
  const Call call;
  Thread& thread = *scheduler.current();
  const void* const destination = pointer_to(shared);
  const bool valid = given != 0;
  if (!is_own(shared))
    fail("cluster", "copy_async_%d by an address of the cluster's: it takes the block's own ones alone", bytes);
  if (given > unsigned(bytes)) fail("async", "copy_async_%d of %u bytes: up to %d are accepted", bytes, given, bytes);
  if (reinterpret_cast<uintptr_t>(destination) % bytes != 0) {
    fail("misaligned", "copy_async_%d to %s", bytes, describe(destination).c_str());
  }
  if (!is_shared(destination, bytes)) {
    fail("out-of-bounds", "copy_async_%d to %s", bytes, describe(destination).c_str());
  }
  // The hardware wants an aligned source address even where it reads nothing from it.
  if (reinterpret_cast<uintptr_t>(source) % bytes != 0) {
    fail("misaligned", "copy_async_%d from %s", bytes, describe(source).c_str());
  }
  if (valid) check_has_waited("copy_async");
  if (valid && !is_in_a_buffer(source, given)) {
    fail("out-of-bounds", "copy_async_%d from %s", bytes, describe(source).c_str());
  }
  unsigned char* const to = pointer_to(shared);
  const auto from = static_cast<const unsigned char*>(source);
  note_write(to, bytes, thread.code);
  fill_nan(to, bytes);
  thread.copies.push_back(std::make_shared<AsyncCopy>(AsyncCopy{to, from, bytes, int(given), thread.committed}));
  count_copy(to, valid ? from : nullptr, bytes);
}

void copy_async_commit() {
  const Call call;
  count_copies_in_flight();
  ++scheduler.current()->committed;
}

// Copies that an mbarrier has landed, which the thread need not wait for any more.
inline void forget_landed(Thread& thread) {
  const auto is_landed = [](const std::shared_ptr<AsyncCopy>& copy) { return copy->is_landed; };
  thread.copies.erase(std::remove_if(thread.copies.begin(), thread.copies.end(), is_landed), thread.copies.end());
}

void copy_async_wait(int pending) {
  const Call call;
  Thread& thread = *scheduler.current();
  observe_order(&thread.copies_arrived);
  auto next = thread.copies.begin();
  for (; next != thread.copies.end() && (*next)->group < thread.committed - pending; ++next) {
    land_copy(*next, thread.code);
  }
  thread.copies.erase(thread.copies.begin(), next);
}

}  // namespace simt
