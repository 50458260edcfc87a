// A fiber is one CUDA thread's stack and registers. One runs at a time, until it goes back to the scheduler by itself.
#pragma once

#include <cstdint>

#include "sanitizers.h"

#if defined(__x86_64__) && !SIMT_UCONTEXT
// Saves the registers that a call keeps, and goes on where the other stack left off. swapcontext would do, but it
// makes a system call each time.
asm(R"(
.text
.type simt_switch_stack, @function
simt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void simt_switch_stack(void** save_stack_pointer, void* stack_pointer);
#else
#include <ucontext.h>
#endif

namespace simt {

class Context {
 public:
#if defined(__x86_64__) && !SIMT_UCONTEXT
  void start(unsigned char* stack, size_t bytes, void (*body)()) {
    void** top = reinterpret_cast<void**>(stack + bytes);
    *--top = nullptr;                              // body's return address: it never returns
    *--top = reinterpret_cast<void*>(body);        // where the first switch goes on
    for (int i = 0; i < 6; ++i) *--top = nullptr;  // the six saved registers
    stack_pointer_ = top;
  }
  void switch_to(Context& other) { simt_switch_stack(&stack_pointer_, other.stack_pointer_); }

 private:
  void* stack_pointer_ = nullptr;
#else
  void start(unsigned char* stack, size_t bytes, void (*body)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, body, 0);
  }
  void switch_to(Context& other) { swapcontext(&context_, &other.context_); }

 private:
  ucontext_t context_;
#endif
};

// A context and what the sanitizers want to know about it.
class Fiber {
 public:
  // The scheduler's own: what main() runs on.
  Fiber() {
#if SIMT_RACE
    tsan_fiber_ = __tsan_get_current_fiber();
#endif
  }

  Fiber(unsigned char* stack, size_t bytes, const char* name) : stack_(stack), bytes_(bytes) {
#if SIMT_RACE
    tsan_fiber_ = __tsan_create_fiber(0);
    __tsan_set_fiber_name(tsan_fiber_, name);
#endif
    (void)name;
  }

  void start(void (*body)()) { context_.start(stack_, bytes_, body); }

  void switch_to(Fiber& other) {
#if SIMT_ADDRESS
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, other.stack_, other.bytes_);
#endif
#if SIMT_RACE
    __tsan_switch_to_fiber(other.tsan_fiber_, NO_SYNC);
#endif
    context_.switch_to(other.context_);
#if SIMT_ADDRESS
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  // First thing on a new stack: the bounds of the one it came from are known only now.
  static void arrived_from(Fiber& other) {
#if SIMT_ADDRESS
    const void* stack;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &other.bytes_);
    other.stack_ = static_cast<unsigned char*>(const_cast<void*>(stack));
#endif
    (void)other;
  }

 private:
  Context context_;
  unsigned char* stack_ = nullptr;
  size_t bytes_ = 0;
#if SIMT_RACE
  void* tsan_fiber_ = nullptr;
#endif
};

}  // namespace simt
