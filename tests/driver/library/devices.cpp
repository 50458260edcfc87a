#include "devices.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <vector>

#include "call.h"

namespace driver {

namespace {

constexpr Gpu GPUS[] = {
    {"H200", "NVIDIA H200", 9, 0, 132, 1980000, 228 << 10, 2048, 32, 50 << 20, 6144, 3201000, 150109880320},
    {"A100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 1410000, 164 << 10, 2048, 32, 40 << 20, 5120, 1593000, 85094236160},
    {"RTX4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 2520000, 100 << 10, 1536, 24, 72 << 20, 384, 10501000,
     25386352640},
};

std::vector<const Gpu*> read_gpus() {
  const char* named = getenv("KSGEN_DRIVER_GPUS");
  std::stringstream list(named != nullptr ? named : "H200");
  std::vector<const Gpu*> found;
  for (std::string word; std::getline(list, word, ',');) {
    const size_t before = found.size();
    for (const Gpu& gpu : GPUS) {
      if (word == gpu.word) found.push_back(&gpu);
    }
    if (found.size() == before) fprintf(stderr, "KSGEN_DRIVER_GPUS: %s is not H200, A100 or RTX4090\n", word.c_str());
  }
  return found;
}

const std::vector<const Gpu*> gpus = read_gpus();

int read_number(const char* name, int otherwise) {
  const char* named = getenv(name);
  return named != nullptr ? atoi(named) : otherwise;
}

// CU_COMPUTEMODE_...: 3 is exclusive-process mode. It is shown, and keeps no process away.
const int compute_mode = read_number("KSGEN_DRIVER_MODE", 0);

}  // namespace

const int most_clustered = read_number("KSGEN_DRIVER_CLUSTER", 8);
const int cuda_version = read_number("KSGEN_DRIVER_CUDA", CUDA_VERSION);
const bool takes_newer_binaries =
    getenv("KSGEN_DRIVER_CUDA") != nullptr && strchr(getenv("KSGEN_DRIVER_CUDA"), '+') != nullptr;

int device_count() { return gpus.size(); }

const Gpu& gpu_of(CUdevice device) {
  need(device >= 0 && device < device_count(), CUDA_ERROR_INVALID_DEVICE);
  return *gpus[device];
}

int attribute_of(CUdevice device, CUdevice_attribute attribute) {
  const Gpu& gpu = gpu_of(device);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return gpu.optin_shared_bytes();
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return gpu.shared_bytes;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 64 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 64 << 10;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return gpu.clock_khz;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return gpu.memory_khz;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return gpu.bus_bits;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return gpu.l2_bytes;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return gpu.multiprocessors;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return gpu.threads_per_multiprocessor;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return gpu.blocks_per_multiprocessor;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return gpu.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return gpu.minor;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return device + 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: return compute_mode;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: return gpu.has_clusters();
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
    default: break;
  }
  need(attribute > 0 && attribute < CU_DEVICE_ATTRIBUTE_MAX);
  return 0;  // what the stand-in does not have
}

}  // namespace driver

using namespace driver;

CUresult cuDriverGetVersion(int* version) {
  return call("cuDriverGetVersion", NOTHING, [&] { *version = cuda_version; });
}

CUresult cuDeviceGetCount(int* count) {
  return call("cuDeviceGetCount", STARTED, [&] { *count = device_count(); });
}

CUresult cuDeviceGet(CUdevice* device, int index) {
  return call("cuDeviceGet", STARTED, [&] {
    gpu_of(index);
    *device = index;
  });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return call("cuDeviceGetName", STARTED, [&] { snprintf(name, length, "%s", gpu_of(device).name); });
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return call("cuDeviceGetUuid", STARTED, [&] {
    memset(uuid, 0, sizeof(*uuid));
    memcpy(uuid, gpu_of(device).word, 4);
    uuid->bytes[15] = device;
  });
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  return call("cuDeviceTotalMem", STARTED, [&] { *bytes = gpu_of(device).memory_bytes; });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return call("cuDeviceGetAttribute", STARTED, [&] { *value = attribute_of(device, attribute); });
}

CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
  return call("cuDeviceComputeCapability", STARTED, [&] {
    *major = gpu_of(device).major;
    *minor = gpu_of(device).minor;
  });
}

CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  return call("cuDeviceGetPCIBusId", STARTED, [&] {
    gpu_of(device);
    snprintf(id, length, "0000:%02x:00.0", device + 1);
  });
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return call("cuDeviceCanAccessPeer", STARTED, [&] {
    gpu_of(device);
    gpu_of(peer);
    *can = 0;
  });
}
