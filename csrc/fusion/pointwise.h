// Rows that more than one file registers.
#pragma once

#include "rows.h"

namespace neuron::fusion {

extern const Row r_copy;  // from any type to any type
// With a number as the second operand, where ATen's operators on tensors take it as a tensor.
extern const Row r_add_number, r_sub_number, r_mul_number, r_div_number;
extern const Row r_addcmul_list, r_addcdiv_list;  // with any number, 1 too
extern const Row r_add_scaled, r_sub_scaled, r_mul, r_div, r_maximum, r_minimum, r_clamp_min, r_clamp_max,
    r_lerp_number, r_lerp, r_addcmul, r_addcdiv, r_pow_number, r_sqrt, r_neg, r_abs, r_exp, r_reciprocal, r_rsqrt,
    r_sign, r_log, r_tanh, r_sigmoid, r_zero;

}  // namespace neuron::fusion
