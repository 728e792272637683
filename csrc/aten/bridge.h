// Neuron tensors as CPU tensors and back, for the length of one operator call. No byte is copied.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include "storage.h"

namespace neuron {

inline bool is_neuron(const at::Tensor& t) { return t.defined() && t.device().type() == kNeuron; }

// Dispatch keys that are excluded while a CPU kernel runs on bridged tensors: what lies above the backend has run.
extern const c10::DispatchKeySet kAboveBackend;

// The pieces for callers that know that every tensor is dense. `host_alias`: a CPU tensor over the memory of a dense
// neuron tensor; `device_alias`: the reverse, on the neuron storage over the same bytes. `adopt_host_tensor`: the
// neuron tensor for a CPU tensor whose storage has no neuron storage yet. `carry_back_strided`: gives a written
// argument the sizes and storage that a kernel gave its alias.
at::Tensor host_alias(const at::Tensor& t);
at::Tensor device_alias(const at::Tensor& host, c10::intrusive_ptr<c10::StorageImpl> storage);
at::Tensor adopt_host_tensor(const at::Tensor& host, c10::DeviceIndex index);
void carry_back_strided(const at::Tensor& device, const at::Tensor& host);

class Bridge {
 public:
  explicit Bridge(c10::DeviceIndex index) : index_(index) {}

  // A CPU tensor over the memory of a neuron tensor, of any layout; other tensors pass. `written`: the operator may
  // change its sizes or storage, and `finish` carries that back.
  at::Tensor to_host(const at::Tensor& t, bool written = false);
  // The neuron tensor for what a CPU kernel returned: the argument itself if it returned one, a view if it shares an
  // argument's storage, else a tensor that takes over the memory.
  at::Tensor to_device(const at::Tensor& host);
  // Carries changes of written arguments back. Call it after the operator and before `to_device`.
  void finish();

 private:
  struct Lowered {
    at::Tensor device, host;
    bool written;
  };
  c10::intrusive_ptr<c10::StorageImpl> device_storage(const c10::Storage& host);
  c10::intrusive_ptr<c10::StorageImpl> twin(c10::StorageImpl& storage);
  void carry_back(const Lowered& arg);

  c10::DeviceIndex index_;
  c10::SmallVector<Lowered, 6> lowered_;
  // Twins known in this call and the neuron storages over the same bytes.
  c10::SmallVector<std::pair<c10::intrusive_ptr<c10::StorageImpl>, c10::StorageImpl*>, 6> storages_;
};

// For the length of a CPU kernel that works on bridged tensors: nothing above the backend runs again (autograd,
// autocast), and allocations come from the device's pool (from the host's if `index` is negative).
class KernelScope {
 public:
  explicit KernelScope(c10::DeviceIndex index);

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
  HostAllocationScope allocations_;
};

}  // namespace neuron
