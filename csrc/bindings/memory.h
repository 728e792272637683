// The part of torchneuron._C that shows the device's memory: statistics, snapshots, history.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace neuron {

void bind_memory(pybind11::module_& m);

}  // namespace neuron
