#include "number_step.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/sqrt.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

namespace neuron {

using c10::IValue;

namespace {

// What PyTorch's CPU kernels compute of the first two arguments, or of the only one.
const NumberStep::Function* find(const c10::OperatorName& name) {
  using F = NumberStep::Function;
  constexpr F add = [](float a, float b) { return a + b; };
  constexpr F sub = [](float a, float b) { return a - b; };
  constexpr F rsub = [](float a, float b) { return b - a; };
  constexpr F mul = [](float a, float b) { return a * b; };
  constexpr F div = [](float a, float b) { return a / b; };
  constexpr F pow = [](float a, float b) { return std::pow(a, b); };
  constexpr F neg = [](float a, float) { return -a; };
  constexpr F reciprocal = [](float a, float) { return 1 / a; };
  // PyTorch's own comes from a library that does not always round to the nearest.
  constexpr F sqrt = [](float a, float) {
    thread_local at::Tensor t = at::detail::empty_cpu({}, at::kFloat);
    float& value = *t.mutable_data_ptr<float>();
    value = a;
    at::sqrt_(t);
    return value;
  };
  constexpr F copy = [](float, float b) { return b; };
  static const std::unordered_map<std::string, F> table = {
      {"aten::_foreach_add.Scalar", add},
      {"aten::_foreach_add.List", add},
      {"aten::_foreach_sub.Scalar", sub},
      {"aten::_foreach_sub.List", sub},
      {"aten::_foreach_mul.Scalar", mul},
      {"aten::_foreach_mul.List", mul},
      {"aten::_foreach_div.Scalar", div},
      {"aten::_foreach_div.List", div},
      {"aten::_foreach_pow.ScalarAndTensor", pow},
      {"aten::_foreach_neg", neg},
      {"aten::_foreach_reciprocal", reciprocal},
      {"aten::_foreach_sqrt", sqrt},
      {"aten::_foreach_copy_", copy},
      {"aten::add.Tensor", add},
      {"aten::sub.Tensor", sub},
      {"aten::rsub.Scalar", rsub},
      {"aten::mul.Tensor", mul},
      {"aten::div.Tensor", div},
      {"aten::pow.Scalar", pow},
      {"aten::neg", neg},
      {"aten::reciprocal", reciprocal},
      {"aten::sqrt", sqrt},
      {"aten::copy_", copy},
  };
  const auto it = table.find(toString(name));
  return it == table.end() ? nullptr : &it->second;
}

// Where the number of a float32 CPU tensor without dimensions lies; null for everything else.
float* number_in(const IValue& value) {
  if (!value.isTensor()) return nullptr;
  const at::Tensor& t = value.toTensor();
  const bool good = t.defined() && t.device().is_cpu() && t.layout() == c10::kStrided && t.dim() == 0 &&
                    t.scalar_type() == at::kFloat && !t.is_neg() && !t._is_zerotensor();
  return good ? static_cast<float*>(t.unsafeGetTensorImpl()->mutable_data()) : nullptr;
}

uint32_t index_in(std::vector<uint32_t>& slots, uint32_t slot) {
  const auto at = static_cast<uint32_t>(std::find(slots.begin(), slots.end(), slot) - slots.begin());
  if (at == slots.size()) slots.push_back(slot);
  return at;
}

}  // namespace

bool computes_numbers(const c10::OperatorHandle& op) { return find(op.operator_name()) != nullptr; }

NumberStep::Source NumberStep::source(const Operand& argument, size_t member) {
  using Kind = Source::Kind;
  const Operand& one = argument.kind == Operand::Kind::list ? argument.items.at(member) : argument;
  if (one.kind == Operand::Kind::constant) {
    const IValue& v = one.constant;
    return {Kind::constant, 0, static_cast<float>((v.isTensor() ? v.toTensor().item() : v.toScalar()).toDouble())};
  }
  const auto it = std::find(made_.begin(), made_.end(), one.slot);
  if (it != made_.end()) return {Kind::made, static_cast<uint32_t>(it - made_.begin()), 0};
  return {Kind::given, index_in(given_, one.slot), 0};
}

NumberStep::NumberStep(std::vector<std::unique_ptr<OperatorStep>> steps) : steps_(std::move(steps)) {
  for (auto& step : steps_) {
    const Function* function = find(step->op().operator_name());
    TORCH_CHECK_VALUE(function, toString(step->op().operator_name()), " is no arithmetic on numbers.");
    const bool writes = step->op().schema().is_mutable();
    const Operand &first = step->arguments()[0], &second = step->arguments()[step->arguments().size() > 1];
    const size_t members = std::max({size_t{1}, first.items.size(), second.items.size()});
    for (size_t m = 0; m < members; m++)
      instructions_.push_back({*function, source(first, m), source(second, m), writes});
    if (!writes) made_.insert(made_.end(), step->outs().begin(), step->outs().end());
  }
  for (size_t i = 0; i < made_.size(); i++) {
    const bool dropped = std::any_of(steps_.begin(), steps_.end(), [&](auto& step) {
      return std::find(step->drops.begin(), step->drops.end(), made_[i]) != step->drops.end();
    });
    if (!dropped) results_.push_back(i);
  }
}

void NumberStep::run(Frame& frame) const {
  c10::SmallVector<float*, 64> given;
  for (uint32_t slot : given_) given.push_back(number_in(frame.any(slot)));
  if (!frame.bridged || std::find(given.begin(), given.end(), nullptr) != given.end()) {
    for (auto& step : steps_) run_step(*step, frame);
    return;
  }
  c10::SmallVector<float, 256> made;
  auto get = [&](const Source& s) {
    if (s.kind == Source::Kind::constant) return s.constant;
    return s.kind == Source::Kind::made ? made[s.index] : *given[s.index];
  };
  for (const Instruction& i : instructions_) {
    const float value = i.function(get(i.a), get(i.b));
    if (i.writes)
      *given[i.a.index] = value;
    else
      made.push_back(value);
  }
  for (size_t i : results_) {
    at::Tensor t = at::detail::empty_cpu({}, at::kFloat);
    *t.mutable_data_ptr<float>() = made[i];
    frame.set(made_[i], std::move(t));
  }
  for (auto& step : steps_)
    for (uint32_t slot : step->drops) frame.drop(slot);
}

}  // namespace neuron
