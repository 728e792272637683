// The software NeuronCore runs on PyTorch's threads.
#pragma once

namespace neuron {

void use_torch_threads();

}  // namespace neuron
