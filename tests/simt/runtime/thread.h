// What the scheduler knows of each CUDA thread, of each barrier and of each block.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "in_flight.h"
#include "interface.h"
#include "launch.h"
#include "memory.h"

namespace simt {

// An address of code as it stands in a message; emulator.py puts lines of the text in its place.
inline std::string place(const void* code) { return "{" + std::to_string(reinterpret_cast<unsigned long>(code)) + "}"; }

// A sanitizer, or a function called, knows where it returns to: the call is the instruction before.
inline const void* before(const void* code) { return code == nullptr ? nullptr : static_cast<const char*>(code) - 1; }

struct Block;

struct Thread {
  enum State { READY, WAITING, EXITED };

  Thread(int number, unsigned char* stack, size_t stack_bytes)
      : number(number), stack_guard(stack - PAGE), fiber(stack, stack_bytes, std::to_string(number).c_str()) {}

  bool overflows_stack(const void* address) const {
    return address >= stack_guard && address < stack_guard + PAGE;
  }
  int lane() const { return number % 32; }
  int warp() const { return number / 32; }

  int number;  // in its block
  Block* block = nullptr;
  unsigned char* stack_guard;  // the page below the stack: no access
  Fiber fiber;
  uint3 index = {};
  State state = READY;
  const void* code = nullptr;  // where it called the runtime last
  // What a waiting thread waits for: its name, the object that will wake it, and more words on that where there are any.
  const char* what = nullptr;
  const void* awaited = nullptr;
  std::function<std::string()> details;
  Exchange* held = nullptr;  // the collective step whose values it may still look at
  std::vector<AsyncCopy> copies;
  int committed = 0;  // groups of copies so far
  std::vector<BoxStore> stores;
  int stores_committed = 0;  // groups of bulk stores so far
  char stores_read = 0;  // a token
};

struct Barrier {
  const void* code = nullptr;  // where the first to arrive came from
  int threads = 0, arrived = 0;
  // By turns, so that a thread still leaving the barrier observes nothing of the next one's arrivals.
  char tokens[2] = {};
  int turn = 0;
};

struct Block {
  static constexpr int BARRIERS = 16;

  long number = -1;  // in the grid
  uint3 index = {};
  int rank = 0;  // in its cluster
  SharedMemory* shared = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::vector<Exchange>> exchanges;  // by warp, one for each lane at most; free when nobody reads it
  Barrier barriers[BARRIERS];
  std::vector<WarpMatrices> matrices;  // by warp
  std::vector<int> registers;  // that each warp holds, a thread
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
