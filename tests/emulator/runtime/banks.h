// How long shared memory takes for what a warp's lanes ask of it at once.
#pragma once

#include <algorithm>
#include <vector>

#include "requests.h"

namespace simt {

constexpr int BANKS = 32, BANK_BYTES = 4;
constexpr int BYTES_A_CYCLE = BANKS * BANK_BYTES;

struct SharedCost {
  long bytes = 0;          // what lanes share, once
  long bank_cycles = 0;    // if all lanes were served together, each bank one word a cycle
  long return_cycles = 0;  // if no two lanes wanted different words of a bank
  long cycles = 0;  // both: as many lanes at a time as a cycle returns bytes for, each bank one word of them a cycle
};

// The most different words of one bank that these lanes want.
inline long busiest_bank(const Request& request, int first, int count) {
  std::vector<size_t> words;
  for (int lane = first; lane < first + count; ++lane) {
    if (!request.has(lane)) continue;
    const size_t address = reinterpret_cast<size_t>(request.at[lane]);
    for (size_t word = address / BANK_BYTES; word <= (address + request.bytes - 1) / BANK_BYTES; ++word)
      words.push_back(word);
  }
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  long wanted[BANKS] = {}, most = 0;
  for (const size_t word : words) most = std::max(most, ++wanted[word % BANKS]);
  return most;
}

inline bool are_shared_by(const Request& request, int distance) {
  for (int lane = 0; lane < LANES; ++lane) {
    const int other = lane ^ distance;
    if (request.has(lane) && request.has(other) && request.at[lane] != request.at[other]) return false;
  }
  return true;
}

// Lanes that are served together: those for which a cycle's bytes suffice. Wide reads return to twice as many where
// lanes n and n ^ 1, or all n and n ^ 2, have one address.
inline int lanes_at_a_time(const Request& request) {
  const int wanted = std::max<int>(request.bytes, BANK_BYTES);
  const int lanes = BYTES_A_CYCLE / wanted;
  const bool is_read = request.kind == Request::LOAD;
  return is_read && lanes < LANES && (are_shared_by(request, 1) || are_shared_by(request, 2)) ? 2 * lanes : lanes;
}

inline SharedCost cost_of(const Request& request) {
  SharedCost cost;
  std::vector<const unsigned char*> addresses;
  for (int lane = 0; lane < LANES; ++lane) {
    if (request.has(lane)) addresses.push_back(request.at[lane]);
  }
  std::sort(addresses.begin(), addresses.end());
  cost.bytes = (std::unique(addresses.begin(), addresses.end()) - addresses.begin()) * request.bytes;
  cost.bank_cycles = busiest_bank(request, 0, LANES);
  const int lanes = lanes_at_a_time(request);
  for (int first = 0; first < LANES; first += lanes) {
    const long turns = busiest_bank(request, first, lanes);
    cost.return_cycles += turns > 0;
    cost.cycles += turns;
  }
  return cost;
}

// What goes in and out as long rows, with no bank left idle.
inline SharedCost cost_of_rows(unsigned long bytes) {
  const long cycles = (bytes + BYTES_A_CYCLE - 1) / BYTES_A_CYCLE;
  return {long(bytes), cycles, cycles, cycles};
}

}  // namespace simt
