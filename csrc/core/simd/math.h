// Elementary functions in fp32 without branches, for vectors: most are templates, of float or of packs of lanes
// (pack.h) with the same bits. Polynomials are minimax fits over the stated intervals (Lawson's iteration on Chebyshev
// nodes, coefficients rounded to fp32 one after the other, from the lowest, and the others fitted again);
// tests/core/kernels_test.cpp bounds the error of each function against libm.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "pack.h"

namespace neuron::NEURON_LEVEL::math {

inline float from_bits(uint32_t b) { return std::bit_cast<float>(b); }
inline uint32_t to_bits(float f) { return std::bit_cast<uint32_t>(f); }
template <class T>
  requires std::is_arithmetic_v<T>
inline T select(bool c, T a, T b) {
  return c ? a : b;
}
inline float root(float a) { return std::sqrt(a); }
inline float floor(float a) { return std::floor(a); }
inline bool any(bool a) { return a; }
inline float lookup(const float (&table)[16], uint32_t a) { return table[a & 15]; }
template <class F, class... Rest>
inline float lane_by_lane(F f, float a, Rest... rest) {
  return f(a, rest...);
}
inline uint32_t shift_signed(uint32_t a, int n) { return static_cast<uint32_t>(static_cast<int32_t>(a) >> n); }
inline float signed_to_float(uint32_t a) { return static_cast<float>(static_cast<int32_t>(a)); }

// a * b + c rounded once, on every machine: polynomials are twice as fast where there is an instruction for it.
inline float mad(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double mad(double a, double b, double c) { return __builtin_fma(a, b, c); }

// b if either is NaN.
template <class T>
  requires std::is_arithmetic_v<T>
inline T least(T a, T b) {
  return a < b ? a : b;
}
template <class T>
  requires std::is_arithmetic_v<T>
inline T greatest(T a, T b) {
  return a > b ? a : b;
}
template <class N>
NEURON_INLINE N magnitude(N x) {
  return from_bits(to_bits(x) & 0x7fffffffu);
}
template <class N>
NEURON_INLINE N with_sign_of(N a, N sign) {
  return from_bits((to_bits(a) & 0x7fffffffu) | (to_bits(sign) & 0x80000000u));
}
// The nearest value that float16 has, which may be infinite; one NaN of each sign.
inline float nearest_half(float f) {
  const uint32_t b = to_bits(f), sign = b & 0x80000000u, magnitude = b & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1)) & ~0x1fffu;
  const uint32_t subnormal = to_bits((from_bits(magnitude) + 0.5f) - 0.5f);
  uint32_t r = magnitude < 0x38800000u ? subnormal : normal;
  r = r >= 0x47800000u ? 0x7f800000u : r;
  r = magnitude > 0x7f800000u ? 0x7fc00000u : r;
  return from_bits(sign | r);
}
#ifdef __FMA__
template <int K>
NEURON_INLINE Floats<K> nearest_half(const Floats<K>& f) {
  return select(f == f, through_half(f), with_sign_of(Floats<K>(from_bits(0x7fc00000u)), f));
}
#endif
// c[0] x^(n-1) + ... + c[n-1]
template <class N, int Terms>
NEURON_INLINE N polynomial(const float (&c)[Terms], N x) {
  N p = c[0];
  for (int i = 1; i < Terms; ++i) p = mad(p, x, N(c[i]));
  return p;
}

inline constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction bits left

