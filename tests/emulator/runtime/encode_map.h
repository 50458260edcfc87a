// What the host does with cuTensorMapEncodeTiled: a map's 128 bytes, of what the job says of an array.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "job.h"
#include "tensor_map.h"

namespace simt {

inline long long read_number(Job& job, const char* what, long long least, long long most) {
  const long long number = job.number();
  if (number < least || number > most) {
    fail("tensor-map", "%s is %lld; %lld to %lld are accepted", what, number, least, most);
  }
  return number;
}

inline std::vector<unsigned char> encode_map(Job& job, const Buffer& buffer) {
  constexpr long long MOST_BYTES = 1ll << 62;
  TensorMap map = {};
  map.magic = TensorMap::MAGIC;
  map.base = buffer.data();
  map.dimensions = read_number(job, "the number of dimensions", 1, TensorMap::MOST_DIMENSIONS);
  map.element_bytes = read_number(job, "the element's size in bytes", 1, 8);
  map.swizzle = TensorMap::Swizzle(read_number(job, "the swizzle's number", 0, TensorMap::BYTES_128));
  for (int i = 0; i < map.dimensions; ++i) map.size[i] = read_number(job, "a size", 0, MOST_BYTES);
  for (int i = 0; i + 1 < map.dimensions; ++i) map.stride[i] = read_number(job, "a stride", 0, MOST_BYTES);
  for (int i = 0; i < map.dimensions; ++i) map.box[i] = read_number(job, "a box size", 0, 1ll << 31);
  if (const std::string complaint = map.complaint(); !complaint.empty()) fail("tensor-map", "%s", complaint.c_str());
  if (map.extent() > buffer.bytes()) {
    fail("tensor-map", "the map takes in %llu bytes of argument %d, which has %zu", map.extent(), buffer.argument(),
         buffer.bytes());
  }
  std::vector<unsigned char> bytes(TensorMap::BYTES);
  memcpy(bytes.data(), &map, sizeof(map));
  return bytes;
}

// A map that holds the caller's address of an array, if that is what the bytes are.
inline void translate_map(std::vector<unsigned char>& bytes, unsigned char* translate(unsigned char*)) {
  TensorMap map;
  memcpy(&map, bytes.data(), sizeof(map));
  if (map.magic != TensorMap::MAGIC) return;
  map.base = translate(map.base);
  if (!is_in_a_buffer(map.base, map.extent())) {
    fail("tensor-map", "the map takes in %llu bytes at %s", map.extent(), describe(map.base).c_str());
  }
  memcpy(bytes.data(), &map, sizeof(map));
}

}  // namespace simt
