// A compiled graph: a straight list of steps on slots, run in one call without Python.
#pragma once

#include <memory>
#include <vector>

#include "step.h"

namespace neuron {

class Executable {
 public:
  // `constants`: tensors of the graph and the slots that hold them. Inputs take the first slots.
  Executable(size_t inputs, size_t slots, std::vector<std::pair<uint32_t, at::Tensor>> constants,
             std::vector<std::unique_ptr<Step>> steps, std::vector<Operand> outputs);

  // Runs the steps in the calling thread. Inputs are released at their last use. An error of a step carries the
  // operator and the user's line. Any number of threads may run one executable at once. `watched`: a Python mode must
  // see each operator on neuron tensors.
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs, bool watched) const;

 private:
  size_t inputs_, slots_;
  std::vector<std::pair<uint32_t, at::Tensor>> constants_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::vector<Operand> outputs_;
};

}  // namespace neuron
