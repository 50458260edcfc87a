// The runtime itself is never instrumented: what it does to the kernel's memory it tells the sanitizer here.
// SIMT_ADDRESS and SIMT_RACE say which sanitizer, if any, the kernel was compiled with.
#pragma once

#include <cstddef>

#if SIMT_ADDRESS
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if SIMT_RACE
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range_pc(void* address, unsigned long bytes, void* code);
void __tsan_write_range_pc(void* address, unsigned long bytes, void* code);
int __tsan_get_report_data(void* report, const char** description, int* count, int* stacks, int* accesses,
                           int* locations, int* mutexes, int* threads, int* unique_threads, void** sleep_trace,
                           unsigned long trace_size);
int __tsan_get_report_mop(void* report, unsigned long index, int* thread, void** address, int* bytes, int* is_write,
                          int* is_atomic, void** trace, unsigned long trace_size);
int __tsan_get_report_thread(void* report, unsigned long index, int* id, unsigned long* system_id, int* running,
                             const char** name, int* parent, void** trace, unsigned long trace_size);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
void __tsan_set_fiber_name(void* fiber, const char* name);
}
#endif

namespace simt {

constexpr unsigned NO_SYNC = 1;  // a switch of fibers is the emulator's doing: it orders nothing

// Bytes that no kernel may touch.
inline void forbid(void* begin, size_t bytes) {
#if SIMT_ADDRESS
  __asan_poison_memory_region(begin, bytes);
#endif
  (void)begin, (void)bytes;
}

// While one lives, what the current thread does in its own code is not looked at: the runtime's memory is no kernel's.
class Unseen {
 public:
#if SIMT_RACE
  Unseen() { __tsan_ignore_thread_begin(); }
  ~Unseen() { __tsan_ignore_thread_end(); }
#else
  Unseen() {}
  ~Unseen() {}
#endif
  Unseen(const Unseen&) = delete;
};

// The current thread reads or writes memory through the runtime, unseen, which the kernel called at `code`.
inline void note_read(const void* address, size_t bytes, const void* code) {
#if SIMT_RACE
  __tsan_ignore_thread_end();
  __tsan_read_range_pc(const_cast<void*>(address), bytes, const_cast<void*>(code));
  __tsan_ignore_thread_begin();
#endif
  (void)address, (void)bytes, (void)code;
}

inline void note_write(void* address, size_t bytes, const void* code) {
#if SIMT_RACE
  __tsan_ignore_thread_end();
  __tsan_write_range_pc(address, bytes, const_cast<void*>(code));
  __tsan_ignore_thread_begin();
#endif
  (void)address, (void)bytes, (void)code;
}

}  // namespace simt
