// What instructions of inline PTX do. emulator/ptx.py makes a call of each: its operands in their order, vectors in
// braces, results as references, or in a vector as pointers. Inlined, so that the call of the runtime has the text's
// own line.
#pragma once

namespace ptx {

// What may stand for an operand: of 32 bits, of 64, of 16, a float. Another width is no conversion, but a mistake.
template <typename T> unsigned r(T) = delete;
__forceinline__ unsigned r(unsigned value) { return value; }
__forceinline__ unsigned r(int value) { return value; }
template <typename T> unsigned long long l(T) = delete;
template <typename T> __forceinline__ unsigned long long l(T* value) {
  return reinterpret_cast<unsigned long long>(value);
}
__forceinline__ unsigned long long l(unsigned long value) { return value; }
__forceinline__ unsigned long long l(unsigned long long value) { return value; }
__forceinline__ unsigned long long l(long long value) { return value; }
template <typename T> unsigned short h(T) = delete;
__forceinline__ unsigned short h(unsigned short value) { return value; }
__forceinline__ unsigned short h(short value) { return value; }
template <typename T> float f(T) = delete;
__forceinline__ float f(float value) { return value; }

// What holds a result: an integer may be signed.
template <typename T, typename U>
__forceinline__ T& result(U& place) {
  static_assert(sizeof(T) == sizeof(U) && U(1) / 2 == T(1) / 2, "a result of another type than its constraint's");
  return reinterpret_cast<T&>(place);
}

__forceinline__ const void* pointer(unsigned long long address) { return reinterpret_cast<const void*>(address); }
__forceinline__ unsigned both(unsigned short high, unsigned short low) { return unsigned(high) << 16 | low; }

// ---- numbers

__forceinline__ void widen_f16(float& to, unsigned short value) { to = simt::half_to_float(value); }
__forceinline__ void narrow_f16(unsigned short& to, float value) { to = simt::float_to_half(value); }
__forceinline__ void narrow_bf16(unsigned short& to, float value) { to = simt::float_to_bfloat16(value); }
__forceinline__ void narrow_f16x2(unsigned& to, float high, float low) {
  to = both(simt::float_to_half(high), simt::float_to_half(low));
}
__forceinline__ void narrow_bf16x2(unsigned& to, float high, float low) {
  to = both(simt::float_to_bfloat16(high), simt::float_to_bfloat16(low));
}
__forceinline__ void widen_e4m3x2(unsigned& to, unsigned short value) {
  narrow_f16x2(to, simt::e4m3_to_float(value >> 8), simt::e4m3_to_float(value & 0xff));
}
template <bool TIES_TO_EVEN>
__forceinline__ void narrow_tf32(unsigned& to, float value) {  // to nearest; other ties go away from zero
  const unsigned bits = __float_as_uint(value), half = TIES_TO_EVEN ? 0xfffu + (bits >> 13 & 1) : 0x1000u;
  const bool is_number = (bits & 0x7f800000u) != 0x7f800000u;
  to = is_number ? (bits + half) & 0xffffe000u : bits & 0x007fffffu ? 0x7fffffffu : bits;
}
// Bit 4x + 2y + z of the table is the result for the bits x, y and z.
__forceinline__ void logical_of_three(unsigned& to, unsigned x, unsigned y, unsigned z, unsigned table) {
  to = 0;
  for (unsigned at = 0; at < 8; ++at)
    if (table >> at & 1) to |= (at & 4 ? x : ~x) & (at & 2 ? y : ~y) & (at & 1 ? z : ~z);
}
__forceinline__ void exp2_approximated(float& to, float value) {  // the exact result; subnormal numbers become zeros
  const float power = exp2f(value);
  to = power < 0x1p-126f ? 0.0f : power;
}
__forceinline__ void pair(unsigned long long& to, const float (&from)[2]) { __builtin_memcpy(&to, from, sizeof(to)); }
__forceinline__ void split(float* const (&to)[2], unsigned long long from) {
  *to[0] = __uint_as_float(from);
  *to[1] = __uint_as_float(from >> 32);
}
__forceinline__ void multiply_add_f32x2(unsigned long long& to, unsigned long long x, unsigned long long y,
                                        unsigned long long z) {
  float a[2], b[2], c[2];
  split({&a[0], &a[1]}, x);
  split({&b[0], &b[1]}, y);
  split({&c[0], &c[1]}, z);
  pair(to, {fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1])});
}
__forceinline__ void set_if_not_equal(bool& to, unsigned x, unsigned y) { to = x != y; }

// ---- memory

