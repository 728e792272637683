// Operators on lists of tensors: one node, one program that runs over all members. The rows are those of the operators
// on single tensors.
//
// Rule: lists. A list is recorded if its members are dense, of one type, and laid out alike member by member, and if
// what is written overlaps nothing else. Others are library operators.
//
// Reason: optimizers call a dozen operators on hundreds of tensors. As nodes of their own they would fill windows with
// thousands of programs of a few microseconds each.
#include <algorithm>
#include <vector>

#include "pointwise.h"
#include "record_list.h"

namespace neuron::fusion {

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
#define OP(op, row) m.impl(direct::Direct<at::_ops::op>::name().c_str(), TORCH_FN((ForEach<at::_ops::op, row>::call)));
#define BOTH(op, overload, row) OP(_foreach_##op##overload, row) OP(_foreach_##op##_##overload, row)
#define UNARY(op) BOTH(op, , r_##op)
  // clang-format off
  BOTH(add, _List, r_add_scaled) BOTH(add, _Scalar, r_add_number) BOTH(add, _ScalarList, r_add_number)
  BOTH(sub, _List, r_sub_scaled) BOTH(sub, _Scalar, r_sub_number) BOTH(sub, _ScalarList, r_sub_number)
  BOTH(mul, _List, r_mul) BOTH(mul, _Scalar, r_mul_number) BOTH(mul, _ScalarList, r_mul_number) BOTH(mul, _Tensor, r_mul)
  BOTH(div, _List, r_div) BOTH(div, _Scalar, r_div_number) BOTH(div, _ScalarList, r_div_number) BOTH(div, _Tensor, r_div)
  BOTH(maximum, _List, r_maximum) BOTH(minimum, _List, r_minimum) BOTH(clamp_min, _Scalar, r_clamp_min)
  BOTH(clamp_max, _Scalar, r_clamp_max) BOTH(lerp, _Scalar, r_lerp_number) BOTH(lerp, _List, r_lerp)
  BOTH(addcmul, _Scalar, r_addcmul) BOTH(addcmul, _ScalarList, r_addcmul_list) BOTH(addcdiv, _Scalar, r_addcdiv)
  BOTH(addcdiv, _ScalarList, r_addcdiv_list) BOTH(pow, _Scalar, r_pow_number) UNARY(sqrt) UNARY(neg) UNARY(abs)
  UNARY(exp) UNARY(reciprocal) UNARY(rsqrt) UNARY(sign) UNARY(log) UNARY(tanh) UNARY(sigmoid)
  OP(_foreach_zero_, r_zero) OP(_foreach_copy_, r_copy)
  // clang-format on
#undef UNARY
#undef BOTH
#undef OP
}

}  // namespace neuron::fusion
