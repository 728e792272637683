// Lane operations: what one step of a tile program computes, element by element on 32-bit lanes. One row each: name,
// inputs, lanes of inputs and result, the instruction of the ISA table that it is (opcode and operation), meaning.
//
// Rows marked `ext` have no instruction in the public ISA: true division, truncating casts, exact integers, rounding to
// a narrower type in mid-program. The ISA column then names the instruction they are counted as.
#pragma once
#include <cstdint>
#include <string_view>

#include "isa.h"

namespace neuron {

enum class Lane : uint8_t { f32, i32, any };  // any: bits of either kind

// X(name, inputs, lane in, lane out, opcode, ext, meaning)
// clang-format off
#define NEURON_LANE_OPS(X)                                                                                          \
  X(copy, 1, any, any, tensor_copy, false, "a")                                                                     \
  X(add, 2, f32, f32, tensor_tensor, false, "a + b")                                                                \
  X(sub, 2, f32, f32, tensor_tensor, false, "a - b")                                                                \
  X(mul, 2, f32, f32, tensor_tensor, false, "a * b")                                                                \
  X(div, 2, f32, f32, tensor_tensor, true, "a / b")                                                                 \
  X(maximum, 2, f32, f32, tensor_tensor, false, "the larger; NaN if either is")                                     \
  X(minimum, 2, f32, f32, tensor_tensor, false, "the smaller; NaN if either is")                                    \
  X(fmax, 2, f32, f32, tensor_tensor, true, "the larger; the other one if one is NaN")                              \
  X(fmin, 2, f32, f32, tensor_tensor, true, "the smaller; the other one if one is NaN")                             \
  X(pow, 2, f32, f32, tensor_tensor, true, "a to the power of b")                                                   \
  X(fmod, 2, f32, f32, tensor_tensor, true, "remainder with the sign of a")                                         \
  X(remainder, 2, f32, f32, tensor_tensor, true, "remainder with the sign of b")                                    \
  X(floor_div, 2, f32, f32, tensor_tensor, true, "floor of a / b as Python rounds it")                              \
  X(atan2, 2, f32, f32, tensor_tensor, true, "angle of the point (b, a)")                                           \
  X(copysign, 2, f32, f32, tensor_tensor, true, "magnitude of a with the sign of b")                                \
  X(eq, 2, f32, i32, tensor_tensor, false, "a == b")                                                                \
  X(ne, 2, f32, i32, tensor_tensor, false, "a != b")                                                                \
  X(lt, 2, f32, i32, tensor_tensor, false, "a < b")                                                                 \
  X(le, 2, f32, i32, tensor_tensor, false, "a <= b")                                                                \
  X(gt, 2, f32, i32, tensor_tensor, false, "a > b")                                                                 \
  X(ge, 2, f32, i32, tensor_tensor, false, "a >= b")                                                                \
  X(iadd, 2, i32, i32, tensor_tensor, false, "a + b, wraps")                                                        \
  X(isub, 2, i32, i32, tensor_tensor, false, "a - b, wraps")                                                        \
  X(imul, 2, i32, i32, tensor_tensor, false, "a * b, wraps")                                                        \
  X(imaximum, 2, i32, i32, tensor_tensor, false, "the larger")                                                      \
  X(iminimum, 2, i32, i32, tensor_tensor, false, "the smaller")                                                     \
  X(ieq, 2, i32, i32, tensor_tensor, false, "a == b")                                                               \
  X(ine, 2, i32, i32, tensor_tensor, false, "a != b")                                                               \
  X(ilt, 2, i32, i32, tensor_tensor, false, "a < b")                                                                \
  X(ile, 2, i32, i32, tensor_tensor, false, "a <= b")                                                               \
  X(igt, 2, i32, i32, tensor_tensor, false, "a > b")                                                                \
  X(ige, 2, i32, i32, tensor_tensor, false, "a >= b")                                                               \
  X(iand, 2, i32, i32, tensor_tensor, false, "a & b")                                                               \
  X(ior, 2, i32, i32, tensor_tensor, false, "a | b")                                                                \
  X(ixor, 2, i32, i32, tensor_tensor, false, "a ^ b")                                                               \
  X(mul_add, 3, f32, f32, scalar_tensor_tensor, false, "a * b, rounded, + c")                                       \
  X(mul_sub, 3, f32, f32, scalar_tensor_tensor, false, "a * b, rounded, - c")                                       \
  X(mul_rsub, 3, f32, f32, scalar_tensor_tensor, false, "c - a * b, which is rounded")                              \
  X(mul_mul, 3, f32, f32, scalar_tensor_tensor, false, "a * b, rounded, * c")                                       \
  X(add_mul, 3, f32, f32, scalar_tensor_tensor, false, "a + b, rounded, * c")                                       \
  X(add_add, 3, f32, f32, scalar_tensor_tensor, false, "a + b, rounded, + c")                                       \
  X(sub_mul, 3, f32, f32, scalar_tensor_tensor, false, "a - b, rounded, * c")                                       \
  X(sub_add, 3, f32, f32, scalar_tensor_tensor, false, "a - b, rounded, + c")                                       \
  X(select, 3, any, any, select_reduce, false, "b where a is not 0, else c")                                        \
  X(neg, 1, f32, f32, activation, true, "-a")                                                                       \
  X(abs, 1, f32, f32, activation, false, "|a|")                                                                     \
  X(sign, 1, f32, f32, activation, false, "-1, 0 or 1; 0 for NaN")                                                  \
  X(sqrt, 1, f32, f32, activation, false, "square root")                                                            \
  X(rsqrt, 1, f32, f32, activation, false, "1 / square root")                                                       \
  X(reciprocal, 1, f32, f32, reciprocal, false, "1 / a")                                                            \
  X(exp, 1, f32, f32, activation, false, "e^a")                                                                     \
  X(exp2, 1, f32, f32, activation, true, "2^a")                                                                     \
  X(expm1, 1, f32, f32, activation, true, "e^a - 1")                                                                \
  X(log, 1, f32, f32, activation, false, "natural logarithm")                                                       \
  X(log2, 1, f32, f32, activation, true, "logarithm to base 2")                                                     \
  X(log10, 1, f32, f32, activation, true, "logarithm to base 10")                                                   \
  X(log1p, 1, f32, f32, activation, true, "log(1 + a)")                                                             \
  X(tanh, 1, f32, f32, activation, false, "hyperbolic tangent")                                                     \
  X(sigmoid, 1, f32, f32, activation, false, "1 / (1 + e^-a)")                                                      \
  X(erf, 1, f32, f32, activation, false, "error function")                                                          \
  X(erfc, 1, f32, f32, activation, true, "1 - erf(a)")                                                              \
  X(sin, 1, f32, f32, activation, true, "sine of any angle")                                                        \
  X(cos, 1, f32, f32, activation, true, "cosine of any angle")                                                      \
  X(tan, 1, f32, f32, activation, true, "tangent of any angle")                                                     \
  X(asin, 1, f32, f32, activation, true, "arc sine")                                                                \
  X(acos, 1, f32, f32, activation, true, "arc cosine")                                                              \
  X(atan, 1, f32, f32, activation, false, "arc tangent")                                                            \
  X(sinh, 1, f32, f32, activation, true, "hyperbolic sine")                                                         \
  X(cosh, 1, f32, f32, activation, true, "hyperbolic cosine")                                                       \
  X(floor, 1, f32, f32, activation, true, "largest integer that is not larger")                                     \
  X(ceil, 1, f32, f32, activation, true, "smallest integer that is not smaller")                                    \
  X(trunc, 1, f32, f32, activation, true, "integer part")                                                           \
  X(round, 1, f32, f32, activation, true, "nearest integer, half to even")                                          \
  X(isnan, 1, f32, i32, tensor_scalar, true, "a is NaN")                                                            \
  X(isinf, 1, f32, i32, tensor_scalar, true, "a is infinite")                                                       \
  X(ineg, 1, i32, i32, tensor_scalar, false, "-a, wraps")                                                           \
  X(iabs, 1, i32, i32, tensor_scalar, false, "|a|, wraps")                                                          \
  X(isign, 1, i32, i32, tensor_scalar, true, "-1, 0 or 1")                                                          \
  X(inot, 1, i32, i32, tensor_scalar, false, "~a")                                                                  \
  X(iszero, 1, i32, i32, tensor_scalar, false, "a == 0")                                                            \
  X(iremainder, 2, i32, i32, tensor_tensor, true, "remainder with the sign of b; b is not 0")                       \
  X(ifmod, 2, i32, i32, tensor_tensor, true, "remainder with the sign of a; b is not 0")                            \
  X(ifloor_div, 2, i32, i32, tensor_tensor, true, "floor of a / b; b is not 0")                                     \
  X(itrunc_div, 2, i32, i32, tensor_tensor, true, "a / b rounded to 0; b is not 0")                                 \
  X(to_float, 1, i32, f32, tensor_copy, false, "nearest float")                                                     \
  X(to_int, 1, f32, i32, tensor_copy, true, "integer part; out of range or NaN: the least integer")                 \
  X(nonzero, 1, f32, i32, tensor_scalar, false, "a != 0")                                                           \
  X(inonzero, 1, i32, i32, tensor_scalar, false, "a != 0")                                                          \
  X(round_bf16, 1, f32, f32, tensor_copy, true, "nearest bfloat16")                                                 \
  X(round_f16, 1, f32, f32, tensor_copy, true, "nearest float16")                                                   \
  X(wrap_i8, 1, i32, i32, tensor_copy, true, "low 8 bits, signed")                                                  \
  X(wrap_u8, 1, i32, i32, tensor_copy, true, "low 8 bits")                                                          \
  X(sum, 1, f32, f32, tensor_reduce, false, "sum of each row")                                                      \
  X(amax, 1, f32, f32, tensor_reduce, false, "largest of each row; NaN if any is")                                  \
  X(amin, 1, f32, f32, tensor_reduce, false, "smallest of each row; NaN if any is")                                 \
  X(iamax, 1, i32, i32, tensor_reduce, false, "largest of each row")                                                \
  X(iamin, 1, i32, i32, tensor_reduce, false, "smallest of each row")                                               \
  X(uniform_bits, 1, any, i32, rng, true, "word i of Philox 4x32-10 at (seed, offset) = 4 lanes of a")              \
  X(div_add, 3, f32, f32, scalar_tensor_tensor, true, "c / (a + b), which is rounded")                              \
  X(exp_neg, 1, f32, f32, activation, false, "e^-a")                                                                \
  X(exp_sub, 2, f32, f32, activation, false, "e^(a - b), each step rounded")                                        \
  X(swish, 2, f32, f32, activation, true, "a / (b + e^-a), each step rounded")                                      \
  X(swish_mul, 3, f32, f32, activation, true, "a / (b + e^-a) * c, each step rounded")
// clang-format on

enum class LaneOp : uint8_t {
#define X(name, inputs, in, out, opcode, ext, meaning) name,
  NEURON_LANE_OPS(X)
#undef X
      count,
};
inline constexpr int kLaneOps = static_cast<int>(LaneOp::count);

struct LaneOpInfo {
  std::string_view name;
  uint8_t inputs;
  Lane in, out;
  Opcode opcode;
  bool extension;
  std::string_view meaning;
};
inline constexpr LaneOpInfo kLaneOpTable[] = {
#define X(name, inputs, in, out, opcode, ext, meaning) \
  {#name, inputs, Lane::in, Lane::out, Opcode::opcode, ext, meaning},
    NEURON_LANE_OPS(X)
#undef X
};
constexpr const LaneOpInfo& info(LaneOp op) { return kLaneOpTable[static_cast<int>(op)]; }
constexpr bool reduces(LaneOp op) { return op >= LaneOp::sum && op <= LaneOp::iamin; }

}  // namespace neuron
