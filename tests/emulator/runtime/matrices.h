// What a warp does together with small matrices: 8 x 8 of 16 bits in shared memory, and products of fragments.
#pragma once

#include <cstddef>

#include "calls.h"
#include "counting.h"
#include "tensor_core.h"

namespace simt {

constexpr unsigned ALL_LANES = 0xffffffff;

// Lane 8m + r gives the address of row r of matrix m. Of each matrix, lane l has the 16-bit elements 2 (l % 4) and the
// next of row l / 4; transposed, of column l / 4.
inline unsigned char* element_in_matrix(const unsigned char* const* rows, int matrix, int lane, int which,
                                        bool transposed) {
  const int line = lane / 4, along = lane % 4 * 2 + which;
  const int row = transposed ? along : line, column = transposed ? line : along;
  return const_cast<unsigned char*>(rows[8 * matrix + row]) + 2 * column;
}

// Of `count` matrices: the address of a later lane is not looked at.
inline void meet_with_rows(const char* what, unsigned row, int count, const unsigned char* (&rows)[32]) {
  const unsigned char* const own = lane() < 8 * count ? own_bytes_at(what, row, 16, 16) : nullptr;
  const Exchange& all = scheduler.meet(what, ALL_LANES, &own, sizeof(own), false);
  for (int i = 0; i < 32; ++i) memcpy(&rows[i], all.values[i], sizeof(own));
}

void ldmatrix(unsigned* words, int count, unsigned row, bool transposed) {
  const Call call;
  const unsigned char* rows[32];
  meet_with_rows("ldmatrix", row, count, rows);
  if (lane() == 0) count_matrices(rows, false);
  for (int matrix = 0; matrix < count; ++matrix) {
    words[matrix] = 0;
    for (int which = 0; which < 2; ++which) {
      const unsigned char* from = element_in_matrix(rows, matrix, lane(), which, transposed);
      note_read(from, 2, scheduler.current()->code);
      words[matrix] |= unsigned(from[0] | from[1] << 8) << 16 * which;
    }
  }
}

void stmatrix(unsigned row, const unsigned* words, int count, bool transposed) {
  const Call call;
  const unsigned char* rows[32];
  meet_with_rows("stmatrix", row, count, rows);
  if (lane() == 0) count_matrices(rows, true);
  for (int matrix = 0; matrix < count; ++matrix) {
    for (int which = 0; which < 2; ++which) {
      unsigned char* to = element_in_matrix(rows, matrix, lane(), which, transposed);
      note_write(to, 2, scheduler.current()->code);
      to[0] = words[matrix] >> 16 * which;
      to[1] = words[matrix] >> (16 * which + 8);
    }
  }
}

// Operands of this kind in a word of a fragment.
inline int in_word(Operand kind) { return kind == Operand::TF32 ? 1 : is_byte(kind) ? 4 : 2; }

// The operand at (row of 16, k) of A, whose four words each lane holds as PTX lays out m16n8k32, m16n8k16 and m16n8k8.
inline float a_element(const unsigned words[32][4], int row, int k, Operand kind) {
  const int word = k / in_word(kind);  // of a row's eight
  return element_of(words[row % 8 * 4 + word % 4][row / 8 + 2 * (word / 4)], k % in_word(kind), kind);
}

struct MmaOperands {
  unsigned a[4], b[2];
  float sums[4];
  Operand kind;
};
static_assert(sizeof(MmaOperands) <= Exchange::VALUE_BYTES);

// For the whole warp at once, so that each operand is widened once. The sums take the place of the lanes' values.
inline void multiply_fragments(Exchange& all) {
  unsigned a_words[32][4], b_words[32][2];
  for (int i = 0; i < 32; ++i) {
    memcpy(a_words[i], all.values[i] + offsetof(MmaOperands, a), 16);
    memcpy(b_words[i], all.values[i] + offsetof(MmaOperands, b), 8);
  }
  Operand kind;
  memcpy(&kind, all.values[0] + offsetof(MmaOperands, kind), sizeof(kind));
  const int depth = 8 * in_word(kind);
  const SumRule rule = sum_rule(kind);
  float x[16][32], w[8][32];
  for (int k = 0; k < depth; ++k) {
    for (int row = 0; row < 16; ++row) x[row][k] = a_element(a_words, row, k, kind);
    for (int column = 0; column < 8; ++column) {
      const int word = k / in_word(kind);
      w[column][k] = element_of(b_words[4 * column + word % 4][word / 4], k % in_word(kind), kind);
    }
  }
  for (int i = 0; i < 32; ++i) {
    float sums[4];
    memcpy(sums, all.values[i] + offsetof(MmaOperands, sums), sizeof(sums));
    for (int j = 0; j < 4; ++j) sums[j] = dot(sums[j], x[i / 4 + j / 2 * 8], w[i % 4 * 2 + j % 2], depth, kind, rule);
    memcpy(all.values[i], sums, sizeof(sums));
  }
}

void mma(float* sums, const unsigned* a, unsigned b0, unsigned b1, Operand kind) {
  const Call call;
  const MmaOperands own = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {sums[0], sums[1], sums[2], sums[3]}, kind};
  const Exchange& all = scheduler.meet("mma", ALL_LANES, &own, sizeof(own), false, multiply_fragments);
  if (lane() == 0) count_mma(kind);
  memcpy(sums, all.values[lane()], 4 * sizeof(float));
}

}  // namespace simt