// p * 2^n rounded once, for p from 1/2 to 2 and n from -250 to 250. n is what `sum`, the bits of kMagic + n, end with.
template <class N, class Bits>
NEURON_INLINE N scaled(N p, Bits sum) {
  if constexpr (requires { times_power(p, p); }) {
    return times_power(p, from_bits(sum) - kMagic);
  } else {
    const auto k = sum << 23, half = shift_signed(k, 1) & 0xff800000u;  // 2^n may be beyond fp32, its factors are not
    return p * from_bits(half + 0x3f800000u) * from_bits(k - half + 0x3f800000u);
  }
}
// e^x = p * 2^n for |x| < 2^21.
template <class N>
NEURON_INLINE auto exp_parts(N x) {
  const N t = mad(x, N(1.44269504f), N(kMagic)), n = t - kMagic;
  const N r = mad(n, N(2.12194440e-4f), mad(n, N(-0.693359375f), x));  // ln 2 in two parts
  // (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2
  static constexpr float c[] = {0.0013939183f, 0.00836882f, 0.04166642f, 0.1666652f, 0.5f};
  const N p = mad(mad(polynomial(c, r), r, N(1.0f)), r, N(1.0f));
  struct Parts {
    N p;
    decltype(to_bits(x)) sum;
  };
  return Parts{p, to_bits(t)};
}
template <class N>
NEURON_INLINE N exp(N x) {
  const auto [p, sum] = exp_parts(least(N(89.0f), greatest(N(-104.0f), x)));
  return scaled(p, sum);
}
// e^x for -87 <= x <= 88.
template <class N>
NEURON_INLINE N exp_near(N x) {
  const auto [p, sum] = exp_parts(x);
  return p * from_bits((sum << 23) + 0x3f800000u);
}

