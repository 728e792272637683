// Rule: fusible. Whether a call is recorded depends on the operator and on metadata alone: types that programs have,
// dense layout, shapes that broadcast, memory that does not overlap itself, at least one element.
//
// Reason: a fusible operator must give the same bits alone and in company, so the choice between executor and library
// may not depend on what else is pending.
#include "record.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>

#include "aten/factories.h"
#include "layout.h"
#include "pointwise.h"
#include "window.h"

namespace neuron::fusion {

std::optional<Dtype> dtype_of(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return Dtype::float32;
    case c10::ScalarType::BFloat16:
      return Dtype::bfloat16;
    case c10::ScalarType::Half:
      return Dtype::float16;
    case c10::ScalarType::Int:
      return Dtype::int32;
    case c10::ScalarType::Char:
      return Dtype::int8;
    case c10::ScalarType::Byte:
      return Dtype::uint8;
    case c10::ScalarType::Bool:
      return Dtype::boolean;
    default:
      return std::nullopt;
  }
}

std::optional<uint32_t> lane_of(const c10::Scalar& s, Dtype compute) {
  if (s.isComplex() || s.isSymbolic()) return std::nullopt;
  if (!is_integer(compute)) return lane(s.to<double>() == s.to<double>() ? static_cast<float>(s.to<double>()) : NAN);
  if (s.isFloatingPoint()) return std::nullopt;
  const int64_t v = s.to<int64_t>();
  int64_t low = INT32_MIN, high = INT32_MAX;
  if (compute == Dtype::int8) low = INT8_MIN, high = INT8_MAX;
  if (compute == Dtype::uint8) low = 0, high = UINT8_MAX;
  if (compute == Dtype::boolean) low = 0, high = 1;
  if (v < low || v > high) return std::nullopt;
  return lane(static_cast<int32_t>(v));
}

std::optional<c10::Scalar> host_number(const Tensor& t) {
  if (!t.device().is_cpu() || t.dim() != 0 || t.layout() != c10::kStrided || t.is_conj() || t.is_neg() ||
      t._is_zerotensor())
    return std::nullopt;
  t_host_numbers++;
  const void* p = t.const_data_ptr();
  switch (t.scalar_type()) {
    case c10::ScalarType::Double:
      return c10::Scalar(*static_cast<const double*>(p));
    case c10::ScalarType::Float:
      return c10::Scalar(*static_cast<const float*>(p));
    case c10::ScalarType::Long:
      return c10::Scalar(*static_cast<const int64_t*>(p));
    case c10::ScalarType::Int:
      return c10::Scalar(static_cast<int64_t>(*static_cast<const int32_t*>(p)));
    case c10::ScalarType::Bool:
      return c10::Scalar(*static_cast<const bool*>(p));
    default:
      return std::nullopt;
  }
}

bool usable(const Tensor& t) {
  const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  // One key, the backend's (autograd's aside), says: dense, strided, neither quantized, conjugated, negated nor zero.
  constexpr c10::DispatchKeySet unusual = c10::DispatchKeySet(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Sparse,
       c10::DispatchKey::SparseCsr, c10::DispatchKey::Quantized, c10::DispatchKey::NestedTensor});
  if (t.device().type() != kNeuron || impl.key_set().has_any(unusual) || t.numel() == 0) return false;
  const c10::StorageImpl& storage = *t.storage().unsafeGetStorageImpl();
  return has_twin(storage) && storage.data() != nullptr && dtype_of(t.scalar_type()).has_value();
}

namespace {

// Whether no two elements of a tensor provably share memory: each dim steps over all that faster ones reach.
bool elements_are_apart(const Tensor& t) {
  if (t.is_non_overlapping_and_dense()) return true;
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> dims;  // stride, size
  for (int64_t d = 0; d < t.dim(); d++)
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return false;
    reach += (size - 1) * stride;
  }
  return true;
}

}  // namespace

