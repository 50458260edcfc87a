// What a thread or a warp has begun and not yet waited for.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "clocks.h"
#include "interface.h"
#include "tensor_map.h"

namespace simt {

// Its thread waits for it, or an mbarrier does, or both: the first of them lands it.
struct AsyncCopy {
  unsigned char* shared;
  const unsigned char* global;
  int bytes;
  int given;  // zeros from there on
  int group;
  bool is_landed = false;
  Token landed = {};
};

// A box on its way from shared memory to an array.
struct BoxStore {
  TensorMap map;
  int corner[TensorMap::MOST_DIMENSIONS];
  const unsigned char* from;
  const void* code;
  int group;
  std::vector<unsigned char> content;  // once it was read
  bool is_read = false;
  std::shared_ptr<Token> issued;
};

// One warp's part of a wgmma.
struct MatrixStep {
  WgmmaShape shape;
  bool accumulates;
  unsigned long long a_descriptor, b_descriptor;
  float* sums[32];
  const unsigned* a[32];  // null where A comes from shared memory
  unsigned a_words[32][4];
  const void* code;
  std::shared_ptr<Token> issued;
};

// The sums of one lane while wgmmas work on them: the lane's own memory holds NaN meanwhile.
struct SumsInFlight {
  std::vector<float> values;
  int steps = 0;
};

struct WarpMatrices {
  std::vector<MatrixStep> uncommitted;
  std::deque<std::vector<MatrixStep>> groups;
  std::map<float*, SumsInFlight> sums;
  bool is_fenced = false;  // since the last wait
  std::shared_ptr<Token> next_issued = std::make_shared<Token>();
  Token landed;
};

// A thread's own memory, where its arrays lie that stand for registers, as it was at its last wgmma_fence.
struct OwnMemory {
  const unsigned char* begin = nullptr;
  std::vector<unsigned char> bytes;
};

// What the warps of a warpgroup have to agree on in each product, and in each change of their registers.
struct AgreedProduct {
  WgmmaShape shape;
  bool accumulates, has_a_in_registers;
  unsigned long long a_descriptor, b_descriptor;
};
struct AgreedRegisters {
  bool increases;
  int count;
};

}  // namespace simt
