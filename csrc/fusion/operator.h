// What a kernel of a fusible operator needs of the operator itself: its counter, and the library path for calls that
// are not recorded.
#pragma once

#include "aten/direct.h"

namespace neuron::fusion {

template <class Op>
OpCounter& counter_of() {
  static OpCounter& c = counter(direct::Direct<Op>::name());
  return c;
}
template <class Op, class... Args>
decltype(auto) library(Args&&... args) {
  return direct::Direct<Op>::call(std::forward<Args>(args)...);
}

}  // namespace neuron::fusion
