// Runs one launch: reads the job file, runs the blocks one after the other, writes the buffers to the result file.
// usage: <executable> <job> <result>. The layout of both files is that of emulator.py.
#include <cstdio>
#include <cstring>
#include <vector>

#include "copies.h"
#include "faults.h"
#include "interface.h"
#include "report.h"
#include "scheduler.h"

namespace simt {

int threads_of_block() { return scheduler.size(); }

// Always inlined: the address wanted is the one that the kernel's call returns to.
__attribute__((always_inline)) static inline void note_call() {
  scheduler.current()->code = before(__builtin_return_address(0));
}

void trap() {
  note_call();
  fail("trap", "__trap() was called");
}

int lane() { return scheduler.current()->number % 32; }

void barrier(const char* what, int id, int threads, bool waits) {
  note_call();
  scheduler.arrive(what, id, threads, waits);
}

const Exchange& exchange(const char* what, unsigned mask, const void* value, int bytes, bool orders_memory) {
  note_call();
  return scheduler.meet(what, mask, value, bytes, orders_memory);
}

// The window starts above zero, so that a null address is no shared memory; static arrays follow the dynamic part.
constexpr unsigned SHARED_WINDOW = 1024, STATIC_WINDOW = 1 << 20;

unsigned shared_address(const void* pointer) {
  note_call();
  if (!shared.holds(pointer, 0)) fail("out-of-bounds", "%s is not shared memory", describe(pointer).c_str());
  const auto byte = static_cast<const unsigned char*>(pointer);
  if (byte >= shared.data() && byte <= shared.data() + shared.bytes()) return SHARED_WINDOW + (byte - shared.data());
  return STATIC_WINDOW + (byte - __start_simt_shared);
}

void* shared_pointer(unsigned address) {
  note_call();
  void* pointer = address < STATIC_WINDOW ? shared.data() + (long(address) - SHARED_WINDOW)
                                          : __start_simt_shared + (address - STATIC_WINDOW);
  if (!shared.holds(pointer, 0)) fail("out-of-bounds", "0x%x is not shared memory", address);
  return pointer;
}

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
  if (!shared.slack_is_untouched()) {
    fail("out-of-bounds", "a write next to the dynamic shared memory, which has %zu bytes", shared.bytes());
  }
}

static void run(const Entry& entry, Order order, unsigned long long seed) {
  scheduler.prepare(blockDim, entry.call, order, seed);
  std::vector<int> blocks(size_t(gridDim.x) * gridDim.y * gridDim.z);
  scheduler.permute(blocks);
  for (const unsigned block : blocks) {
    blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
    shared.fill();
    scheduler.run_block(block);
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

static void launch(Job job) {
  gridDim = read_size(job);
  blockDim = read_size(job);
  const size_t shared_bytes = job.number();
  const Order order = Order(job.number());
  const unsigned long long seed = job.number();
  catch_signals(job.number());
  const Entry& entry = entries[job.number()];

  for (long long i = 0, count = job.number(); i < count; ++i) {
    const int first_argument = job.number();
    const bool writable = job.number();
    const size_t address = job.number(), bytes = job.number();
    buffers.emplace_back(first_argument, job.bytes(bytes), bytes, address, writable);
  }
  const int count = job.number();
  for (int i = 0; i < count; ++i) {
    enum Kind { VALUE, BUFFER, NULL_POINTER };
    const Kind kind = Kind(job.number());
    const long long detail = job.number();  // bytes of a value, or which buffer
    const void* data = kind == BUFFER ? buffers[detail].data() : nullptr;
    const auto begin = kind == VALUE ? job.bytes(detail) : reinterpret_cast<const unsigned char*>(&data);
    arguments.push_back({kind != VALUE, {begin, begin + (kind == VALUE ? detail : sizeof(data))}});
  }
  if (count != entry.parameters) {
    fail("argument", "the kernel takes %d arguments, given are %d", entry.parameters, count);
  }
  shared.set_size(shared_bytes);
  run(entry, order, seed);
  write_buffers();
}

}  // namespace simt

int main(int, char** argv) {
  simt::result_path = argv[2];
  simt::launch(simt::Job(argv[1]));
  fflush(stdout);
  _exit(0);  // no leak or thread checks on the way out
}
