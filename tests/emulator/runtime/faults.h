// What finds a fault while kernel code runs, and how it comes to be reported: signals, and the hooks of the compiler's
// sanitizers. Nothing of their own printing is used: report() says the same in every build.
#pragma once

#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <cstring>

#include "report.h"

namespace simt {

inline void on_signal(int signal, siginfo_t* info, void* context) {
#if defined(__x86_64__)
  const void* code = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#else
  const void* code = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#endif
  const Thread* thread = scheduler.current();
  if (thread != nullptr && thread->overflows_stack(info->si_addr)) {
    report("stack-overflow", {code}, "a thread has room for 64 KiB of local variables");
  }
  if (signal == SIGSEGV || signal == SIGBUS) {
    if (thread != nullptr && !thread->has_waited && is_in_a_buffer(info->si_addr, 1)) {
      report("grid", {code}, "access before wait_for_previous_grid() to " + describe(info->si_addr));
    }
    if (is_in_a_buffer(info->si_addr, 1)) report("read-only", {code}, "write to " + describe(info->si_addr));
    report("out-of-bounds", {code}, "access to " + describe(info->si_addr));
  }
  if (signal == SIGALRM) report("timeout", {code}, "still running");
  report("crash", {code}, strsignal(signal));
}

#if SIMT_ADDRESS
// AddressSanitizer calls this with its report as text, before it ends the process.
inline void on_address_report(const char*) {
  const void* code = before(__asan_get_report_pc());
  char message[256];
  snprintf(message, sizeof(message), "%s of %zu bytes at %s", __asan_get_report_access_type() ? "write" : "read",
           __asan_get_report_access_size(), describe(__asan_get_report_address()).c_str());
  report("out-of-bounds", {code}, message);
}
#endif

inline void catch_signals(unsigned seconds) {
  static unsigned char stack[64 << 10];  // the faulting stack may be full
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof(stack);
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM}) sigaction(signal, &action, nullptr);
  alarm(seconds);
#if SIMT_ADDRESS
  __asan_set_error_report_callback(on_address_report);
#endif
}

}  // namespace simt

#if SIMT_ADDRESS
extern "C" const char* __asan_default_options() {
  return "detect_leaks=0:symbolize=0:use_sigaltstack=0:handle_segv=0:handle_sigbus=0:handle_sigfpe=0:handle_sigill=0";
}
#endif

#if SIMT_RACE
extern "C" const char* __tsan_default_options() {
  return "symbolize=0:atexit_sleep_ms=0:report_thread_leaks=0:report_signal_unsafe=0:use_sigaltstack=0:"
         "handle_segv=0:handle_sigbus=0:handle_sigfpe=0:handle_sigill=0";
}

namespace simt {

struct RacingAccess {
  int thread, bytes, is_write, is_atomic;
  void *address, *trace[8];

  Code code() const {
    Code result;
    for (const void* address : trace) result.push_back(before(address));
    return result;
  }
};

// The CUDA thread's number, which is its fiber's name, or the engine's name.
inline std::string name_thread(void* found, int id) {
  const char *description, *name;
  void* trace[1];
  int unused, thread, count = 0;
  unsigned long system_id;
  __tsan_get_report_data(found, &description, &unused, &unused, &unused, &unused, &unused, &count, &unused, trace, 1);
  for (int i = 0; i < count; ++i) {
    __tsan_get_report_thread(found, i, &thread, &system_id, &unused, &name, &unused, trace, 1);
    if (thread == id) return name[0] == 't' ? name : std::string("thread ") + name;
  }
  return "another thread";
}

inline std::string describe_race(void* found, const RacingAccess& now, const RacingAccess& earlier) {
  const std::string who = name_thread(found, now.thread), other = name_thread(found, earlier.thread);
  const std::string here = (now.is_write ? "write at " : "read at ") + describe(now.address);
  const std::string there = other + (earlier.is_write ? " wrote at " : " read at ") + place_of(earlier.code());
  const std::string none = " with no barrier between", unfenced = " with no fence_proxy_async and barrier between";
  if (other == BLOCK_END) return here + ", of a block that may have ended" + none;
  if (who == BLOCK_END) return "the block may end before " + there + " at " + describe(now.address) + none;
  return here + ", which " + there + (who == PROXY || other == PROXY ? unfenced : none);
}

}  // namespace simt

// ThreadSanitizer calls this when it has found a race, before it prints anything.
extern "C" void __tsan_on_report(void* found) {
  simt::RacingAccess now = {}, earlier = {};
  for (simt::RacingAccess* access : {&now, &earlier}) {
    __tsan_get_report_mop(found, access == &earlier, &access->thread, &access->address, &access->bytes,
                          &access->is_write, &access->is_atomic, access->trace, 8);
  }
  simt::report("race", now.code(), simt::describe_race(found, now, earlier));
}
#endif

// What code compiled with -fsanitize=alignment,bounds calls, with the compiler's own record of the type.
extern "C" {
struct SourceLocation {
  const char* file;
  unsigned line, column;
};

struct TypeDescriptor {
  unsigned short kind, info;
  char name[1];  // quoted
};

struct TypeMismatch {
  SourceLocation location;
  TypeDescriptor* type;
  unsigned char log_alignment, check;
};

struct OutOfBounds {
  SourceLocation location;
  TypeDescriptor *array, *index;
};

[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, void* pointer) {
  simt::scheduler.current()->code = simt::before(__builtin_return_address(0));
  simt::fail("misaligned", "%s at %s: its address has to be a multiple of %d", data->type->name,
             simt::describe(pointer).c_str(), 1 << data->log_alignment);
}

[[noreturn]] void __ubsan_handle_out_of_bounds_abort(OutOfBounds* data, unsigned long index) {
  simt::scheduler.current()->code = simt::before(__builtin_return_address(0));
  simt::fail("out-of-bounds", "index %ld of an array %s", long(index), data->array->name);
}
}
