// What the kernel side (compiled with each text) asks of the runtime (compiled once per build).
//
// Where the kernel asked is the address that the call returns to: debug information turns it into a line and, since
// everything between is inlined, into the lines it was called from.
#pragma once

namespace simt {

// Ends the run: what was caught, at the place where the thread last called the runtime.
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Barrier 0 is __syncthreads, 1 to 15 are the named ones. Without `waits` the thread only arrives.
void barrier(const char* what, int id, int threads, bool waits);
int threads_of_block();

[[noreturn]] void trap();

// A warp-collective step: every lane of `mask` hands in a value, and goes on when all of them have.
struct Exchange {
  static constexpr int VALUE_BYTES = 64;
  const char* what;
  const void* code;  // where the first lane came from
  unsigned mask;
  unsigned arrived;
  unsigned reading;  // lanes that may still look at the values
  alignas(16) unsigned char values[32][VALUE_BYTES];
};

// The result stays valid until the lane's next collective step. Only `orders_memory` makes writes visible.
const Exchange& exchange(const char* what, unsigned mask, const void* value, int bytes, bool orders_memory);
int lane();

void copy_async(unsigned shared, const void* global, int bytes, unsigned given);  // zeros from `given` bytes on
void copy_async_commit();
void copy_async_wait(int pending);
void copy_async_arrive(unsigned barrier, bool adds_arrival);  // the phase then expects one arrival more

// Addresses of the shared window, as PTX takes them.
unsigned shared_address(const void* pointer);
void* shared_pointer(unsigned address);
void* dynamic_shared();

// What the operands of matrix instructions are, 32 bits or two 16-bit ones a register.
enum class Operand : unsigned char { F32, TF32, F16, BF16, E4M3, E5M2 };

void ldmatrix(unsigned* words, int count, unsigned row, bool transposed);
void stmatrix(unsigned row, const unsigned* words, int count, bool transposed);
void mma(float* sums, const unsigned* a, unsigned b0, unsigned b1, Operand kind);

void mbarrier_init(unsigned barrier, unsigned arrivals);
void fence_mbarrier_init();
unsigned mbarrier_arrive(unsigned barrier, unsigned bytes);  // and expect that many bytes. The phase that it counts for
void mbarrier_arrive_cluster(unsigned barrier);         // which may be another block's
bool mbarrier_try_wait(unsigned barrier, unsigned parity);  // which may give up

// A mask names blocks of the cluster.
constexpr int AS_ADDRESSED = -1;  // the one block in which `to` lies
void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier, int mask);
void load_box(unsigned to, const void* map, const int* corner, int dimensions, unsigned barrier, int mask);
void store_box(const void* map, const int* corner, int dimensions, unsigned from);
void prefetch_map(const void* map);
void bulk_commit();
void bulk_wait(int pending, bool reads_only);
void fence_proxy_async();

struct WgmmaShape {
  short columns;
  Operand operand;
  bool transposes_a, transposes_b, subtracts;
};

// A is in shared memory where `a` is null.
void wgmma(float* sums, const unsigned* a, unsigned long long a_descriptor, unsigned long long b_descriptor,
           bool accumulates, WgmmaShape shape);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

void wait_for_previous_grid();

void registers_increase(int count);
void registers_decrease(int count);

int cluster_rank();
int cluster_size();
unsigned cluster_address(unsigned address, int rank);
void cluster_arrive(bool releases);
void cluster_wait();

// The launch's argument `index`, which must be `bytes` long and a pointer or not as `is_pointer` says.
const void* argument(int index, int bytes, bool is_pointer);

// What the kernel's attributes say; 0 where they say nothing.
struct LaunchBounds {
  int threads = 0, blocks = 0, cluster = 0;
};
struct ClusterSize {
  int x = 0, y = 1, z = 1;
};

struct Entry {
  void (*call)();  // runs the kernel as the current thread, with the launch's arguments
  int parameters;
  LaunchBounds bounds;
  ClusterSize cluster;
};

extern const Entry entries[];  // in the order in which the text has them

}  // namespace simt
