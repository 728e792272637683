// Storage of neuron tensors, and its twin: the same bytes seen as CPU memory.
//
// The software device's memory is host memory, so PyTorch's CPU kernels can work on it in place. They need tensors that
// say "cpu": aliases over a CPU storage, the twin. Tensors that share a neuron storage share its twin, so that CPU
// kernels see overlap and aliasing as they are.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <atomic>

#include "runtime/allocator.h"

namespace neuron {

class NeuronStorage final : public c10::StorageImpl {
 public:
  using c10::StorageImpl::StorageImpl;
  // The last reference calls release_resources only if weak references are left.
  ~NeuronStorage() override { NeuronStorage::release_resources(); }
  void release_resources() override;

 private:
  friend c10::intrusive_ptr<c10::StorageImpl> twin_of(c10::StorageImpl& storage);
  friend c10::intrusive_ptr<c10::StorageImpl> adopt_host_storage(c10::StorageImpl& host, c10::DeviceIndex index);
  void set_twin(c10::intrusive_ptr<c10::StorageImpl> twin);
  c10::intrusive_ptr<c10::StorageImpl> twin_;
  std::atomic<c10::StorageImpl*> published_{nullptr};  // twin_, for readers without the lock
};

// A storage with `bytes` of the device's memory.
c10::intrusive_ptr<c10::StorageImpl> make_storage(size_t bytes, c10::DeviceIndex index);

// The CPU storage over the same bytes. A NeuronStorage keeps its twin; for the storages that core makes itself
// (torch.UntypedStorage) each call makes one.
c10::intrusive_ptr<c10::StorageImpl> twin_of(c10::StorageImpl& storage);

// Whether `storage` keeps its twin, so that tensors on it share one alias storage in every call.
bool has_twin(const c10::StorageImpl& storage);

// Takes over the twin's memory if a CPU kernel gave it other memory (resize_).
void sync_from_twin(c10::StorageImpl& storage, c10::StorageImpl& twin);

// Memory that a CPU storage keeps owning, as a DataPtr of device `index`; and that CPU storage again, or null.
c10::DataPtr borrow_host(c10::Storage host, c10::DeviceIndex index);
const c10::Storage* host_owner(const c10::StorageImpl& storage);

// A neuron storage that takes over the memory of `host`, which becomes its twin.
c10::intrusive_ptr<c10::StorageImpl> adopt_host_storage(c10::StorageImpl& host, c10::DeviceIndex index);

}  // namespace neuron
