// Blocks of one cluster: they run together, meet, and reach into each other's shared memory.
#pragma once

#include "calls.h"
#include "counting.h"

namespace simt {

int cluster_rank() { return scheduler.block().rank; }
int cluster_size() { return int(scheduler.blocks().size()); }

unsigned cluster_address(unsigned address, int rank) {
  const Call call;
  if (rank < 0 || rank >= cluster_size()) fail("cluster", "cluster_address of block %d of %d", rank, cluster_size());
  pointer_to(address);
  return (rank + 1) * CLUSTER_WINDOW + address % CLUSTER_WINDOW;
}

// Threads that have exited are not waited for.
inline void open_cluster_barrier_if_all_came() {
  Barrier& barrier = scheduler.cluster_barrier();
  if (barrier.arrived == 0 || barrier.arrived < scheduler.running()) return;
  barrier.arrived = 0;
  barrier.turn ^= 1;
  count_cluster_barrier();
  scheduler.wake(&barrier);
}

// Shows what a thread did before its fence_mbarrier_init, and orders no other accesses to memory.
void cluster_sync_relaxed() {
  const Call call;
  Barrier& barrier = scheduler.cluster_barrier();
  const int turn = barrier.turn;
  count_meeting();
  ++barrier.arrived;
  open_cluster_barrier_if_all_came();
  if (barrier.turn == turn) scheduler.wait_for(&barrier, "cluster_sync_relaxed");
  observe_order(&barrier.tokens[turn]);
}

}  // namespace simt
