// What the scheduler knows of each CUDA thread, of each barrier and of each block.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "clocks.h"
#include "fiber.h"
#include "in_flight.h"
#include "interface.h"
#include "launch.h"
#include "memory.h"
#include "sequence.h"

namespace simt {

// An address of code as it stands in a message; emulator.py puts lines of the text in its place.
inline std::string place(const void* code) { return "{" + std::to_string(reinterpret_cast<unsigned long>(code)) + "}"; }

// A sanitizer, or a function called, knows where it returns to: the call is the instruction before.
inline const void* before(const void* code) { return code == nullptr ? nullptr : static_cast<const char*>(code) - 1; }

struct Block;

struct Thread {
  enum State { READY, WAITING, EXITED };
  static constexpr int NO_TURN = -1;

  Thread(int number, unsigned char* stack, size_t stack_bytes)
      : number(number), stack_guard(stack - PAGE), stack_end(stack + stack_bytes),
        fiber(stack, stack_bytes, std::to_string(number).c_str()) {}

  bool overflows_stack(const void* address) const {
    return address >= stack_guard && address < stack_guard + PAGE;
  }
  int lane() const { return number % 32; }
  int warp() const { return number / 32; }

  int number;  // in its block
  bool has_waited = true;  // for the grid before: until then, memory is not there
  Block* block = nullptr;
  unsigned char *stack_guard, *stack_end;  // the page below the stack, without access; and where it began
  Fiber fiber;
  uint3 index = {};
  State state = READY;
  const void* code = nullptr;  // where it called the runtime last
  // What a waiting thread waits for: its name, the object that will wake it, and more words on that where there are
  // any.
  const char* what = nullptr;
  const void* awaited = nullptr;
  std::function<std::string()> details;
  const void* given_up = nullptr;  // the mbarrier at which its last try gave up
  int cluster_turn = NO_TURN;      // that it has arrived for, and not waited
  Exchange* held = nullptr;  // the collective step whose values it may still look at
  std::vector<std::shared_ptr<AsyncCopy>> copies;
  int committed = 0;  // groups of copies so far
  Token copies_arrived;  // by mbarriers
  std::vector<BoxStore> stores;
  int stores_committed = 0;  // groups of bulk stores so far
  Token stores_read;
  OwnMemory at_fence;
  Clock proxy;
  Token shown_to_proxy;
  WorkClockPool work_clocks;
};

// A collective step of a warp.
struct Meeting : Exchange {
  Token token;
};

struct Barrier {
  const void* code = nullptr;  // where the first to arrive came from
  int threads = 0, arrived = 0;
  // By turns, so that a thread still leaving the barrier observes nothing of the next one's arrivals.
  Token tokens[2];
  int turn = 0;
};

// Four warps. What they have not all done when the block ends was done wrong.
struct Warpgroup {
  Sequence<AgreedProduct> products;
  Sequence<AgreedRegisters> registers;
};

struct Block {
  static constexpr int BARRIERS = 16;

  long number = -1;  // in the grid
  uint3 index = {};
  int rank = 0;  // in its cluster
  SharedMemory* shared = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;
  int running = 0;  // threads
  Token ended;      // by each thread that exits
  Clock end;
  std::vector<std::vector<Meeting>> meetings;  // by warp, one for each lane at most; free when no thread reads it
  Barrier barriers[BARRIERS];
  std::vector<WarpMatrices> matrices;          // by warp
  std::vector<WorkClockPool> product_clocks;   // by warp
  std::vector<Warpgroup> warpgroups;
  std::vector<int> registers;  // that each warp holds, a thread
  // of registers: by any warp, by one that held more since the launch
  int largest_increase = 0, least_increase_at_launch = 256;
};

// Threads met at what seem to be two different calls. Only the debug information tells whether the compiler has just
// written one call of the text twice, so emulator.py judges, after the run.
struct Suspect {
  const char* kind;
  const char* what;
  const void *code, *other_code;
  long block;
  int thread;
};

}  // namespace simt
