// Compiled once per level with NEURON_LEVEL = its name. No contraction to FMA: a level changes speed, never bits.
#include "lanes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "math.h"

namespace neuron::NEURON_LEVEL {

namespace {

using math::from_bits;
using math::to_bits;

// Input k of an operation: n lanes, or one for all.
template <class T, bool Vector>
struct Input {
  const T* p;
  T one;
  explicit Input(const void* from) : p(static_cast<const T*>(from)), one(*p) {}
  T operator[](int64_t i) const {
    if constexpr (Vector)
      return p[i];
    else
      return one;
  }
};

// `out` may be an input, element by element, so that no iteration depends on another: the compiler is told.
template <class In, class Out, class F>
void map1(void* out, const void* a, const void*, const void*, int vectors, int64_t n, int64_t) {
  auto* o = static_cast<Out*>(out);
  if (!vectors) {
    std::fill(o, o + n, static_cast<Out>(F{}(*static_cast<const In*>(a))));
    return;
  }
  const auto* x = static_cast<const In*>(a);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) o[i] = static_cast<Out>(F{}(x[i]));
}

template <class F>
void wide1(void* out, const void* a, const void*, const void*, int vectors, int64_t n, int64_t) {
  auto* o = static_cast<float*>(out);
  const auto* x = static_cast<const float*>(a);
  if (vectors)
    map_packs(x, o, n, F{});
  else
    std::fill(o, o + n, F{}(*x));
}

template <class In, class Out, class F, bool A, bool B>
void loop2(Out* o, const void* a, const void* b, int64_t n) {
  const Input<In, A> x(a);
  const Input<In, B> y(b);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) o[i] = static_cast<Out>(F{}(x[i], y[i]));
}
template <class In, class Out, class F>
void map2(void* out, const void* a, const void* b, const void*, int vectors, int64_t n, int64_t) {
  auto* o = static_cast<Out*>(out);
  switch (vectors & 3) {
    case 0:
      std::fill(o, o + n, static_cast<Out>(F{}(*static_cast<const In*>(a), *static_cast<const In*>(b))));
      return;
    case 1:
      return loop2<In, Out, F, true, false>(o, a, b, n);
    case 2:
      return loop2<In, Out, F, false, true>(o, a, b, n);
    default:
      return loop2<In, Out, F, true, true>(o, a, b, n);
  }
}

template <bool A, bool B, bool C>
void select3(uint32_t* o, const void* a, const void* b, const void* c, int64_t n) {
  const Input<uint32_t, A> p(a);
  const Input<uint32_t, B> x(b);
  const Input<uint32_t, C> y(c);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t mask = p[i] ? ~0u : 0u;
    o[i] = (x[i] & mask) | (y[i] & ~mask);
  }
}
void select(void* out, const void* a, const void* b, const void* c, int vectors, int64_t n, int64_t) {
  auto* o = static_cast<uint32_t*>(out);
  switch (vectors & 7) {
    case 0:
      std::fill(o, o + n, *static_cast<const uint32_t*>(*static_cast<const uint32_t*>(a) ? b : c));
      return;
    case 1:
      return select3<true, false, false>(o, a, b, c, n);
    case 2:
      return select3<false, true, false>(o, a, b, c, n);
    case 3:
      return select3<true, true, false>(o, a, b, c, n);
    case 4:
      return select3<false, false, true>(o, a, b, c, n);
    case 5:
      return select3<true, false, true>(o, a, b, c, n);
    case 6:
      return select3<false, true, true>(o, a, b, c, n);
    default:
      return select3<true, true, true>(o, a, b, c, n);
  }
}

