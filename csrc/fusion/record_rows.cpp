// Rule: rows. What is reduced are the elements of a row if they lie fast in memory, else the rows of a program whose
// columns stay, if a row is one run in memory; other reductions are library operators.
//
// Reason: a row is reduced in one tree that depends on its length alone, and so is a column. Rows whose elements lie
// far apart would be gathered element by element, at a multiple of the cost of PyTorch's kernel, and share no program
// with operators that walk through memory.
#include "record_rows.h"

#include "aten/factories.h"

namespace neuron::fusion {

namespace {

void flat(Place& p, int64_t elements) {
  p.ndim = 0;
  if (elements == 1) return;
  p.ndim = 1;
  p.size[0] = elements;
  p.stride[0] = 1;
}

}  // namespace

RowsCall::RowsCall(const Row& row, OpCounter& counter, at::IntArrayRef shape, const bool* columns)
    : row_(row), counter_(counter) {
  layout_.ndim = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), layout_.size);
  std::copy(columns, columns + shape.size(), column_dims_);
  int at = 0;
  for (bool part : {false, true})
    for (int d = 0; d < layout_.ndim; d++)
      if (column_dims_[d] == part) {
        (part ? columns_ : rows_) *= shape[d];
        layout_.order[at++] = d;
      }
  layout_.elements = rows_ * columns_;
}

bool RowsCall::columns_are_fast(const Tensor& t) const {
  int64_t fast[2] = {INT64_MAX, INT64_MAX};
  for (int d = 0; d < layout_.ndim; d++)
    if (layout_.size[d] > 1) fast[column_dims_[d]] = std::min(fast[column_dims_[d]], t.stride(d));
  return columns_ == 1 || fast[1] <= fast[0];
}

bool RowsCall::rows_are_runs(const Tensor& t) const {
  Place p;
  return place_of(t, layout_, p) && p.ndim && p.stride[p.ndim - 1] == 1 && p.size[p.ndim - 1] >= columns_;
}

bool RowsCall::input(const Tensor& t, const Place& place, bool integer) {
  if (inputs_.size() >= static_cast<size_t>(kMaxInputs) || !usable(t) ||
      is_integer(*dtype_of(t.scalar_type())) != integer || (index_ != -1 && t.device().index() != index_))
    return false;
  index_ = t.device().index();
  Place& p = in_[inputs_.size()];
  p = place;
  p.dtype = *dtype_of(t.scalar_type());
  p.offset = t.storage_offset();
  inputs_.push_back(t);
  return true;
}

bool RowsCall::full(const Tensor& t) {
  Place p;
  if (t.sizes() != at::IntArrayRef(layout_.size, layout_.ndim) || !place_of(t, layout_, p)) return false;
  return input(t, p);
}

bool RowsCall::full_flat(const Tensor& t) {
  Place p;
  flat(p, layout_.elements);
  return t.numel() == layout_.elements && t.is_contiguous() && input(t, p);
}

bool RowsCall::per_row(const Tensor& t) {
  Place p;
  flat(p, rows_);
  if (t.numel() != rows_ || (!t.is_contiguous() && t.dim() != 1)) return false;
  if (!t.is_contiguous()) p.stride[0] = t.stride(0);
  return input(t, p);
}

bool RowsCall::per_channel(const Tensor& t, int64_t inner) {
  Place p;
  p.ndim = 0;
  const int64_t channels = t.numel(), outer = layout_.elements / (channels * inner);
  for (auto [size, stride] : {std::pair<int64_t, int64_t>{outer, 0}, {channels, 1}, {inner, 0}})
    if (size > 1) p.size[p.ndim] = size, p.stride[p.ndim++] = stride;
  return t.is_contiguous() && outer * channels * inner == layout_.elements && input(t, p);
}

bool RowsCall::per_rows(const Tensor& t, int64_t repeats) {
  Place p;
  p.ndim = 0;
  for (auto [size, stride] : {std::pair<int64_t, int64_t>{t.numel(), 1}, {repeats, 0}})
    if (size > 1) p.size[p.ndim] = size, p.stride[p.ndim++] = stride;
  return t.is_contiguous() && t.numel() * repeats == rows_ && input(t, p);
}

bool RowsCall::labels(const Tensor& t) {
  Place p;
  flat(p, rows_);
  return input(t, p, true);
}

bool RowsCall::single(const Tensor& t) {
  Place p;
  p.ndim = 0;
  return t.numel() == 1 && input(t, p);
}

bool RowsCall::per_column(const Tensor& t) {
  Place p;
  p.ndim = 0;
  if (rows_ > 1) p.size[p.ndim] = rows_, p.stride[p.ndim++] = 0;
  if (columns_ > 1) p.size[p.ndim] = columns_, p.stride[p.ndim++] = 1;
  return t.numel() == columns_ && t.is_contiguous() && input(t, p);
}

Tensor RowsCall::result(c10::ScalarType type, at::IntArrayRef sizes, int64_t elements) {
  const auto meta = c10::scalarTypeToTypeMeta(type);
  Tensor t = uninitialised(static_cast<size_t>(elements) * meta.itemsize(), meta, index_);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  Place& p = out_[results_.size()];
  flat(p, elements);
  p.dtype = *dtype_of(type);
  p.offset = 0;
  results_.push_back(t);
  return t;
}

Tensor RowsCall::full_result(c10::ScalarType type, at::IntArrayRef sizes) {
  return result(type, sizes, rows_ * columns_);
}
Tensor RowsCall::row_result(c10::ScalarType type, at::IntArrayRef sizes) { return result(type, sizes, rows_); }
Tensor RowsCall::column_result(c10::ScalarType type, at::IntArrayRef sizes) { return result(type, sizes, columns_); }

void RowsCall::record(bool counted) {
  DtypeUse use;
  if (counted) account(counter_, use);
  Node node{};
  node.row = &row_;
  node.compute = node.result = Dtype::float32;
  node.inputs = static_cast<uint8_t>(inputs_.size());
  node.outputs = static_cast<uint8_t>(results_.size());
  node.scalars = static_cast<uint8_t>(scalars_.size());
  node.reduces = true;
  Window::Recording recording(Window::current(index_));
  for (size_t i = 0; i < inputs_.size(); i++) {
    in_[i].storage = recording.storage(*inputs_[i].storage().unsafeGetStorageImpl(), false);
    node.in[i] = recording.operand({&in_[i], 1});
  }
  for (size_t i = 0; i < results_.size(); i++) {
    out_[i].storage = recording.storage(*results_[i].storage().unsafeGetStorageImpl(), true);
    node.out[i] = recording.operand({&out_[i], 1});
  }
  const int64_t elements = rows_ * columns_;
  node.space = recording.space({&elements, 1});
  node.row_space = recording.space({&rows_, 1});
  recording.append(node, {scalars_.data(), scalars_.size()});
  if (more_) more_(recording);
  recording.finish();
}

}  // namespace neuron::fusion
