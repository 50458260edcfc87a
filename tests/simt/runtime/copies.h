// Asynchronous copies, as late as they may be: the destination is NaN from the start of a copy until the copying
// thread's own wait, and the source is read only then.
#pragma once

#include <cstdint>

#include "calls.h"

namespace simt {

inline void land_copy(const AsyncCopy& copy, const void* code) {
  if (copy.global != nullptr) note_read(copy.global, copy.bytes, code);
  note_write(copy.shared, copy.bytes, code);
  for (int i = 0; i < copy.bytes; ++i) copy.shared[i] = copy.global != nullptr ? copy.global[i] : 0;
}

void copy_async(void* destination, const void* source, int bytes, bool valid) {
  const Call call;
  Thread& thread = *scheduler.current();
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
  if (valid && !is_in_a_buffer(source, bytes)) {
    fail("out-of-bounds", "copy_async_%d from %s", bytes, describe(source).c_str());
  }
  const auto to = static_cast<unsigned char*>(destination);
  const auto from = static_cast<const unsigned char*>(source);
  note_write(to, bytes, thread.code);
  fill_nan(to, bytes);
  thread.copies.push_back({to, valid ? from : nullptr, bytes, thread.committed});
}

void copy_async_commit() { ++scheduler.current()->committed; }

void copy_async_wait(int pending) {
  const Call call;
  Thread& thread = *scheduler.current();
  auto next = thread.copies.begin();
  for (; next != thread.copies.end() && next->group < thread.committed - pending; ++next) {
    land_copy(*next, thread.code);
  }
  thread.copies.erase(thread.copies.begin(), next);
}

}  // namespace simt
