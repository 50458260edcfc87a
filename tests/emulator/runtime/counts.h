// What one launch asks of the memories and of the matrix units, counted.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "banks.h"
#include "counting.h"
#include "requests.h"
#include "scheduler.h"
#include "sectors.h"
#include "wgmma.h"

namespace simt {

struct GlobalTally {
  long requests = 0, sectors = 0, bytes = 0;  // sectors of each request by itself; bytes that lanes asked for
};

struct SharedTally {
  long requests = 0;
  SharedCost cost;

  void add(const SharedCost& more) {
    ++requests;
    cost.bytes += more.bytes;
    cost.bank_cycles += more.bank_cycles;
    cost.return_cycles += more.return_cycles;
    cost.cycles += more.cycles;
  }
};

struct BlockCounts {
  std::vector<WarpRequests> warps;
  std::map<int, long> copies_in_flight;  // by thread: the most bytes at a time
  long bulk_in_flight = 0, most_bulk_in_flight = 0;
};

struct Counts {
  long blocks = 0, barriers = 0, cluster_barriers = 0, mbarrier_phases = 0, bytes_in_flight = 0, multiply_adds = 0;
  std::map<std::string, GlobalTally> global;
  std::map<std::string, SharedTally> shared;
  std::map<std::string, long> instructions;
  Sectors sectors_read, sectors_written;
  std::map<const Block*, BlockCounts> under_way;  // by block of the cluster
};

inline Counts counts;

inline BlockCounts& counts_of(const Block& block) { return counts.under_way[&block]; }

inline WarpRequests& requests_of(const Thread& thread) {
  std::vector<WarpRequests>& warps = counts_of(*thread.block).warps;
  if (warps.empty()) warps.resize((scheduler.size() + LANES - 1) / LANES);
  return warps[thread.warp()];
}

// ---- global memory

inline void add_sectors(GlobalTally& tally, const std::set<size_t>& sectors, bool is_write, const Block& block) {
  ++tally.requests;
  tally.sectors += sectors.size();
  for (const size_t each : sectors) {
    (is_write ? counts.sectors_written : counts.sectors_read).touch(each, block.rank, block.number);
  }
}

inline void collect_sectors(std::set<size_t>& sectors, bool is_write, const unsigned char* from, size_t bytes) {
  Sectors& all = is_write ? counts.sectors_written : counts.sectors_read;
  const size_t first = all.number_of(from), last = all.number_of(from + bytes - 1);
  if (first == Sectors::NOWHERE || last == Sectors::NOWHERE) return;
  for (size_t each = first; each <= last; ++each) sectors.insert(each);
}

inline void count_global(const char* kind, const Request& request, const unsigned char* const* lanes,
                         const Block& block) {
  const bool is_write = request.kind == Request::STORE || request.kind == Request::ATOMIC;
  GlobalTally& tally = counts.global[kind];
  std::set<size_t> sectors;
  for (int lane = 0; lane < LANES; ++lane) {
    if (lanes[lane] == nullptr) continue;
    tally.bytes += request.bytes;
    collect_sectors(sectors, is_write, lanes[lane], request.bytes);
  }
  add_sectors(tally, sectors, is_write, block);
}

// ---- a warp's requests

inline bool is_in_shared_memory(const Request& request) {
  for (const unsigned char* at : request.at) {
    if (at != nullptr) return is_shared(at, 1);
  }
  return false;
}

inline void count_request(const Request& request, const Block& block) {
  static constexpr const char* NAMES[] = {"load", "store", "copy_async", "atomic"};
  const char* const name = NAMES[request.kind];
  if (request.kind == Request::COPY) {
    counts.shared[name].add(cost_of(request));
    count_global(name, request, request.from, block);
  } else if (is_in_shared_memory(request)) {
    counts.shared[name].add(cost_of(request));
  } else {
    count_global(name, request, request.at, block);
  }
}

inline void count_access(const void* address, int bytes, Request::Kind kind, const void* place, int part = 0) {
  const Thread* thread = scheduler.current();
  if (thread == nullptr || (address >= thread->stack_guard && address < thread->stack_end)) return;
  if (!is_shared(address, 1) && !is_in_a_buffer(address, 1)) return;  // the runtime's own
  Request& request = requests_of(*thread).join(thread->lane(), place, part);
  request.kind = kind;
  request.bytes = bytes;
  request.at[thread->lane()] = static_cast<const unsigned char*>(address);
}

// As the widest accesses that there are.
inline void count_range(const void* address, long bytes, Request::Kind kind, const void* place) {
  for (long done = 0; done < bytes; done += WIDEST) {
    count_access(static_cast<const char*>(address) + done, int(std::min<long>(WIDEST, bytes - done)), kind, place,
                 int(done));
  }
}

void count_meeting() {
  Thread& thread = *scheduler.current();
  const int lanes = std::min(LANES, scheduler.size() - thread.warp() * LANES);
  requests_of(thread).meet(thread.lane(), lanes,
                           [&](const Request& request) { count_request(request, *thread.block); });
}

void count_copy(const void* shared, const void* global, int bytes) {
  const Thread& thread = *scheduler.current();
  Request& request = requests_of(thread).join(thread.lane(), thread.code, 0);
  request.kind = Request::COPY;
  request.bytes = bytes;
  request.at[thread.lane()] = static_cast<const unsigned char*>(shared);
  request.from[thread.lane()] = static_cast<const unsigned char*>(global);
}

void count_matrices(const unsigned char* const* rows, bool is_store) {
  Request request;
  request.kind = is_store ? Request::STORE : Request::LOAD;
  request.bytes = 16;
  std::copy(rows, rows + LANES, request.at);
  counts.shared[is_store ? "matrix_store" : "matrix_load"].add(cost_of(request));
}

// ---- asynchronous work

// A thread waits for its own copies, so the most of a block is the sum of the most of its threads.
void count_copies_in_flight() {
  const Thread& thread = *scheduler.current();
  long bytes = 0;
  for (const auto& copy : thread.copies) bytes += copy->is_landed ? 0 : copy->given;
  long& most = counts_of(*thread.block).copies_in_flight[thread.number];
  most = std::max(most, bytes);
}

void count_bulk_copy(const void* global, unsigned bytes) {
  GlobalTally& tally = counts.global["bulk_load"];
  std::set<size_t> sectors;
  collect_sectors(sectors, false, static_cast<const unsigned char*>(global), bytes);
  tally.bytes += bytes;
  add_sectors(tally, sectors, false, scheduler.block());
}

void count_box(const TensorMap& map, const int* corner, bool is_store) {
  GlobalTally& tally = counts.global[is_store ? "bulk_store" : "bulk_load"];
  std::set<size_t> sectors;
  for_each_element(map, corner, [&](size_t, const unsigned char* place) {
    if (place == nullptr) return;
    tally.bytes += map.element_bytes;
    collect_sectors(sectors, is_store, place, map.element_bytes);
  });
  add_sectors(tally, sectors, is_store, scheduler.block());
  if (is_store) counts.shared["bulk_store"].add(cost_of_rows(map.box_bytes()));
}

void count_bulk_start(const Block& block, unsigned long bytes) {
  counts.shared["bulk_load"].add(cost_of_rows(bytes));
  BlockCounts& own = counts_of(block);
  own.bulk_in_flight += bytes;
  own.most_bulk_in_flight = std::max(own.most_bulk_in_flight, own.bulk_in_flight);
}

void count_bulk_end(const Block& block, unsigned long bytes) { counts_of(block).bulk_in_flight -= bytes; }

// ---- products

constexpr int K_BYTES = 32;  // of one row of A or column of B

inline void count_product(const char* instruction, int rows, int columns, Operand operand) {
  const int depth = K_BYTES / element_bytes_of(operand);
  const std::string shape = "m" + std::to_string(rows) + "n" + std::to_string(columns) + "k" + std::to_string(depth);
  ++counts.instructions[std::string(instruction) + " " + shape + " " + name_of(operand)];
  counts.multiply_adds += long(rows) * columns * depth;
}

void count_mma(Operand operand) { count_product("mma", 16, 8, operand); }

// Called for each warp. The four of them read A by rows of their own, and B together.
void count_wgmma(const MatrixStep& step) {
  SharedTally& tally = counts.shared["wgmma"];
  const bool is_first = scheduler.current()->warp() % 4 == 0;
  if (step.a[0] == nullptr) tally.add(cost_of_rows(16 * K_BYTES));
  if (!is_first) return;
  tally.add(cost_of_rows(step.shape.columns * K_BYTES));
  count_product("wgmma", 64, step.shape.columns, step.shape.operand);
}

// ---- barriers

void count_barrier() { ++counts.barriers; }
void count_cluster_barrier() { ++counts.cluster_barriers; }
void count_mbarrier_phase() { ++counts.mbarrier_phases; }

// ---- ends

void count_block_end(const Block& block) {
  BlockCounts own = std::move(counts_of(block));
  counts.under_way.erase(&block);
  ++counts.blocks;
  for (WarpRequests& warp : own.warps) warp.end([&](const Request& request) { count_request(request, block); });
  long in_flight = own.most_bulk_in_flight;
  for (const auto& [thread, most] : own.copies_in_flight) in_flight += most;
  counts.bytes_in_flight = std::max(counts.bytes_in_flight, in_flight);
}

template <typename Map, typename Write>
void write_object(FILE* file, const char* name, const Map& map, const Write& write) {
  fprintf(file, "\"%s\": {", name);
  const char* between = "";
  for (const auto& [key, value] : map) {
    fprintf(file, "%s\"%s\": ", between, key.c_str());
    write(value);
    between = ", ";
  }
  fprintf(file, "}, ");
}

void write_counts(FILE* file) {
  fprintf(file, "{");
  write_object(file, "global", counts.global, [&](const GlobalTally& tally) {
    fprintf(file, "{\"requests\": %ld, \"sectors\": %ld, \"bytes\": %ld}", tally.requests, tally.sectors, tally.bytes);
  });
  write_object(file, "shared", counts.shared, [&](const SharedTally& tally) {
    const SharedCost& cost = tally.cost;
    fprintf(file, "{\"requests\": %ld, \"bytes\": %ld, \"bank_cycles\": %ld, ", tally.requests, cost.bytes,
            cost.bank_cycles);
    fprintf(file, "\"return_cycles\": %ld, \"cycles\": %ld}", cost.return_cycles, cost.cycles);
  });
  write_object(file, "instructions", counts.instructions, [&](long count) { fprintf(file, "%ld", count); });
  const Sectors &read = counts.sectors_read, &written = counts.sectors_written;
  fprintf(file, "\"cache_read_bytes\": %ld, \"cache_written_bytes\": %ld, ", read.bytes_by_blocks,
          written.bytes_by_blocks);
  fprintf(file, "\"memory_read_bytes\": %ld, \"memory_written_bytes\": %ld, ", read.bytes_by_all, written.bytes_by_all);
  fprintf(file, "\"multiply_adds\": %ld, \"barriers\": %ld, ", counts.multiply_adds, counts.barriers);
  fprintf(file, "\"cluster_barriers\": %ld, \"mbarrier_phases\": %ld, ", counts.cluster_barriers,
          counts.mbarrier_phases);
  fprintf(file, "\"bytes_in_flight\": %ld, \"blocks\": %ld}\n", counts.bytes_in_flight, counts.blocks);
}

}  // namespace simt
