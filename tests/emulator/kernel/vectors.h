// CUDA's vector types, with CUDA's alignments: the address of a misaligned one is an error.
#pragma once

#define SIMT_VECTORS(name, type)                                                                      \
  struct name##1 { type x; };                                                                         \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                            \
  struct name##3 { type x, y, z; };                                                                   \
  struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; };         \
  inline name##1 make_##name##1(type x) { return {x}; }                                               \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                    \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                         \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

SIMT_VECTORS(char, signed char)
SIMT_VECTORS(uchar, unsigned char)
SIMT_VECTORS(short, short)
SIMT_VECTORS(ushort, unsigned short)
SIMT_VECTORS(int, int)
SIMT_VECTORS(long, long)
SIMT_VECTORS(ulong, unsigned long)
SIMT_VECTORS(longlong, long long)
SIMT_VECTORS(ulonglong, unsigned long long)
SIMT_VECTORS(float, float)
SIMT_VECTORS(double, double)

// uint3 is threadIdx's type, so language.h has it already.
struct uint1 { unsigned int x; };
struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
inline uint1 make_uint1(unsigned int x) { return {x}; }
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
inline uint3 make_uint3(unsigned int x, unsigned int y, unsigned int z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

#undef SIMT_VECTORS
