// Steps of an executable and their operands.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aten/library.h"
#include "frame.h"

namespace neuron {

// Where a step finds an argument.
struct Operand {
  enum class Kind : uint8_t { constant, slot, last_use, list };
  enum class Element : uint8_t { tensor, optional_tensor, integer, floating, boolean, scalar };
  Kind kind = Kind::constant;
  Element element = Element::tensor;  // of a list
  uint32_t slot = 0;
  c10::IValue constant;
  std::vector<Operand> items;  // of a list with slots in it

  // `host`: neuron tensors as CPU tensors.
  c10::IValue get(Frame& frame, bool host) const;
};

struct Step {
  virtual ~Step() = default;
  virtual void run(Frame& frame) const = 0;
  std::vector<uint32_t> drops;  // slots used here for the last time
  std::string where;            // the operator and the user's line, for errors
};

// Runs a step, and drops what nobody needs after it.
void run_step(const Step& step, Frame& frame);

// One operator. `outs`: the slot of each result; a list of tensors counts as its elements.
class OperatorStep final : public Step {
 public:
  struct Site {
    bool bridged = false;         // the CPU kernel on host faces is what eager runs; else by the dispatcher
    c10::DeviceIndex index = -1;  // device of the results of a bridged operator; -1: CPU
    DtypeUse dtypes;              // of its neuron arguments
  };
  OperatorStep(const c10::OperatorHandle& op, std::vector<Operand> arguments, std::vector<uint32_t> outs, Site site);
  void run(Frame& frame) const override;
  const std::vector<Operand>& arguments() const { return arguments_; }
  const std::vector<uint32_t>& outs() const { return outs_; }
  const c10::OperatorHandle& op() const { return op_; }

 private:
  void run_bridged(Frame& frame) const;
  c10::OperatorHandle op_;
  CallPlan plan_;
  std::vector<Operand> arguments_;
  std::vector<uint32_t> outs_;
  Site site_;
  OpCounter* counter_;  // null if eager does not count it either: views, composites
};

// Whether eager runs this operator, on dense neuron tensors of one device, as the CPU kernel on bridged tensors (or
// as metadata), drawing no random numbers: then an executable may run it on host faces.
bool runs_bridged(const c10::OperatorHandle& op);

// How an operator takes part in fused programs when its tensors are of types that programs have.
enum class Fusion : uint8_t {
  none,
  program,  // becomes instructions
  view,     // changes no byte: may stand between those that do
};
Fusion fusion_of(const c10::OperatorHandle& op);

// Integer and float arithmetic on sizes and scalars, as Python would do it.
class ScalarStep final : public Step {
 public:
  using Function = c10::IValue (*)(const c10::IValue* arguments, size_t count);
  // Throws ValueError for a name that is not in the table.
  ScalarStep(const std::string& name, std::vector<Operand> arguments, uint32_t out);
  void run(Frame& frame) const override;

 private:
  Function function_;
  std::vector<Operand> arguments_;
  uint32_t out_;
};
std::vector<std::string> scalar_functions();

// What has no C++ form: a function (of Python) on the values of slots.
class CallbackStep final : public Step {
 public:
  using Function = std::function<std::vector<c10::IValue>(std::vector<c10::IValue>)>;
  CallbackStep(Function function, std::vector<Operand> arguments, std::vector<uint32_t> outs)
      : function_(std::move(function)), arguments_(std::move(arguments)), outs_(std::move(outs)) {}
  void run(Frame& frame) const override;

 private:
  Function function_;
  std::vector<Operand> arguments_;
  std::vector<uint32_t> outs_;
};

}  // namespace neuron
