// What the stand-in driver knows, and what every call of it begins with: one lock, the thread's context, faults on
// request.
//
// Handles are the addresses of these objects, which live as long as the process: a handle that is no longer valid is
// known as such. The API itself is cuda.h's, one file of this folder for each of its chapters.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace driver {

struct Stream;
struct Capture;

// ---- contexts

struct Context {
  CUdevice device;
  bool is_primary;
  unsigned long long number;                           // no other one has had it
  int users = 0;                                       // of a primary context: how often it was retained
  CUresult lost = CUDA_SUCCESS;                        // the error that it never recovers from
  std::vector<Stream*> streams = {};                   // its legacy default stream first
  std::map<std::thread::id, Stream*> of_threads = {};  // the per-thread default streams
  uint64_t clock_ns = 0;                               // of its device's work, which takes time by a model

  // work begins when the host has queued it
  void begin_at(uint64_t queued_ns) { clock_ns = std::max(clock_ns, queued_ns); }
};

// The host's clock, by a model as well: it needs longer for a launch than a short kernel runs. Both return the time
// afterwards.
uint64_t host_queues_launch();  // 6 to 8 us, another one each time
uint64_t host_queues_event();

Context* current();        // null where the thread has none
Context* valid_current();  // throws what the call has to return where there is none, or where it is lost
void check_lost(const Context& context);
void lose(Context& context, CUresult code);
bool is_sticky(CUresult code);

// ---- streams. Work waits in its stream until somebody waits for it.

struct Hang {};  // thrown by work that never ends

struct Work {
  uint64_t number;  // in the order in which all streams were given theirs
  std::function<CUresult()> run;
};

struct Stream {
  Context* context;
  bool is_legacy, is_blocking;  // a blocking one and the legacy stream wait for each other
  std::deque<Work> queue = {};
  Capture* capture = nullptr;
};

struct Event {
  Context* context;
  bool is_timed;
  Stream* stream = nullptr;  // where it was recorded last; null before
  uint64_t number = 0;
  uint64_t time_ns = 0;
  bool is_pending = false;
  Capture* capture = nullptr;  // that it was recorded in
  size_t captured_after = 0;   // of the capture's nodes
};

Stream* stream_of(CUstream handle);
void enqueue(Stream& stream, std::function<CUresult()> run);  // or records it, where the stream is captured
void run_through(Stream& stream, uint64_t number);            // throws Hang; what it ran may have lost the context
void finish(Stream& stream);                                  // everything in it; throws what the context was lost to
void finish_all(Context& context);
// a blocking call: in the stream's order, complete on return
void run_now(Stream& stream, std::function<CUresult()> run);

// ---- capture

struct Capture {
  Context* context;
  Stream* origin;
  CUstreamCaptureMode mode;
  std::thread::id thread;
  bool is_valid = true;
  std::vector<std::function<CUresult()>> nodes = {};
  std::map<Stream*, size_t> streams = {};  // how many nodes there were when the stream's last one was recorded
  std::map<Stream*, size_t> joined = {};   // and when the work of the stream was last waited for
};

void refuse_in_capture();  // of calls that no capture allows: throws, and invalidates the capture
void refuse_legacy_in_capture(Context& context);  // the default stream waits for captured ones
void invalidate(Capture& capture);

// ---- memory

struct Allocation {
  CUdeviceptr begin;
  Context* context;
  std::vector<unsigned char> content;
};

// The allocation that holds all these bytes; null where none does.
std::shared_ptr<Allocation> allocation_at(CUdeviceptr pointer, size_t bytes);
void free_memory_of(Context& context);

// ---- modules

struct Parameter {
  size_t offset, bytes;
};

struct Kernel {
  std::string name;
  int number;  // in the emulator's executable
  int registers, shared_bytes, most_threads, cluster;
  std::vector<Parameter> parameters;

  size_t parameter_bytes() const { return parameters.empty() ? 0 : parameters.back().offset + parameters.back().bytes; }
};

struct Image {
  std::string emulator;  // the executable that emulates its kernels
  int target = 0;        // 90 for sm_90 and sm_90a
  std::vector<Kernel> kernels;
};

struct Function {
  Kernel kernel;
  std::string emulator;
  Context* context;  // null for a library's, which serves every context
  bool is_loaded = true;
  int most_dynamic_bytes = 48 << 10;
};

// What the registry has for this code; null where it has nothing, or the code is damaged.
std::shared_ptr<Image> find_image(const void* code);
Function* function_of(const void* handle);

}  // namespace driver
