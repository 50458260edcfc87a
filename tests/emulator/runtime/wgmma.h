// Products by a warpgroup, asynchronous: they are done when a warp waits for them. Until then their sums are NaN in the
// lanes' own memory, and A's registers and shared memory are looked at only then.
#pragma once

#include <string>

#include "calls.h"
#include "descriptor.h"
#include "matrices.h"
#include "tensor_core.h"

namespace simt {

inline WarpMatrices& own_matrices() { return scheduler.block().matrices[scheduler.current()->warp()]; }
inline Sequence<AgreedProduct>& own_sequence() {
  return scheduler.block().warpgroups[scheduler.current()->warp() / 4].products;
}

// Content of arrays that no code has set: see build.py.
constexpr unsigned UNSET = 0xfefefefe;

// Whether the lane has written these words since its last wgmma_fence.
inline bool is_written_since_fence(int lane, const void* array, size_t words) {
  const OwnMemory& before = scheduler.block().threads[scheduler.current()->warp() * 32 + lane]->at_fence;
  for (size_t i = 0; i < words; ++i) {
    const unsigned char* word = static_cast<const unsigned char*>(array) + 4 * i;
    if (are_equal(word, &UNSET, 4)) continue;
    if (!lies_in(word, 4, before.begin, before.bytes.size())) return true;
    if (!are_equal(word, &before.bytes[word - before.begin], 4)) return true;
  }
  return false;
}

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

// The calling warp's rows of A, and B, in shared memory.
inline OperandPart own_a(const MatrixStep& step) {
  return {MatrixDescriptor(step.a_descriptor), 16 * (scheduler.current()->warp() % 4), 16, step.shape.transposes_a};
}
inline OperandPart all_b(const MatrixStep& step) {
  return {MatrixDescriptor(step.b_descriptor), 0, step.shape.columns, step.shape.transposes_b};
}

inline std::vector<float> read_a(const MatrixStep& step) {
  if (step.a[0] == nullptr) return read_operand(step, own_a(step));
  const Operand kind = step.shape.operand;
  const int depth = 32 / element_bytes_of(kind);
  std::vector<float> result(16 * depth);
  for (int i = 0; i < 16 * depth; ++i) result[i] = a_element(step.a_words, i / depth, i % depth, kind);
  return result;
}

// The warp's 16 rows of one product, into the sums in flight; back to the lanes' memory with the last product on them.
inline void land_step(WarpMatrices& warp, const MatrixStep& step) {
  const int depth = 32 / element_bytes_of(step.shape.operand), columns = step.shape.columns;
  const SumRule rule = sum_rule(step.shape.operand);
  for (int lane = 0; lane < 32; ++lane) check_operands(step, warp.sums[step.sums[lane]], lane);
  std::vector<float> x = read_a(step);
  const std::vector<float> w = read_operand(step, all_b(step));
  if (step.shape.subtracts) {
    for (float& value : x) value = -value;
  }
  for (int lane = 0; lane < 32; ++lane) {
    SumsInFlight& sums = warp.sums[step.sums[lane]];
    for (int i = 0; i < columns / 2; ++i) {
      const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const float before = step.accumulates ? sums.values[i] : 0;
      sums.values[i] = dot(before, &x[row * depth], &w[column * depth], depth, step.shape.operand, rule);
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
                     scheduler.current()->code, {}};
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

inline void check_agreement(const MatrixStep& step) {
  const AgreedProduct own = {step.shape, step.accumulates, step.a[0] != nullptr, step.a_descriptor, step.b_descriptor};
  const AgreedProduct first = own_sequence().next(scheduler.current()->warp(), own);
  const char* differs = nullptr;
  if (first.a_descriptor != own.a_descriptor) differs = "A's descriptor";
  if (first.b_descriptor != own.b_descriptor) differs = "B's descriptor";
  if (first.accumulates != own.accumulates) differs = "whether it adds";
  if (first.has_a_in_registers != own.has_a_in_registers) differs = "where A lies";
  if (first.shape.columns != own.shape.columns || first.shape.operand != own.shape.operand ||
      first.shape.transposes_a != own.shape.transposes_a || first.shape.transposes_b != own.shape.transposes_b ||
      first.shape.subtracts != own.shape.subtracts) {
    differs = "its shape or its sign";
  }
  if (differs != nullptr) fail("collective", "wgmma differs from another warp's of the warpgroup in %s", differs);
}

inline void check_fences(const WarpMatrices& warp, const MatrixStep& step) {
  if (!warp.is_fenced) fail("wgmma", "wgmma with no wgmma_fence since the start or the last wgmma_wait");
  for (int lane = 0; lane < 32; ++lane) {
    if (step.a[lane] != nullptr && is_written_since_fence(lane, step.a[lane], 4)) {
      fail("wgmma", "wgmma on registers of A that were written with no wgmma_fence since, by lane %d", lane);
    }
    if (warp.sums.count(step.sums[lane]) == 0 &&
        is_written_since_fence(lane, step.sums[lane], step.shape.columns / 2)) {
      fail("wgmma", "wgmma on sums that were written with no wgmma_fence since, by lane %d", lane);
    }
  }
}

inline void check_shared_operands(const MatrixStep& step) {
  const auto check = [&step](const char* name, const OperandPart& part) {
    const std::string complaint = part.matrix.complaint(part.mn_major);
    if (!complaint.empty())
      fail("descriptor", "%s's descriptor, 0x%llx: %s", name, part.matrix.bits, complaint.c_str());
    for_each_chunk(step, part, [](int, int, const unsigned char*) {});
  };
  if (step.a[0] == nullptr) check("A", own_a(step));
  check("B", all_b(step));
}

inline void issue_step(Exchange& all) {
  WarpMatrices& warp = own_matrices();
  MatrixStep step = gather_step(all);
  check_agreement(step);
  check_fences(warp, step);
  check_shared_operands(step);
  count_wgmma(step);
  for (int i = 0; i < 32; ++i) {
    SumsInFlight& sums = warp.sums[step.sums[i]];
    const size_t count = step.shape.columns / 2;
    if (sums.steps++ == 0) {
      sums.values.assign(step.sums[i], step.sums[i] + count);
      fill_nan(reinterpret_cast<unsigned char*>(step.sums[i]), count * sizeof(float));
    } else if (sums.values.size() != count) {
      fail("wgmma", "wgmma on sums that another one of %zu columns still works on", 2 * sums.values.size());
    }
  }
  step.issued = std::move(warp.next_issued);
  warp.next_issued = std::make_shared<Token>();
  warp.uncommitted.push_back(std::move(step));
  scheduler.wake(&own_sequence());
}

void wgmma(float* sums, const unsigned* a, unsigned long long a_descriptor, unsigned long long b_descriptor,
           bool accumulates, WgmmaShape shape) {
  const Call call;
  if (scheduler.size() % 128 != 0) {
    fail("wgmma", "wgmma in a block of %d threads; whole warpgroups are needed", scheduler.size());
  }
  const WgmmaOperands own = {shape, accumulates, a_descriptor, b_descriptor, sums, a};
  signal_order(own_matrices().next_issued.get());
  scheduler.meet("wgmma", ALL_LANES, &own, sizeof(own), false, issue_step);
}

void wgmma_fence() {
  const Call call;
  Thread& thread = *scheduler.current();
  const auto begin = static_cast<const unsigned char*>(__builtin_frame_address(0));
  thread.at_fence.begin = begin;
  thread.at_fence.bytes.resize(thread.stack_end - begin);
  copy_bytes(thread.at_fence.bytes.data(), begin, thread.at_fence.bytes.size());
  scheduler.meet("wgmma_fence", ALL_LANES, nullptr, 0, false, [](Exchange&) { own_matrices().is_fenced = true; });
}

void wgmma_commit() {
  const Call call;
  scheduler.meet("wgmma_commit", ALL_LANES, nullptr, 0, false, [](Exchange&) {
    WarpMatrices& warp = own_matrices();
    warp.groups.push_back(std::move(warp.uncommitted));
    warp.uncommitted.clear();
  });
}

// The warpgroup's products that are due when all but `pending` of the calling warp's groups have to be done.
inline long count_due(int pending) {
  const WarpMatrices& warp = own_matrices();
  long due = own_sequence().count(scheduler.current()->warp()) - long(warp.uncommitted.size());
  const int groups = int(warp.groups.size());
  for (int i = groups - 1; i >= 0 && i >= groups - pending; --i) due -= long(warp.groups[i].size());
  return due;
}

// A product is done by all four warps together.
inline void wait_for_warpgroup(long due) {
  const Sequence<AgreedProduct>& sequence = own_sequence();
  const int first = scheduler.current()->warp() / 4 * 4;
  while (sequence.count(sequence.laggard()) < due) {
    scheduler.wait_for(&sequence, "wgmma_wait", [&sequence, first, due] {
      const int behind = sequence.laggard();
      return "warp " + std::to_string(first + behind) + " has come to " + std::to_string(sequence.count(behind)) +
          " of " + std::to_string(due) + " wgmma";
    });
  }
}

void wgmma_wait(int pending) {
  const Call call;
  wait_for_warpgroup(count_due(pending));
  scheduler.meet("wgmma_wait", ALL_LANES, &pending, sizeof(pending), false, [](Exchange& all) {
    int pending;
    memcpy(&pending, all.values[0], sizeof(pending));
    WarpMatrices& warp = own_matrices();
    WorkClockPool& clocks = scheduler.block().product_clocks[scheduler.current()->warp()];
    for (; int(warp.groups.size()) > pending; warp.groups.pop_front()) {
      for (const MatrixStep& step : warp.groups.front()) {
        run_as_work(clocks, step.issued.get(), &warp.landed, [&] { land_step(warp, step); });
      }
    }
    warp.is_fenced = false;
  });
  observe_order(&own_matrices().landed);
}

}  // namespace simt