bool record_pointwise(const Call& call, Tensor& out) {
  const auto compute = dtype_of(call.compute), result = dtype_of(call.result);
  if (!compute || !result) return false;
  c10::DeviceIndex index = -1;
  for (const Tensor* t : call.inputs) {
    if (!usable(*t)) return false;
    const c10::DeviceIndex own = t->device().index();
    if (index != -1 && own != index) return false;
    index = own;
  }
  const bool given = out.defined();
  if (given) {
    if (!usable(out) || (index != -1 && out.device().index() != index) || !c10::canCast(call.result, out.scalar_type()))
      return false;
    index = out.device().index();
  }
  Layout layout;
  if (!plan_layout(call.inputs, out, call.row.overwrites, layout)) return false;
  if (given) {
    if (!layout.flat && !elements_are_apart(out)) return false;
    for (const Tensor* t : call.inputs) {
      if (t->storage().unsafeGetStorageImpl() != out.storage().unsafeGetStorageImpl()) continue;
      const at::MemOverlapStatus status = at::get_overlap_status(out, *t);
      if (status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::No) return false;
      if (status == at::MemOverlapStatus::Full && t->dtype() != out.dtype()) return false;
    }
  }
  Place places[kMaxInputs + 2];
  for (size_t i = 0; i < call.inputs.size(); i++) {
    if (!place_of(*call.inputs[i], layout, places[i])) return false;
    places[i].dtype = *dtype_of(call.inputs[i]->scalar_type());
  }
  if (!given) {
    const auto type = c10::scalarTypeToTypeMeta(call.result);
    out = uninitialised(static_cast<size_t>(layout.elements) * type.itemsize(), type, index);
    const at::IntArrayRef size(layout.size, static_cast<size_t>(layout.ndim));
    if (layout.flat || call.row.contiguous) {
      out.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    } else {
      int64_t strides[kMaxDims];
      result_strides(layout, call.inputs, strides);
      out.unsafeGetTensorImpl()->set_sizes_and_strides(size, {strides, static_cast<size_t>(layout.ndim)});
    }
  }
  Place& to = places[call.inputs.size()];
  if (!place_of(out, layout, to)) {
    if (!given) out = Tensor();
    return false;
  }
  to.dtype = *dtype_of(out.scalar_type());
  Place& beside = places[call.inputs.size() + 1];
  if (call.second) {
    const auto type = c10::scalarTypeToTypeMeta(call.second_type);
    *call.second = uninitialised(static_cast<size_t>(layout.elements) * type.itemsize(), type, index);
    call.second->unsafeGetTensorImpl()->set_sizes_and_strides(out.sizes(), out.strides());
    beside = to;
    beside.offset = 0;
    beside.dtype = *dtype_of(call.second_type);
  }
  DtypeUse use;
  if (call.counted) account(call.counter, use);

  Node node{};
  node.row = &call.row;
  node.compute = *compute;
  node.result = *result;
  node.inputs = static_cast<uint8_t>(call.inputs.size());
  node.outputs = call.second ? 2 : 1;
  node.scalars = static_cast<uint8_t>(call.scalars.size());
  node.numbers = call.numbers;
  node.row_space = kNone;
  Window::Recording recording(Window::current(index));
  for (size_t i = 0; i < call.inputs.size(); i++) {
    places[i].storage = recording.storage(*call.inputs[i]->storage().unsafeGetStorageImpl(), false);
    node.in[i] = recording.operand({&places[i], 1});
  }
  c10::StorageImpl& storage = *out.storage().unsafeGetStorageImpl();
  const bool whole = !given || static_cast<size_t>(layout.elements) * out.dtype().itemsize() == storage.nbytes();
  to.storage = recording.storage(storage, whole);
  node.out[0] = recording.operand({&to, 1});
  if (call.second) {
    beside.storage = recording.storage(*call.second->storage().unsafeGetStorageImpl(), true);
    node.out[1] = recording.operand({&beside, 1});
  }
  node.space = recording.space({&layout.elements, 1});
  recording.append(node, {call.scalars.data(), call.scalars.size()});
  for (size_t i = 0; i < call.hosted.size(); i++) recording.hosted(i, *call.hosted[i]);
  if (call.generator) recording.draws(*call.generator, call.counters);
  recording.finish();
  return true;
}

bool record_copy(const Tensor& from, Tensor to) {
  static OpCounter& count = counter("aten::copy_");
  return record_pointwise({r_copy, count, to.scalar_type(), to.scalar_type(), {&from}, {}}, to);
}

}  // namespace neuron::fusion
