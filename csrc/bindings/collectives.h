// The part of torchneuron._C that serves torch.distributed.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace neuron {

void bind_collectives(pybind11::module_& m, void (*check_signals)());

}  // namespace neuron