template <class F, bool A, bool B, bool C>
void loop3(float* o, const void* a, const void* b, const void* c, int64_t n) {
  const Input<float, A> x(a);
  const Input<float, B> y(b);
  const Input<float, C> z(c);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) o[i] = F{}(x[i], y[i], z[i]);
}
template <class F>
void map3(void* out, const void* a, const void* b, const void* c, int vectors, int64_t n, int64_t) {
  auto* o = static_cast<float*>(out);
  switch (vectors & 7) {
    case 0:
      loop3<F, false, false, false>(o, a, b, c, n);
      return;
    case 1:
      return loop3<F, true, false, false>(o, a, b, c, n);
    case 2:
      return loop3<F, false, true, false>(o, a, b, c, n);
    case 3:
      return loop3<F, true, true, false>(o, a, b, c, n);
    case 4:
      return loop3<F, false, false, true>(o, a, b, c, n);
    case 5:
      return loop3<F, true, false, true>(o, a, b, c, n);
    case 6:
      return loop3<F, false, true, true>(o, a, b, c, n);
    default:
      return loop3<F, true, true, true>(o, a, b, c, n);
  }
}

// ---- what the operations compute -----------------------------------------------------------------------------------
#define F1(NAME, IN, EXPR)                       \
  struct NAME {                                  \
    auto operator()(IN a) const { return EXPR; } \
  };
#define F2(NAME, IN, EXPR)                             \
  struct NAME {                                        \
    auto operator()(IN a, IN b) const { return EXPR; } \
  };
#define WIDE(NAME, EXPR)                    \
  struct NAME {                             \
    template <class N>                      \
    NEURON_INLINE N operator()(N a) const { \
      return EXPR;                          \
    }                                       \
  };
using U = uint32_t;
using I = int32_t;

inline float bf16(float f) {
  const uint32_t b = to_bits(f), rounded = (b + 0x7fffu + (b >> 16 & 1)) & 0xffff0000u;
  return from_bits(f != f ? (b | 0x400000u) & 0xffff0000u : rounded);
}
// The nearest value that float16 has.
inline float f16(float f) {
  const uint32_t b = to_bits(f), sign = b & 0x80000000u, magnitude = b & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1)) & ~0x1fffu;
  const uint32_t subnormal = to_bits((from_bits(magnitude) + 0.5f) - 0.5f);
  uint32_t r = magnitude < 0x38800000u ? subnormal : normal;
  r = r >= 0x47800000u ? 0x7f800000u : r;
  r = magnitude > 0x7f800000u ? 0x7fc00000u : r;
  return from_bits(sign | r);
}
inline int32_t integer(float f) {  // as x86 converts
  const bool fits = f >= -2147483648.0f && f < 2147483648.0f;
  const int32_t i = static_cast<int32_t>(fits ? f : 0.0f);
  return fits ? i : INT32_MIN;
}
inline float floor_divide(float a, float b) {  // Python's: the quotient of what is left without the remainder
  if (b == 0.0f) return a / b;
  const float mod = std::fmod(a, b);
  float div = (a - mod) / b;
  if (mod != 0.0f && (b < 0.0f) != (mod < 0.0f)) div -= 1.0f;
  if (div == 0.0f) return std::copysign(0.0f, a / b);
  const float f = std::floor(div);
  return div - f > 0.5f ? f + 1.0f : f;
}
inline float signed_remainder(float a, float b) {
  const float r = std::fmod(a, b);
  return r != 0.0f && (b < 0.0f) != (r < 0.0f) ? r + b : r;
}
inline int32_t quotient(int32_t a, int32_t b) { return b == -1 ? static_cast<int32_t>(0u - static_cast<U>(a)) : a / b; }
inline int32_t rest(int32_t a, int32_t b) { return b == -1 ? 0 : a % b; }

// One NaN for all: which of two NaNs an addition hands on depends on the order that the compiler gives its operands,
// and so on the form of the loop.
inline float one_nan(float r) { return r == r ? r : from_bits(0x7fc00000u); }

