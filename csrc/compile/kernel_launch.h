// An NKI kernel traced for one signature, ready to run: nothing of PyTorch's operators here, as core has an Operand of
// its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace neuron {

class Program;

// A program per core, and where each finds its tensors.
struct LaunchedCore {
  const Program* program;
  std::vector<uint32_t> inputs;                             // storage of each tensor
  std::vector<std::pair<uint32_t, size_t>> buffers;         // storage, number of the launch's buffer
  std::vector<std::pair<uint32_t, const void*>> constants;  // storage, values
};

// Runs the cores on the memory of the inputs and of the launch's buffers. False: the kernel failed (an access outside
// its tensor, cores that wait for ever).
bool launch(std::span<const LaunchedCore> cores, std::span<void* const> inputs, std::span<void* const> buffers);

}  // namespace neuron
