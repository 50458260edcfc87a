// Stream capture and graphs. A capture that does what no graph can hold is an error, and invalid from then on.
#include <algorithm>

#include "call.h"

namespace driver {

namespace {

struct Graph {
  std::vector<std::function<CUresult()>> nodes;
};

auto& captures = *new std::vector<Capture*>;  // under way
auto& graphs = *new std::set<Graph*>;
auto& executables = *new std::set<Graph*>;
thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

// Whether the capture forbids calls that may not be safe to this thread.
bool forbids(const Capture& capture) {
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  const bool is_own = capture.thread == std::this_thread::get_id();
  if (is_own) return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

bool is_joined(const Capture& capture) {
  return std::all_of(capture.streams.begin(), capture.streams.end(), [&](const auto& each) {
    const auto waited = capture.joined.find(each.first);
    return each.first == capture.origin || (waited != capture.joined.end() && waited->second >= each.second);
  });
}

void end(Capture& capture) {
  for (auto& [stream, last] : capture.streams) stream->capture = nullptr;
  captures.erase(std::find(captures.begin(), captures.end(), &capture));
}

Graph* find(const std::set<Graph*>& among, const void* handle) {
  auto* graph = static_cast<Graph*>(const_cast<void*>(handle));
  need(among.count(graph) != 0);
  return graph;
}

CUresult instantiate(CUgraphExec* executable, CUgraph graph) {
  return call("cuGraphInstantiate", IN_CONTEXT, [&] {
    auto* made = new Graph(*find(graphs, graph));
    executables.insert(made);
    *executable = reinterpret_cast<CUgraphExec>(made);
  });
}

}  // namespace

void invalidate(Capture& capture) { capture.is_valid = false; }

void refuse_in_capture() {
  bool is_refused = false;
  for (Capture* capture : captures) {
    if (!forbids(*capture)) continue;
    invalidate(*capture);
    is_refused = true;
  }
  need(!is_refused, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void refuse_legacy_in_capture(Context& context) {
  bool is_refused = false;
  for (Capture* capture : captures) {
    for (auto& [stream, last] : capture->streams) {
      if (capture->context != &context || !stream->is_blocking) continue;
      invalidate(*capture);
      is_refused = true;
    }
  }
  need(!is_refused, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
}

}  // namespace driver

using namespace driver;

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  return call("cuStreamBeginCapture", IN_CONTEXT, [&] {
    Stream* origin = stream_of(stream);
    need(!origin->is_legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    need(origin->capture == nullptr, CUDA_ERROR_ILLEGAL_STATE);
    auto* capture = new Capture{current(), origin, mode, std::this_thread::get_id()};
    capture->streams[origin] = 0;
    captures.push_back(capture);
    origin->capture = capture;
  });
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return call("cuStreamEndCapture", IN_CONTEXT, [&] {
    *graph = nullptr;
    Capture* capture = stream_of(stream)->capture;
    need(capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
    need(capture->origin == stream_of(stream), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    const bool is_own = capture->thread == std::this_thread::get_id();
    need(is_own || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    end(*capture);
    need(capture->is_valid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    need(is_joined(*capture), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    auto* made = new Graph{capture->nodes};
    graphs.insert(made);
    *graph = reinterpret_cast<CUgraph>(made);
  });
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return call("cuStreamIsCapturing", IN_CONTEXT, [&] {
    const Stream* found = stream_of(stream);
    if (found->is_legacy) refuse_legacy_in_capture(*found->context);
    const Capture* capture = found->capture;
    *status = capture == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture->is_valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                  : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  });
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return call("cuThreadExchangeStreamCaptureMode", STARTED, [&] { std::swap(*mode, thread_mode); });
}

CUresult cuGraphInstantiate(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  return instantiate(executable, graph);
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  return call("cuGraphGetNodes", STARTED, [&] {
    need(nodes == nullptr, CUDA_ERROR_NOT_SUPPORTED);
    *count = find(graphs, graph)->nodes.size();
  });
}

CUresult cuGraphUpload(CUgraphExec executable, CUstream stream) {
  return call("cuGraphUpload", IN_CONTEXT, [&] {
    find(executables, executable);
    stream_of(stream);
  });
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  return call("cuGraphLaunch", IN_CONTEXT, [&] {
    const std::vector<std::function<CUresult()>> nodes = find(executables, executable)->nodes;
    enqueue(*stream_of(stream), [nodes] {
      CUresult code = CUDA_SUCCESS;
      for (auto node = nodes.begin(); code == CUDA_SUCCESS && node != nodes.end(); ++node) code = (*node)();
      return code;
    });
  });
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
  return call("cuGraphExecDestroy", STARTED, [&] { executables.erase(find(executables, executable)); });
}

CUresult cuGraphDestroy(CUgraph graph) {
  return call("cuGraphDestroy", STARTED, [&] { graphs.erase(find(graphs, graph)); });
}
