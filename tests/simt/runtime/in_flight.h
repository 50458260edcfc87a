// What a thread or a warp has begun and not yet waited for.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "interface.h"
#include "tensor_map.h"

namespace simt {

struct AsyncCopy {
  unsigned char* shared;
  const unsigned char* global;  // null: fill with zeros
  int bytes;
  int group;
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
  std::shared_ptr<char> issued;  // a token
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
  std::map<const unsigned*, std::vector<unsigned>> known_a;  // what A's registers held at their last wgmma
  int committed = 0, steps = 0;
  bool is_fenced = false;  // since the last wait
  bool is_fenced_since_step = false;
  char issued = 0, landed = 0;  // tokens
};

}  // namespace simt
