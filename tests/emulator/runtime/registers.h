// setmaxnreg: warpgroups hand registers back to the block's pool, and take more when there are enough.
#pragma once

#include <algorithm>
#include <string>

#include "calls.h"
#include "matrices.h"

namespace simt {

inline int registers_held(const Block& block) {
  int sum = 0;
  for (const int each : block.registers) sum += 32 * each;
  return sum;
}

inline void check_register_count(const char* what, int count) {
  if (scheduler.size() % 128 != 0)
    fail("registers", "%s in a block of %d threads; whole warpgroups", what, scheduler.size());
  if (scheduler.registers() == 0) {
    fail("registers", "%s in a kernel whose __launch_bounds__ do not say threads and blocks: ptxas leaves it out",
         what);
  }
  if (count % 8 != 0 || count < 24 || count > 256) {
    fail("registers", "%s<%d>: multiples of 8 from 24 to 256 are accepted", what, count);
  }
}

// The lanes of a warp arrive together. The warps of a warpgroup have to arrive too, sequentially.
inline void meet_for_registers(const char* what, const AgreedRegisters& own) {
  const int warp = scheduler.current()->warp();
  scheduler.meet(what, ALL_LANES, nullptr, 0, false);
  if (lane() != 0) return;
  const AgreedRegisters first = scheduler.block().warpgroups[warp / 4].registers.next(warp, own);
  if (first.increases == own.increases && first.count == own.count) return;
  fail("registers", "%s<%d>, where another warp of the warpgroup came to registers_%s<%d>", what, own.count,
       first.increases ? "increase" : "decrease", first.count);
}

void registers_decrease(int count) {
  const Call call;
  check_register_count("registers_decrease", count);
  int& held = scheduler.block().registers[scheduler.current()->warp()];
  meet_for_registers("registers_decrease", {false, count});
  if (lane() != 0) return;
  if (count > held) fail("registers", "registers_decrease<%d>: the warp has %d", count, held);
  held = count;
  scheduler.wake(&scheduler.block().registers);
}

// ptxas has a kernel begin with no more registers than its largest increase asks for. The warps' counts are lowered
// only here, so that the pool stays as large as without that.
inline void begin_with_largest_increase(Block& block, int& held, int count) {
  const int at_launch = scheduler.registers();
  if (count < held && held == at_launch) {
    held = count;
    block.least_increase_at_launch = std::min(block.least_increase_at_launch, count);
  }
  block.largest_increase = std::max(block.largest_increase, count);
  const int begun = std::min(at_launch, block.largest_increase), least = block.least_increase_at_launch;
  if (least < begun) fail("registers", "registers_increase<%d>: the warp has %d", least, begun);
}

void registers_increase(int count) {
  const Call call;
  check_register_count("registers_increase", count);
  Block& block = scheduler.block();
  int& held = block.registers[scheduler.current()->warp()];
  begin_with_largest_increase(block, held, count);
  if (count < held) fail("registers", "registers_increase<%d>: the warp has %d", count, held);
  meet_for_registers("registers_increase", {true, count});
  const int pool = scheduler.registers() * scheduler.size();
  while (held < count) {  // the first lane that finds room takes it for its warp
    if (registers_held(block) + 32 * (count - held) <= pool) {
      held = count;
      break;
    }
    scheduler.wait_for(&block.registers, "registers_increase", [&block, count, pool] {
      return "to " + std::to_string(count) + " a thread; the block holds " + std::to_string(registers_held(block)) +
          " of " + std::to_string(pool);
    });
  }
}

}  // namespace simt
