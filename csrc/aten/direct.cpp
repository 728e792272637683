// Registers the typed library path of what direct.inc lists.
#include "direct.h"

namespace neuron {

using direct::Direct;

const std::vector<c10::OperatorName>& direct_operators() {
  static const std::vector<c10::OperatorName> names = {
#define DIRECT(op) {at::_ops::op::name, at::_ops::op::overload_name},
#include "direct.inc"
#undef DIRECT
  };
  return names;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
#define DIRECT(op) m.impl(Direct<at::_ops::op>::name().c_str(), TORCH_FN(Direct<at::_ops::op>::call));
#include "direct.inc"
#undef DIRECT
}

}  // namespace neuron
