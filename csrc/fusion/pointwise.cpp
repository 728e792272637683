// Rows: pointwise arithmetic, comparison, logic and functions.
#include "pointwise.h"

#include "typed.h"

namespace neuron::fusion {

namespace {

using L = LaneOp;

constexpr uint8_t kFI = kFloats | kInts, kIB = kInts | kBools;

// One lane operation on all tensor arguments.
void unary(Lowering& l, const Row& row) { l.out(0, l.op(row.op(l.compute()), l.in(0))); }
void binary(Lowering& l, const Row& row) {
  const Lanes a = l.in(0);
  l.out(0, l.op(row.op(l.compute()), a, l.in(1)));
}
// self op number
void with_number(Lowering& l, const Row& row) {
  const Lanes a = l.in(0);
  l.out(0, l.op(row.op(l.compute()), a, l.scalar(0)));
}
// number op other
void number_first(Lowering& l, const Row& row) {
  const Lanes a = l.scalar(0);
  l.out(0, l.op(row.op(l.compute()), a, l.in(0)));
}
// self op alpha * other
void scaled(Lowering& l, const Row& row) {
  const Lanes a = l.in(0), b = l.in(1);
  l.out(0, l.op(row.op(l.compute()), a, l.op(l.floating() ? L::mul : L::imul, b, l.scalar(0))));
}
void same(Lowering& l, const Row&) { l.out(0, l.in(0)); }
Lanes truth(Lowering& l, Lanes v) { return l.op(v.floating ? L::nonzero : L::inonzero, v); }
void logical(Lowering& l, const Row& row) {
  const Lanes a = truth(l, l.raw(0));
  l.out(0, l.op(row.bools, a, truth(l, l.raw(1))));
}

// Kinds of rows.
constexpr Row function(const char* name, L op) {
  return {.name = name, .lower = unary, .types = kFloats, .floats = op, .to_float = true};
}
constexpr Row rounding(const char* name, L op) { return {.name = name, .lower = unary, .types = kFI, .floats = op}; }
constexpr Row arithmetic(const char* name, void (*lower)(Lowering&, const Row&), L floats, L ints) {
  return {.name = name, .lower = lower, .types = kFI, .floats = floats, .ints = ints};
}
constexpr Row division(const char* name, void (*lower)(Lowering&, const Row&), L floats, L ints) {
  return {.name = name, .lower = lower, .types = kFI, .floats = floats, .ints = ints, .promoting = 1, .divides = true};
}
constexpr Row bitwise(const char* name, void (*lower)(Lowering&, const Row&), L op) {
  return {.name = name, .lower = lower, .types = kIB, .ints = op, .bools = op, .promoting = 1};
}
constexpr Row compares(const char* name, void (*lower)(Lowering&, const Row&), L floats, L ints) {
  return {.name = name, .lower = lower, .floats = floats, .ints = ints, .bools = ints, .to_bool = true, .promoting = 1};
}
constexpr Row truth_of(const char* name, L op) {
  return {.name = name, .lower = logical, .bools = op, .to_bool = true};
}

}  // namespace

#define ROW constexpr Row
ROW r_add{.name = "add", .lower = binary, .floats = L::add, .ints = L::iadd, .bools = L::ior, .drops_number = true};
ROW r_add_scaled{
    .name = "add", .lower = scaled, .types = kFI, .floats = L::add, .ints = L::iadd, .for_number = [](double alpha) {
      return alpha == 1 ? &r_add : nullptr;
    }};
ROW r_sub{.name = "sub", .lower = binary, .types = kFI, .floats = L::sub, .ints = L::isub, .drops_number = true};
ROW r_sub_scaled{
    .name = "sub", .lower = scaled, .types = kFI, .floats = L::sub, .ints = L::isub, .for_number = [](double alpha) {
      return alpha == 1 ? &r_sub : nullptr;
    }};
ROW r_mul{.name = "mul", .lower = binary, .floats = L::mul, .ints = L::imul, .bools = L::iand};
ROW r_div{.name = "div", .lower = binary, .types = kFloats, .floats = L::div, .to_float = true};
ROW r_add_number = arithmetic("add", with_number, L::add, L::iadd);
ROW r_sub_number = arithmetic("sub", with_number, L::sub, L::isub);
ROW r_mul_number = arithmetic("mul", with_number, L::mul, L::imul);
ROW r_div_number{.name = "div", .lower = with_number, .types = kFloats, .floats = L::div};
ROW r_maximum{.name = "maximum", .lower = binary, .floats = L::maximum, .ints = L::imaximum, .bools = L::ior};
ROW r_minimum{.name = "minimum", .lower = binary, .floats = L::minimum, .ints = L::iminimum, .bools = L::iand};
ROW r_fmax{.name = "fmax", .lower = binary, .floats = L::fmax, .ints = L::imaximum, .bools = L::ior};
ROW r_fmin{.name = "fmin", .lower = binary, .floats = L::fmin, .ints = L::iminimum, .bools = L::iand};
ROW r_floor_divide = division("floor_divide", binary, L::floor_div, L::ifloor_div);
ROW r_remainder = division("remainder", binary, L::remainder, L::iremainder);
ROW r_remainder_number = division("remainder", with_number, L::remainder, L::iremainder);
ROW r_fmod = division("fmod", binary, L::fmod, L::ifmod);
ROW r_fmod_number = division("fmod", with_number, L::fmod, L::ifmod);
ROW r_div_trunc{.name = "div(trunc)",
                .lower =
                    [](Lowering& l, const Row&) {
                      const Lanes a = l.in(0), b = l.in(1);
                      l.out(0, l.floating() ? l.op(L::trunc, l.op(L::div, a, b)) : l.op(L::itrunc_div, a, b));
                    },
                .types = kFI,
                .divides = true};
ROW r_atan2{.name = "atan2", .lower = binary, .types = kFloats, .floats = L::atan2, .to_float = true};
ROW r_copysign{.name = "copysign", .lower = binary, .types = kFloats, .floats = L::copysign, .to_float = true};

ROW r_neg = arithmetic("neg", unary, L::neg, L::ineg);
ROW r_abs = arithmetic("abs", unary, L::abs, L::iabs);
ROW r_sign{.name = "sign", .lower = unary, .floats = L::sign, .ints = L::isign};
ROW r_sqrt = function("sqrt", L::sqrt);
ROW r_rsqrt = function("rsqrt", L::rsqrt);
ROW r_reciprocal = function("reciprocal", L::reciprocal);
ROW r_exp = function("exp", L::exp);
ROW r_exp2 = function("exp2", L::exp2);
ROW r_expm1 = function("expm1", L::expm1);
ROW r_log = function("log", L::log);
ROW r_log2 = function("log2", L::log2);
ROW r_log10 = function("log10", L::log10);
ROW r_log1p = function("log1p", L::log1p);
ROW r_tanh = function("tanh", L::tanh);
ROW r_sigmoid = function("sigmoid", L::sigmoid);
ROW r_erf = function("erf", L::erf);
ROW r_erfc = function("erfc", L::erfc);
ROW r_sin = function("sin", L::sin);
ROW r_cos = function("cos", L::cos);
ROW r_tan = function("tan", L::tan);
ROW r_asin = function("asin", L::asin);
ROW r_acos = function("acos", L::acos);
ROW r_atan = function("atan", L::atan);
ROW r_sinh = function("sinh", L::sinh);
ROW r_cosh = function("cosh", L::cosh);
ROW r_floor = rounding("floor", L::floor);
ROW r_ceil = rounding("ceil", L::ceil);
ROW r_trunc = rounding("trunc", L::trunc);
ROW r_round = rounding("round", L::round);
ROW r_frac{.name = "frac",
           .lower =
               [](Lowering& l, const Row&) {
                 const Lanes x = l.in(0);
                 l.out(0, l.op(L::sub, x, l.op(L::trunc, x)));
               },
           .types = kFloats};

// x to the power of a number: the exponents that PyTorch computes in their own way.
ROW r_pow_0{.name = "pow(0)",
            .lower = [](Lowering& l, const Row&) { l.out(0, l.floating() ? l.constant(1.0f) : l.integer(1)); },
            .drops_number = true};
ROW r_pow_1{.name = "pow(1)", .lower = same, .drops_number = true};
ROW r_pow_half{.name = "pow(0.5)", .lower = unary, .types = kFloats, .floats = L::sqrt, .drops_number = true};
ROW r_pow_2{.name = "pow(2)",
            .lower =
                [](Lowering& l, const Row&) {
                  const Lanes x = l.in(0);
                  l.out(0, l.op(l.floating() ? L::mul : L::imul, x, x));
                },
            .types = kFI,
            .drops_number = true};
ROW r_pow_3{.name = "pow(3)",
            .lower =
                [](Lowering& l, const Row&) {
                  const Lanes x = l.in(0);
                  const L mul = l.floating() ? L::mul : L::imul;
                  l.out(0, l.op(mul, l.op(mul, x, x), x));
                },
            .types = kFI,
            .drops_number = true};
ROW r_pow_minus_half{.name = "pow(-0.5)", .lower = unary, .types = kFloats, .floats = L::rsqrt, .drops_number = true};
ROW r_pow_minus_1{.name = "pow(-1)", .lower = unary, .types = kFloats, .floats = L::reciprocal, .drops_number = true};
ROW r_pow_minus_2{.name = "pow(-2)",
                  .lower =
                      [](Lowering& l, const Row&) {
                        const Lanes x = l.in(0);
                        l.out(0, l.op(L::reciprocal, l.op(L::mul, x, x)));
                      },
                  .types = kFloats,
                  .drops_number = true};
namespace {
const Row* pow_of(double exponent) {
  static constexpr std::pair<double, const Row*> kSpecial[] = {
      {0, &r_pow_0}, {1, &r_pow_1},        {0.5, &r_pow_half},   {2, &r_pow_2},
      {3, &r_pow_3}, {-1, &r_pow_minus_1}, {-2, &r_pow_minus_2}, {-0.5, &r_pow_minus_half}};
  for (auto& [value, row] : kSpecial)
    if (value == exponent) return row;
  return nullptr;
}
}  // namespace
ROW r_pow_number{
    .name = "pow", .lower = with_number, .types = kFloats, .floats = L::pow, .promoting = 1, .for_number = pow_of};
ROW r_pow_of_number{
    .name = "pow", .lower = number_first, .types = kFloats, .floats = L::pow, .contiguous = true, .promoting = 1};
ROW r_pow{.name = "pow", .lower = binary, .types = kFloats, .floats = L::pow};

ROW r_eq = compares("eq", binary, L::eq, L::ieq), r_eq_number = compares("eq", with_number, L::eq, L::ieq);
ROW r_ne = compares("ne", binary, L::ne, L::ine), r_ne_number = compares("ne", with_number, L::ne, L::ine);
ROW r_lt = compares("lt", binary, L::lt, L::ilt), r_lt_number = compares("lt", with_number, L::lt, L::ilt);
ROW r_le = compares("le", binary, L::le, L::ile), r_le_number = compares("le", with_number, L::le, L::ile);
ROW r_gt = compares("gt", binary, L::gt, L::igt), r_gt_number = compares("gt", with_number, L::gt, L::igt);
ROW r_ge = compares("ge", binary, L::ge, L::ige), r_ge_number = compares("ge", with_number, L::ge, L::ige);
ROW r_isnan{.name = "isnan",
            .lower = [](Lowering& l, const Row&) { l.out(0, l.op(L::isnan, l.raw(0))); },
            .types = kFloats,
            .to_bool = true};

ROW r_logical_and = truth_of("logical_and", L::iand);
ROW r_logical_or = truth_of("logical_or", L::ior);
ROW r_logical_xor = truth_of("logical_xor", L::ixor);
ROW r_logical_not{.name = "logical_not",
                  .lower = [](Lowering& l, const Row&) { l.out(0, l.op(L::iszero, truth(l, l.raw(0)))); },
                  .to_bool = true};
ROW r_bitwise_and = bitwise("bitwise_and", binary, L::iand);
ROW r_bitwise_or = bitwise("bitwise_or", binary, L::ior);
ROW r_bitwise_xor = bitwise("bitwise_xor", binary, L::ixor);
ROW r_bitwise_and_number = bitwise("bitwise_and", with_number, L::iand);
ROW r_bitwise_or_number = bitwise("bitwise_or", with_number, L::ior);
ROW r_bitwise_xor_number = bitwise("bitwise_xor", with_number, L::ixor);
ROW r_bitwise_not{.name = "bitwise_not", .lower = unary, .types = kIB, .ints = L::inot, .bools = L::iszero};

ROW r_where{.name = "where",
            .lower =
                [](Lowering& l, const Row&) {
                  const Lanes a = l.in(1), b = l.in(2);
                  l.out(0, l.op(L::select, l.raw(0), a, b));
                },
            .raw = 1};
ROW r_masked_fill{.name = "masked_fill",
                  .lower =
                      [](Lowering& l, const Row&) {
                        const Lanes x = l.in(0);
                        l.out(0, l.op(L::select, l.raw(1), l.rounded(l.scalar(0)), x));
                      },
                  .raw = 2};
ROW r_masked_fill_tensor{.name = "masked_fill",
                         .lower =
                             [](Lowering& l, const Row&) {
                               const Lanes x = l.in(0);
                               l.out(0, l.op(L::select, l.raw(1), l.in(2), x));
                             },
                         .raw = 6};

namespace {
// self + (value * a) / b and the like
template <L Combine, bool Scaled>
void add_combined(Lowering& l, const Row&) {
  Lanes a = l.in(1);
  if (Scaled) a = l.op(L::mul, l.scalar(0), a);
  l.out(0, l.op(L::add, l.in(0), l.op(Combine, a, l.in(2))));
}
// Weights below 1/2 start from self, others from end: exact at both ends.
template <bool Low>
void interpolate(Lowering& l, const Row&) {
  const Lanes a = l.in(0), b = l.in(1), w = l.scalar(0), d = l.op(L::sub, b, a);
  if (Low)
    l.out(0, l.op(L::add, a, l.op(L::mul, w, d)));
  else
    l.out(0, l.op(L::sub, b, l.op(L::mul, d, l.op(L::sub, l.constant(1.0f), w))));
}
}  // namespace
ROW r_addcmul_1{.name = "addcmul", .lower = add_combined<L::mul, false>, .types = kFloats, .drops_number = true};
ROW r_addcmul{.name = "addcmul", .lower = add_combined<L::mul, true>, .types = kFloats, .for_number = [](double v) {
                return v == 1 ? &r_addcmul_1 : nullptr;
              }};
ROW r_addcdiv_1{.name = "addcdiv", .lower = add_combined<L::div, false>, .types = kFloats, .drops_number = true};
ROW r_addcdiv{.name = "addcdiv", .lower = add_combined<L::div, true>, .types = kFloats, .for_number = [](double v) {
                return v == 1 ? &r_addcdiv_1 : nullptr;
              }};
ROW r_addcmul_list{.name = "addcmul", .lower = add_combined<L::mul, true>, .types = kFloats};
ROW r_addcdiv_list{.name = "addcdiv", .lower = add_combined<L::div, true>, .types = kFloats};
ROW r_lerp_low{.name = "lerp", .lower = interpolate<true>, .types = kFloats};
ROW r_lerp_number{.name = "lerp", .lower = interpolate<false>, .types = kFloats, .for_number = [](double w) {
                    return std::abs(w) < 0.5 ? &r_lerp_low : nullptr;
                  }};
ROW r_lerp{.name = "lerp",
           .lower =
               [](Lowering& l, const Row&) {
                 const Lanes a = l.in(0), b = l.in(1), w = l.in(2), d = l.op(L::sub, b, a);
                 const Lanes low = l.op(L::add, a, l.op(L::mul, w, d));
                 const Lanes high = l.op(L::sub, b, l.op(L::mul, d, l.op(L::sub, l.constant(1.0f), w)));
                 l.out(0, l.op(L::select, l.op(L::lt, l.op(L::abs, w), l.constant(0.5f)), low, high));
               },
           .types = kFloats};

ROW r_clamp{.name = "clamp",
            .lower =
                [](Lowering& l, const Row&) {
                  const bool f = l.floating();
                  const Lanes low = l.op(f ? L::maximum : L::imaximum, l.in(0), l.scalar(0));
                  l.out(0, l.op(f ? L::minimum : L::iminimum, low, l.scalar(1)));
                },
            .types = kFI,
            .promoting = 3};
ROW r_clamp_min{
    .name = "clamp_min", .lower = with_number, .types = kFI, .floats = L::maximum, .ints = L::imaximum, .promoting = 1};
ROW r_clamp_max{
    .name = "clamp_max", .lower = with_number, .types = kFI, .floats = L::minimum, .ints = L::iminimum, .promoting = 1};

ROW r_fill{.name = "fill", .lower = [](Lowering& l, const Row&) { l.out(0, l.scalar(0)); }, .overwrites = true};
ROW r_fill_tensor{.name = "fill", .lower = same, .overwrites = true, .raw = 1};
ROW r_zero{.name = "zero",
           .lower = [](Lowering& l, const Row&) { l.out(0, l.floating() ? l.constant(0.0f) : l.integer(0)); },
           .overwrites = true};
ROW r_copy{.name = "copy", .lower = same, .overwrites = true};
#undef ROW

namespace {

// div with a rounding mode: which row it is.
template <class Op, class... Args>
auto divide(std::optional<c10::string_view> mode, Args&&... args) {
  if (mode && *mode == "floor") return Typed<Op, r_floor_divide>::call(std::forward<Args>(args)...);
  if (mode && *mode == "trunc") return Typed<Op, r_div_trunc>::call(std::forward<Args>(args)...);
  return Typed<Op, r_div>::call(std::forward<Args>(args)...);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
#define OP(op, row) m.impl(direct::Direct<at::_ops::op>::name().c_str(), TORCH_FN((Typed<at::_ops::op, row>::call)));
#define UNARY(op) OP(op, r_##op) OP(op##_, r_##op) OP(op##_out, r_##op)
#define TENSOR(op, row) OP(op##_Tensor, row) OP(op##__Tensor, row)
#define BINARY(op) TENSOR(op, r_##op) OP(op##_Tensor_out, r_##op)
#define NUMBER(op) \
  OP(op##_Scalar, r_##op##_number) OP(op##__Scalar, r_##op##_number) OP(op##_Scalar_out, r_##op##_number)
  // clang-format off
  TENSOR(add, r_add_scaled) OP(add_out, r_add_scaled) TENSOR(sub, r_sub_scaled) OP(sub_out, r_sub_scaled)
  TENSOR(mul, r_mul) OP(mul_out, r_mul) TENSOR(div, r_div) OP(div_out, r_div)
  OP(maximum, r_maximum) OP(maximum_out, r_maximum) OP(minimum, r_minimum) OP(minimum_out, r_minimum)
  OP(fmax, r_fmax) OP(fmax_out, r_fmax) OP(fmin, r_fmin) OP(fmin_out, r_fmin)
  OP(floor_divide, r_floor_divide) OP(floor_divide__Tensor, r_floor_divide) OP(floor_divide_out, r_floor_divide)
  BINARY(remainder) BINARY(fmod) OP(remainder_Scalar, r_remainder_number) OP(remainder__Scalar, r_remainder_number)
  OP(fmod_Scalar, r_fmod_number) OP(fmod__Scalar, r_fmod_number)
  UNARY(atan2) OP(copysign_Tensor, r_copysign) OP(copysign__Tensor, r_copysign) OP(copysign_out, r_copysign)
  UNARY(neg) UNARY(abs) UNARY(sign) UNARY(sqrt) UNARY(rsqrt) UNARY(reciprocal) UNARY(exp) UNARY(exp2) UNARY(expm1)
  UNARY(log) UNARY(log2) UNARY(log10) UNARY(log1p) UNARY(tanh) UNARY(sigmoid) UNARY(erf) UNARY(erfc) UNARY(sin) UNARY(cos)
  UNARY(tan) UNARY(asin) UNARY(acos) UNARY(atan) UNARY(sinh) UNARY(cosh) UNARY(floor) UNARY(ceil) UNARY(trunc)
  UNARY(round) UNARY(frac) UNARY(logical_not) UNARY(bitwise_not) OP(isnan, r_isnan)
  OP(pow_Tensor_Scalar, r_pow_number) OP(pow__Scalar, r_pow_number) OP(pow_Tensor_Scalar_out, r_pow_number)
  OP(pow_Tensor_Tensor, r_pow) OP(pow__Tensor, r_pow) OP(pow_Tensor_Tensor_out, r_pow)
  OP(pow_Scalar, r_pow_of_number) OP(pow_Scalar_out, r_pow_of_number)
  BINARY(eq) NUMBER(eq) BINARY(ne) NUMBER(ne) BINARY(lt) NUMBER(lt) BINARY(le) NUMBER(le) BINARY(gt) NUMBER(gt)
  BINARY(ge) NUMBER(ge) UNARY(logical_and) UNARY(logical_or) UNARY(logical_xor)
  BINARY(bitwise_and) NUMBER(bitwise_and) BINARY(bitwise_or) NUMBER(bitwise_or) BINARY(bitwise_xor) NUMBER(bitwise_xor)
  OP(where_self, r_where) OP(where_self_out, r_where)
  OP(masked_fill_Scalar, r_masked_fill) OP(masked_fill__Scalar, r_masked_fill)
  OP(masked_fill_Tensor, r_masked_fill_tensor) OP(masked_fill__Tensor, r_masked_fill_tensor)
  UNARY(addcmul) UNARY(addcdiv) OP(lerp_Scalar, r_lerp_number) OP(lerp__Scalar, r_lerp_number)
  OP(lerp_Scalar_out, r_lerp_number) OP(lerp_Tensor, r_lerp) OP(lerp__Tensor, r_lerp) OP(lerp_Tensor_out, r_lerp)
  UNARY(clamp) UNARY(clamp_min) UNARY(clamp_max) OP(fill__Scalar, r_fill) OP(fill__Tensor, r_fill_tensor) OP(zero_, r_zero)
  // clang-format on
#undef NUMBER
#undef BINARY
#undef TENSOR
#undef UNARY
#undef OP
}

}  // namespace neuron::fusion
