#include "recipes.h"

#include <array>

#include "../simd/lanes.h"
#include "loop.h"

namespace neuron {

namespace x86 {

namespace {

constexpr uint8_t kEqual = 0, kUnordered = 3, kNotEqual = 4;  // predicates of vcmpps

// clang-format off
constexpr Recipe recipe(LaneOp op) {
  using enum LaneOp;
  using enum Form;
  constexpr auto gives = Recipe::gives, takes = Recipe::takes, follows = Recipe::follows, exact = Recipe::exact;
  switch (op) {
    case add: return {binary, vaddps, {}, 0, gives};
    case sub: return {binary, vsubps, {}, 0, gives};
    case mul: return {binary, vmulps, {}, 0, gives};
    case div: return {binary, vdivps, {}, 0, gives};
    case iadd: return {binary, vpaddd};
    case isub: return {binary, vpsubd};
    case imul: return {binary, vpmulld};
    case imaximum: return {binary, vpmaxsd};
    case iminimum: return {binary, vpminsd};
    case iand: return {binary, vpandd};
    case ior: return {binary, vpord};
    case ixor: return {binary, vpxord};
    case mul_add: return {merged, vmulps, vaddps, 0, gives};
    case mul_sub: return {merged, vmulps, vsubps, 0, gives};
    case mul_rsub: return {swapped, vmulps, vsubps, 0, gives};
    case mul_mul: return {merged, vmulps, vmulps, 0, gives};
    case add_mul: return {merged, vaddps, vmulps, 0, gives};
    case add_add: return {merged, vaddps, vaddps, 0, gives};
    case sub_mul: return {merged, vsubps, vmulps, 0, gives};
    case sub_add: return {merged, vsubps, vaddps, 0, gives};
    case div_add: return {swapped, vaddps, vdivps, 0, gives};
    case eq: return {compare, {}, {}, kEqual, takes};
    case ne: return {compare, {}, {}, kNotEqual, takes};
    case lt: return {compare, {}, {}, 0x11, takes};
    case le: return {compare, {}, {}, 0x12, takes};
    case gt: return {compare, {}, {}, 0x1e, takes};
    case ge: return {compare, {}, {}, 0x1d, takes};
    case ieq: return {icompare, {}, {}, 0};
    case ilt: return {icompare, {}, {}, 1};
    case ile: return {icompare, {}, {}, 2};
    case ine: return {icompare, {}, {}, 4};
    case ige: return {icompare, {}, {}, 5};
    case igt: return {icompare, {}, {}, 6};
    case maximum: return {extreme, vmaxps, {}, 0};
    case minimum: return {extreme, vminps, {}, 0};
    case fmax: return {extreme, vmaxps, {}, 1};
    case fmin: return {extreme, vminps, {}, 1};
    case sqrt: return {unary, vsqrtps};
    case iabs: return {unary, vpabsd};
    case to_float: return {unary, vcvtdq2ps};
    case to_int: return {unary, vcvttps2dq, {}, 0, takes};
    case round: return {rounding, {}, {}, 8};
    case floor: return {rounding, {}, {}, 9};
    case ceil: return {rounding, {}, {}, 10};
    case trunc: return {rounding, {}, {}, 11};
    case abs: return {other, {}, {}, 0, follows};
    case round_bf16: return {other, {}, {}, 0, follows};
    case copy: return {other, {}, {}, 0, follows};
    case isnan: case nonzero: return {other, {}, {}, 0, takes};
    case neg: case rsqrt: case reciprocal: case copysign: case select: case isinf: case ineg: case inot: case iszero:
    case inonzero: case wrap_i8: case wrap_u8: return {other, {}, {}, 0, exact};
    case uniform_bits: return {none};
    default: return {call};
  }
}

// clang-format on
constexpr auto kRecipes = [] {
  std::array<Recipe, kLaneOps> all;
  for (int i = 0; i < kLaneOps; i++) all[static_cast<size_t>(i)] = recipe(static_cast<LaneOp>(i));
  return all;
}();

constexpr DtypeSet kNarrow = dtypes(Dtype::boolean, Dtype::uint8, Dtype::int8, Dtype::float16, Dtype::bfloat16);
// What makes lanes of the elements of a type; of bfloat16, their upper halves are yet to be put in place.
Op widen(Dtype narrow) {
  switch (narrow) {
    case Dtype::int8:
      return vpmovsxbd;
    case Dtype::float16:
      return vcvtph2ps;
    case Dtype::bfloat16:
      return vpmovzxwd;
    default:
      return vpmovzxbd;
  }
}

}  // namespace

const Recipe& recipe_of(LaneOp op) { return kRecipes[static_cast<size_t>(op)]; }

void settle(Assembler& a, Zmm lanes) {
  a.v_immediate(vcmpps, kChosen, lanes, lanes, kUnordered);
  a.v(vbroadcastss, lanes, 0, word_at(one_nan), kChosen);
}

// `to` is written last; zmm0 and zmm1 are free for what comes between.
void write(Assembler& code, LaneOp op, Zmm to, const Zmm (&in)[3]) {
  const Recipe& recipe = recipe_of(op);
  const Zmm a = in[0], b = in[1], c = in[2];
  auto choice = [&] {  // 1 in the chosen lanes
    code.v(vpmovm2d, 0, 0, kChosen);
    code.shift(shift_right, to, 0, 31);
  };
  auto with_word = [&](Op o, Zmm r, Zmm x, Word w) { code.v(o, r, x, word_at(w), 0, false, true); };
  switch (recipe.form) {
    case Form::binary:
      return code.v(recipe.op, to, a, b);
    case Form::merged:
      code.v(recipe.op, 0, a, b);
      return code.v(recipe.second, to, 0, c);
    case Form::swapped:
      code.v(recipe.op, 0, a, b);
      return code.v(recipe.second, to, c, 0);
    case Form::compare:
      code.v_immediate(vcmpps, kChosen, a, b, recipe.detail);
      return choice();
    case Form::icompare:
      code.v_immediate(vpcmpd, kChosen, a, b, recipe.detail);
      return choice();
    case Form::extreme:
      code.v(recipe.op, 0, a, b);
      code.v_immediate(vcmpps, kChosen, in[recipe.detail], in[recipe.detail], kUnordered);
      return code.v(vblendmps, to, 0, a, kChosen);
    case Form::unary:
      return code.v(recipe.op, to, 0, a);
    case Form::rounding:
      return code.v_immediate(vrndscaleps, to, 0, a, recipe.detail);
    case Form::other:
      break;
    case Form::call:
    case Form::none:
      return;
  }
  switch (op) {
    case LaneOp::copy:
      return code.v(vmovups, to, 0, a);
    case LaneOp::neg:
      return with_word(vpxord, to, a, sign_bit);
    case LaneOp::abs:
      return with_word(vpandd, to, a, magnitude_bits);
    case LaneOp::rsqrt:
      code.v(vsqrtps, 0, 0, a);
      code.v(vbroadcastss, 1, 0, word_at(one_float));
      return code.v(vdivps, to, 1, 0);
    case LaneOp::reciprocal:
      code.v(vbroadcastss, 1, 0, word_at(one_float));
      return code.v(vdivps, to, 1, a);
    case LaneOp::copysign:  // bit by bit: where the word has a 1, b's, else a's
      code.v(vbroadcastss, 0, 0, word_at(sign_bit));
      code.v_immediate(vpternlogd, 0, b, a, 0xca);
      return code.v(vmovups, to, 0, 0);
    case LaneOp::select:
      code.v(vptestmd, kChosen, a, a);
      return code.v(vblendmps, to, c, b, kChosen);
    case LaneOp::isnan:
      code.v_immediate(vcmpps, kChosen, a, a, kUnordered);
      return choice();
    case LaneOp::isinf:
      with_word(vpandd, 0, a, magnitude_bits);
      code.v(vbroadcastss, 1, 0, word_at(infinity));
      code.v_immediate(vpcmpd, kChosen, 0, 1, kEqual);
      return choice();
    case LaneOp::nonzero:
      code.v(vpxord, 0, 0, 0);
      code.v_immediate(vcmpps, kChosen, a, 0, kNotEqual);
      return choice();
    case LaneOp::inonzero:
      code.v(vptestmd, kChosen, a, a);
      return choice();
    case LaneOp::iszero:
      code.v(vptestnmd, kChosen, a, a);
      return choice();
    case LaneOp::ineg:
      code.v(vpxord, 0, 0, 0);
      return code.v(vpsubd, to, 0, a);
    case LaneOp::inot:
      return code.v_immediate(vpternlogd, to, a, a, 0x55);
    case LaneOp::wrap_i8:
      code.shift(shift_left, 0, a, 24);
      return code.shift(shift_right_signed, to, 0, 24);
    case LaneOp::wrap_u8:
      return with_word(vpandd, to, a, low_byte);
    case LaneOp::round_bf16:  // half a unit less one, and one more if the last bit that stays is 1; NaN stays NaN
      code.shift(shift_right, 0, a, 16);
      with_word(vpandd, 0, 0, one);
      code.v(vpaddd, 0, 0, a);
      with_word(vpaddd, 0, 0, half_less);
      code.v_immediate(vcmpps, kChosen, a, a, kUnordered);
      code.v(vpord, 0, a, word_at(quiet_bit), kChosen, false, true);
      return with_word(vpandd, to, 0, high_half);
    default:
      return;
  }
}

void load_narrow(Assembler& a, Dtype from, Zmm to, const Address& m, Mask mask) {
  a.v(widen(from), to, 0, m, mask, mask);
  if (from == Dtype::bfloat16) a.shift(shift_left, to, to, 16);
}

void store_narrow(Assembler& a, Dtype to, const Address& m, Zmm lanes, Mask mask) {
  if (to == Dtype::float16) {
    // To nearest even; of NaNs, the sign alone stays.
    a.v_immediate(vcmpps, kChosen, lanes, lanes, kUnordered);
    a.v(vmovups, 0, 0, lanes);
    a.v(vpandd, 0, lanes, word_at(sign_bit), kChosen, false, true);
    a.v(vpord, 0, 0, word_at(one_nan), kChosen, false, true);
    a.store_immediate(vcvtps2ph, m, 0, 0, mask);
  } else if (to == Dtype::bfloat16) {
    const Zmm in[3] = {lanes};
    write(a, LaneOp::round_bf16, 0, in);
    a.shift(shift_right, 0, 0, 16);
    a.store(vpmovdw, m, 0, mask);
  } else {
    a.store(vpmovdb, m, lanes, mask);
  }
}

}  // namespace x86

bool is_loop_call(LaneOp op) { return x86::recipe_of(op).form == x86::Form::call; }

bool has_loop_form(LaneOp op) {
  return is_loop_call(op) ? lane_kernels().call[static_cast<size_t>(op)] != nullptr
                          : x86::recipe_of(op).form != x86::Form::none;
}

bool has_loop_form(Dtype narrow) { return contains(x86::kNarrow, narrow); }

}  // namespace neuron
