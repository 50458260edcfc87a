// Runs one launch: reads the job file, runs the blocks sequentially, writes the buffers to the result file.
// usage: <executable> <job> <result>. The layout of both files is that of emulator.py.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "bulk.h"
#include "calls.h"
#include "cluster.h"
#include "copies.h"
#include "encode_map.h"
#include "engine_work.h"
#include "faults.h"
#include "interface.h"
#include "job.h"
#include "leave.h"
#include "matrices.h"
#include "mbarrier.h"
#include "registers.h"
#include "report.h"
#include "scheduler.h"
#include "stores.h"
#include "stuck.h"
#include "tensor_core.h"
#include "wgmma.h"
#if SIMT_COUNTS
#include "hooks.h"
#endif

namespace simt {

int threads_of_block() { return scheduler.size(); }

void trap() {
  const Call call;
  fail("trap", "__trap() was called");
}

int lane() { return scheduler.current()->lane(); }

void barrier(const char* what, int id, int threads, bool waits) {
  const Call call;
  scheduler.arrive(what, id, threads, waits);
}

const Exchange& exchange(const char* what, unsigned mask, const void* value, int bytes, bool orders_memory) {
  const Call call;
  return scheduler.meet(what, mask, value, bytes, orders_memory);
}

unsigned shared_address(const void* pointer) {
  const Call call;
  return address_of(pointer);
}

void* shared_pointer(unsigned address) {
  const Call call;
  return own_bytes_at("the address of shared memory", address, 0, 1);
}

void* dynamic_shared() { return scheduler.block().shared->data(); }

void fence_proxy_async() {
  const Call call;
  scheduler.block().shared->publish();
  show_own_mbarriers();
  show_to_proxy(&scheduler.current()->shown_to_proxy);
}

void wait_for_previous_grid() {
  const Call call;
  if (scheduler.current()->has_waited) return;
  scheduler.current()->has_waited = true;
  if (!order.happens(4)) return scheduler.yield();
  show_memory(true);  // others may still wait: this is no barrier
}

struct Argument {
  bool is_pointer;
  std::vector<unsigned char> bytes;
  bool is_of_caller = false;  // addresses in it are the caller's, and only the kernel knows whether it is one
};

static std::vector<Argument> arguments;

// Translates the caller's address into this process. An address outside all buffers is returned unchanged.
static unsigned char* translate(unsigned char* address) {
  for (const Buffer& buffer : buffers) {
    if (unsigned char* here = buffer.at(reinterpret_cast<size_t>(address))) return here;
  }
  return address;
}

static Argument translate(Argument given, bool is_pointer) {
  unsigned char* address;
  if (is_pointer && given.bytes.size() == sizeof(address)) {
    memcpy(&address, given.bytes.data(), sizeof(address));
    address = translate(address);
    memcpy(given.bytes.data(), &address, sizeof(address));
  } else if (given.bytes.size() == TensorMap::BYTES) {
    translate_map(given.bytes, translate);
  }
  return {is_pointer, given.bytes};
}

const void* argument(int index, int bytes, bool is_pointer) {
  if (arguments[index].is_of_caller) arguments[index] = translate(arguments[index], is_pointer);
  const Argument& given = arguments[index];
  if (given.is_pointer != is_pointer || int(given.bytes.size()) != bytes) {
    fail("argument", "argument %d: the kernel takes a %d-byte %s, given is a %zu-byte %s", index, bytes,
         is_pointer ? "pointer" : "value", given.bytes.size(), given.is_pointer ? "pointer" : "value");
  }
  return given.bytes.data();
}

static void check_slack() {
  for (const Buffer& buffer : buffers) {
    if (buffer.slack_is_untouched()) continue;
    fail("out-of-bounds", "a write next to argument %d, which has %zu bytes", buffer.argument(), buffer.bytes());
  }
  for (const SharedMemory& shared : shared_memories) {
    if (shared.slack_is_untouched()) continue;
    fail("out-of-bounds", "a write next to the dynamic shared memory, which has %zu bytes", shared.bytes());
  }
}

// Clusters run sequentially; a cluster is `cluster_size` neighbours along x.
static void run(const Entry& entry, unsigned cluster_size) {
  scheduler.prepare(cluster_size, entry);
  std::vector<int> clusters(size_t(gridDim.x) * gridDim.y * gridDim.z / cluster_size);
  order.permute(clusters);
  for (const unsigned cluster : clusters) {
    std::vector<unsigned> blocks;
    for (unsigned rank = 0; rank < cluster_size; ++rank) blocks.push_back(cluster * cluster_size + rank);
    mbarriers.clear();
    scheduler.run_cluster(blocks);
    check_slack();
  }
}

static void write_buffers() {
  FILE* file = fopen(result_path, "wb");
  for (const Buffer& buffer : buffers) fwrite(buffer.data(), 1, buffer.bytes(), file);
  write_counts(file);
  for (const Suspect& suspect : scheduler.suspects()) write_suspect(file, suspect);
  if (fclose(file) != 0) fail("crash", "cannot write the result file");
}

static dim3 read_size(Job& job) {
  const unsigned x = job.number(), y = job.number(), z = job.number();
  return {x, y, z};
}

static Argument read_argument(Job& job) {
  enum Kind { VALUE, BUFFER, NULL_POINTER, TENSOR_MAP, AS_A_DRIVER_HAS_IT };
  const Kind kind = Kind(job.number());
  const long long detail = job.number();  // bytes of a value, or which buffer
  if (kind == VALUE || kind == AS_A_DRIVER_HAS_IT) {
    const unsigned char* begin = job.bytes(detail);
    return {false, {begin, begin + detail}, kind == AS_A_DRIVER_HAS_IT};
  }
  if (kind == TENSOR_MAP) return {false, encode_map(job, buffers[detail])};
  const void* data = kind == BUFFER ? buffers[detail].data() : nullptr;
  const auto begin = reinterpret_cast<const unsigned char*>(&data);
  return {true, {begin, begin + sizeof(data)}};
}

// What the hardware would not launch.
static void check_launch(const Entry& entry, int arguments_given, unsigned cluster_size) {
  const int threads = blockDim.x * blockDim.y * blockDim.z, cluster = cluster_size;
  if (arguments_given != entry.parameters) {
    fail("argument", "the kernel takes %d arguments, given are %d", entry.parameters, arguments_given);
  }
  if (entry.bounds.threads != 0 && threads > entry.bounds.threads) {
    fail("launch", "%d threads a block; the kernel's __launch_bounds__ say %d", threads, entry.bounds.threads);
  }
  if (entry.bounds.cluster != 0 && cluster > entry.bounds.cluster) {
    fail("launch", "clusters of %d blocks; the kernel's __launch_bounds__ say %d", cluster, entry.bounds.cluster);
  }
  const ClusterSize& declared = entry.cluster;
  if (declared.x != 0 && (declared.x != cluster || declared.y != 1 || declared.z != 1)) {
    fail("launch", "clusters of (%d, 1, 1) blocks; the kernel's __cluster_dims__ say (%d, %d, %d)", cluster, declared.x,
         declared.y, declared.z);
  }
  if (gridDim.x % cluster != 0) fail("launch", "%u blocks along x, in clusters of %d", gridDim.x, cluster);
  if (cluster > 1 && static_shared_bytes() > 0) {
    fail("cluster", "static __shared__ arrays in a cluster, which the emulator cannot do");
  }
}

static void launch(Job job) {
  gridDim = read_size(job);
  blockDim = read_size(job);
  const size_t shared_bytes = job.number();
  const auto kind = Order::Kind(job.number());
  order.set(kind, job.number());
  const unsigned cluster_asked = job.number();  // 0: as the kernel says
  is_early = job.number();
  accumulation = Accumulation(job.number());
  architecture = job.number();
  catch_signals(job.number());
  const Entry& entry = entries[job.number()];
  const unsigned cluster_size = std::max(1u, cluster_asked != 0 ? cluster_asked : unsigned(entry.cluster.x));

  for (long long i = 0, count = job.number(); i < count; ++i) {
    const int first_argument = job.number();
    const bool writable = job.number();
    const size_t address = job.number(), bytes = job.number();
    buffers.emplace_back(first_argument, job.bytes(bytes), bytes, address, writable);
  }
  const int count = job.number();
  for (int i = 0; i < count; ++i) arguments.push_back(read_argument(job));
  check_launch(entry, count, cluster_size);
  for (unsigned rank = 0; rank < cluster_size; ++rank) shared_memories.emplace_back(shared_bytes);
  run(entry, cluster_size);
  write_buffers();
}

}  // namespace simt

int main(int, char** argv) {
  simt::result_path = argv[2];
  simt::launch(simt::Job(argv[1]));
  fflush(stdout);
  simt::leave(0);
}
