#include "kernel_launch.h"

#include <memory>

#include "core/error.h"
#include "core/executor.h"

namespace neuron {

bool launch(std::span<const LaunchedCore> cores, std::span<void* const> inputs, std::span<void* const> buffers) {
  std::vector<std::unique_ptr<Core>> made;
  std::vector<Core*> all;
  for (const LaunchedCore& c : cores) {
    Core& core = *made.emplace_back(std::make_unique<Core>(*c.program, static_cast<int>(made.size())));
    for (size_t i = 0; i < inputs.size(); i++) core.bind(c.inputs[i], inputs[i]);
    for (auto [storage, buffer] : c.buffers) core.bind(storage, buffers[buffer]);
    for (auto [storage, values] : c.constants) core.bind(storage, const_cast<void*>(values));
    all.push_back(&core);
  }
  try {
    run(std::move(all));
  } catch (const Error&) {
    return false;
  }
  return true;
}

}  // namespace neuron
