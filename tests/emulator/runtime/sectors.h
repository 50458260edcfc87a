// Which 32-byte sectors of the launch's arrays were touched, by each block and by all. An array is taken to begin at a
// multiple of 256 bytes, as allocations do, plus what its address has beyond a multiple of 16.
#pragma once

#include <vector>

#include "memory.h"

namespace simt {

constexpr size_t SECTOR = 32;

class Sectors {
 public:
  static constexpr size_t NOWHERE = ~size_t(0);

  // The number of the sector in which this byte lies, over all arrays.
  size_t number_of(const void* address) {
    if (begins_.empty()) number_arrays();
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (!buffers[i].holds(address, 1)) continue;
      const unsigned char* data = buffers[i].data();
      const size_t beyond = reinterpret_cast<size_t>(data) % 16;
      return begins_[i] + (static_cast<const unsigned char*>(address) - data + beyond) / SECTOR;
    }
    return NOWHERE;
  }

  // Bytes of the sectors that were touched for the first time: by this block, or by any.
  long bytes_by_blocks = 0, bytes_by_all = 0;

  void touch(size_t sector, int rank, long block) {
    if (rank >= int(last_.size())) last_.resize(rank + 1, std::vector<long>(begins_.back(), -1));
    if (last_[rank][sector] != block) bytes_by_blocks += SECTOR;
    last_[rank][sector] = block;
    if (touched_.empty()) touched_.resize(begins_.back());
    if (!touched_[sector]) bytes_by_all += SECTOR;
    touched_[sector] = true;
  }

 private:
  void number_arrays() {
    begins_.push_back(0);
    for (const Buffer& buffer : buffers) begins_.push_back(begins_.back() + buffer.bytes() / SECTOR + 2);
  }

  std::vector<size_t> begins_;            // the first number of each array, and one past the last
  std::vector<std::vector<long>> last_;   // by rank in the cluster and sector: the block that touched it last
  std::vector<bool> touched_;
};

}  // namespace simt
