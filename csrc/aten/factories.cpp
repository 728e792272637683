// Tensors without contents: empty, empty_strided, and the zero tensor of forward-mode AD.
#include "factories.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace neuron {

using at::Tensor;

Tensor uninitialised(size_t bytes, caffe2::TypeMeta type, c10::DeviceIndex index) {
  return at::detail::make_tensor<c10::TensorImpl>(c10::Storage(make_storage(bytes, index)),
                                                  c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

namespace {

using at::IntArrayRef;

c10::Device target(std::optional<c10::Device> device, std::optional<c10::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned; leave pin_memory out for a neuron tensor.");
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "This factory makes strided tensors; got layout ",
              *layout);
  return {kNeuron, resolve_device(device ? device->index() : -1)};
}

Tensor filled_if_asked(Tensor t) {
  auto& context = at::globalContext();
  if (C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()))
    at::native::fill_empty_deterministic_(t);
  return t;
}

Tensor empty(IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  at::detail::check_size_nonnegative(size);
  const auto type = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  Tensor t = uninitialised(at::detail::computeStorageNbytesContiguous(size, type.itemsize()), type,
                           target(device, layout, pin).index());
  if (size.size() != 1 || size[0] != 0) t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Contiguous) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return filled_if_asked(std::move(t));
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  at::detail::check_size_nonnegative(size);
  const auto type = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  Tensor t = uninitialised(at::detail::computeStorageNbytes(size, stride, type.itemsize()), type,
                           target(device, layout, pin).index());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return filled_if_asked(std::move(t));
}

// A tensor that is known to be zero and has no memory.
struct ZeroAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t) override { return {nullptr, c10::Device(kNeuron, current_device())}; }
  void copy_data(void*, const void*, size_t) const override {}
};

Tensor efficient_zero_tensor(IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                             std::optional<c10::Device> device, std::optional<bool> pin) {
  static auto* allocator = new ZeroAllocator;
  const c10::DeviceGuard guard(target(device, layout, pin));
  return at::detail::empty_generic(
      size, allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
      c10::dtype_or_default(dtype), std::nullopt);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(efficient_zero_tensor));
}

}  // namespace neuron
