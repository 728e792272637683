#include "accumulate.h"

#include <bit>
#include <cmath>

namespace neuron {

namespace {

struct Form {
  LaneOp reduction, combine;
  float identity;
};
constexpr Form kForms[] = {{LaneOp::sum, LaneOp::add, 0.0f},
                           {LaneOp::amax, LaneOp::maximum, -INFINITY},
                           {LaneOp::amin, LaneOp::minimum, INFINITY}};

}  // namespace

Accumulation::Accumulation(LaneOp op, int64_t rows, int64_t cols) : rows_(rows), cols_(cols) {
  const Form& form =
      *std::find_if(std::begin(kForms), std::end(kForms), [&](const Form& f) { return f.reduction == op; });
  combine_ = lane_kernels().map[static_cast<int>(form.combine)];
  identity_ = std::bit_cast<uint32_t>(form.identity);
  chunks_.reset(new uint32_t[static_cast<size_t>((rows + kRows - 1) / kRows * cols)]);
}

void Accumulation::combine(uint32_t* into, const char* lanes, bool vector, int64_t n) const {
  combine_(into, into, lanes, lanes, vector ? 3 : 1, n, 0);
}

void Accumulation::add(int64_t row, int64_t column, const char* lanes, bool vector, int64_t n) {
  uint32_t* chunk = chunks_.get() + row / kRows * cols_ + column;
  if (row % kRows == 0) std::fill_n(chunk, n, identity_);
  combine(chunk, lanes, vector, n);
}

void Accumulation::finish() {
  for (int64_t rows = (rows_ + kRows - 1) / kRows; rows > 1; rows = (rows + kRows - 1) / kRows)
    for (int64_t row = 0; row < rows; row++) {
      uint32_t* from = chunks_.get() + row * cols_;
      uint32_t* into = chunks_.get() + row / kRows * cols_;
      if (row % kRows)
        combine(into, reinterpret_cast<const char*>(from), true, cols_);
      else
        std::copy_n(from, cols_, into);
    }
}

}  // namespace neuron
