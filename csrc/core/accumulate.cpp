#include "accumulate.h"

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "reductions.h"

namespace neuron {

namespace {

constexpr int kNarrow = 16;  // columns for which a call for each row would cost more than its work
constexpr int kAtOnce = 4;   // chunks of narrow rows whose sums do not wait for each other

// Adds to the sums of chunks, which are `apart` lanes apart, `rows` rows of each. Sums stay in registers.
template <int Columns, int Chunks>
void add_narrow(uint32_t* into, int64_t apart, const char* lanes, int64_t pitch, int64_t rows) {
  float sums[Chunks][Columns];
  for (int k = 0; k < Chunks; k++) std::memcpy(sums[k], into + k * apart, sizeof sums[k]);
  for (int64_t r = 0; r < rows; r++)
    for (int k = 0; k < Chunks; k++) {
      const auto* row = reinterpret_cast<const float*>(lanes + (k * Accumulation::kRows + r) * pitch);
      for (int c = 0; c < Columns; c++) sums[k][c] += row[c];
    }
  for (int k = 0; k < Chunks; k++)
    for (int c = 0; c < Columns; c++)  // the one NaN of all lane operations
      into[k * apart + c] = sums[k][c] == sums[k][c] ? std::bit_cast<uint32_t>(sums[k][c]) : 0x7fc00000u;
}
using AddNarrow = void (*)(uint32_t*, int64_t, const char*, int64_t, int64_t);
template <int Chunks, int... Columns>
constexpr std::array<AddNarrow, kNarrow> narrow_table(std::integer_sequence<int, Columns...>) {
  return {nullptr, add_narrow<Columns + 1, Chunks>...};
}
constexpr auto kAddOne = narrow_table<1>(std::make_integer_sequence<int, kNarrow - 1>{});
constexpr auto kAddSeveral = narrow_table<kAtOnce>(std::make_integer_sequence<int, kNarrow - 1>{});

}  // namespace

Accumulation::Accumulation(LaneOp op, int64_t rows, int64_t cols) : rows_(rows), cols_(cols) {
  const Reduction& form = reduction(op);
  const auto& map = lane_kernels().map;
  combine_ = map[static_cast<int>(form.combine)];
  combine_two_ = form.combine == LaneOp::add ? map[static_cast<int>(LaneOp::add_add)] : nullptr;
  identity_ = form.identity;
  chunks_.reset(new uint32_t[static_cast<size_t>((rows + kRows - 1) / kRows * cols)]);
}

void Accumulation::combine(uint32_t* into, int64_t rows, const char* lanes, int64_t pitch, bool vector,
                           int64_t n) const {
  int64_t r = 0;
  if (combine_two_ && vector && n < kNarrow) {
    kAddOne[static_cast<size_t>(n)](into, 0, lanes, pitch, rows);
    return;
  }
  if (combine_two_)
    for (; r + 2 <= rows; r += 2)
      combine_two_(into, into, lanes + r * pitch, lanes + (r + 1) * pitch, vector ? 7 : 1, {n});
  for (; r < rows; r++) combine_(into, into, lanes + r * pitch, lanes, vector ? 3 : 1, {n});
}

void Accumulation::add(int64_t row, int64_t rows, int64_t column, const char* lanes, int64_t pitch, bool vector,
                       int64_t n) {
  for (const int64_t end = row + rows; row < end;) {
    uint32_t* chunk = chunks_.get() + row / kRows * cols_ + column;
    int64_t here = std::min(end - row, kRows - row % kRows);
    if (combine_two_ && vector && n < kNarrow && row % kRows == 0 && end - row >= kAtOnce * kRows) {
      for (int k = 0; k < kAtOnce; k++) std::fill_n(chunk + k * cols_, n, identity_);
      here = kAtOnce * kRows;
      kAddSeveral[static_cast<size_t>(n)](chunk, cols_, lanes, pitch, kRows);
    } else {
      if (row % kRows == 0) std::fill_n(chunk, n, identity_);
      combine(chunk, here, lanes, pitch, vector, n);
    }
    row += here;
    lanes += here * pitch;
  }
}

void Accumulation::finish() {
  for (int64_t rows = (rows_ + kRows - 1) / kRows; rows > 1; rows = (rows + kRows - 1) / kRows)
    for (int64_t row = 0; row < rows; row += kRows) {
      uint32_t* from = chunks_.get() + row * cols_;
      uint32_t* into = chunks_.get() + row / kRows * cols_;
      if (row) std::copy_n(from, cols_, into);
      combine(into, std::min(kRows, rows - row) - 1, reinterpret_cast<const char*>(from + cols_), cols_ * 4, true,
              cols_);
    }
}

}  // namespace neuron