__forceinline__ void store_words(unsigned long long to, const unsigned (&words)[4]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}
__forceinline__ void store_words(unsigned long long to, const unsigned (&words)[2]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}
__forceinline__ void load_shared(float& to, unsigned from) {
  to = *static_cast<const float*>(simt::shared_pointer(from));
}
__forceinline__ void load_shared(float& to, unsigned long long from) { load_shared(to, unsigned(from)); }
__forceinline__ void store_shared(unsigned long long to, float value) {
  *static_cast<float*>(simt::shared_pointer(unsigned(to))) = value;
}
template <bool SKIPS_L1>
__forceinline__ void copy_async(unsigned to, unsigned long long from, unsigned bytes, unsigned given) {
  if (bytes != 16 && (SKIPS_L1 || (bytes != 4 && bytes != 8))) {
    simt::fail("async", "cp.async.%s of %u bytes; accepted are %s", SKIPS_L1 ? "cg" : "ca", bytes,
               SKIPS_L1 ? "16" : "4, 8 and 16");
  }
  simt::copy_async(to, pointer(from), bytes, given);
}
template <bool SKIPS_L1>
__forceinline__ void copy_async(unsigned to, unsigned long long from, unsigned bytes) {
  copy_async<SKIPS_L1>(to, from, bytes, bytes);
}
__forceinline__ void copy_async_commit() { simt::copy_async_commit(); }
__forceinline__ void copy_async_wait(unsigned pending) { simt::copy_async_wait(pending); }
__forceinline__ void copy_async_wait_all() {
  simt::copy_async_commit();
  simt::copy_async_wait(0);
}
template <bool ADDS_ARRIVAL>
__forceinline__ void copy_async_arrive(unsigned barrier) {
  simt::copy_async_arrive(barrier, ADDS_ARRIVAL);
}

// ---- matrices

// Of a row: a shared address of either width, or a generic one.
template <bool IS_GENERIC>
__forceinline__ unsigned shared_row(unsigned long long row) {
  return unsigned(IS_GENERIC ? __cvta_generic_to_shared(pointer(row)) : row);
}
template <int COUNT, bool TRANSPOSED, bool IS_GENERIC>
__forceinline__ void load_matrices(unsigned* const (&words)[COUNT], unsigned long long row) {
  unsigned found[COUNT];
  simt::ldmatrix(found, COUNT, shared_row<IS_GENERIC>(row), TRANSPOSED);
  for (int i = 0; i < COUNT; ++i) *words[i] = found[i];
}
template <int COUNT, bool TRANSPOSED, bool IS_GENERIC>
__forceinline__ void store_matrices(unsigned long long row, const unsigned (&words)[COUNT]) {
  simt::stmatrix(shared_row<IS_GENERIC>(row), words, COUNT, TRANSPOSED);
}
template <simt::Operand KIND>
__forceinline__ void multiply_fragments(float* const (&to)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                        const float (&sums)[4]) {
  float found[4] = {sums[0], sums[1], sums[2], sums[3]};
  simt::mma(found, a, b[0], b[1], KIND);
  for (int i = 0; i < 4; ++i) *to[i] = found[i];
}

// Sums of 16 bits, two in a word. Assumed: they are added as float32, and rounded once at the end.
__forceinline__ void multiply_to_halves(unsigned* const (&to)[2], const unsigned (&a)[4], const unsigned (&b)[2],
                                        const unsigned (&sums)[2]) {
  float found[4];
  for (int i = 0; i < 4; ++i) found[i] = simt::half_to_float(sums[i / 2] >> 16 * (i % 2));
  simt::mma(found, a, b[0], b[1], simt::Operand::F16);
  for (int i = 0; i < 2; ++i) narrow_f16x2(*to[i], found[2 * i + 1], found[2 * i]);
}

// wgmma works on registers while the thread goes on: they are an array of the text, whose address it gets.
template <typename T, int COUNT>
__forceinline__ T* array_of(const char* name, T* const (&registers)[COUNT]) {
  for (int i = 1; i < COUNT; ++i) {
    if (registers[i] == registers[0] + i) continue;
    simt::fail("wgmma", "%s: operand %d lies not behind operand %d, as elements of one array do", name, i, i - 1);
  }
  return registers[0];
}
__forceinline__ bool subtracts(int scale_a, int scale_b) {
  if ((scale_a != 1 && scale_a != -1) || (scale_b != 1 && scale_b != -1)) {
    simt::fail("wgmma", "A times %d and B times %d; accepted are 1 and -1", scale_a, scale_b);
  }
  return scale_a != scale_b;
}
template <simt::Operand KIND, int COUNT>
__forceinline__ void multiply_shared(float* const (&sums)[COUNT], unsigned long long a, unsigned long long b, bool adds,
                                     int scale_a, int scale_b, bool transposes_a = false, bool transposes_b = false) {
  simt::wgmma(array_of("sums", sums), nullptr, a, b, adds,
              {2 * COUNT, KIND, transposes_a, transposes_b, subtracts(scale_a, scale_b)});
}
template <simt::Operand KIND, int COUNT>
__forceinline__ void multiply_registers(float* const (&sums)[COUNT], const unsigned* const (&a)[4],
                                        unsigned long long b, bool adds, int scale_a, int scale_b,
                                        bool transposes_b = false) {
  simt::wgmma(array_of("sums", sums), array_of("A", a), 0, b, adds,
              {2 * COUNT, KIND, false, transposes_b, subtracts(scale_a, scale_b)});
}
__forceinline__ void wgmma_fence() { simt::wgmma_fence(); }
__forceinline__ void wgmma_commit_group() { simt::wgmma_commit(); }
__forceinline__ void wgmma_wait(unsigned pending) { simt::wgmma_wait(pending); }
__forceinline__ void registers_increase(unsigned count) { simt::registers_increase(count); }
__forceinline__ void registers_decrease(unsigned count) { simt::registers_decrease(count); }

