// Blocks of one cluster: they run together, meet, and reach into each other's shared memory.
#pragma once

#include "calls.h"

namespace simt {

int cluster_rank() { return scheduler.block().rank; }
int cluster_size() { return int(scheduler.blocks().size()); }

unsigned cluster_address(unsigned address, int rank) {
  const Call call;
  if (rank < 0 || rank >= cluster_size()) fail("cluster", "cluster_address of block %d of %d", rank, cluster_size());
  pointer_to(address);
  return (rank + 1) * CLUSTER_WINDOW + address % CLUSTER_WINDOW;
}

void cluster_sync() {
  const Call call;
  static Barrier barrier;
  char* token = &barrier.tokens[barrier.turn];
  signal_order(token);
  if (++barrier.arrived == scheduler.size() * cluster_size()) {
    barrier.arrived = 0;
    barrier.turn ^= 1;
    scheduler.wake(&barrier);
  } else {
    scheduler.wait_for(&barrier, "cluster_sync");
  }
  observe_order(token);
}

}  // namespace simt
