// Recording of operators that reduce: softmax, norms, sums. Their space is rows * columns, each of them the product of
// some dims in their order. Operators that reduce rows have the reduced dims as columns, others the dims that stay.
#pragma once

#include "layout.h"
#include "record.h"
#include "window.h"

namespace neuron::fusion {

class RowsCall {
 public:
  // `columns[d]`: dim d of `shape` belongs to the columns.
  RowsCall(const Row& row, OpCounter& counter, at::IntArrayRef shape, const bool* columns);

  // Inputs, in order. False if the call cannot be recorded.
  bool full(const Tensor& t);        // of the whole shape
  bool full_flat(const Tensor& t);   // contiguous, of as many elements
  bool per_row(const Tensor& t);     // contiguous or of one dim, one element a row
  bool per_column(const Tensor& t);  // contiguous, one element a column
  // Contiguous, one element for each of some channels: `inner` elements follow each other in one, then the next comes.
  bool per_channel(const Tensor& t, int64_t inner);
  // Contiguous, one element for each `repeats` rows.
  bool per_rows(const Tensor& t, int64_t repeats);
  bool labels(const Tensor& t);  // int32, otherwise as per_row
  bool single(const Tensor& t);  // one element for all
  void number(float value) { scalars_.push_back(lane(value)); }

  // New results, in order.
  Tensor full_result(c10::ScalarType type, at::IntArrayRef sizes);
  Tensor row_result(c10::ScalarType type, at::IntArrayRef sizes);
  Tensor column_result(c10::ScalarType type, at::IntArrayRef sizes);

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  // Whether the columns are what a walk through `t` meets first: else its rows would be gathered from far apart.
  bool columns_are_fast(const Tensor& t) const;
  // Whether each row of `t` is one run in memory.
  bool rows_are_runs(const Tensor& t) const;
  // What the node depends on besides: told to the window when it is recorded.
  void tell(std::function<void(Window::Recording&)> more) { more_ = std::move(more); }
  // `counted`: the node is the first of its call.
  void record(bool counted = true);

 private:
  bool input(const Tensor& t, const Place& place, bool integer = false);
  Tensor result(c10::ScalarType type, at::IntArrayRef sizes, int64_t elements);

  const Row& row_;
  OpCounter& counter_;
  Layout layout_;
  bool column_dims_[kMaxDims];
  int64_t rows_ = 1, columns_ = 1;
  c10::DeviceIndex index_ = -1;
  c10::SmallVector<Tensor, 6> inputs_;
  c10::SmallVector<Tensor, 3> results_;
  Place in_[kMaxInputs], out_[kMaxOutputs];
  c10::SmallVector<uint32_t, 4> scalars_;
  std::function<void(Window::Recording&)> more_;
};

}  // namespace neuron::fusion
