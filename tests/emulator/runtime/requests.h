// The accesses of a warp's lanes, combined into requests. Threads run sequentially, so a lane's access waits
// here for those of the others: the same ones at the same place of the text, as often after the last point at which the
// warp met. Lanes of which some leave out a turn of a loop are taken to have left out its last one.
#pragma once

#include <deque>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "thread.h"

namespace simt {

constexpr int LANES = 32;
constexpr int WIDEST = 16;  // bytes of a lane's access

// A warp's accesses by one instruction.
struct Request {
  enum Kind : unsigned char { LOAD, STORE, COPY, ATOMIC };
  Kind kind = LOAD;
  unsigned char bytes = 0;  // of a lane
  const unsigned char* at[LANES] = {};    // null where the lane does not take part
  const unsigned char* from[LANES] = {};  // of a COPY to shared memory; null where it fills in zeros

  bool has(int lane) const { return at[lane] != nullptr; }
};

class WarpRequests {
 public:
  // The request that this lane's access belongs to. `place` is where the text makes it, `part` which of several it
  // makes there.
  Request& join(int lane, const void* place, int part) {
    Place& here = epoch_of(lane).places[{place, part}];
    const size_t turn = here.turns[lane]++;
    if (turn == here.requests.size()) here.requests.emplace_back();
    return here.requests[turn];
  }

  // The lane has come to a point at which all lanes meet. Calls visit(request) for those that no lane can join any
  // more.
  template <typename Visit>
  void meet(int lane, int lanes, const Visit& visit) {
    if (++epoch_of(lane).left == lanes) {
      visit_all(epochs_.front(), visit);
      epochs_.pop_front();
      ++first_;
    }
    ++epoch_[lane];
  }

  template <typename Visit>
  void end(const Visit& visit) {
    for (const Epoch& epoch : epochs_) visit_all(epoch, visit);
    *this = WarpRequests();
  }

 private:
  struct Place {
    size_t turns[LANES] = {};
    std::vector<Request> requests;
  };
  struct Hash {
    size_t operator()(const std::pair<const void*, int>& key) const {
      return reinterpret_cast<size_t>(key.first) * 31 + key.second;
    }
  };
  struct Epoch {  // between two points at which the warp meets
    std::unordered_map<std::pair<const void*, int>, Place, Hash> places;
    int left = 0;  // lanes that have gone on
  };

  // Turns of a loop in which each lane goes on right where it was are one wide access, as nvcc makes of an unrolled
  // loop: in shared memory, of which it knows the alignment. Calls visit(request) for each of what is left.
  template <typename Visit>
  static void visit_all(const Epoch& epoch, const Visit& visit) {
    for (const auto& [key, place] : epoch.places) {
      const std::vector<Request>& turns = place.requests;
      for (size_t first = 0, count; first < turns.size(); first += count) {
        Request request = turns[first];
        for (count = WIDEST / request.bytes; count > 1; count /= 2) {
          if (first + count <= turns.size() && are_neighbours(&turns[first], count)) break;
        }
        request.bytes *= count;
        visit(request);
      }
    }
  }
  static bool are_neighbours(const Request* turns, size_t count) {
    for (int lane = 0; lane < LANES; ++lane) {
      const unsigned char* const first = turns[0].at[lane];
      for (size_t i = 0; i < count; ++i) {
        if (turns[i].kind != turns[0].kind || turns[i].bytes != turns[0].bytes ||
            turns[i].has(lane) != (first != nullptr)) return false;
        if (first != nullptr && turns[i].at[lane] != first + i * turns[i].bytes) return false;
      }
      if (first == nullptr) continue;
      const bool is_plain = turns[0].kind == Request::LOAD || turns[0].kind == Request::STORE;
      if (!is_plain || !is_shared(first, 1) || reinterpret_cast<size_t>(first) % (count * turns[0].bytes) != 0)
        return false;
    }
    return true;
  }
  Epoch& epoch_of(int lane) {
    while (epoch_[lane] - first_ >= long(epochs_.size())) epochs_.emplace_back();
    return epochs_[epoch_[lane] - first_];
  }

  std::deque<Epoch> epochs_;
  long first_ = 0, epoch_[LANES] = {};
};

}  // namespace simt
