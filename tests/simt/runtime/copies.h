// Asynchronous copies, as late as they may be: the destination is NaN from the start of a copy until the copying
// thread's own wait, and the source is read only then.
#pragma once

#include <cstdint>

#include "scheduler.h"

namespace simt {

void copy_async(void* destination, const void* source, int bytes, bool valid) {
  Thread& thread = *scheduler.current();
  const void* code = __builtin_return_address(0);
  thread.code = before(code);
  if (reinterpret_cast<uintptr_t>(destination) % bytes != 0) {
    fail("misaligned", "copy_async_%d to %s", bytes, describe(destination).c_str());
  }
  if (!shared.holds(destination, bytes)) {
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
  note_write(to, bytes, code);
  fill_nan(to, bytes);
  thread.copies.push_back({to, valid ? from : nullptr, bytes, thread.committed});
}

void copy_async_commit() { ++scheduler.current()->committed; }

void copy_async_wait(int pending) {
  Thread& thread = *scheduler.current();
  const void* code = __builtin_return_address(0);
  auto next = thread.copies.begin();
  for (; next != thread.copies.end() && next->group < thread.committed - pending; ++next) {
    if (next->global != nullptr) note_read(next->global, next->bytes, code);
    note_write(next->shared, next->bytes, code);
    for (int i = 0; i < next->bytes; ++i) next->shared[i] = next->global != nullptr ? next->global[i] : 0;
  }
  thread.copies.erase(thread.copies.begin(), next);
}

}  // namespace simt
