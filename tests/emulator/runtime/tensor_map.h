// The description of an array that bulk copies take boxes of: what cuTensorMapEncodeTiled makes, with its checks.
// The 128 bytes are this emulator's own; those of a driver are unknown.
#pragma once

#include <cstring>
#include <string>

namespace simt {

struct TensorMap {
  static constexpr int MOST_DIMENSIONS = 5, BYTES = 128;
  static constexpr unsigned MOST_BOX = 256;
  static constexpr unsigned long long MAGIC = 0x70616d726f736e74;
  enum Swizzle : unsigned char { NONE, BYTES_32, BYTES_64, BYTES_128 };

  unsigned long long magic;
  unsigned char* base;
  unsigned long long size[MOST_DIMENSIONS];        // elements, innermost first
  unsigned long long stride[MOST_DIMENSIONS - 1];  // bytes, from dimension 1 on
  unsigned box[MOST_DIMENSIONS];                   // elements
  unsigned char dimensions, element_bytes;
  Swizzle swizzle;

  // Bytes over which a swizzle permutes 16-byte chunks of rows.
  static int span(Swizzle swizzle) { return swizzle == NONE ? 16 : 16 << swizzle; }
  // The address at which a byte of a swizzled image lies: bits 4 and up take in bits 7 and up.
  static unsigned swizzled(unsigned address, Swizzle swizzle) {
    return address ^ (address >> 3 & (span(swizzle) - 16));
  }

  size_t box_bytes() const {
    size_t bytes = element_bytes;
    for (int i = 0; i < dimensions; ++i) bytes *= box[i];
    return bytes;
  }

  // How many bytes of memory the whole array takes, from base on; at most 2^63.
  unsigned long long extent() const {
    constexpr unsigned __int128 MOST = static_cast<unsigned __int128>(1) << 63;
    unsigned __int128 bytes = size[0] * element_bytes;
    for (int i = 1; i < dimensions; ++i) bytes += static_cast<unsigned __int128>(size[i] - 1) * stride[i - 1];
    return static_cast<unsigned long long>(bytes < MOST ? bytes : MOST);
  }

  // What the driver would refuse, in words; empty where it would not. It takes rows shorter than a swizzle's span, but
  // their order in memory is unknown.
  std::string complaint() const {
    const auto text = [](const char* what, int i, unsigned long long value) {
      return std::string(what) + " " + std::to_string(i) + " is " + std::to_string(value);
    };
    if ((element_bytes & (element_bytes - 1)) != 0) {
      return "an element has " + std::to_string(element_bytes) + " bytes; 1, 2, 4 and 8 are accepted";
    }
    if (reinterpret_cast<unsigned long long>(base) % 16 != 0) return "the array's address is not a multiple of 16";
    for (int i = 0; i < dimensions; ++i) {
      if (size[i] < 1 || size[i] > 1ull << 32) return text("size", i, size[i]) + "; 1 to 2^32 are accepted";
      if (box[i] < 1 || box[i] > MOST_BOX) return text("box", i, box[i]) + "; 1 to 256 are accepted";
    }
    for (int i = 0; i + 1 < dimensions; ++i) {
      if (stride[i] % 16 != 0 || stride[i] >= 1ull << 40) {
        return text("stride", i + 1, stride[i]) + "; multiples of 16 below 2^40 are accepted";
      }
    }
    const std::string row = "a row of the box is " + std::to_string(box[0] * element_bytes) + " bytes";
    if (box[0] * element_bytes % 16 != 0) return row + "; a multiple of 16 is needed";
    if (swizzle != NONE && int(box[0] * element_bytes) != span(swizzle)) {
      return row + "; its swizzle wants " + std::to_string(span(swizzle));
    }
    return "";
  }
};

static_assert(sizeof(TensorMap) <= TensorMap::BYTES);

}  // namespace simt
