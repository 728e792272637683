// Arithmetic on numbers that are tensors: what follows from the step counters of a compiled optimizer, one for each
// parameter, which lie on the host.
//
// As operators, ten of them on lists of thirty numbers take a millisecond: each number is a tensor. Here they are
// floats, computed by the same formulas in the same precision; tensors are made for those that are read afterwards.
#pragma once

#include <memory>

#include "step.h"

namespace neuron {

class NumberStep final : public Step {
 public:
  // Operators of the table in number_step.cpp, on float32 CPU tensors without dimensions, lists of them and numbers,
  // with no arguments but those.
  explicit NumberStep(std::vector<std::unique_ptr<OperatorStep>> steps);
  void run(Frame& frame) const override;

  using Function = float (*)(float, float);

 private:
  struct Source {
    enum class Kind : uint8_t { constant, given, made } kind;
    uint32_t index;  // of a slot in `given_` or `made_`
    float constant;
  };
  struct Instruction {
    Function function;
    Source a, b;
    bool writes;  // to the tensor that is its first argument; others make the next number
  };
  Source source(const Operand& argument, size_t member);

  std::vector<std::unique_ptr<OperatorStep>> steps_;
  std::vector<Instruction> instructions_;
  std::vector<uint32_t> given_, made_;  // slots
  std::vector<size_t> results_;         // which of those that are made are read after the step
};

// Whether the table has an operator.
bool computes_numbers(const c10::OperatorHandle& op);

}  // namespace neuron