// ---- barriers, clusters and grids

__forceinline__ void barrier_sync(unsigned id, unsigned threads) { simt::barrier("barrier_sync", id, threads, true); }
__forceinline__ void barrier_arrive(unsigned id, unsigned threads) {
  simt::barrier("barrier_arrive", id, threads, false);
}
__forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) { simt::mbarrier_init(barrier, arrivals); }
__forceinline__ void mbarrier_arrive(unsigned barrier, unsigned bytes = 0) { simt::mbarrier_arrive(barrier, bytes); }
__forceinline__ void mbarrier_arrive_cluster(unsigned barrier) { simt::mbarrier_arrive_cluster(barrier); }
__forceinline__ void mbarrier_try_wait(bool& is_complete, unsigned barrier, unsigned parity, unsigned) {
  is_complete = simt::mbarrier_try_wait(barrier, parity);
}
// A phase's token is its number.
__forceinline__ void mbarrier_arrive_for(unsigned long long& phase, unsigned barrier) {
  phase = simt::mbarrier_arrive(barrier, 0);
}
__forceinline__ void mbarrier_try_wait_for(bool& is_complete, unsigned barrier, unsigned long long phase) {
  is_complete = simt::mbarrier_try_wait(barrier, phase % 2);
}
__forceinline__ void fence_mbarrier_init() { simt::fence_mbarrier_init(); }
__forceinline__ void fence_proxy_async() { simt::fence_proxy_async(); }
__forceinline__ void lane(unsigned& found) { found = simt::lane(); }
__forceinline__ void cluster_rank(unsigned& rank) { rank = simt::cluster_rank(); }
__forceinline__ void cluster_address(unsigned& there, unsigned address, unsigned rank) {
  there = simt::cluster_address(address, rank);
}
template <bool RELEASES>
__forceinline__ void cluster_arrive() {
  simt::cluster_arrive(RELEASES);
}
__forceinline__ void cluster_wait() { simt::cluster_wait(); }
__forceinline__ void wait_for_previous_grid() { simt::wait_for_previous_grid(); }
__forceinline__ void allow_next_grid() {}  // the next grid runs when this one has ended, which is never wrong

// ---- bulk copies and boxes

__forceinline__ void copy_bulk(unsigned to, unsigned long long from, unsigned bytes, unsigned barrier,
                               int blocks = simt::AS_ADDRESSED) {
  simt::copy_bulk(to, pointer(from), bytes, barrier, blocks);
}
template <int DIMENSIONS, typename... HINT>
__forceinline__ void load_box(unsigned to, unsigned long long map, const unsigned (&corner)[DIMENSIONS],
                              unsigned barrier, unsigned short blocks, HINT...) {
  simt::load_box(to, pointer(map), reinterpret_cast<const int*>(corner), DIMENSIONS, barrier, blocks);
}
template <int DIMENSIONS>
__forceinline__ void load_box(unsigned to, unsigned long long map, const unsigned (&corner)[DIMENSIONS],
                              unsigned barrier) {
  simt::load_box(to, pointer(map), reinterpret_cast<const int*>(corner), DIMENSIONS, barrier, simt::AS_ADDRESSED);
}
template <int DIMENSIONS>
__forceinline__ void load_box(unsigned to, unsigned long long map, const unsigned (&corner)[DIMENSIONS],
                              unsigned barrier,
                              unsigned long long) {  // the policy of caches
  load_box(to, map, corner, barrier);
}
template <int DIMENSIONS>
__forceinline__ void store_box(unsigned long long map, const unsigned (&corner)[DIMENSIONS], unsigned from) {
  simt::store_box(pointer(map), reinterpret_cast<const int*>(corner), DIMENSIONS, from);
}
__forceinline__ void bulk_commit() { simt::bulk_commit(); }
template <bool READS_ONLY>
__forceinline__ void bulk_wait(unsigned pending) {
  simt::bulk_wait(pending, READS_ONLY);
}
__forceinline__ void prefetch_map(unsigned long long map) { simt::prefetch_map(pointer(map)); }

}  // namespace ptx
