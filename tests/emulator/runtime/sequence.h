// What the four warps of a warpgroup have to do alike, in the same order, though not at the same time.
#pragma once

#include <deque>

namespace simt {

template <typename Step>
class Sequence {
 public:
  // The calling warp's next step, as the first warp to come did it.
  Step next(int warp, const Step& own) {
    const size_t place = counts_[warp % 4]++ - forgotten_;
    if (place == steps_.size()) steps_.push_back(own);
    const Step known = steps_[place];
    if (is_forgettable()) steps_.pop_front(), ++forgotten_;
    return known;
  }
  long count(int warp) const { return counts_[warp % 4]; }
  // The warp that has done fewest; with as many as the others, the first.
  int laggard() const {
    int found = 0;
    for (int i = 1; i < 4; ++i) found = counts_[i] < counts_[found] ? i : found;
    return found;
  }
  long most() const {
    long count = 0;
    for (const long each : counts_) count = each > count ? each : count;
    return count;
  }

 private:
  bool is_forgettable() const {
    for (const long each : counts_) {
      if (each == forgotten_) return false;
    }
    return true;
  }

  std::deque<Step> steps_;
  long counts_[4] = {}, forgotten_ = 0;
};

}  // namespace simt
