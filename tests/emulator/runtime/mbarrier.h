// Barriers in shared memory that count arrivals, and bytes of bulk copies, phase by phase.
#pragma once

#include <map>
#include <string>

#include "calls.h"
#include "copies.h"
#include "engine_work.h"

namespace simt {

struct Mbarrier {
  unsigned count, pending;
  long bytes_due = 0;
  unsigned phase = 0;
  const Thread* initialiser;
  bool is_fenced = false;
  Token tokens[2];
};

constexpr unsigned long long MBARRIER_MARK = 0x7265697272616d62;  // what its eight bytes hold here
constexpr long MOST_BYTES_DUE = (1 << 20) - 1;

inline std::map<const unsigned char*, Mbarrier> mbarriers;  // of the cluster

inline Mbarrier& find_mbarrier(const char* what, const unsigned char* bytes) {
  const auto found = mbarriers.find(bytes);
  if (found == mbarriers.end()) fail("mbarrier", "%s: nothing was initialised at %s", what, describe(bytes).c_str());
  note_read(bytes, 8, scheduler.current()->code);
  if (memcmp(bytes, &MBARRIER_MARK, 8) != 0) {
    fail("mbarrier", "%s: the barrier at %s was written over", what, describe(bytes).c_str());
  }
  return found->second;
}

inline Mbarrier& find_own_mbarrier(const char* what, unsigned address) {
  return find_mbarrier(what, own_bytes_at(what, address, 8, 8));
}

inline void complete_if_done(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes_due != 0) return;
  ++barrier.phase;
  count_mbarrier_phase();
  barrier.pending = barrier.count;
  scheduler.wake(&barrier);
}

inline void arrive_at(const char* what, Mbarrier& barrier, long bytes) {
  if (barrier.pending == 0) {
    fail("mbarrier", "%s: more arrivals than the barrier's %u, while %ld bytes are due", what, barrier.count,
         barrier.bytes_due);
  }
  barrier.bytes_due += bytes;
  if (barrier.bytes_due > MOST_BYTES_DUE) {
    fail("mbarrier", "%s: %ld bytes are due; at most %ld can be", what, barrier.bytes_due, MOST_BYTES_DUE);
  }
  signal_order(&barrier.tokens[barrier.phase % 2]);
  --barrier.pending;
  complete_if_done(barrier);
}

// Bytes of a copy have landed.
inline void complete_bytes(Mbarrier& barrier, long bytes) {
  barrier.bytes_due -= bytes;
  signal_order(&barrier.tokens[barrier.phase % 2]);
  complete_if_done(barrier);
}

inline std::string missing_at(const Mbarrier& barrier) {
  return "phase " + std::to_string(barrier.phase) + ": " + std::to_string(barrier.pending) + " of " +
         std::to_string(barrier.count) + " arrivals and " + std::to_string(barrier.bytes_due) + " bytes are missing";
}

void mbarrier_init(unsigned address, unsigned arrivals) {
  const Call call;
  unsigned char* bytes = own_bytes_at("mbarrier_init", address, 8, 8);
  if (arrivals < 1 || arrivals >= 1 << 20) fail("mbarrier", "mbarrier_init: %u arrivals; 1 to 2^20 - 1", arrivals);
  if (mbarriers.count(bytes)) fail("mbarrier", "mbarrier_init: %s holds a barrier already", describe(bytes).c_str());
  note_write(bytes, 8, scheduler.current()->code);
  memcpy(bytes, &MBARRIER_MARK, 8);
  Mbarrier& barrier = mbarriers[bytes];
  barrier.count = barrier.pending = arrivals;
  barrier.initialiser = scheduler.current();
}

// Shows the engine the barriers that the thread has initialised, which are writes to shared memory like any other.
inline void show_own_mbarriers() {
  for (auto& entry : mbarriers) {
    if (entry.second.initialiser == scheduler.current()) entry.second.is_fenced = true;
  }
}

void fence_mbarrier_init() {
  const Call call;
  show_own_mbarriers();
  signal_order(&scheduler.cluster_barrier().tokens[scheduler.cluster_barrier().turn]);
}

unsigned mbarrier_arrive(unsigned address, unsigned bytes) {
  const Call call;
  Mbarrier& barrier = find_own_mbarrier("mbarrier_arrive", address);
  const unsigned phase = barrier.phase;
  arrive_at("mbarrier_arrive", barrier, bytes);
  return phase;
}

void mbarrier_arrive_cluster(unsigned address) {
  const Call call;
  const char* const what = "mbarrier_arrive_cluster";
  const unsigned char* bytes = cluster_bytes_at(what, address, 8, 8);
  check_is_running(what, block_at(address));
  arrive_at(what, find_mbarrier(what, bytes), 0);
}

// A try may give up early, after an unknown time: the first try of each thread at a phase does so.
bool mbarrier_try_wait(unsigned address, unsigned parity) {
  const Call call;
  Thread& thread = *scheduler.current();
  Mbarrier& barrier = find_own_mbarrier("mbarrier_wait", address);
  if (parity > 1) fail("mbarrier", "mbarrier_wait: parity %u; 0 and 1 are accepted", parity);
  if (barrier.phase % 2 == parity && thread.given_up != &barrier) {
    thread.given_up = &barrier;
    return false;
  }
  thread.given_up = nullptr;
  while (barrier.phase % 2 == parity) {
    scheduler.wait_for(&barrier, "mbarrier_wait", [&barrier] { return missing_at(barrier); });
  }
  observe_order(&barrier.tokens[parity]);
  return true;
}

// Arrives when the thread's copies so far have landed. With `adds_arrival`, the phase expects one arrival more.
void copy_async_arrive(unsigned address, bool adds_arrival) {
  const Call call;
  Thread& thread = *scheduler.current();
  Mbarrier& barrier = find_own_mbarrier("copy_async_arrive", address);
  if (adds_arrival) ++barrier.pending;
  forget_landed(thread);
  count_copies_in_flight();
  engine.start("copy_async_arrive", thread, [&barrier, &thread, copies = thread.copies] {
    for (const auto& copy : copies) land_copy(copy, thread.code);
    signal_order(&thread.copies_arrived);
    arrive_at("copy_async_arrive", barrier, 0);
  });
}

}  // namespace simt
