// Streams and events. Work is queued, and runs as late as may be: when somebody waits for it, asks whether it is done,
// or copies with the host waiting. So what a missing wait or a wrong stream leaves behind is seen.
#include "call.h"

namespace driver {

namespace {

constexpr uint64_t EVENT_NS = 500;  // what an event tells of time, by the manual; the host takes as long to record it

uint64_t last_number = 0;
uint64_t host_ns = 0;
uint32_t drawn = 1;
auto& handles = *new std::set<Stream*>;  // that users made, and have not destroyed
auto& events = *new std::set<Event*>;

Stream* legacy_of(Context& context) { return context.streams.front(); }

// The legacy stream's work comes after all that blocking streams were given before it, and theirs after its.
void run_what_comes_before(Stream& stream, uint64_t number) {
  if (stream.is_legacy) {
    for (Stream* other : stream.context->streams) {
      if (other != &stream && other->is_blocking) run_through(*other, number - 1);
    }
  } else if (stream.is_blocking) {
    run_through(*legacy_of(*stream.context), number - 1);
  }
}

// Throws Hang, with everything still queued behind it, where the work never ends.
void run_first(Stream& stream) {
  Work work = std::move(stream.queue.front());
  stream.queue.pop_front();
  try {
    run_what_comes_before(stream, work.number);
    if (stream.context->lost != CUDA_SUCCESS) return;
    if (const CUresult code = work.run(); code != CUDA_SUCCESS) lose(*stream.context, code);
  } catch (Hang) {
    stream.queue.push_front(std::move(work));
    throw;
  }
}

// Whether everything up to the number has run now, without waiting for what never ends.
bool is_done(Stream& stream, uint64_t number) {
  try {
    run_through(stream, number);
  } catch (Hang) {
    return false;
  }
  check_lost(*stream.context);
  return true;
}

Stream* per_thread(Context& context) {
  Stream*& found = context.of_threads[std::this_thread::get_id()];
  if (found == nullptr) context.streams.push_back(found = new Stream{&context, false, true});
  return found;
}

CUresult make_stream(const char* name, CUstream* handle, unsigned int flags) {
  return call(name, IN_CONTEXT, [&] {
    need((flags & ~CU_STREAM_NON_BLOCKING) == 0);
    auto* stream = new Stream{current(), false, (flags & CU_STREAM_NON_BLOCKING) == 0};
    current()->streams.push_back(stream);
    handles.insert(stream);
    *handle = reinterpret_cast<CUstream>(stream);
  });
}

Event* event_of(CUevent handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  need(events.count(event) != 0, CUDA_ERROR_INVALID_HANDLE);
  return event;
}

// Whether what the event stands for is done; throws where only a graph knows.
bool is_done(const Event& event) {
  need(event.capture == nullptr, CUDA_ERROR_CAPTURED_EVENT);
  return event.stream == nullptr || is_done(*event.stream, event.number);
}

void record(Event& event, Stream& stream) {
  need(event.context == stream.context, CUDA_ERROR_INVALID_HANDLE);
  event.capture = stream.capture;
  if (stream.capture != nullptr) {
    need(stream.capture->is_valid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    event.captured_after = stream.capture->nodes.size();
    return;
  }
  const uint64_t number = last_number + 1, queued_ns = host_queues_event();
  enqueue(stream, [&event, &stream, number, queued_ns] {
    if (event.number != number) return CUDA_SUCCESS;  // it was recorded again
    stream.context->begin_at(queued_ns);
    event.time_ns = stream.context->clock_ns / EVENT_NS * EVENT_NS;
    event.is_pending = false;
    return CUDA_SUCCESS;
  });
  event.stream = &stream;
  event.number = number;
  event.is_pending = true;
}

// The stream takes part in the event's capture from here on, or waits for another stream of its own.
void join(Stream& stream, const Event& event) {
  Capture& capture = *event.capture;
  if (stream.capture != nullptr && stream.capture != &capture) {
    invalidate(*stream.capture);
    throw CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  stream.capture = &capture;
  capture.streams.emplace(&stream, event.captured_after);
  for (auto& [other, last] : capture.streams) {
    if (last <= event.captured_after) capture.joined[other] = event.captured_after;
  }
}

// The host goes on when the device has come to the end of what it waited for.
void host_waited(const Context& context) { host_ns = std::max(host_ns, context.clock_ns); }

}  // namespace

uint64_t host_queues_launch() {
  drawn = drawn * 1664525 + 1013904223;
  return host_ns += 6000 + (drawn >> 8) % 2001;
}

uint64_t host_queues_event() { return host_ns += EVENT_NS; }

Stream* stream_of(CUstream handle) {
  Context& context = *current();
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return legacy_of(context);
  if (handle == CU_STREAM_PER_THREAD) return per_thread(context);
  auto* stream = reinterpret_cast<Stream*>(handle);
  need(handles.count(stream) != 0 && stream->context == &context, CUDA_ERROR_INVALID_HANDLE);
  return stream;
}

void enqueue(Stream& stream, std::function<CUresult()> run) {
  if (Capture* capture = stream.capture) {
    need(capture->is_valid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    capture->nodes.push_back(std::move(run));
    capture->streams[&stream] = capture->nodes.size();
    return;
  }
  if (stream.is_legacy) refuse_legacy_in_capture(*stream.context);
  stream.queue.push_back({++last_number, std::move(run)});
}

void run_through(Stream& stream, uint64_t number) {
  while (!stream.queue.empty() && stream.queue.front().number <= number) run_first(stream);
}

void finish(Stream& stream) {
  run_through(stream, last_number);
  if (stream.is_legacy) run_what_comes_before(stream, last_number + 1);
  host_waited(*stream.context);
  check_lost(*stream.context);
}

void finish_all(Context& context) {
  for (Stream* stream : std::vector<Stream*>(context.streams)) run_through(*stream, last_number);
  host_waited(context);
  check_lost(context);
}

void run_now(Stream& stream, std::function<CUresult()> run) {
  refuse_in_capture();
  enqueue(stream, std::move(run));
  finish(stream);
}

}  // namespace driver

using namespace driver;

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) { return make_stream("cuStreamCreate", stream, flags); }

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int) {
  return make_stream("cuStreamCreateWithPriority", stream, flags);
}

// What it was given still runs.
CUresult cuStreamDestroy(CUstream stream) {
  return call("cuStreamDestroy", IN_CONTEXT, [&] {
    need(handles.erase(reinterpret_cast<Stream*>(stream)) != 0, CUDA_ERROR_INVALID_HANDLE);
  });
}

CUresult cuStreamSynchronize(CUstream stream) {
  return call("cuStreamSynchronize", IN_CONTEXT, [&] {
    Stream* found = stream_of(stream);
    if (found->capture != nullptr) {
      invalidate(*found->capture);
      throw CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (found->is_legacy) refuse_legacy_in_capture(*found->context);
    finish(*found);
  });
}

CUresult cuStreamQuery(CUstream stream) {
  return call("cuStreamQuery", IN_CONTEXT, [&] {
    Stream* found = stream_of(stream);
    if (found->capture != nullptr) {
      invalidate(*found->capture);
      throw CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    need(is_done(*found, last_number), CUDA_ERROR_NOT_READY);
  });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
  return call("cuStreamWaitEvent", IN_CONTEXT, [&] {
    Stream* in = stream_of(stream);
    const Event* waited = event_of(event);
    if (waited->capture != nullptr) return join(*in, *waited);
    if (in->capture != nullptr && waited->stream != nullptr) {
      invalidate(*in->capture);
      throw CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (waited->stream == nullptr) return;
    Stream* other = waited->stream;
    const uint64_t number = waited->number;
    enqueue(*in, [other, number] {
      run_through(*other, number);
      return other->context->lost;
    });
  });
}

CUresult cuStreamGetFlags(CUstream stream, unsigned int* flags) {
  return call("cuStreamGetFlags", IN_CONTEXT,
              [&] { *flags = stream_of(stream)->is_blocking ? 0 : CU_STREAM_NON_BLOCKING; });
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  return call("cuStreamGetCtx", IN_CONTEXT,
              [&] { *context = reinterpret_cast<CUcontext>(stream_of(stream)->context); });
}

CUresult cuEventCreate(CUevent* event, unsigned int flags) {
  return call("cuEventCreate", IN_CONTEXT, [&] {
    auto* made = new Event{current(), (flags & CU_EVENT_DISABLE_TIMING) == 0};
    events.insert(made);
    *event = reinterpret_cast<CUevent>(made);
  });
}

CUresult cuEventDestroy(CUevent event) {
  return call("cuEventDestroy", IN_CONTEXT, [&] { events.erase(event_of(event)); });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  return call("cuEventRecord", IN_CONTEXT, [&] { record(*event_of(event), *stream_of(stream)); });
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int) { return cuEventRecord(event, stream); }

CUresult cuEventQuery(CUevent event) {
  return call("cuEventQuery", IN_CONTEXT, [&] { need(is_done(*event_of(event)), CUDA_ERROR_NOT_READY); });
}

CUresult cuEventSynchronize(CUevent event) {
  return call("cuEventSynchronize", IN_CONTEXT, [&] {
    if (!is_done(*event_of(event))) throw Hang();
  });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return call("cuEventElapsedTime", IN_CONTEXT, [&] {
    for (const Event* event : {event_of(start), event_of(end)}) {
      need(event->is_timed && event->stream != nullptr && event->context == current(), CUDA_ERROR_INVALID_HANDLE);
      need(!event->is_pending, CUDA_ERROR_NOT_READY);
    }
    *milliseconds = (double(event_of(end)->time_ns) - double(event_of(start)->time_ns)) * 1e-6;
  });
}
