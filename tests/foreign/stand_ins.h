// What foreign kernels use of the libraries of CUDA and C++, as the PTX that it becomes.
#define assert(condition)
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

using uint = unsigned int;
using uint8_t = unsigned char;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;
using bf16 = __nv_bfloat16;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

struct alignas(64) CUtensorMap {
  unsigned char bytes[128];
};

inline __nv_bfloat162 __float22bfloat162_rn(float2 both) { return __floats2bfloat162_rn(both.x, both.y); }
inline __half2 __float22half2_rn(float2 both) { return __floats2half2_rn(both.x, both.y); }
inline void memset(void* to, int value, size_t bytes) { __builtin_memset(to, value, bytes); }
__forceinline__ void cudaGridDependencySynchronize() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

namespace std {
template <typename T, typename U>
constexpr bool is_same_v = false;
template <typename T>
constexpr bool is_same_v<T, T> = true;
template <bool FIRST, typename T, typename U>
struct conditional {
  using type = U;
};
template <typename T, typename U>
struct conditional<true, T, U> {
  using type = T;
};
template <bool FIRST, typename T, typename U>
using conditional_t = typename conditional<FIRST, T, U>::type;

template <typename T>
constexpr T max(T x, T y) {
  return x < y ? y : x;
}
template <typename T>
constexpr T min(T x, T y) {
  return y < x ? y : x;
}
}  // namespace std

namespace cooperative_groups {
struct thread_block {
  unsigned thread_rank() const { return threadIdx.x; }
  unsigned size() const { return blockDim.x; }
};
inline thread_block this_thread_block() { return {}; }
}  // namespace cooperative_groups

namespace cuda {

enum thread_scope { thread_scope_block };

template <thread_scope SCOPE>
struct barrier {
  using arrival_token = unsigned long long;
  unsigned long long state;

  unsigned address() const { return (unsigned)__cvta_generic_to_shared(this); }
  arrival_token arrive() {
    arrival_token token;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(token) : "r"(address()) : "memory");
    return token;
  }
  void wait(arrival_token token) const {
    asm volatile("{.reg .pred p;\nAGAIN: mbarrier.try_wait.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;}"
                 ::"r"(address()), "l"(token) : "memory");
  }
  void arrive_and_wait() { wait(arrive()); }
};

template <thread_scope SCOPE>
void init(barrier<SCOPE>* at, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at->address()), "r"(arrivals) : "memory");
}

template <size_t ALIGNMENT>
struct aligned_size_t {
  size_t bytes;
  explicit aligned_size_t(size_t count) : bytes(count) {}
};

template <size_t BYTES, thread_scope SCOPE>
void memcpy_async(void* to, const void* from, aligned_size_t<BYTES>, barrier<SCOPE>& done) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(from), "n"(BYTES) : "memory");
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(done.address()) : "memory");
}

namespace device {

template <thread_scope SCOPE>
unsigned long long barrier_arrive_tx(barrier<SCOPE>& at, int, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at.address()), "r"(bytes) : "memory");
  return 0;  // no thread waits for it
}

namespace experimental {

inline void fence_proxy_async_shared_cta() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <thread_scope SCOPE>
void cp_async_bulk_tensor_2d_global_to_shared(void* to, const CUtensorMap* map, int x, int y, barrier<SCOPE>& done) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               ::"r"(place), "l"(map), "r"(done.address()), "r"(x), "r"(y) : "memory");
}

}  // namespace experimental
}  // namespace device
}  // namespace cuda
