// Views of dense tensors: metadata only, and the operators that change which memory a tensor sees.
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "library.h"

namespace neuron {

namespace {

using at::IntArrayRef;
using at::Tensor;

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  begin_library_call(self.device().index());
  return at::native::resize_(self, size, format);
}

void check_storage(const Tensor& self, const c10::Storage& source) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(),
              "\". This is no longer allowed; the devices must match.");
}

Tensor& set_storage_offset(Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  check_storage(self, source);
  const c10::DeviceGuard guard(self.device());
  begin_library_call(self.device().index());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const int64_t n = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, n, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::Storage storage(make_storage(0, self.device().index()));
  return set_storage_offset(self, std::move(storage), 0, {0}, {});
}

// `module.to("neuron")` keeps its Parameter objects, and `cpu_tensor.data = neuron_tensor` works: the implementations
// are plain TensorImpls on both sides.
bool compatible_shallow_copy(const Tensor& self, const Tensor& from) {
  auto dense = [](const Tensor& t) {
    return (t.device().type() == c10::kCPU || t.device().type() == kNeuron) && t.layout() == c10::kStrided;
  };
  return self.key_set().has_backend(c10::BackendComponent::PrivateUse1Bit) && self.layout() == from.layout()
             ? dense(from) || from.device().type() == kNeuron
             : dense(self) && dense(from);
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(compatible_shallow_copy));
  m.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace neuron
