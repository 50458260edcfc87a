// Launches: what a driver checks when it is asked for one, and what runs it later: the emulator, in a process of its
// own.
#include <fnmatch.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "call.h"
#include "devices.h"
#include "emulator.h"

namespace driver {

namespace {

using Bytes = std::vector<unsigned char>;

// For benchmarks of what happens on the host: launches are checked, and then dropped.
const bool is_idle = getenv("KSGEN_DRIVER_IDLE") != nullptr;

// The arguments as one block, from an array of pointers to each or from a block that the caller laid out.
Bytes take_arguments(const Kernel& kernel, void** pointers, void** extra) {
  Bytes block(kernel.parameter_bytes());
  if (extra != nullptr) {
    const void* given = nullptr;
    size_t bytes = 0;
    for (void** each = extra; *each != CU_LAUNCH_PARAM_END; each += 2) {
      if (*each == CU_LAUNCH_PARAM_BUFFER_POINTER) given = each[1];
      if (*each == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t*>(each[1]);
    }
    need(bytes == block.size() && (given != nullptr || bytes == 0));
    if (bytes != 0) memcpy(block.data(), given, bytes);
    return block;
  }
  need(pointers != nullptr || kernel.parameters.empty());
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    memcpy(block.data() + kernel.parameters[i].offset, pointers[i], kernel.parameters[i].bytes);
  }
  return block;
}

Manner manner_of(const CUlaunchConfig& config, const Function& function, const Gpu& gpu) {
  Manner manner = {std::max(function.kernel.cluster, 1), 10 * gpu.major + gpu.minor};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config.attrs[i];
    const auto& size = attribute.value.clusterDim;
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        need(size.y == 1 && size.z == 1, CUDA_ERROR_NOT_SUPPORTED);  // here
        need(function.kernel.cluster == 0 || int(size.x) == function.kernel.cluster);
        manner.cluster = size.x;
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        need(gpu.has_clusters(), CUDA_ERROR_NOT_SUPPORTED);  // both came with compute capability 9.0
        manner.is_early = attribute.value.programmaticStreamSerializationAllowed != 0;
        break;
      default:
        throw CUDA_ERROR_NOT_SUPPORTED;  // here
    }
  }
  return manner;
}

