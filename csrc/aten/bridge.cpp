#include "bridge.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>

namespace neuron {

using c10::DispatchKey;
using c10::DispatchKeySet;

const DispatchKeySet kAboveBackend = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

namespace {

void copy_geometry(const c10::TensorImpl& from, c10::TensorImpl& to) {
  to.set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  to._set_conj(from.is_conj());
  to._set_neg(from.is_neg());
  if (from.is_wrapped_number()) to.set_wrapped_number(true);
}

bool same_geometry(const c10::TensorImpl& a, const c10::TensorImpl& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

// A strided or quantized tensor over `storage` with the geometry of `like`.
at::Tensor make_strided(c10::Storage storage, const at::Tensor& like, DispatchKey dense, DispatchKey quantized) {
  c10::intrusive_ptr<c10::TensorImpl> impl;
  DispatchKeySet keys(like.is_quantized() ? quantized : dense);
  if (C10_UNLIKELY(like._is_zerotensor())) keys = keys.add(DispatchKey::ZeroTensor);
  if (like.is_quantized()) {
    impl = c10::make_intrusive<at::QTensorImpl>(std::move(storage), keys, like.dtype(),
                                                at::get_qtensorimpl(like)->quantizer());
  } else {
    impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  }
  copy_geometry(*like.unsafeGetTensorImpl(), *impl);
  return at::Tensor(std::move(impl));
}

// A CPU tensor over the memory of a dense or quantized neuron tensor. `twin`: the CPU storage over the same bytes.
at::Tensor alias(c10::intrusive_ptr<c10::StorageImpl> twin, const at::Tensor& t) {
  TORCH_CHECK(twin->data() || t.numel() == 0 || t._is_zerotensor(), "A neuron tensor of sizes ", t.sizes(),
              " has no memory: its storage was resized to ", twin->nbytes(),
              " bytes. Resize the storage again before the tensor is used.");
  return make_strided(c10::Storage(std::move(twin)), t, DispatchKey::CPU, DispatchKey::QuantizedCPU);
}

// The same sparse or nested tensor with each part replaced by `convert(part)`.
template <class Convert>
at::Tensor convert_parts(const at::Tensor& t, c10::Device device, DispatchKey coo, DispatchKey csr, Convert convert) {
  if (t.is_nested()) {
    auto* nested = at::native::get_nested_tensor_impl(t);
    return at::detail::make_tensor<at::native::NestedTensorImpl>(
        convert(nested->get_unsafe_storage_as_tensor()), nested->get_nested_sizes(), nested->get_nested_strides(),
        nested->get_storage_offsets());
  }
  if (t.is_sparse()) {
    auto* from = static_cast<at::SparseTensorImpl*>(t.unsafeGetTensorImpl());
    auto out = at::detail::make_tensor<at::SparseTensorImpl>(DispatchKeySet(coo), t.dtype());
    auto* to = static_cast<at::SparseTensorImpl*>(out.unsafeGetTensorImpl());
    to->raw_resize_(from->sparse_dim(), from->dense_dim(), t.sizes());
    to->set_indices_and_values_unsafe(convert(from->indices()), convert(from->values()));
    to->set_coalesced(from->coalesced());
    return out;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(at::sparse_csr::is_sparse_compressed(t), "Tensors of layout ", t.layout(),
                              " are not available on neuron; convert to a strided tensor first.");
  auto* from = static_cast<at::SparseCsrTensorImpl*>(t.unsafeGetTensorImpl());
  auto out = at::detail::make_tensor<at::SparseCsrTensorImpl>(DispatchKeySet(csr), device, t.layout(), t.dtype());
  static_cast<at::SparseCsrTensorImpl*>(out.unsafeGetTensorImpl())
      ->set_member_tensors(convert(from->compressed_indices()), convert(from->plain_indices()), convert(from->values()),
                           t.sizes());
  return out;
}

}  // namespace

at::Tensor host_alias(const at::Tensor& t) { return alias(twin_of(*t.storage().unsafeGetStorageImpl()), t); }

at::Tensor device_alias(const at::Tensor& host, c10::intrusive_ptr<c10::StorageImpl> storage) {
  return make_strided(c10::Storage(std::move(storage)), host, DispatchKey::PrivateUse1,
                      DispatchKey::QuantizedPrivateUse1);
}

at::Tensor adopt_host_tensor(const at::Tensor& host, c10::DeviceIndex index) {
  if (!host.defined()) return host;
  return device_alias(host, adopt_host_storage(*host.storage().unsafeGetStorageImpl(), index));
}

namespace {

// Sizes and lazy bits that a kernel gave a written argument.
void carry_back_metadata(const c10::TensorImpl& from, c10::TensorImpl& to) {
  if (!same_geometry(from, to)) to.set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  if (from.is_conj() != to.is_conj()) to._set_conj(from.is_conj());
  if (from.is_neg() != to.is_neg()) to._set_neg(from.is_neg());
}

}  // namespace

void carry_back_strided(const at::Tensor& device, const at::Tensor& host) {
  c10::StorageImpl& storage = *device.storage().unsafeGetStorageImpl();
  sync_from_twin(storage, *host.storage().unsafeGetStorageImpl());
  carry_back_metadata(*host.unsafeGetTensorImpl(), *device.unsafeGetTensorImpl());
}

c10::intrusive_ptr<c10::StorageImpl> Bridge::twin(c10::StorageImpl& storage) {
  for (auto& [twin, known] : storages_)
    if (known == &storage) return twin;
  storages_.emplace_back(twin_of(storage), &storage);
  return storages_.back().first;
}

at::Tensor Bridge::to_host(const at::Tensor& t, bool written) {
  if (!is_neuron(t)) return t;
  // One tensor given twice is one tensor: some kernels ask (sums of sparse tensors; overlap of tensors without
  // elements).
  for (auto& arg : lowered_)
    if (C10_UNLIKELY(arg.device.is_same(t))) {
      arg.written |= written;
      return arg.host;
    }
  at::Tensor host;
  if (C10_LIKELY(t.layout() == c10::kStrided && !t.is_nested())) {
    host = alias(twin(*t.storage().unsafeGetStorageImpl()), t);
  } else {
    host = convert_parts(t, c10::Device(c10::kCPU), DispatchKey::SparseCPU, DispatchKey::SparseCsrCPU,
                         [&](const at::Tensor& part) { return to_host(part, written); });
  }
  // Some kernels save for backward only if asked to (_sparse_mm_reduce_impl), or choose by it (convolution, attention).
  if (t.requires_grad()) host.unsafeGetTensorImpl()->set_requires_grad(true);
  lowered_.push_back({t, host, written});
  return host;
}

c10::intrusive_ptr<c10::StorageImpl> Bridge::device_storage(const c10::Storage& host) {
  for (auto& [twin, storage] : storages_)
    if (twin.get() == host.unsafeGetStorageImpl()) return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
  auto* impl = host.unsafeGetStorageImpl();
  auto storage = adopt_host_storage(*impl, index_);
  storages_.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl), storage.get());
  return storage;
}

at::Tensor Bridge::to_device(const at::Tensor& host) {
  if (!host.defined() || host.device().type() != c10::kCPU) return host;
  for (auto& arg : lowered_)
    if (arg.host.is_same(host)) return arg.device;
  if (C10_LIKELY(host.layout() == c10::kStrided && !host.is_nested()))
    return device_alias(host, device_storage(host.storage()));
  return convert_parts(host, c10::Device(kNeuron, index_), DispatchKey::SparsePrivateUse1,
                       DispatchKey::SparseCsrPrivateUse1, [&](const at::Tensor& part) { return to_device(part); });
}

void Bridge::carry_back(const Lowered& arg) {
  auto* to = arg.device.unsafeGetTensorImpl();
  auto* from = arg.host.unsafeGetTensorImpl();
  if (arg.device.is_nested()) return;
  if (arg.device.is_sparse()) {
    auto* sparse = static_cast<at::SparseTensorImpl*>(from);
    auto* out = static_cast<at::SparseTensorImpl*>(to);
    out->raw_resize_(sparse->sparse_dim(), sparse->dense_dim(), arg.host.sizes());
    out->set_indices_and_values_unsafe(to_device(sparse->indices()), to_device(sparse->values()));
    out->set_coalesced(sparse->coalesced());
    return;
  }
  if (arg.device.layout() != c10::kStrided) {
    auto* csr = static_cast<at::SparseCsrTensorImpl*>(from);
    static_cast<at::SparseCsrTensorImpl*>(to)->set_member_tensors(to_device(csr->compressed_indices()),
                                                                  to_device(csr->plain_indices()),
                                                                  to_device(csr->values()), arg.host.sizes());
    return;
  }
  c10::StorageImpl& storage = *arg.device.storage().unsafeGetStorageImpl();
  if (auto known = twin(storage); arg.host.storage().unsafeGetStorageImpl() == known.get()) {
    sync_from_twin(storage, *known);
  } else {
    to->set_storage_keep_dtype(c10::Storage(device_storage(arg.host.storage())));
  }
  carry_back_metadata(*from, *to);
}

void Bridge::finish() {
  // By index: carrying parts of sparse tensors back does not add to the list, but may look it up.
  for (size_t i = 0; i < lowered_.size(); i++)
    if (lowered_[i].written) carry_back(lowered_[i]);
}

KernelScope::KernelScope(c10::DeviceIndex index) : exclude_(kAboveBackend), allocations_(index) {}

}  // namespace neuron
