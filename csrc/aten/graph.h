// Graph capture and replay (torch.accelerator.Graph).
//
// While a thread captures, each operator runs once, so that its outputs have shapes and addresses, and is written down
// with its arguments, its allocations and its outputs. As on CUDA, capturing has no effect that outlives it: memory
// from outside of the graph that an operator writes is saved first and put back at the end, and so is the state of
// generators. A replay runs the same operators on the same addresses: allocations are answered from what was written
// down, in the same order.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <string>

#include "bridge.h"

namespace neuron {

class Capture;

// The capture that this thread records into, or null.
Capture* current_capture();

// Throws if this thread captures: `what` needs a value on the host or has no fixed result.
void forbid_in_capture(const char* what);

class Capture {
 public:
  virtual ~Capture() = default;
  // Runs the operator on host arguments (top of `stack`) and records it. `generator_slot`: position of the generator
  // among the arguments, or -1; `generator`: what the caller gave there.
  virtual void call(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t arguments, size_t returns,
                    int generator_slot, const std::optional<at::Generator>& generator, c10::DeviceIndex index) = 0;
  // Runs and records any other work.
  virtual void step(std::string name, std::function<void()> work) = 0;
  // An operator of the graph reads or writes this tensor: it stays alive with the graph if it comes from outside, and
  // its bytes are put back when the capture ends if they are written.
  virtual void touch(const at::Tensor& tensor, bool written) = 0;
  virtual void touch(const c10::Storage& storage, bool written) = 0;
  // An operator of the graph is about to draw from this generator: its offset is put back when the capture ends.
  virtual void remember_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex index) = 0;
};

bool is_capturing(c10::DeviceIndex index, c10::StreamId stream);

void register_graph();

}  // namespace neuron
