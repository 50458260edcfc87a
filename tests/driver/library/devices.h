// The GPUs that the stand-in shows: KSGEN_DRIVER_GPUS lists them, H200 unless set, none where it is empty.
#pragma once

#include <cuda.h>

#include <string>

namespace driver {

struct Gpu {
  const char *word, *name;
  int major, minor, multiprocessors, clock_khz, shared_bytes, threads_per_multiprocessor, blocks_per_multiprocessor;
  int l2_bytes, bus_bits, memory_khz;
  size_t memory_bytes;

  int optin_shared_bytes() const { return shared_bytes - 1024; }
  bool has_clusters() const { return major >= 9; }
};

constexpr size_t MOST_MEMORY_BYTES = size_t(4) << 30;  // that is free on each of them: it is the host's

// The CUDA that the driver serves: KSGEN_DRIVER_CUDA, the header's unless set. With a + behind it, it loads newer
// binaries too, as none does: for tests of what else its version changes, with a compiler that is newer.
extern const int cuda_version;
extern const bool takes_newer_binaries;

// Blocks of the largest cluster that fits: KSGEN_DRIVER_CLUSTER, 8 unless set. A part of a GPU may have room for none.
extern const int most_clustered;

int device_count();
const Gpu& gpu_of(CUdevice device);  // throws CUDA_ERROR_INVALID_DEVICE
int attribute_of(CUdevice device, CUdevice_attribute attribute);

}  // namespace driver
