// Runs one launch: reads the job file, runs the blocks one after the other, writes the buffers to the result file.
// usage: <executable> <job> <result>. The layout of both files is that of emulator.py.
#include <cstdio>
#include <cstring>
#include <vector>

#include "bulk.h"
#include "calls.h"
#include "cluster.h"
#include "copies.h"
#include "engine_work.h"
#include "faults.h"
#include "interface.h"
#include "matrices.h"
#include "mbarrier.h"
#include "registers.h"
#include "report.h"
#include "scheduler.h"
#include "stuck.h"
#include "tensor_core.h"
#include "wgmma.h"

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
  void* pointer = pointer_to(address);
  if (!is_shared(pointer, 0)) fail("out-of-bounds", "0x%x is not shared memory", address);
  return pointer;
}

void* dynamic_shared() { return scheduler.block().shared->data(); }

void fence_proxy_async() { scheduler.block().shared->publish(); }

struct Argument {
  bool is_pointer;
  std::vector<unsigned char> bytes;
};

static std::vector<Argument> arguments;

const void* argument(int index, int bytes, bool is_pointer) {
  const Argument& given = arguments[index];
  if (given.is_pointer != is_pointer || int(given.bytes.size()) != bytes) {
    fail("argument", "argument %d: the kernel takes a %d-byte %s, given is a %zu-byte %s", index, bytes,
         is_pointer ? "pointer" : "value", given.bytes.size(), given.is_pointer ? "pointer" : "value");
  }
  return given.bytes.data();
}

class Job {
 public:
  explicit Job(const char* path) {
    FILE* file = fopen(path, "rb");
    if (file == nullptr) fail("crash", "cannot open the job file");
    fseek(file, 0, SEEK_END);
    content_.resize(ftell(file));
    rewind(file);
    if (fread(content_.data(), 1, content_.size(), file) != content_.size()) fail("crash", "short job file");
    fclose(file);
  }

  long long number() { return *reinterpret_cast<const long long*>(bytes(sizeof(long long))); }

  const unsigned char* bytes(size_t count) {
    const unsigned char* result = content_.data() + position_;
    position_ += round_up(count, sizeof(long long));
    return result;
  }

 private:
  std::vector<unsigned char> content_;
  size_t position_ = 0;
};

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

// Clusters run one after the other; a cluster is `cluster_size` neighbours along x.
static void run(const Entry& entry, unsigned cluster_size) {
  scheduler.prepare(cluster_size, entry.call);
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
  for (const Suspect& suspect : scheduler.suspects()) write_suspect(file, suspect);
  if (fclose(file) != 0) fail("crash", "cannot write the result file");
}

static dim3 read_size(Job& job) {
  const unsigned x = job.number(), y = job.number(), z = job.number();
  return {x, y, z};
}

// What the host does with cuTensorMapEncodeTiled.
static std::vector<unsigned char> encode_map(Job& job, const Buffer& buffer) {
  TensorMap map = {};
  map.magic = TensorMap::MAGIC;
  map.base = buffer.data();
  map.dimensions = job.number();
  map.element_bytes = job.number();
  map.swizzle = TensorMap::Swizzle(job.number());
  for (int i = 0; i < map.dimensions; ++i) map.size[i] = job.number();
  for (int i = 0; i + 1 < map.dimensions; ++i) map.stride[i] = job.number();
  for (int i = 0; i < map.dimensions; ++i) map.box[i] = job.number();
  if (const std::string complaint = map.complaint(); !complaint.empty()) fail("tensor-map", "%s", complaint.c_str());
  if (map.extent() > buffer.bytes()) {
    fail("tensor-map", "the map takes in %llu bytes of argument %d, which has %zu", map.extent(), buffer.argument(),
         buffer.bytes());
  }
  std::vector<unsigned char> bytes(128);
  memcpy(bytes.data(), &map, sizeof(map));
  return bytes;
}

static Argument read_argument(Job& job) {
  enum Kind { VALUE, BUFFER, NULL_POINTER, TENSOR_MAP };
  const Kind kind = Kind(job.number());
  const long long detail = job.number();  // bytes of a value, or which buffer
  if (kind == VALUE) {
    const unsigned char* begin = job.bytes(detail);
    return {false, {begin, begin + detail}};
  }
  if (kind == TENSOR_MAP) return {false, encode_map(job, buffers[detail])};
  const void* data = kind == BUFFER ? buffers[detail].data() : nullptr;
  const auto begin = reinterpret_cast<const unsigned char*>(&data);
  return {true, {begin, begin + sizeof(data)}};
}

static void launch(Job job) {
  gridDim = read_size(job);
  blockDim = read_size(job);
  const size_t shared_bytes = job.number();
  const auto kind = Order::Kind(job.number());
  order.set(kind, job.number());
  const unsigned cluster_size = job.number();
  accumulation = Accumulation(job.number());
  catch_signals(job.number());
  const Entry& entry = entries[job.number()];

  for (long long i = 0, count = job.number(); i < count; ++i) {
    const int first_argument = job.number();
    const bool writable = job.number();
    const size_t address = job.number(), bytes = job.number();
    buffers.emplace_back(first_argument, job.bytes(bytes), bytes, address, writable);
  }
  const int count = job.number();
  for (int i = 0; i < count; ++i) arguments.push_back(read_argument(job));
  if (count != entry.parameters) {
    fail("argument", "the kernel takes %d arguments, given are %d", entry.parameters, count);
  }
  if (cluster_size > 1 && static_shared_bytes() > 0) {
    fail("cluster", "static __shared__ arrays in a cluster, which the emulator cannot do");
  }
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
