// wgmma's operands in shared memory: where a descriptor says that their elements lie.
#pragma once

#include <string>

#include "bulk.h"
#include "calls.h"
#include "in_flight.h"
#include "tensor_core.h"

namespace simt {

// A matrix in shared memory, from the bits of its 64-bit descriptor.
struct MatrixDescriptor {
  unsigned long long bits;
  unsigned start, leading, stride;
  TensorMap::Swizzle swizzle;

  explicit MatrixDescriptor(unsigned long long bits)
      : bits(bits), start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4),
        stride((bits >> 32 & 0x3fff) << 4) {
    const int code = bits >> 62;
    swizzle = code == 0 ? TensorMap::NONE : TensorMap::Swizzle(4 - code);
  }

  // The address of element (mn, k): mn counts A's rows or B's columns.
  unsigned address(int mn, int k, int element_bytes, bool mn_major) const {
    const int span = TensorMap::span(swizzle);
    unsigned offset;
    if (!mn_major && swizzle == TensorMap::NONE) {  // contiguous cores of 8 rows of 16 bytes
      offset = mn / 8 * stride + k * element_bytes / 16 * leading + mn % 8 * 16 + k * element_bytes % 16;
    } else if (!mn_major) {  // rows of a span, the k of one product within it
      offset = mn / 8 * stride + mn % 8 * span + k * element_bytes;
    } else if (swizzle == TensorMap::NONE) {
      offset = mn / 8 * stride + k / 8 * leading + k % 8 * 16 + mn % 8 * element_bytes;
    } else {
      const int along = span / element_bytes;
      offset = mn / along * leading + k / 8 * stride + k % 8 * span + mn % along * element_bytes;
    }
    return TensorMap::swizzled(start + offset, swizzle);
  }

  // What is wrong with it, in words; empty where nothing is.
  std::string complaint(bool mn_major) const {
    constexpr unsigned long long UNUSED = 3ull << 14 | 3ull << 30 | 7ull << 46 | 0x3ffull << 52;
    if ((bits & UNUSED) != 0) return "its unused bits 14-15, 30-31, 46-48 and 52-61 are not all zero";
    if ((bits >> 49 & 7) != 0)
      return "its base offset is not zero; tiles lie at multiples of their swizzle's pattern here";
    if (swizzle == TensorMap::NONE) return "";
    const unsigned span = TensorMap::span(swizzle), period = 8 * span, off = start % period;
    const bool is_k_step = !mn_major && off < span && off % 32 == 0;
    if (off == 0 || is_k_step) return "";
    const char* const steps = mn_major ? "" : "; steps of 32 bytes inside the first row are accepted";
    return "it starts " + std::to_string(off) + " bytes off its swizzle's pattern, of " + std::to_string(period) +
           steps;
  }
};

inline int element_bytes_of(Operand kind) { return kind == Operand::TF32 ? 4 : is_byte(kind) ? 1 : 2; }

// One operand of a product, or its rows or columns from `first` on.
struct OperandPart {
  MatrixDescriptor matrix;
  int first, count;
  bool mn_major;
};

// Calls visit(mn, k, bytes) for each 16 bytes of it, whose elements lie along k, or along mn if mn_major.
template <typename Visit>
void for_each_chunk(const MatrixStep& step, const OperandPart& part, const Visit& visit) {
  const int bytes = element_bytes_of(step.shape.operand), depth = 32 / bytes, along = 16 / bytes;
  const SharedMemory& shared = *scheduler.block().shared;
  for (int mn = 0; mn < part.count; mn += part.mn_major ? along : 1) {
    for (int k = 0; k < depth; k += part.mn_major ? 1 : along) {
      const unsigned char* from = pointer_to(part.matrix.address(part.first + mn, k, bytes, part.mn_major));
      if (!shared.holds(from, 16)) {
        refuse_static("wgmma", from);
        fail("out-of-bounds", "wgmma at %s reads %s", place(step.code).c_str(), describe(from).c_str());
      }
      if (const unsigned char* missing = shared.find_unpublished(from, 16)) {
        fail("proxy", "wgmma at %s reads %s, which was written with no fence_proxy_async since",
             place(step.code).c_str(), describe(missing).c_str());
      }
      visit(mn, k, from);
    }
  }
}

// Its elements, as the asynchronous proxy sees them: result[mn * depth + k].
inline std::vector<float> read_operand(const MatrixStep& step, const OperandPart& part) {
  const Operand kind = step.shape.operand;
  const int bytes = element_bytes_of(kind), depth = 32 / bytes;
  std::vector<float> result(part.count * depth);
  for_each_chunk(step, part, [&](int mn, int k, const unsigned char* from) {
    note_async_read(*scheduler.block().shared, from, 16, step.code);
    for (int i = 0; i < 16 / bytes; ++i) {
      unsigned word = 0;
      for (int j = 0; j < bytes; ++j) word |= unsigned(from[i * bytes + j]) << 8 * j;
      result[(part.mn_major ? mn + i : mn) * depth + (part.mn_major ? k : k + i)] = element_of(word, 0, kind);
    }
  });
  return result;
}

}  // namespace simt