F1(copy, U, a)
F2(add, float, one_nan(a + b))
F2(sub, float, one_nan(a - b))
F2(mul, float, one_nan(a* b))
F2(div, float, one_nan(a / b))
F2(maximum, float, (a > b) | (a != a) ? a : b)
F2(minimum, float, (a < b) | (a != a) ? a : b)
F2(fmax, float, (a > b) | (b != b) ? a : b)
F2(fmin, float, (a < b) | (b != b) ? a : b)
F2(pow, float, math::pow(a, b))
F2(fmod, float, std::fmod(a, b))
F2(remainder, float, signed_remainder(a, b))
F2(floor_div, float, floor_divide(a, b))
F2(atan2, float, std::atan2(a, b))
F2(copysign, float, from_bits((to_bits(a) & 0x7fffffffu) | (to_bits(b) & 0x80000000u)))
F2(eq, float, a == b)
F2(ne, float, a != b)
F2(lt, float, a < b)
F2(le, float, a <= b)
F2(gt, float, a > b)
F2(ge, float, a >= b)
F2(iadd, U, a + b)
F2(isub, U, a - b)
F2(imul, U, a* b)
F2(imaximum, I, a > b ? a : b)
F2(iminimum, I, a < b ? a : b)
F2(ieq, I, a == b)
F2(ine, I, a != b)
F2(ilt, I, a < b)
F2(ile, I, a <= b)
F2(igt, I, a > b)
F2(ige, I, a >= b)
F2(iand, U, a& b)
F2(ior, U, a | b)
F2(ixor, U, a ^ b)
#define F3(NAME, EXPR)                                                 \
  struct NAME {                                                        \
    float operator()(float a, float b, float c) const { return EXPR; } \
  };
F3(mul_add, one_nan(a* b + c))
F3(mul_sub, one_nan(a* b - c))
F3(mul_rsub, one_nan(c - a * b))
F3(mul_mul, one_nan(a * b * c))
F3(add_mul, one_nan((a + b) * c))
F3(add_add, one_nan((a + b) + c))
F3(sub_mul, one_nan((a - b) * c))
F3(sub_add, one_nan((a - b) + c))
#undef F3
F1(neg, float, -a)
F1(abs, float, from_bits(to_bits(a) & 0x7fffffffu))
F1(sign, float, static_cast<float>((a > 0.0f) - (a < 0.0f)))
F1(sqrt, float, std::sqrt(a))
F1(rsqrt, float, 1.0f / std::sqrt(a))
F1(reciprocal, float, 1.0f / a)
WIDE(exp, math::exp(a))
F1(exp2, float, math::exp2(a))
F1(expm1, float, math::expm1(a))
WIDE(log, math::log(a))
F1(log2, float, math::log2(a))
F1(log10, float, math::log10(a))
F1(log1p, float, math::log1p(a))
WIDE(tanh, math::tanh(a))
WIDE(sigmoid, math::sigmoid(a))
WIDE(erf, math::erf(a))
F1(erfc, float, static_cast<float>(std::erfc(static_cast<double>(a))))
F1(asin, float, std::asin(a))
F1(acos, float, std::acos(a))
F1(atan, float, std::atan(a))
F1(sinh, float, std::sinh(a))
F1(cosh, float, std::cosh(a))
F1(floor, float, std::floor(a))
F1(ceil, float, std::ceil(a))
F1(trunc, float, std::trunc(a))
F1(round, float, std::nearbyint(a))
F1(isnan, float, a != a)
F1(isinf, float, (to_bits(a) & 0x7fffffffu) == 0x7f800000u)
F1(ineg, U, 0u - a)
F1(iabs, I, a < 0 ? 0u - static_cast<U>(a) : static_cast<U>(a))
F1(isign, I, (a > 0) - (a < 0))
F1(inot, U, ~a)
F1(iszero, I, a == 0)
F2(iremainder, I, (rest(a, b) != 0 && (rest(a, b) < 0) != (b < 0) ? rest(a, b) + b : rest(a, b)))
F2(ifmod, I, rest(a, b))
F2(ifloor_div, I, quotient(a, b) - (rest(a, b) != 0 && (rest(a, b) < 0) != (b < 0)))
F2(itrunc_div, I, quotient(a, b))
F1(to_float, I, static_cast<float>(a))
F1(to_int, float, integer(a))
F1(nonzero, float, a != 0.0f)
F1(inonzero, I, a != 0)
F1(round_bf16, float, bf16(a))
F1(round_f16, float, f16(a))
F1(wrap_i8, I, static_cast<I>(static_cast<int8_t>(a)))
F1(wrap_u8, I, static_cast<I>(static_cast<uint8_t>(a)))
#undef WIDE
#undef F1
#undef F2

