// The part of torchneuron._C that shows fusion: counters, programs, what `torchneuron explain` is told.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace neuron {

void bind_fusion(pybind11::module_& m);

}  // namespace neuron
