// The part of torchneuron._C that serves torch.compile.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace neuron {

void bind_compile(pybind11::module_& m);

}  // namespace neuron
