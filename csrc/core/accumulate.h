// Sums, largest and smallest elements of each column: one accumulation step of a tile program.
//
// Rule: rows. The rows are cut into chunks of kRows. Each chunk adds up its rows in their order, and what the chunks
// give is added up in the same way, as rows, until one is left.
//
// Reason: bits may depend on the number of rows alone, and rounding errors must not grow with it. A chunk belongs to
// one thread, so that nobody waits; the results of all chunks take a thirty-second of the memory that was read.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>

#include "lane_ops.h"
#include "simd/lanes.h"

namespace neuron {

class Accumulation {
 public:
  static constexpr int64_t kRows = 32;

  // `op`: sum, amax or amin.
  Accumulation(LaneOp op, int64_t rows, int64_t cols);

  // Takes lanes [column, column + n) of rows [row, row + rows), which lie `pitch` bytes apart; of each one lane for all
  // if not `vector`. Rows of a chunk come in order.
  void add(int64_t row, int64_t rows, int64_t column, const char* lanes, int64_t pitch, bool vector, int64_t n);
  // After the last row.
  void finish();
  // Lanes of the result, one for each column.
  const char* result() const { return reinterpret_cast<const char*>(chunks_.get()); }

 private:
  // Rows of one chunk.
  void combine(uint32_t* into, int64_t rows, const char* lanes, int64_t pitch, bool vector, int64_t n) const;

  LaneKernels::Map combine_, combine_two_;  // with one row, and with two in order; the latter may be null
  uint32_t identity_;
  int64_t rows_, cols_;
  std::unique_ptr<uint32_t[]> chunks_;  // a row of lanes for each chunk
};

}  // namespace neuron