void check_sizes(const CUlaunchConfig& config, const Function& function, const Gpu& gpu, int cluster) {
  const unsigned blocks[] = {config.gridDimX, config.gridDimY, config.gridDimZ};
  const unsigned threads[] = {config.blockDimX, config.blockDimY, config.blockDimZ};
  need(*std::min_element(blocks, blocks + 3) > 0 && *std::min_element(threads, threads + 3) > 0);
  need(blocks[0] <= 0x7fffffff && blocks[1] <= 65535 && blocks[2] <= 65535);
  need(threads[0] <= 1024 && threads[1] <= 1024 && threads[2] <= 64);
  const unsigned long long all = 1ull * threads[0] * threads[1] * threads[2];
  need(all <= 1024 && (function.kernel.most_threads == 0 || all <= unsigned(function.kernel.most_threads)));
  const unsigned warps = (all + 31) / 32, registers = (function.kernel.registers + 7) / 8 * 8;
  need(warps * 32 * registers <= 64 << 10, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  need(int(config.sharedMemBytes) >= 0 && int(config.sharedMemBytes) <= function.most_dynamic_bytes);
  need(int(config.sharedMemBytes) + function.kernel.shared_bytes <= gpu.optin_shared_bytes());
  need(cluster == 1 || gpu.has_clusters(), CUDA_ERROR_NOT_SUPPORTED);
  need(cluster <= most_clustered && blocks[0] % cluster == 0, CUDA_ERROR_INVALID_CLUSTER_SIZE);
}

// Of KSGEN_DRIVER_DURATIONS, a list of `entry:microseconds` with commas between and * for any letters.
std::vector<std::pair<std::string, double>> read_durations() {
  const char* named = getenv("KSGEN_DRIVER_DURATIONS");
  std::stringstream list(named != nullptr ? named : "");
  std::vector<std::pair<std::string, double>> found;
  for (std::string each; std::getline(list, each, ',');) {
    const size_t colon = each.find(':');
    if (colon != std::string::npos) found.emplace_back(each.substr(0, colon), atof(each.c_str() + colon + 1));
  }
  return found;
}

const auto durations = read_durations();

// Duration by a model. A configured duration comes first. A waiting kernel takes four cycles per round.
// Other launches take 2 us, and 1 us more per wave of threads that fill the GPU.
uint64_t duration_ns(const Kernel& kernel, const CUlaunchConfig& config, const Bytes& arguments, const Gpu& gpu) {
  for (const auto& [entry, microseconds] : durations) {
    if (fnmatch(entry.c_str(), kernel.name.c_str(), 0) == 0) return uint64_t(microseconds * 1000);
  }
  if (kernel.name == "ks_wait") {
    uint64_t rounds = 0;
    memcpy(&rounds, arguments.data() + kernel.parameters.at(1).offset, sizeof(rounds));
    return rounds * 4 * 1000000 / gpu.clock_khz;
  }
  const double blocks = 1.0 * config.gridDimX * config.gridDimY * config.gridDimZ;
  const double threads = blocks * config.blockDimX * config.blockDimY * config.blockDimZ;
  return 2000 + uint64_t(1000 * threads / (1.0 * gpu.multiprocessors * gpu.threads_per_multiprocessor));
}

// As a kernel that is wrong would: everything that it wrote is something else.
void spoil(const std::vector<Bytes>& before, const std::vector<std::shared_ptr<Allocation>>& after) {
  for (size_t i = 0; i < after.size(); ++i) {
    Bytes& content = after[i]->content;
    for (size_t at = 0; at < content.size(); ++at) {
      if (content[at] != before[i][at]) content[at] ^= 0x5a;
    }
  }
}

struct Launch {
  CUlaunchConfig config;
  const Function* function;
  Manner manner;
  Bytes arguments;
  Context* context;
  uint64_t queued_ns;

  // The allocations that the arguments point into: what else a kernel reaches for is not there.
  std::vector<std::shared_ptr<Allocation>> allocations() const {
    std::vector<std::shared_ptr<Allocation>> found;
    for (size_t at = 0; at + 8 <= arguments.size(); at += 8) {
      CUdeviceptr word;
      memcpy(&word, arguments.data() + at, 8);
      const auto each = allocation_at(word, 0);
      if (each == nullptr || each->context != context) continue;
      if (std::find(found.begin(), found.end(), each) == found.end()) found.push_back(each);
    }
    return found;
  }

  CUresult run() const {
    const KernelFault fault = fault_of_kernel(function->kernel.name);
    if (fault.hangs) throw Hang();
    if (fault.code != CUDA_SUCCESS) return fault.code;
    if (!function->is_loaded) return CUDA_ERROR_ILLEGAL_INSTRUCTION;
    const auto memory = allocations();
    std::vector<Bytes> before;
    for (const auto& each : memory) before.push_back(each->content);
    const CUresult code = emulate(*function, config, manner, arguments, memory);
    if (fault.is_wrong) spoil(before, memory);
    context->begin_at(queued_ns);
    context->clock_ns += duration_ns(function->kernel, config, arguments, gpu_of(context->device));
    return code;
  }
};

CUresult launch(const char* name, const CUlaunchConfig& config, CUfunction handle, void** pointers, void** extra) {
  return call(name, IN_CONTEXT, [&] {
    const Function* function = function_of(handle);
    Stream* stream = stream_of(config.hStream);
    const Gpu& gpu = gpu_of(current()->device);
    const Manner manner = manner_of(config, *function, gpu);
    if (manner.is_early && stream->capture != nullptr && cuda_version < 12030) {  // graphs hold such edges from then on
      invalidate(*stream->capture);
      throw CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    check_sizes(config, *function, gpu, manner.cluster);
    const Launch made = {config, function, manner, take_arguments(function->kernel, pointers, extra), current(),
                         host_queues_launch()};
    if (is_idle) return;
    enqueue(*stream, [made] { return made.run(); });
  });
}

}  // namespace

}  // namespace driver

using namespace driver;

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void** pointers, void** extra) {
  const CUlaunchConfig config = {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, nullptr, 0};
  return launch("cuLaunchKernel", config, function, pointers, extra);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** pointers, void** extra) {
  return launch("cuLaunchKernelEx", *config, function, pointers, extra);
}

CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction handle, const CUlaunchConfig* config) {
  return call("cuOccupancyMaxActiveClusters", IN_CONTEXT, [&] {
    const Gpu& gpu = gpu_of(current()->device);
    const Manner manner = manner_of(*config, *function_of(handle), gpu);
    *clusters = gpu.has_clusters() && manner.cluster <= most_clustered ? gpu.multiprocessors / manner.cluster : 0;
  });
}
