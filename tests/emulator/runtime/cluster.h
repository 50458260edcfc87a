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

// Shows what a thread did before its fence_mbarrier_init; other accesses to memory only where it releases.
void cluster_arrive(bool releases) {
  const Call call;
  Thread& thread = *scheduler.current();
  Barrier& barrier = scheduler.cluster_barrier();
  if (thread.cluster_turn != Thread::NO_TURN)
    fail("cluster", "barrier.cluster.arrive twice, with no barrier.cluster.wait between");
  thread.cluster_turn = barrier.turn;
  if (releases) signal_order(&barrier.tokens[barrier.turn]);
  count_meeting();
  ++barrier.arrived;
  open_cluster_barrier_if_all_came();
}

void cluster_wait() {
  const Call call;
  Thread& thread = *scheduler.current();
  Barrier& barrier = scheduler.cluster_barrier();
  const int turn = thread.cluster_turn;
  if (turn == Thread::NO_TURN) fail("cluster", "barrier.cluster.wait with no barrier.cluster.arrive before");
  thread.cluster_turn = Thread::NO_TURN;
  if (barrier.turn == turn) scheduler.wait_for(&barrier, "barrier.cluster.wait");
  observe_order(&barrier.tokens[turn]);
}

inline void leave_cluster_barrier(const Thread& thread) {
  if (thread.cluster_turn == Thread::NO_TURN) return;
  fail("cluster", "the thread exits after barrier.cluster.arrive, with no barrier.cluster.wait");
}

}  // namespace simt
