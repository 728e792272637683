// The values of one run of an executable: numbered slots, each holding what Python would hold there.
//
// A dense neuron tensor has two faces: the tensor itself, and a CPU tensor over the same bytes for PyTorch's CPU
// kernels. Steps that run such kernels back to back pass CPU tensors on to each other; the neuron tensor is made only
// for who asks for it (an output, a kernel of the device's own, Python). So an intermediate costs what it costs on CPU.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

#include "aten/bridge.h"

namespace neuron {

class Frame {
 public:
  // `bridged`: steps may run CPU kernels on host faces. Otherwise every operator goes through the dispatcher with
  // neuron tensors: a graph is being captured, or a Python mode watches.
  Frame(size_t slots, bool bridged) : bridged(bridged), slots_(slots) {}

  // Any value, as the device's kernels and Python see it.
  void set(uint32_t slot, c10::IValue value);
  // A result of a CPU kernel whose tensors are those of device `index`; -1: they are CPU tensors.
  void set_host(uint32_t slot, c10::IValue value, c10::DeviceIndex index);

  const c10::IValue& device(uint32_t slot) {
    Slot& s = slots_[slot];
    return C10_LIKELY(s.index < 0 || !s.device.isNone()) ? s.device : raise(s);
  }
  const c10::IValue& host(uint32_t slot) {
    Slot& s = slots_[slot];
    return s.index < 0 ? s.device : C10_LIKELY(!s.host.isNone()) ? s.host : lower(s);
  }
  // As above for the last use of a slot: the caller gets the reference. What a host face lies on stays until `drop`.
  c10::IValue take_device(uint32_t slot);
  c10::IValue take_host(uint32_t slot);
  // A tensor in whichever face it has, for its sizes.
  const c10::IValue& any(uint32_t slot) const {
    const Slot& s = slots_[slot];
    return s.index >= 0 && s.device.isNone() ? s.host : s.device;
  }
  // Whether a slot holds a dense neuron tensor.
  bool is_device(uint32_t slot) const { return slots_[slot].index >= 0; }
  void drop(uint32_t slot) { slots_[slot] = {}; }

  const bool bridged;
  // The thread's dispatch keys at the call, for steps that call Python.
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  torch::jit::Stack stack;  // of the operator that runs

 private:
  struct Slot {
    c10::IValue device, host;
    c10::DeviceIndex index = -1;  // >= 0: a dense neuron tensor, which has two faces; -1: `device` is the value
  };
  const c10::IValue& raise(Slot& slot);
  const c10::IValue& lower(Slot& slot);

  std::vector<Slot> slots_;
  // CPU storages that do not own their memory, and the neuron storages that do; the latest entry of a CPU storage
  // counts. A CPU storage in use that does not own its memory is always here, and its neuron storage alive: when that
  // dies first, the memory goes back to the CPU storage.
  std::vector<std::pair<c10::StorageImpl*, c10::StorageImpl*>> twins_;
};

}  // namespace neuron