// Angles too large for the vector form take libm's.
template <float (*Near)(float), double (*Far)(double)>
void angle(void* out, const void* a, const void*, const void*, int vectors, int64_t n, int64_t) {
  constexpr int64_t kBlock = 256;
  const auto* x = static_cast<const float*>(a);
  auto* o = static_cast<float*>(out);
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t m = std::min(kBlock, n - at);
    float in[kBlock];
    if (vectors)
      std::copy(x + at, x + at + m, in);
    else
      std::fill(in, in + m, *x);
    bool far = false;
    for (int64_t i = 0; i < m; ++i) far |= !(std::fabs(in[i]) < math::kReducible);
    for (int64_t i = 0; i < m; ++i) o[at + i] = Near(in[i]);
    if (far)
      for (int64_t i = 0; i < m; ++i)
        if (!(std::fabs(in[i]) < math::kReducible)) o[at + i] = static_cast<float>(Far(in[i]));
  }
}

// ---- random bits ---------------------------------------------------------------------------------------------------
// Philox 4x32-10 (Salmon et al., SC11). Counter: offset + i / 4; word i % 4 of its result.
void uniform_bits(void* out, const void* a, const void*, const void*, int, int64_t n, int64_t index) {
  const auto* seed = static_cast<const uint32_t*>(a);
  const uint64_t offset = seed[2] | static_cast<uint64_t>(seed[3]) << 32;
  auto* o = static_cast<uint32_t*>(out);
  constexpr int kLanes = 16;
  const int64_t last = index + n;
  for (int64_t block = index / 4; block * 4 < last; block += kLanes) {
    uint32_t c[4][kLanes], k[2] = {seed[0], seed[1]};
    for (int l = 0; l < kLanes; ++l) {
      const uint64_t counter = offset + static_cast<uint64_t>(block + l);
      c[0][l] = static_cast<uint32_t>(counter);
      c[1][l] = static_cast<uint32_t>(counter >> 32);
      c[2][l] = c[3][l] = 0;
    }
    for (int round = 0; round < 10; ++round) {
      for (int l = 0; l < kLanes; ++l) {
        const uint64_t p0 = static_cast<uint64_t>(c[0][l]) * 0xD2511F53u,
                       p1 = static_cast<uint64_t>(c[2][l]) * 0xCD9E8D57u;
        const uint32_t h0 = static_cast<uint32_t>(p0 >> 32), h1 = static_cast<uint32_t>(p1 >> 32);
        c[0][l] = h1 ^ c[1][l] ^ k[0];
        c[1][l] = static_cast<uint32_t>(p1);
        c[2][l] = h0 ^ c[3][l] ^ k[1];
        c[3][l] = static_cast<uint32_t>(p0);
      }
      k[0] += 0x9E3779B9u;
      k[1] += 0xBB67AE85u;
    }
    uint32_t words[4 * kLanes];
    for (int l = 0; l < kLanes; ++l)
      for (int w = 0; w < 4; ++w) words[4 * l + w] = c[w][l];
    const int64_t first = block * 4, from = std::max(index, first), to = std::min(last, first + 4 * kLanes);
    std::copy(words + (from - first), words + (to - first), o + (from - index));
  }
}

// ---- reductions ----------------------------------------------------------------------------------------------------
struct plus {
  float operator()(float a, float b) const { return a + b; }
};
// 32 running lanes, folded in halves: one tree for every width of the machine's vectors.
template <class T, class F>
void fold(void* out, const void* a, int64_t n, T identity) {
  const auto* x = static_cast<const T*>(a);
  T lane[32];
  for (T& l : lane) l = identity;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int j = 0; j < 32; ++j) lane[j] = F{}(lane[j], x[i + j]);
  for (int j = 0; i + j < n; ++j) lane[j] = F{}(lane[j], x[i + j]);
  for (int width = 16; width; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] = F{}(lane[j], lane[j + width]);
  if constexpr (std::is_same_v<T, float>)
    *static_cast<T*>(out) = one_nan(lane[0]);
  else
    *static_cast<T*>(out) = lane[0];
}

