#include "accumulate.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace neuron {

namespace {

struct Form {
  LaneOp reduction, combine;
  float identity;
};
constexpr Form kForms[] = {{LaneOp::sum, LaneOp::add, 0.0f},
                           {LaneOp::amax, LaneOp::maximum, -INFINITY},
                           {LaneOp::amin, LaneOp::minimum, INFINITY}};

constexpr int64_t kNarrow = 16;  // columns for which a call for each row would cost more than its work

}  // namespace

Accumulation::Accumulation(LaneOp op, int64_t rows, int64_t cols) : rows_(rows), cols_(cols) {
  const Form& form =
      *std::find_if(std::begin(kForms), std::end(kForms), [&](const Form& f) { return f.reduction == op; });
  const auto& map = lane_kernels().map;
  combine_ = map[static_cast<int>(form.combine)];
  combine_two_ = form.combine == LaneOp::add ? map[static_cast<int>(LaneOp::add_add)] : nullptr;
  identity_ = std::bit_cast<uint32_t>(form.identity);
  chunks_.reset(new uint32_t[static_cast<size_t>((rows + kRows - 1) / kRows * cols)]);
}

void Accumulation::combine(uint32_t* into, int64_t rows, const char* lanes, int64_t pitch, bool vector,
                           int64_t n) const {
  int64_t r = 0;
  if (combine_two_ && vector && n < kNarrow) {
    float sums[kNarrow];
    std::memcpy(sums, into, static_cast<size_t>(n) * 4);
    for (; r < rows; r++) {
      const auto* row = reinterpret_cast<const float*>(lanes + r * pitch);
      for (int64_t c = 0; c < n; c++) sums[c] += row[c];
    }
    for (int64_t c = 0; c < n; c++)
      if (sums[c] != sums[c]) sums[c] = std::bit_cast<float>(0x7fc00000u);  // the one NaN of all lane operations
    std::memcpy(into, sums, static_cast<size_t>(n) * 4);
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
    const int64_t here = std::min(end - row, kRows - row % kRows);
    uint32_t* chunk = chunks_.get() + row / kRows * cols_ + column;
    if (row % kRows == 0) std::fill_n(chunk, n, identity_);
    combine(chunk, here, lanes, pitch, vector, n);
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
