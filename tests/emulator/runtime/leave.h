// A thread ends: what it may not leave behind. And with its last thread, its block.
#pragma once

#include "cluster.h"
#include "stores.h"
#include "wgmma.h"

namespace simt {

// What it has stored arrives, if it waited for the reads.
inline void leave_stores(Thread& thread) {
  for (BoxStore& store : thread.stores) {
    if (!store.is_read) {
      thread.code = store.code;
      fail("async", "the thread exits while store_box may still read shared memory; bulk_wait_read<0>() comes first");
    }
    write_for_store(store);
  }
  thread.stores.clear();
}

inline void leave_products(Thread& thread) {
  const WarpMatrices& warp = thread.block->matrices[thread.warp()];
  const MatrixStep* left = nullptr;
  if (!warp.uncommitted.empty()) left = &warp.uncommitted.front();
  if (!warp.groups.empty() && !warp.groups.front().empty()) left = &warp.groups.front().front();
  if (left == nullptr) return;
  thread.code = left->code;
  fail("async", "the thread exits while wgmma may still be under way; wgmma_commit() and wgmma_wait<0>() come first");
}

template <typename Step>
void check_lengths(const char* what, const Sequence<Step>& sequence, int first_warp) {
  const int behind = sequence.laggard();
  if (sequence.count(behind) == sequence.most()) return;
  fail("collective", "%s: warp %d came to %ld of the %ld that its warpgroup did", what, first_warp + behind,
       sequence.count(behind), sequence.most());
}

// The next grid waits for this one alone, and takes it that what is before this one has ended, too.
inline void check_some_thread_waited(const Block& block) {
  for (const auto& thread : block.threads) {
    if (thread->has_waited) return;
  }
  fail("grid", "no thread of the block has called wait_for_previous_grid()");
}

// The memory of a block that has ended is gone: other blocks' accesses come before that, or are races.
inline void leave_block(Block& block, Token* cluster_end) {
  for (size_t i = 0; i < block.warpgroups.size(); ++i) {
    check_lengths("wgmma", block.warpgroups[i].products, 4 * i);
    check_lengths("setmaxnreg", block.warpgroups[i].registers, 4 * i);
  }
  check_some_thread_waited(block);
  count_block_end(block);
  if (scheduler.blocks().size() == 1) return;
  block.end.make(BLOCK_END);
  block.end.run([&] {
    acquire(&block.ended.generic);
    note_write(block.shared->data(), block.shared->bytes(), nullptr);
    release(&cluster_end->generic);
  });
}

void leave_thread(Thread& thread, Token* cluster_end) {
  leave_stores(thread);
  leave_products(thread);
  leave_cluster_barrier(thread);
  signal_order(&thread.block->ended);
  if (--thread.block->running == 0) leave_block(*thread.block, cluster_end);
  open_cluster_barrier_if_all_came();
  signal_order(cluster_end);
}

}  // namespace simt