// ---- tables --------------------------------------------------------------------------------------------------------
template <Lane L>
using Type = std::conditional_t<L == Lane::f32, float, std::conditional_t<L == Lane::i32, int32_t, uint32_t>>;

template <class F, LaneOp Op>
constexpr LaneKernels::Map pick() {
  if constexpr (info(Op).inputs == 1)
    return map1<Type<info(Op).in>, Type<info(Op).out>, F>;
  else if constexpr (info(Op).inputs == 2)
    return map2<Type<info(Op).in>, Type<info(Op).out>, F>;
  else
    return map3<F>;
}

LaneKernels make() {
  LaneKernels k{};
  auto map = [&](LaneOp op, LaneKernels::Map f) { k.map[static_cast<int>(op)] = f; };
  auto reduce = [&](LaneOp op, LaneKernels::Reduce f) { k.reduce[static_cast<int>(op)] = f; };
#define OP(NAME) map(LaneOp::NAME, pick<NAME, LaneOp::NAME>());
  // clang-format off
  OP(copy) OP(add) OP(sub) OP(mul) OP(div) OP(maximum) OP(minimum) OP(fmax) OP(fmin) OP(pow) OP(fmod) OP(remainder)
  OP(floor_div) OP(atan2) OP(copysign) OP(eq) OP(ne) OP(lt) OP(le) OP(gt) OP(ge) OP(iadd) OP(isub) OP(imul) OP(imaximum)
  OP(iminimum) OP(ieq) OP(ine) OP(ilt) OP(ile) OP(igt) OP(ige) OP(iand) OP(ior) OP(ixor) OP(neg) OP(abs) OP(sign)
  OP(sqrt) OP(rsqrt) OP(reciprocal) OP(exp2) OP(expm1) OP(log2) OP(log10) OP(log1p)
  OP(erfc) OP(asin) OP(acos) OP(atan) OP(sinh) OP(cosh) OP(floor) OP(ceil) OP(trunc) OP(round)
  OP(mul_add) OP(mul_sub) OP(mul_rsub) OP(mul_mul) OP(add_mul) OP(add_add) OP(sub_mul) OP(sub_add)
  OP(isnan) OP(isinf) OP(ineg) OP(iabs) OP(isign) OP(inot) OP(iszero) OP(iremainder) OP(ifmod) OP(ifloor_div)
  OP(itrunc_div) OP(to_float) OP(to_int) OP(nonzero) OP(inonzero) OP(round_bf16) OP(round_f16) OP(wrap_i8) OP(wrap_u8)
  // clang-format on
#undef OP
                                  map(LaneOp::select, select);
  map(LaneOp::exp, wide1<exp>);
  map(LaneOp::log, wide1<log>);
  map(LaneOp::tanh, wide1<tanh>);
  map(LaneOp::sigmoid, wide1<sigmoid>);
  map(LaneOp::erf, wide1<erf>);
  map(LaneOp::sin, angle<math::sin_any, std::sin>);
  map(LaneOp::cos, angle<math::cos_any, std::cos>);
  map(LaneOp::tan, angle<math::tan_any, std::tan>);
  map(LaneOp::uniform_bits, uniform_bits);
  reduce(LaneOp::sum, [](void* o, const void* a, int64_t n) { fold<float, plus>(o, a, n, 0.0f); });
  reduce(LaneOp::amax, [](void* o, const void* a, int64_t n) { fold<float, maximum>(o, a, n, -INFINITY); });
  reduce(LaneOp::amin, [](void* o, const void* a, int64_t n) { fold<float, minimum>(o, a, n, INFINITY); });
  reduce(LaneOp::iamax, [](void* o, const void* a, int64_t n) { fold<int32_t, imaximum>(o, a, n, INT32_MIN); });
  reduce(LaneOp::iamin, [](void* o, const void* a, int64_t n) { fold<int32_t, iminimum>(o, a, n, INT32_MAX); });
  return k;
}

}  // namespace

const LaneKernels& lane_table() {
  static const LaneKernels k = make();
  return k;
}

}  // namespace neuron::NEURON_LEVEL
