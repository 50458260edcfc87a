// What the runtime tells the build that counts (SIMT_COUNTS; counts.h). In the other builds each of these is nothing.
#pragma once

#include <cstdio>

namespace simt {

struct Block;
struct MatrixStep;
struct TensorMap;
enum class Operand : unsigned char;

#if SIMT_COUNTS
#define SIMT_COUNTED(declaration) declaration;
#else
#define SIMT_COUNTED(declaration) \
  inline declaration {}
#endif

SIMT_COUNTED(void count_meeting())  // the calling thread's warp has come together, or will before it goes on
SIMT_COUNTED(void count_barrier())
SIMT_COUNTED(void count_cluster_barrier())
SIMT_COUNTED(void count_mbarrier_phase())

// `global` is null where zeros are filled in
SIMT_COUNTED(void count_copy(const void* shared, const void* global, int bytes))
SIMT_COUNTED(void count_copies_in_flight())
SIMT_COUNTED(void count_bulk_copy(const void* global, unsigned bytes))
SIMT_COUNTED(void count_box(const TensorMap& map, const int* corner, bool is_store))
SIMT_COUNTED(void count_bulk_start(const Block& block, unsigned long bytes))  // for each block that gets them
SIMT_COUNTED(void count_bulk_end(const Block& block, unsigned long bytes))

SIMT_COUNTED(void count_matrices(const unsigned char* const* rows, bool is_store))
SIMT_COUNTED(void count_mma(Operand operand))
SIMT_COUNTED(void count_wgmma(const MatrixStep& step))

SIMT_COUNTED(void count_block_end(const Block& block))
SIMT_COUNTED(void write_counts(FILE* file))

#undef SIMT_COUNTED

}  // namespace simt
