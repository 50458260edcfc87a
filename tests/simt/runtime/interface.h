// What the kernel side (compiled with each text) asks of the runtime (compiled once per build).
//
// Where the kernel asked is the address that the call returns to: debug information turns it into a line and, since
// everything between is inlined, into the lines it was called from.
#pragma once

namespace simt {

// Ends the run: what was caught, at the place where the thread last called the runtime.
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Barrier 0 is __syncthreads, 1 to 15 are the named ones. Without `waits` the thread only arrives.
void barrier(const char* what, int id, int threads, bool waits);
int threads_of_block();

[[noreturn]] void trap();

// A warp-collective step: every lane of `mask` hands in a value, and goes on when all of them have.
struct Exchange {
  static constexpr int VALUE_BYTES = 64;
  const char* what;
  const void* code;  // where the first lane came from
  unsigned mask;
  unsigned arrived;
  unsigned reading;  // lanes that may still look at the values
  alignas(16) unsigned char values[32][VALUE_BYTES];
};

// The result stays valid until the lane's next collective step. Only `orders_memory` makes writes visible.
const Exchange& exchange(const char* what, unsigned mask, const void* value, int bytes, bool orders_memory);
int lane();

void copy_async(void* shared, const void* global, int bytes, bool valid);
void copy_async_commit();
void copy_async_wait(int pending);

// Addresses of the shared window, as PTX takes them.
unsigned shared_address(const void* pointer);
void* shared_pointer(unsigned address);

// The launch's argument `index`, which must be `bytes` long and a pointer or not as `is_pointer` says.
const void* argument(int index, int bytes, bool is_pointer);

struct Entry {
  void (*call)();  // runs the kernel as the current thread, with the launch's arguments
  int parameters;
};

extern const Entry entries[];  // in the order in which the text has them

}  // namespace simt
