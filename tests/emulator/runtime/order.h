// In which order blocks and threads run, and asynchronous work is done, where the hardware leaves it open.
#pragma once

#include <utility>
#include <vector>

namespace simt {

class Order {
 public:
  enum Kind { FORWARD, REVERSE, SHUFFLED };

  void set(Kind kind, unsigned long long seed) {
    kind_ = kind;
    random_ = seed * 2 + 1;
  }

  void permute(std::vector<int>& items) {
    const int count = int(items.size());
    for (int i = 0; i < count; ++i) items[i] = kind_ == REVERSE ? count - 1 - i : i;
    shuffle_again(items);
  }

  void shuffle_again(std::vector<int>& items) {
    if (kind_ != SHUFFLED) return;
    for (int i = int(items.size()) - 1; i > 0; --i) std::swap(items[i], items[next() % (i + 1)]);
  }

  // True with a probability of 1 / count, drawn from the seed, in every order.
  bool happens(unsigned count) { return (next() >> 32) % count == 0; }

  // One of `count` things, of which any may come first.
  size_t pick(size_t count) {
    if (kind_ == SHUFFLED) return next() % count;
    return kind_ == REVERSE ? count - 1 : 0;
  }

 private:
  unsigned long long next() {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    return random_;
  }

  Kind kind_ = FORWARD;
  unsigned long long random_ = 1;
};

inline Order order;

}  // namespace simt
