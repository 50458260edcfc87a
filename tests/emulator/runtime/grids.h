// A launch that may begin while the one before it in its stream ends. That one may still write what this one reads, and
// read what it writes: to a thread that has not waited for it, no argument's memory is there.
#pragma once

#include "memory.h"

namespace simt {

inline bool is_early = false;

inline void show_memory(bool is_shown) {
  static bool was_shown = true;
  if (!is_early || is_shown == was_shown) return;
  for (const Buffer& buffer : buffers) buffer.show(is_shown);
  was_shown = is_shown;
}

}  // namespace simt
