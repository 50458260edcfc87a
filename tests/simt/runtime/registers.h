// setmaxnreg: warps hand registers back to the block's pool, and take more when there are enough.
#pragma once

#include <string>

#include "calls.h"
#include "matrices.h"

namespace simt {

inline int registers_held(const Block& block) {
  int sum = 0;
  for (const int each : block.registers) sum += 32 * each;
  return sum;
}

inline int registers_of_pool() { return registers_at_launch(scheduler.size()) * scheduler.size(); }

inline void check_register_count(const char* what, int count) {
  if (scheduler.size() % 128 != 0) fail("registers", "%s in a block of %d threads; whole warpgroups", what, scheduler.size());
  if (count % 8 != 0 || count < 24 || count > 256) {
    fail("registers", "%s<%d>: multiples of 8 from 24 to 256 are accepted", what, count);
  }
}

void registers_decrease(int count) {
  const Call call;
  check_register_count("registers_decrease", count);
  int& held = scheduler.block().registers[scheduler.current()->warp()];
  scheduler.meet("registers_decrease", ALL_LANES, nullptr, 0, false);
  if (lane() != 0) return;
  if (count > held) fail("registers", "registers_decrease<%d>: the warp has %d", count, held);
  held = count;
  scheduler.wake(&scheduler.block().registers);
}

void registers_increase(int count) {
  const Call call;
  check_register_count("registers_increase", count);
  Block& block = scheduler.block();
  int& held = block.registers[scheduler.current()->warp()];
  if (count < held) fail("registers", "registers_increase<%d>: the warp has %d", count, held);
  scheduler.meet("registers_increase", ALL_LANES, nullptr, 0, false);
  while (held < count) {  // the first lane that finds room takes it for its warp
    if (registers_held(block) + 32 * (count - held) <= registers_of_pool()) {
      held = count;
      break;
    }
    scheduler.wait_for(&block.registers, "registers_increase", [&block, count] {
      return "to " + std::to_string(count) + " a thread; the block holds " + std::to_string(registers_held(block)) + " of " +
             std::to_string(registers_at_launch(int(block.threads.size())) * block.threads.size());
    });
  }
}

}  // namespace simt
