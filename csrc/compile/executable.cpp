#include "executable.h"

#include "aten/graph.h"
#include "fusion/stats.h"

namespace neuron {

using c10::DispatchKey;
using c10::IValue;

namespace {

// Whether something that transforms each operator must see it on neuron tensors.
bool transformed() {
  const c10::DispatchKeySet modes({DispatchKey::Functionalize, DispatchKey::FuncTorchDynamicLayerFrontMode});
  return current_capture() || c10::impl::tls_local_dispatch_key_set().included_.has_any(modes);
}

}  // namespace

void run_step(const Step& step, Frame& frame) {
  try {
    step.run(frame);
  } catch (c10::Error& error) {
    error.add_context(step.where);
    throw;
  }
  frame.stack.clear();
  for (uint32_t slot : step.drops) frame.drop(slot);
}

Executable::Executable(size_t inputs, size_t slots, std::vector<std::pair<uint32_t, at::Tensor>> constants,
                       std::vector<std::unique_ptr<Step>> steps, std::vector<Operand> outputs)
    : inputs_(inputs),
      slots_(slots),
      constants_(std::move(constants)),
      steps_(std::move(steps)),
      outputs_(std::move(outputs)) {}

std::vector<IValue> Executable::run(std::vector<IValue> inputs, bool watched) const {
  TORCH_CHECK(inputs.size() == inputs_, "The compiled graph takes ", inputs_, " inputs, got ", inputs.size(), ".");
  Frame frame(slots_, !watched && !transformed());
  fusion::count(fusion::g_stats.executables_run);
  c10::impl::ExcludeDispatchKeyGuard backend_only(kAboveBackend);
  for (size_t i = 0; i < inputs.size(); i++) frame.set(i, std::move(inputs[i]));
  inputs.clear();
  for (auto& [slot, tensor] : constants_) frame.set(slot, tensor);
  for (auto& step : steps_) run_step(*step, frame);
  std::vector<IValue> out;
  out.reserve(outputs_.size());
  for (auto& output : outputs_) out.push_back(output.get(frame, /*host=*/false));
  return out;
}

void CallbackStep::run(Frame& frame) const {
  std::vector<IValue> values;
  values.reserve(arguments_.size());
  for (auto& argument : arguments_) values.push_back(argument.get(frame, /*host=*/false));
  std::vector<IValue> results;
  {
    // Python code finds the dispatch keys that the caller had.
    c10::impl::ForceDispatchKeyGuard caller(frame.keys);
    results = function_(std::move(values));
  }
  TORCH_CHECK(results.size() == outs_.size(), "A call of Python returned ", results.size(),
              " values, the compiled graph expects ", outs_.size(), ".");
  for (size_t i = 0; i < outs_.size(); i++) frame.set(outs_[i], std::move(results[i]));
}

}  // namespace neuron