// x = 2^exponent * (1 + f), 1 + f from sqrt(1/2) to sqrt(2), for positive finite x.
template <class N>
struct MantissaOf {
  N exponent, f;
};
template <class N>
NEURON_INLINE MantissaOf<N> mantissa_of_normal(N x) {
  const auto shifted = to_bits(x) - 0x3f3504f3u;
  return {signed_to_float(shift_signed(shifted, 23)), from_bits((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f};
}
template <class N>
NEURON_INLINE MantissaOf<N> mantissa(N x) {
  const auto tiny = x < 1.17549435e-38f;
  const auto m = mantissa_of_normal(select(tiny, x * 8388608.0f, x));
  return {m.exponent - select(tiny, N(23.0f), N(0.0f)), m.f};
}
// e * ln(2) + log(1 + f)
template <class N>
NEURON_INLINE N log_of(N e, N f) {
  // (log(1 + f) - f + f^2 / 2) / f^3
  static constexpr float c[] = {0.07150066f,  -0.11572523f, 0.11661972f, -0.12410901f, 0.14249881f,
                                -0.16668485f, 0.2000071f,   -0.2499999f, 0.33333331f};
  const N u = f * f;
  return mad(e, N(0.693359375f), mad(N(-0.5f), u, mad(polynomial(c, f) * f, u, e * -2.12194440e-4f)) + f);
}
// What a logarithm gives for 0, for infinity, and where there is none; `y` else.
template <class N>
NEURON_INLINE N log_edges(N x, N y) {
  return select(x > 0.0f, select(x < INFINITY, y, x), select(x == 0.0f, N(-INFINITY), N(NAN)));
}
template <class N>
NEURON_INLINE N log(N x) {
  const auto [e, f] = mantissa(x);
  return log_edges(x, log_of(e, f));
}

template <class N>
NEURON_INLINE N tanh(N x) {
  const N a = magnitude(x), u = x * x;
  // (tanh(x) / x - 1) / x^2 on |x| < 0.625
  static constexpr float c[] = {0.0022956324f, -0.008346744f, 0.021769864f, -0.05395939f, 0.13333304f, -0.33333334f};
  const N small = mad(x * u, polynomial(c, u), x);
  // Near 1 the error must be that of the distance from 1: tanh forms of GELU subtract there.
  const N large = 1.0f - 2.0f / (exp_near(2.0f * least(N(20.0f), a)) + 1.0f);
  return with_sign_of(select(a < 0.625f, small, large), x);
}

template <class N>
NEURON_INLINE N sigmoid(N x) {  // 0 where e^-x is beyond fp32's range
  const N y = 1.0f / (1.0f + exp_near(least(N(88.0f), greatest(N(-87.0f), -x))));
  return select(x < -88.0f, N(0.0f), y);
}

// erf(a) = 1 - 2^-y, y = a * q(a): one form from 0, where 2^-y - 1 must not be rounded as a number near 1, to the end.
template <class N>
NEURON_INLINE N erf(N x) {
  const N a = least(N(4.0f), magnitude(x));
  // -log2(erfc(a)) / a on 0 <= a <= 4, weighted by what it does to erf(a)
  static constexpr float c[] = {-1.2916017e-05f, 1.6595688e-04f, -9.0024143e-04f, 0.0023832358f, -2.1148901e-04f,
                                -0.02764158f,    0.14827925f,    0.91844743f,     1.627907f};
  const N y = polynomial(c, a) * a, t = kMagic - y, r = (kMagic - t) - y;
  // (2^r - 1) / r on |r| <= 1 / 2
  static constexpr float d[] = {1.5461385e-04f, 0.0013387563f, 0.009618066f, 0.05550367f, 0.2402265f, 0.6931472f};
  const N scale = from_bits((to_bits(t) << 23) + 0x3f800000u);
  return with_sign_of(mad(polynomial(d, r) * r, -scale, 1.0f - scale), x);
}

inline float sin_core(float x) {  // |x| <= pi / 2
  const float u = x * x;
  float p = -2.4079133e-08f;
  p = mad(p, u, 2.7536414e-06f);
  p = mad(p, u, -0.00019841085f);
  p = mad(p, u, 0.0083333328f);
  p = mad(p, u, -0.16666667f);
  return mad(x * u, p, x);
}

// ScalarE's sine: right on [-pi, pi]; outside, the cubic through the end of the interval goes on.
inline float sin(float x) {
  const float a = std::fabs(x), pi = 3.14159265f;
  const float near = sin_core(a > 1.57079633f ? pi - a - 8.7422777e-8f : a);
  const float d = a - pi, outside = d * d * d * 0.16666667f - d;
  return std::copysign(1.0f, x) * (a <= pi ? near : outside);
}

template <class N>
NEURON_INLINE N gelu(N x) {
  return 0.5f * x * (1.0f + erf(x * 0.70710678f));
}
template <class N>
NEURON_INLINE N erf_dx(N x) {
  return 1.12837917f * exp(-x * x);
}
template <class N>
NEURON_INLINE N gelu_dx(N x) {
  return 0.5f * (1.0f + erf(x * 0.70710678f)) + x * 0.39894228f * exp(-0.5f * x * x);
}
template <class N>
NEURON_INLINE N gelu_tanh(N x) {
  return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
}
template <class N>
NEURON_INLINE N gelu_sigmoid(N x) {
  return x * sigmoid(1.702f * x);
}
template <class N>
NEURON_INLINE N gelu_sigmoid_dx(N x) {
  const N s = sigmoid(1.702f * x);
  return s + 1.702f * (x * s * (1.0f - s));  // 1.702 x may overflow
}
template <class N>
NEURON_INLINE N silu(N x) {
  return x * sigmoid(x);
}
template <class N>
NEURON_INLINE N silu_dx(N x) {
  const N s = sigmoid(x);
  return s + x * s * (1.0f - s);
}
template <class N>
NEURON_INLINE N softplus(N x) {  // max(x, 0) + log(1 + e^-|x|)
  const N e = exp(-magnitude(x));
  const N w = 1.0f + e;
  const N l = select(w == 1.0f, e, log(w) * (e / (w - 1.0f)));  // log1p
  return select(x > 0.0f, x, N(0.0f)) + l;
}
template <class N>
NEURON_INLINE N mish(N x) {
  return x * tanh(softplus(x));
}

template <class N>
NEURON_INLINE N atan_near(N q) {  // 0 <= q <= 1
  const N u = q * q;
  // (atan(q) / q - 1) / q^2, in u
  static constexpr float c[] = {-0.0017875476f, 0.010887361f, -0.031127002f, 0.057906546f, -0.08400475f,
                                0.10951175f,    -0.14264052f, 0.19998531f,   -0.333333f};
  return mad(polynomial(c, u) * u, q, q);
}
template <class N>
NEURON_INLINE N atan(N x) {
  const N a = magnitude(x);
  const auto steep = a > 1.0f;
  const N p = atan_near(select(steep, 1.0f / a, a));
  return with_sign_of(select(steep, 1.57079637f - (p + 4.3711388e-8f), p), x);
}

// ---- pairs of fp32 numbers, whose sums have twice the digits -------------------------------------------------------
// Additions and multiplications alone, each rounded; the error of a product is exact, so an FMA gives the bits that
// products of halves give where there is none (torchneuron/nki/source_functions.py has the same functions so).
template <class N>
struct PairOf {
  N high, low;
};
template <class N>
NEURON_INLINE PairOf<N> two_sum(N a, N b) {
  const N s = a + b, t = s - a;
  return {s, (a - (s - t)) + (b - t)};
}
template <class N>
NEURON_INLINE PairOf<N> fast_sum(N a, N b) {  // |a| >= |b|
  const N s = a + b;
  return {s, b - (s - a)};
}
template <class N>
NEURON_INLINE PairOf<N> two_product(N a, N b) {
  const N p = a * b;
  return {p, mad(a, b, -p)};
}
// c[0] x^(n-1) + ... + c[n-1], each step rounded.
template <class N, int Terms>
NEURON_INLINE N rounded_polynomial(const float (&c)[Terms], N x) {
  N p = c[0];
  for (int i = 1; i < Terms; ++i) p = p * x + c[i];
  return p;
}

// ---- functions that printed programs spell out: each step is rounded, or a function above --------------------------
template <class N>
NEURON_INLINE N expm1(N x) {
  // (e^x - 1 - x) / x^2 on |x| <= 0.7
  static constexpr float c[] = {2.4821235e-05f, 2.0093776e-04f, 0.0013889929f, 0.008332652f,
                                0.04166664f,    0.16666672f,    0.5f};
  const N near = x + x * (rounded_polynomial(c, x) * x);
  return select(magnitude(x) < 0.7f, with_sign_of(near, x), exp(x) - 1.0f);
}
template <class N>
NEURON_INLINE N log1p(N x) {
  const auto s = two_sum(N(1.0f), x);
  const auto [e, f] = mantissa_of_normal(s.high);
  return with_sign_of(log_edges(s.high, log_of(e, f) + s.low * (1.0f / s.high)), x);
}
template <class N>
NEURON_INLINE N log2(N x) {
  const auto [e, f] = mantissa(x);
  const N l = log_of(N(0.0f), f);
  return log_edges(x, e + (l * 1.442695f + l * 1.925963e-8f));  // 1 / log(2) in two parts
}
template <class N>
NEURON_INLINE N log10(N x) {
  const auto [e, f] = mantissa(x);
  const N l = log_of(N(0.0f), f);
  // log10(2) and 1 / log(10) in two parts, the first one of 7 bits
  return log_edges(x, e * 0.30078125f + (e * 2.4874567e-4f + (l * 0.4342945f + l * -1.010305e-8f)));
}
template <class N>
NEURON_INLINE N erfc(N x) {
  const N a = least(N(10.1f), greatest(N(0.25f), x)), t = 1.0f / (a + 1.5f);
  // erfc(a) * e^(a^2) / t on 1 / 4 <= a <= 10.1, in t
  static constexpr float c[] = {4.8071823f,  -10.670567f, 5.0545044f, 5.95647f,   -6.7439833f,
                                0.82956904f, 0.40624207f, 1.0099473f, 0.8450653f, 0.5642171f};
  const N r = rounded_polynomial(c, t) * t;
  const auto square = two_product(a, a);
  const auto small = a > 8.0f;  // e^-(a^2) is, and is scaled by e^32
  const N e = exp(select(small, N(32.0f), N(0.0f)) - square.high);
  const N far = (r - r * square.low) * e * select(small, N(1.2664166e-14f), N(1.0f));
  return select(x < 0.25f, 1.0f - erf(x), far);
}

// asin(a) = p for a <= 1 / 2, pi / 2 - 2 p above, where p = asin(sqrt((1 - a) / 2)).
template <class N>
NEURON_INLINE N asin_part(N a) {
  const auto above = a > 0.5f;
  const N u = select(above, 0.5f - a * 0.5f, a * a), s = select(above, root(u), a);
  // (asin(s) / s - 1) / s^2 on 0 <= s <= 1 / 2, in u = s^2
  static constexpr float c[] = {0.042211797f, 0.024152093f, 0.04547604f, 0.07495252f, 0.16666754f};
  return s + s * (rounded_polynomial(c, u) * u);
}
template <class N>
NEURON_INLINE N asin(N x) {
  const N a = magnitude(x), p = asin_part(a);
  return with_sign_of(select(a > 0.5f, 1.57079637f - (p * 2.0f + 4.3711388e-8f), p), x);
}
template <class N>
NEURON_INLINE N acos(N x) {
  const N a = magnitude(x), p = asin_part(a), twice = p * 2.0f;
  const N far = select(x > 0.0f, twice, 3.14159274f - (twice + 8.7422777e-8f));
  return select(a > 0.5f, far, 1.57079637f - (with_sign_of(p, x) + 4.3711388e-8f));
}

template <class N>
NEURON_INLINE N atan2(N y, N x) {
  const N a = magnitude(y), b = magnitude(x);
  const auto steep = a > b;
  const N low = select(steep, b, a), high = select(steep, a, b);
  // 0 / 0 is 0 here, and infinity / infinity 1.
  const N p = atan_near(select(low == high, select(high > 0.0f, N(1.0f), high), low / high));
  const auto left = shift_signed(to_bits(x), 31) != 0u;
  const N from = select(steep, N(1.57079637f), select(left, N(3.14159274f), N(0.0f)));
  const N turn = select(steep, select(left, p, -p), select(left, -p, p));
  return with_sign_of(from + (turn + from * -2.7827534e-8f), y);  // the rest of pi
}

// Of e^(a - 1), which is finite where e^a no longer is.
template <class N>
NEURON_INLINE N sinh(N x) {
  const N a = magnitude(x), u = a * a, e = exp(a - 1.0f);
  // (sinh(a) / a - 1) / a^2 on 0 <= a <= 1, in u = a^2
  static constexpr float c[] = {2.782229e-06f, 1.9842894e-04f, 0.0083333105f, 0.16666667f};
  const N small = a + a * (rounded_polynomial(c, u) * u);
  const N large = e * 1.35914091f - (1.0f / e) * 0.18393973f;
  return with_sign_of(select(a < 1.0f, small, large), x);
}
template <class N>
NEURON_INLINE N cosh(N x) {
  const N e = exp(magnitude(x) - 1.0f);
  return e * 1.35914091f + (1.0f / e) * 0.18393973f;
}

// ---- functions of one pair: an FMA where it helps, as no printed program spells them out ---------------------------
// 2^(x + low) for |low| < 1 / 2; 0 or infinity where |x| is large.
template <class N>
NEURON_INLINE N exp2_of_pair(N x, N low) {
  const N limited = least(N(129.0f), greatest(N(-152.0f), x));
  low = select(limited == x, low, N(0.0f));
  const N t = (limited + low) + kMagic, n = t - kMagic, r = (limited - n) + low;
  // (2^r - 1) / r on |r| <= 1 / 2
  static constexpr float c[] = {1.546288e-04f, 0.0013390984f, 0.0096180625f, 0.055503596f, 0.2402265f, 0.6931472f};
  return scaled(mad(polynomial(c, r), r, N(1.0f)), to_bits(t));
}
template <class N>
NEURON_INLINE N exp2(N x) {
  return exp2_of_pair(x, N(0.0f));
}

// By the first 4 bits of a mantissa m, rounded: a number of 5 bits near 1 / m, so that their product less 1 has 24 and
// is exact, and the logarithm to base 2 of its inverse, of which the first part has 16 bits after the point.
struct MantissaTable {
  float inverse[16], high[16], low[16];
};
inline constexpr MantissaTable kMantissas = {
    {1.0f, 0.9375f, 0.875f, 0.84375f, 0.8125f, 0.75f, 0.71875f, 0.6875f, 0.65625f, 0.625f, 0.625f, 0.59375f, 0.5625f,
     0.5625f, 0.53125f, 0.5f},
    {0.0f, 0.093109131f, 0.19264221f, 0.24511719f, 0.29956055f, 0.41503906f, 0.47644043f, 0.54057312f, 0.60768127f,
     0.67807007f, 0.67807007f, 0.7520752f, 0.83007812f, 0.83007812f, 0.91253662f, 1.0f},
    {0.0f, 2.735321e-07f, 2.8660284e-06f, -4.6896635e-06f, -2.650161e-07f, -1.5632212e-06f, -2.3857444e-06f,
     -4.7387543e-06f, 1.3028072e-06f, 1.8367533e-06f, 1.8367533e-06f, -2.708756e-06f, -3.1264424e-06f, -3.1264424e-06f,
     5.376559e-07f, 0.0f}};
// The logarithm to base 2 of positive finite x.
template <class N>
NEURON_INLINE PairOf<N> log2_pair(N x) {
  const auto tiny = x < 1.17549435e-38f;
  const auto bits = to_bits(select(tiny, x * 8388608.0f, x)), nearest = bits + 0x40000u;
  const auto exponent = (nearest & 0xff800000u) - 0x3f800000u;
  const auto place = shift_signed(nearest, 19);
  const N e = signed_to_float(shift_signed(exponent, 23)) - select(tiny, N(23.0f), N(0.0f));
  const N f = mad(from_bits(bits - exponent), lookup(kMantissas.inverse, place), N(-1.0f));
  // log(1 + f) = f - f^2 / 2 + f^3 * ..., the first two terms exactly
  const auto square = two_product(f, f);
  const auto s = fast_sum(f, -0.5f * square.high);
  // (log(1 + f) - f + f^2 / 2) / f^3 on |f| <= 3 / 64
  static constexpr float c[] = {0.14604974f, -0.16702792f, 0.19998896f, -0.24999979f, 0.33333334f};
  const N low = mad(polynomial(c, f) * f, square.high, mad(N(-0.5f), square.low, s.low));
  const auto p = two_product(s.high, N(1.442695f));
  const auto sum = fast_sum(e + lookup(kMantissas.high, place), p.high);
  const N rest = mad(low, N(1.442695f), mad(s.high, N(1.925963e-8f), p.low));
  return {sum.high, sum.low + (rest + lookup(kMantissas.low, place))};
}
// What x^y is where the sign of x says more than its magnitude.
template <class N>
NEURON_INLINE N power_of_negative(N x, N y, N r) {
  const N b = magnitude(y), half = b * 0.5f;
  auto fraction = [](N v) { return (v < 8388608.0f) & ((v + 8388608.0f) - 8388608.0f != v); };  // no room from 2^23 on
  const auto odd = fraction(half) & (b < 16777216.0f);
  const auto edge = (x == 0.0f) | (magnitude(x) == INFINITY);
  const N negative = select(fraction(b), select(edge, r, N(NAN)), select(odd, -r, r));
  return select((to_bits(x) & 0x80000000u) != 0u, negative, r);
}
template <class N>
NEURON_INLINE N pow(N x, N y) {
  const N a = magnitude(x);
  const auto l = log2_pair(a);
  const N high = select(a < INFINITY, select(a > 0.0f, l.high, N(-INFINITY)), a);
  const auto p = two_product(y, high);
  N r = exp2_of_pair(p.high, mad(y, l.low, p.low));
  r = select(a == 1.0f, N(1.0f), r);  // y may be infinite
  if (any((to_bits(x) & 0x80000000u) != 0u)) [[unlikely]]
    r = power_of_negative(x, y, select(y == y, r, y));
  return select((x == 1.0f) | (y == 0.0f), N(1.0f), r);
}

// ---- angles --------------------------------------------------------------------------------------------------------
inline constexpr float kReducible = 2e5f;  // larger angles need more digits of pi

// Sine and cosine of |x| less the nearest multiple of pi / 2, whose number's low bits `quarters` has.
template <class N>
NEURON_INLINE auto quarter_turns(N x) {
  x = magnitude(x);
  const N t = mad(x, N(0.63661975f), N(kMagic)), n = t - kMagic;
  // pi / 2 in three parts. The first difference is exact; `low` is what is lost in r, however much cancels there.
  const N first = mad(n, N(-1.57079637f), x), second = n * 4.3711388e-8f, r = first + second;
  const N low = ((first - r) + second) + mad(n, N(1.7151245e-15f), mad(n, N(4.3711388e-8f), -second));
  const N u = r * r, half = 0.5f * u, near = 1.0f - half;
  // (sin(r) / r - 1) / r^2 and (cos(r) - 1 + r^2 / 2) / r^4 on |r| <= pi / 4, in u
  static constexpr float s[] = {-1.9518619e-04f, 0.008332191f, -0.16666655f};
  static constexpr float c[] = {2.4430668e-05f, -0.0013887301f, 0.041666646f};
  struct Turns {
    N sine, cosine;
    decltype(to_bits(x)) quarters;
  };
  return Turns{r + mad(polynomial(s, u) * u, r, low),
               near + mad(polynomial(c, u), u * u, mad(-r, low, (1.0f - near) - half)), to_bits(t)};
}
// For |x| < kReducible.
template <class N>
NEURON_INLINE N sin_near(N x) {
  const auto [s, c, q] = quarter_turns(x);
  return from_bits(to_bits(select((q & 1u) != 0u, c, s)) ^ ((q & 2u) << 30) ^ (to_bits(x) & 0x80000000u));
}
template <class N>
NEURON_INLINE N cos_near(N x) {
  const auto [s, c, q] = quarter_turns(x);
  return from_bits(to_bits(select((q & 1u) != 0u, s, c)) ^ (((q + 1u) & 2u) << 30));
}
template <class N>
NEURON_INLINE N tan_near(N x) {
  const auto [s, c, q] = quarter_turns(x);
  const auto odd = (q & 1u) != 0u;
  const N y = select(odd, c, s) / select(odd, s, c);
  return from_bits(to_bits(y) ^ ((q & 1u) << 31) ^ (to_bits(x) & 0x80000000u));
}
// Angles too large for the vector form, which are rare, take libm's.
template <class N>
NEURON_INLINE N with_far_angles(N x, N near, double (*far)(double)) {
  if (!any(!(magnitude(x) < kReducible))) [[likely]]
    return near;
  auto either = [far](float angle, float y) {
    return std::fabs(angle) < kReducible ? y : static_cast<float>(far(static_cast<double>(angle)));
  };
  return lane_by_lane(either, x, near);
}
template <class N>
NEURON_INLINE N sin_any(N x) {
  return with_far_angles(x, sin_near(x), std::sin);
}
template <class N>
NEURON_INLINE N cos_any(N x) {
  return with_far_angles(x, cos_near(x), std::cos);
}
template <class N>
NEURON_INLINE N tan_any(N x) {
  return with_far_angles(x, tan_near(x), std::tan);
}

// ---- remainders ----------------------------------------------------------------------------------------------------
// The remainder with the sign of a. While the quotient has less than 23 bits, what is left without its nearest integer
// is exact, and at most one b too small.
template <class N>
NEURON_INLINE N fmod(N a, N b) {
  const N x = magnitude(a), d = magnitude(b), q = x / d;
  const N rest = mad((kMagic - q) - kMagic, d, x);
  const N r = with_sign_of(select(rest < 0.0f, rest + d, rest), a);
  if (!any(((q >= 4194304.0f) & (d > 0.0f)) | (d == INFINITY))) [[likely]]
    return r;
  return lane_by_lane([](float n, float m) { return std::fmod(n, m); }, a, b);
}
// With the sign of b.
template <class N>
NEURON_INLINE N remainder(N a, N b) {
  const N r = fmod(a, b);
  return select((r != 0.0f) & ((b < 0.0f) != (r < 0.0f)), r + b, r);
}
template <class N>
NEURON_INLINE N floor_divide(N a, N b) {  // Python's: the quotient of what is left without the remainder
  const N ratio = a / b, rest = fmod(a, b), whole = (a - rest) / b;
  const N quotient = select((rest != 0.0f) & ((b < 0.0f) != (rest < 0.0f)), whole - 1.0f, whole),
          below = floor(quotient);
  const N near = select(quotient - below > 0.5f, below + 1.0f, below);
  return select(b == 0.0f, ratio, select(quotient == 0.0f, with_sign_of(N(0.0f), ratio), near));
}

}  // namespace neuron::NEURON_LEVEL::math
