// The asynchronous engine: bulk copies and arrivals that are under way, done one by one, as late as they may be.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "clocks.h"
#include "interface.h"
#include "order.h"

namespace simt {

struct Thread;

class Engine {
 public:
  // `what` was asked for by this thread, just now; its effects come later, by `land`.
  void start(const char* what, Thread& thread, std::function<void()> land);
  bool land_one();
  void check_idle() const;  // nothing may be under way when the blocks that it works for have ended

 private:
  struct Work {
    const char* what;
    Thread* thread;
    const void* code;
    std::function<void()> land;
    std::unique_ptr<Token> issued;
  };

  std::vector<Work> under_way_;
};

inline Engine engine;

}  // namespace simt
