// Contexts: the primary one of each device, others that users make, and the stack of them that each thread has.
#include <cstdio>

#include "call.h"
#include "devices.h"

namespace driver {

std::mutex guard;
pid_t started_in = 0;

namespace {

// Libraries call while a thread or the process ends: these are never destroyed.
thread_local auto& stack = *new std::vector<Context*>;
auto& contexts = *new std::set<Context*>;  // that are alive
auto& primary = *new std::map<CUdevice, Context*>;

Context* make(CUdevice device, bool is_primary) {
  static unsigned long long made = 0;
  auto* context = new Context{device, is_primary, ++made};
  context->streams.push_back(new Stream{context, true, true});
  contexts.insert(context);
  return context;
}

Context* find(CUcontext handle) {
  auto* context = reinterpret_cast<Context*>(handle);
  need(contexts.count(context) != 0, CUDA_ERROR_INVALID_CONTEXT);
  return context;
}

void end(Context& context) {
  if (context.lost == CUDA_SUCCESS) finish_all(context);
  free_memory_of(context);
  contexts.erase(&context);
}

CUcontext handle_of(Context* context) { return reinterpret_cast<CUcontext>(context); }

}  // namespace

Context* current() { return stack.empty() ? nullptr : stack.back(); }

Context* valid_current() {
  need(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  need(contexts.count(current()) != 0, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  check_lost(*current());
  return current();
}

void check_lost(const Context& context) { need(context.lost == CUDA_SUCCESS, context.lost); }

void lose(Context& context, CUresult code) {
  context.lost = code;
  for (Stream* stream : context.streams) stream->queue.clear();
}

bool is_sticky(CUresult code) {
  static const std::set<int> STICKY = {CUDA_ERROR_ECC_UNCORRECTABLE,      CUDA_ERROR_ILLEGAL_ADDRESS,
                                       CUDA_ERROR_LAUNCH_TIMEOUT,         CUDA_ERROR_ASSERT,
                                       CUDA_ERROR_HARDWARE_STACK_ERROR,   CUDA_ERROR_ILLEGAL_INSTRUCTION,
                                       CUDA_ERROR_MISALIGNED_ADDRESS,     CUDA_ERROR_INVALID_ADDRESS_SPACE,
                                       CUDA_ERROR_INVALID_PC,             CUDA_ERROR_LAUNCH_FAILED};
  return STICKY.count(code) != 0;
}

}  // namespace driver

using namespace driver;

CUresult cuInit(unsigned int flags) {
  return call("cuInit", NOTHING, [&] {
    need(flags == 0);
    need(device_count() != 0, CUDA_ERROR_NO_DEVICE);
    need(started_in == 0 || started_in == getpid(), CUDA_ERROR_NOT_INITIALIZED);
    started_in = getpid();
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return call("cuDevicePrimaryCtxRetain", STARTED, [&] {
    gpu_of(device);
    Context*& found = primary[device];
    if (found == nullptr) found = make(device, true);
    ++found->users;
    *context = handle_of(found);
  });
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return call("cuDevicePrimaryCtxRelease", STARTED, [&] {
    Context*& found = primary[device];
    need(found != nullptr, CUDA_ERROR_INVALID_CONTEXT);
    if (--found->users > 0) return;
    end(*found);
    found = nullptr;
  });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  return call("cuDevicePrimaryCtxGetState", STARTED, [&] {
    gpu_of(device);
    *flags = 0;
    *active = primary[device] != nullptr;
  });
}

CUresult cuCtxCreate(CUcontext* context, CUctxCreateParams*, unsigned int, CUdevice device) {
  return call("cuCtxCreate", STARTED, [&] {
    gpu_of(device);
    stack.push_back(make(device, false));
    *context = handle_of(stack.back());
  });
}

// By its name before CUDA 13, which had no parameters.
extern "C" CUresult cuCtxCreate_v2(CUcontext* context, unsigned int flags, CUdevice device) {
  return cuCtxCreate(context, nullptr, flags, device);
}

CUresult cuCtxDestroy(CUcontext context) {
  return call("cuCtxDestroy", STARTED, [&] {
    Context* found = find(context);
    need(!found->is_primary, CUDA_ERROR_INVALID_CONTEXT);
    if (current() == found) stack.pop_back();
    end(*found);
  });
}

CUresult cuCtxDetach(CUcontext context) { return cuCtxDestroy(context); }

CUresult cuCtxGetCurrent(CUcontext* context) {
  return call("cuCtxGetCurrent", STARTED, [&] { *context = handle_of(current()); });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return call("cuCtxSetCurrent", STARTED, [&] {
    Context* found = context == nullptr ? nullptr : find(context);
    if (!stack.empty()) stack.pop_back();
    if (found != nullptr) stack.push_back(found);
  });
}

CUresult cuCtxPushCurrent(CUcontext context) {
  return call("cuCtxPushCurrent", STARTED, [&] { stack.push_back(find(context)); });
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  return call("cuCtxPopCurrent", STARTED, [&] {
    need(!stack.empty(), CUDA_ERROR_INVALID_CONTEXT);
    if (context != nullptr) *context = handle_of(stack.back());
    stack.pop_back();
  });
}

CUresult cuCtxGetDevice(CUdevice* device) {
  return call("cuCtxGetDevice", STARTED, [&] {
    need(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
    *device = current()->device;
  });
}

CUresult cuCtxGetId(CUcontext context, unsigned long long* number) {
  return call("cuCtxGetId", STARTED, [&] { *number = (context == nullptr ? valid_current() : find(context))->number; });
}

CUresult cuCtxGetApiVersion(CUcontext context, unsigned int* version) {
  return call("cuCtxGetApiVersion", STARTED, [&] {
    if (context != nullptr) find(context);
    *version = 4;
  });
}

CUresult cuCtxSynchronize(void) {
  return call("cuCtxSynchronize", IN_CONTEXT, [&] {
    refuse_in_capture();
    finish_all(*current());
  });
}
