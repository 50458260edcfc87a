// Products by a warpgroup, asynchronous: they are done when a warp waits for them. Until then their sums are NaN in the
// lanes' own memory, and A's registers and shared memory are looked at only then.
#pragma once

#include <string>

#include "calls.h"
#include "matrices.h"
#include "tensor_core.h"

namespace simt {

// A matrix in shared memory, from the bits of its 64-bit descriptor.
struct MatrixDescriptor {
  unsigned start, leading, stride, base_offset;
  TensorMap::Swizzle swizzle;

  explicit MatrixDescriptor(unsigned long long bits)
      : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4),
        base_offset(bits >> 49 & 7) {
    const int code = bits >> 62;
    swizzle = code == 0 ? TensorMap::NONE : TensorMap::Swizzle(4 - code);
  }

  // The address of element (mn, k): mn counts A's rows or B's columns.
  unsigned address(int mn, int k, int element_bytes, bool mn_major) const {
    const int span = TensorMap::span(swizzle);
    unsigned offset;
    if (!mn_major && swizzle == TensorMap::NONE) {  // cores of 8 rows of 16 bytes, one after the other
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
};

inline int element_bytes_of(Operand kind) { return kind == Operand::TF32 ? 4 : 2; }

// One operand's element, seen by the asynchronous proxy.
inline float shared_element(const MatrixStep& step, const MatrixDescriptor& matrix, int mn, int k, bool mn_major) {
  const int bytes = element_bytes_of(step.shape.operand);
  const unsigned char* from = pointer_to(matrix.address(mn, k, bytes, mn_major));
  const SharedMemory& shared = *scheduler.block().shared;
  if (!shared.holds(from, bytes)) {
    fail("out-of-bounds", "wgmma at %s reads %s", place(step.code).c_str(), describe(from).c_str());
  }
  if (const unsigned char* missing = shared.find_unpublished(from, bytes)) {
    fail("proxy", "wgmma at %s reads %s, which was written with no fence_proxy_async since", place(step.code).c_str(),
         describe(missing).c_str());
  }
  note_read(from, bytes, step.code);
  unsigned word = 0;
  for (int i = 0; i < bytes; ++i) word |= unsigned(from[i]) << 8 * i;
  return element_of(word, 0, step.shape.operand);
}

inline WarpMatrices& own_matrices() { return scheduler.block().matrices[scheduler.current()->warp()]; }

inline void check_operands(const MatrixStep& step, const SumsInFlight& sums, int lane) {
  if (!is_untouched(reinterpret_cast<const unsigned char*>(step.sums[lane]), sums.values.size() * sizeof(float))) {
    fail("wgmma", "the sums of the wgmma at %s were written before it was waited for, by lane %d",
         place(step.code).c_str(), lane);
  }
  if (step.a[lane] != nullptr && !are_equal(step.a[lane], step.a_words[lane], 16)) {
    fail("wgmma", "the registers that hold A of the wgmma at %s were written before it was waited for, by lane %d",
         place(step.code).c_str(), lane);
  }
}

// The warp's 16 rows of one product, into the sums in flight; back to the lanes' memory with the last product on them.
inline void land_step(WarpMatrices& warp, const MatrixStep& step, int warp_in_group) {
  const Operand kind = step.shape.operand;
  const int depth = 32 / element_bytes_of(kind), columns = step.shape.columns;
  const MatrixDescriptor a(step.a_descriptor), b(step.b_descriptor);
  for (int lane = 0; lane < 32; ++lane) check_operands(step, warp.sums[step.sums[lane]], lane);
  std::vector<float> x(16 * depth), w(columns * depth);
  for (int k = 0; k < depth; ++k) {
    for (int row = 0; row < 16; ++row) {
      x[row * depth + k] = step.a[0] != nullptr
                               ? a_element(step.a_words, row, k, kind)
                               : shared_element(step, a, 16 * warp_in_group + row, k, step.shape.transposes_a);
    }
    for (int column = 0; column < columns; ++column) {
      w[column * depth + k] = shared_element(step, b, column, k, step.shape.transposes_b);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    SumsInFlight& sums = warp.sums[step.sums[lane]];
    for (int i = 0; i < columns / 2; ++i) {
      const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const float before = step.accumulates ? sums.values[i] : 0;
      sums.values[i] = dot(before, &x[row * depth], &w[column * depth], depth);
    }
    if (--sums.steps > 0) continue;
    copy_bytes(step.sums[lane], sums.values.data(), sums.values.size() * sizeof(float));
    warp.sums.erase(step.sums[lane]);
  }
}

struct WgmmaOperands {
  WgmmaShape shape;
  bool accumulates;
  unsigned long long a_descriptor, b_descriptor;
  float* sums;
  const unsigned* a;
};
static_assert(sizeof(WgmmaOperands) <= Exchange::VALUE_BYTES);

inline MatrixStep gather_step(const Exchange& all) {
  WgmmaOperands lanes[32];
  for (int i = 0; i < 32; ++i) memcpy(&lanes[i], all.values[i], sizeof(WgmmaOperands));
  MatrixStep step = {lanes[0].shape, lanes[0].accumulates, lanes[0].a_descriptor, lanes[0].b_descriptor, {}, {}, {},
                     scheduler.current()->code};
  for (int i = 0; i < 32; ++i) {
    if (lanes[i].a_descriptor != step.a_descriptor || lanes[i].b_descriptor != step.b_descriptor ||
        lanes[i].accumulates != step.accumulates) {
      fail("collective", "wgmma: lanes 0 and %d differ in a descriptor, or in whether they add", i);
    }
    step.sums[i] = lanes[i].sums;
    step.a[i] = lanes[i].a;
    if (step.a[i] != nullptr) copy_bytes(step.a_words[i], step.a[i], 16);
  }
  return step;
}

inline void check_fences(const WarpMatrices& warp, const MatrixStep& step) {
  if (!warp.is_fenced) fail("wgmma", "wgmma with no wgmma_fence since the start or the last wgmma_wait");
  if (step.a[0] == nullptr || warp.is_fenced_since_step) return;
  for (int i = 0; i < 32; ++i) {
    const auto known = warp.known_a.find(step.a[i]);
    if (known != warp.known_a.end() && !are_equal(known->second.data(), step.a_words[i], 16)) {
      fail("wgmma", "wgmma on registers of A that were written with no wgmma_fence since");
    }
  }
}

inline void issue_step(Exchange& all) {
  WarpMatrices& warp = own_matrices();
  const MatrixStep step = gather_step(all);
  check_fences(warp, step);
  for (int i = 0; i < 32; ++i) {
    SumsInFlight& sums = warp.sums[step.sums[i]];
    const size_t count = step.shape.columns / 2;
    if (sums.steps++ == 0) {
      sums.values.assign(step.sums[i], step.sums[i] + count);
      fill_nan(reinterpret_cast<unsigned char*>(step.sums[i]), count * sizeof(float));
    } else if (sums.values.size() != count) {
      fail("wgmma", "wgmma on sums that another one of %zu columns still works on", 2 * sums.values.size());
    }
    if (step.a[i] != nullptr) warp.known_a[step.a[i]].assign(step.a_words[i], step.a_words[i] + 4);
  }
  warp.is_fenced_since_step = false;
  warp.uncommitted.push_back(step);
  ++warp.steps;
}

void wgmma(float* sums, const unsigned* a, unsigned long long a_descriptor, unsigned long long b_descriptor,
           bool accumulates, WgmmaShape shape) {
  const Call call;
  if (scheduler.size() % 128 != 0) fail("wgmma", "wgmma in a block of %d threads; whole warpgroups are needed", scheduler.size());
  if (MatrixDescriptor(a == nullptr ? a_descriptor : 0).base_offset != 0 || MatrixDescriptor(b_descriptor).base_offset != 0) {
    fail("wgmma", "a descriptor's base offset is not zero; tiles lie at multiples of their swizzle's period here");
  }
  const WgmmaOperands own = {shape, accumulates, a_descriptor, b_descriptor, sums, a};
  signal_order(&own_matrices().issued);
  scheduler.meet("wgmma", ALL_LANES, &own, sizeof(own), false, issue_step);
}

void wgmma_fence() {
  const Call call;
  scheduler.meet("wgmma_fence", ALL_LANES, nullptr, 0, false, [](Exchange&) {
    WarpMatrices& warp = own_matrices();
    warp.is_fenced = warp.is_fenced_since_step = true;
  });
}

void wgmma_commit() {
  const Call call;
  scheduler.meet("wgmma_commit", ALL_LANES, nullptr, 0, false, [](Exchange&) {
    WarpMatrices& warp = own_matrices();
    warp.groups.push_back(std::move(warp.uncommitted));
    warp.uncommitted.clear();
    ++warp.committed;
    scheduler.wake(&warp.committed);
  });
}

// The warp of this warpgroup that is behind the calling one; null if none is. A product needs all four.
inline const WarpMatrices* find_laggard() {
  const int warp = scheduler.current()->warp(), first = warp / 4 * 4;
  const std::vector<WarpMatrices>& all = scheduler.block().matrices;
  for (int i = first; i < first + 4; ++i) {
    if (all[i].committed < all[warp].committed) return &all[i];
  }
  return nullptr;
}

void wgmma_wait(int pending) {
  const Call call;
  while (const WarpMatrices* behind = find_laggard()) {
    const WarpMatrices* const first = scheduler.block().matrices.data();
    scheduler.wait_for(&behind->committed, "wgmma_wait", [behind, first] {
      const int warp = behind - first;
      return "warp " + std::to_string(warp) + " has not committed as many groups";
    });
  }
  scheduler.meet("wgmma_wait", ALL_LANES, &pending, sizeof(pending), false, [](Exchange& all) {
    int pending;
    memcpy(&pending, all.values[0], sizeof(pending));
    WarpMatrices& warp = own_matrices();
    const int warp_in_group = scheduler.current()->warp() % 4;
    run_as_engine([&] {
      observe_order(&warp.issued);
      for (; int(warp.groups.size()) > pending; warp.groups.pop_front()) {
        for (const MatrixStep& step : warp.groups.front()) land_step(warp, step, warp_in_group);
      }
      signal_order(&warp.landed);
    });
    warp.is_fenced = false;
  });
  observe_order(&own_matrices().landed);
}

}  // namespace simt
