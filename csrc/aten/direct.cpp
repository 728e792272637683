// Registers the typed library path of what direct.inc lists.
#include "direct.h"

namespace neuron {

using direct::Direct;

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
#define DIRECT(op) m.impl(Direct<at::_ops::op>::name().c_str(), TORCH_FN(Direct<at::_ops::op>::call));
#include "direct.inc"
#undef DIRECT
}

}  // namespace neuron
