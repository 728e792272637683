#include "record_list.h"

#include <algorithm>

#include "aten/factories.h"
#include "window.h"

namespace neuron::fusion {

void ListCall::list(at::TensorList tensors, bool written, bool read) {
  if (!written && !tensors.empty() && tensors[0].device().is_cpu()) {
    std::vector<c10::Scalar> values;
    for (const Tensor& t : tensors)
      if (const auto value = host_number(t)) values.push_back(*value);
    if (values.size() == tensors.size()) {
      host_arguments_ |= static_cast<uint8_t>(1u << (lists_.size() + host_.size()));
      host_.push_back(std::move(values));
      hosted_.push_back(tensors);
      return;
    }
  }
  if (written) written_.push_back(tensors);
  if (read && (!written || !row_->overwrites)) lists_.push_back({tensors});
}

namespace {

// Bytes that written members occupy, in order; empty if two of them overlap.
using Interval = std::pair<const char*, const char*>;
Interval bytes_of(const Tensor& t) {
  const char* begin = static_cast<const char*>(t.const_data_ptr());
  return {begin, begin + t.numel() * static_cast<int64_t>(t.itemsize())};
}

bool apart(std::vector<Interval>& intervals) {
  std::sort(intervals.begin(), intervals.end());
  for (size_t i = 1; i < intervals.size(); i++)
    if (intervals[i].first < intervals[i - 1].second) return false;
  return true;
}
bool meets(const std::vector<Interval>& sorted, const Interval& x) {
  auto it = std::upper_bound(sorted.begin(), sorted.end(), Interval{x.second, nullptr});
  return it != sorted.begin() && std::prev(it)->second > x.first && std::prev(it)->first < x.second;
}

void flat(Place& p, const Tensor& t, Dtype dtype, int64_t stride) {
  p.dtype = dtype;
  p.offset = t.storage_offset();
  p.ndim = 0;
  const int64_t n = t.numel();
  if (stride == 0 || n == 1) return;
  p.ndim = 1;
  p.size[0] = n;
  p.stride[0] = stride;
}

}  // namespace

bool ListCall::record(OpCounter& counter, std::vector<Tensor>* results) {
  const bool writes = !written_.empty();
  const at::TensorList first = writes ? written_[0] : lists_.empty() ? at::TensorList() : lists_[0].members;
  const size_t members = first.size();
  if (members == 0 || members > 4096) return false;
  const c10::ScalarType type = first[0].scalar_type();
  const auto compute = dtype_of(type);
  if (!compute || *compute == Dtype::boolean || (is_integer(*compute) && !host_.empty())) return false;
  if (!(row_->types & (is_integer(*compute) ? kInts : kFloats)) || row_->to_bool) return false;
  const c10::DeviceIndex index = first[0].device().index();
  for (const List& l : lists_) {
    if (l.one) {
      if (!usable(*l.one) || l.one->dim() != 0 || l.one->device().index() != index ||
          (l.one->scalar_type() != type && (!row_->reads_float32 || l.one->scalar_type() != at::kFloat)))
        return false;
      continue;
    }
    if (l.members.size() != members) return false;
    for (size_t m = 0; m < members; m++) {
      const Tensor& t = l.members[m];
      if (l.steps) {
        if (!usable(t) || t.numel() != 1 || t.scalar_type() != at::kFloat || t.device().index() != index) return false;
        continue;
      }
      if (!usable(t) || t.scalar_type() != type || t.device().index() != index || t.sizes() != first[m].sizes() ||
          t.strides() != first[m].strides() || !t.is_non_overlapping_and_dense())
        return false;
    }
  }
  if (writes) {
    std::vector<Interval> written;
    for (const at::TensorList& list : written_) {
      if (list.size() != members) return false;
      for (size_t m = 0; m < members; m++) {
        const Tensor& t = list[m];
        if (!usable(t) || t.scalar_type() != type || !t.is_non_overlapping_and_dense() || t.device().index() != index ||
            t.sizes() != first[m].sizes() || t.strides() != first[m].strides())
          return false;
        written.push_back(bytes_of(t));
      }
    }
    if (!apart(written)) return false;
    for (const List& l : lists_) {
      if (l.one && meets(written, bytes_of(*l.one))) return false;
      for (size_t m = 0; m < l.members.size(); m++) {
        const Interval bytes = bytes_of(l.members[m]);
        const bool same = std::any_of(written_.begin(), written_.end(),
                                      [&](const at::TensorList& list) { return bytes_of(list[m]) == bytes; });
        if ((l.steps || !same) && meets(written, bytes)) return false;
      }
    }
  }
  if (row_->for_number && numbers_.size() == 1 && numbers_[0].size() == 1 && !numbers_[0][0].isComplex())
    if (const Row* special = row_->for_number(numbers_[0][0].to<double>())) {
      row_ = special;
      if (row_->drops_number) numbers_.clear();
    }
  std::vector<uint32_t> scalars;
  for (size_t m = 0; m < members; m++)
    for (auto* lists : {&host_, &numbers_})
      for (auto& list : *lists) {
        if (list.size() != 1 && list.size() != members) return false;
        const auto value = lane_of(list[list.size() == 1 ? 0 : m], *compute);
        if (!value) return false;
        scalars.push_back(*value);
      }

  std::vector<Tensor> made;
  if (!writes)
    for (const Tensor& t : first) {
      Tensor out = uninitialised(static_cast<size_t>(t.numel()) * t.itemsize(), t.dtype(), index);
      out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
      made.push_back(std::move(out));
    }
  DtypeUse use;
  account(counter, use);
  Node node{};
  node.row = row_;
  node.compute = node.result = *compute;
  node.inputs = static_cast<uint8_t>(lists_.size());
  node.outputs = static_cast<uint8_t>(writes ? written_.size() : 1);
  node.scalars = static_cast<uint8_t>(host_.size() + numbers_.size());
  node.numbers = host_arguments_;
  node.row_space = kNone;
  std::vector<int64_t> counts;
  for (const Tensor& t : first) counts.push_back(t.numel());

  Window::Recording recording(Window::current(index));
  std::vector<Place> places(members);
  auto operand = [&](auto member, bool written, int64_t stride) {
    for (size_t m = 0; m < members; m++) {
      const Tensor& t = member(m);
      c10::StorageImpl& storage = *t.storage().unsafeGetStorageImpl();
      flat(places[m], t, *dtype_of(t.scalar_type()), stride);
      const bool whole = written && static_cast<size_t>(t.numel()) * t.itemsize() == storage.nbytes();
      places[m].storage = recording.storage(storage, whole);
    }
    return recording.operand(places);
  };
  for (size_t i = 0; i < lists_.size(); i++) {
    const List& l = lists_[i];
    if (!l.one) {
      node.in[i] = operand([&](size_t m) -> const Tensor& { return l.members[m]; }, false, !l.steps);
      continue;
    }
    node.in[i] = operand([&](size_t) -> const Tensor& { return *l.one; }, false, 0);
  }
  for (int i = 0; i < node.outputs; i++)
    node.out[i] = operand(
        [&](size_t m) -> const Tensor& { return writes ? written_[static_cast<size_t>(i)][m] : made[m]; }, true, 1);
  node.space = recording.space(counts);
  recording.append(node, scalars);
  for (size_t i = 0; i < hosted_.size(); i++)
    for (size_t m = 0; m < members; m++)
      recording.hosted(m * node.scalars + i, hosted_[i][hosted_[i].size() == 1 ? 0 : m]);
  recording.finish();
  if (results) *results = std::move(made);
  return true;
}

}  // namespace neuron::fusion
