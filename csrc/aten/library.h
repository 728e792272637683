// The library path: an ATen operator on neuron tensors runs PyTorch's own CPU kernel on the device's memory.
//
// A LibraryKernel is registered for every operator that has a CPU kernel, also where PyTorch would otherwise take a
// composite (`_foreach_*` tensor by tensor, layer norm, convolution ...): a kernel registered at the backend's key
// is found before any composite. Operators of other namespaces reach the same code through the backend's fallback.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <vector>

#include "bridge.h"
#include "op_table.h"

namespace neuron {

// What the library path needs to know of an operator's arguments, read once from its schema.
struct CallPlan {
  enum class Arg : uint8_t { tensor, tensor_list, device, generator };
  struct Slot {
    uint16_t index;  // position among the arguments
    Arg kind;
    bool written;      // the schema says the operator writes to it
    bool may_be_host;  // a CPU tensor of any shape is allowed here
  };
  explicit CallPlan(const c10::FunctionSchema& schema);
  std::vector<Slot> slots;
  size_t arguments, returns;
  bool random = false;
};

class LibraryKernel final : public c10::OperatorKernel {
 public:
  explicit LibraryKernel(const c10::OperatorHandle& op);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  CallPlan plan_;
  OpCounter& counter_;
};

// The device all neuron tensors of a call are on. Throws as CUDA does if there are several, or if a CPU tensor with
// dimensions is among the arguments where it may not be.
c10::DeviceIndex common_device(const c10::OperatorHandle& op, const CallPlan& plan, at::ArrayRef<c10::IValue> args);

// Calls of begin_library_call in this thread: who records operators sees whether one of them ran at once.
inline thread_local uint64_t t_library_calls = 0;

// Makes the host wait for the stream that the caller works on; called before a library operator touches memory.
inline void begin_library_call(c10::DeviceIndex index) {
  t_library_calls++;
  current_queue(index).drain();
}

// A CPU generator seeded from the next Philox counters of a device generator, so that operators which only PyTorch's
// CPU kernels know draw reproducible numbers without touching the host's generator.
at::Generator derived_host_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex index);

// Whether the kernel for dense neuron tensors is PyTorch's CPU kernel on bridged tensors, boxed or direct.
bool is_library_operator(const c10::OperatorName& name);
// The operators that have a typed kernel (direct.cpp).
const std::vector<c10::OperatorName>& direct_operators();

// Registers LibraryKernels for the operators that have a CPU kernel. Returns how many.
size_t register_library();

// Operators with a CPU kernel which a key of our backend would resolve to a composite without us, as pairs of key and
// operator (for the check in CI).
std::vector<std::pair<std::string, std::string>> shadowed_operators();

}  // namespace neuron
