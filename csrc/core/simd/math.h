// Elementary functions in fp32 without branches, for vectors: most are templates, of float or of packs of lanes
// (pack.h) with the same bits. Polynomials are Chebyshev fits over the stated intervals; tests/core/kernels_test.cpp
// bounds the error of each function against libm.
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
// c[0] x^(n-1) + ... + c[n-1]
template <class N, int Terms>
NEURON_INLINE N polynomial(const float (&c)[Terms], N x) {
  N p = c[0];
  for (int i = 1; i < Terms; ++i) p = mad(p, x, N(c[i]));
  return p;
}

// e^x = p * 2^k for |x| < 2^21. The low bits of `exponent` are k.
template <class N>
NEURON_INLINE auto exp_parts(N x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction bits left
  const N t = mad(x, N(1.44269504f), N(magic)), n = t - magic;
  const N r = mad(n, N(2.12194440e-4f), mad(n, N(-0.693359375f), x));  // ln 2 in two parts
  // (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2
  static constexpr float c[] = {0.00019899367f, 0.0013933654f, 0.0083332984f, 0.041666463f, 0.16666667f, 0.5f};
  const N p = mad(polynomial(c, r) * r, r, r) + 1.0f;
  struct Parts {
    N p;
    decltype(to_bits(x)) exponent;
  };
  return Parts{p, to_bits(t) << 23};
}
template <class N>
NEURON_INLINE N exp(N x) {
  const auto [p, k] = exp_parts(least(N(89.0f), greatest(N(-104.0f), x)));
  const auto half = shift_signed(k, 1) & 0xff800000u;  // 2^k may be beyond fp32's range, its two factors are not
  return p * from_bits(half + 0x3f800000u) * from_bits(k - half + 0x3f800000u);
}
// e^x for -87 <= x <= 88.
template <class N>
NEURON_INLINE N exp_near(N x) {
  const auto [p, k] = exp_parts(x);
  return p * from_bits(k + 0x3f800000u);
}

template <class N>
NEURON_INLINE N log(N x) {
  const auto tiny = x < 1.17549435e-38f;
  const auto bits = to_bits(select(tiny, x * 8388608.0f, x));
  const auto shifted = bits - 0x3f3504f3u;  // sqrt(1/2): mantissas from there to sqrt(2)
  const N e = signed_to_float(shift_signed(shifted, 23)) - select(tiny, N(23.0f), N(0.0f));
  const N f = from_bits((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  // (log(1 + f) - f + f^2 / 2) / f^3
  static constexpr float c[] = {0.07150066f,  -0.11572523f, 0.11661972f, -0.12410901f, 0.14249881f,
                                -0.16668485f, 0.2000071f,   -0.2499999f, 0.33333331f};
  const N u = f * f;
  const N y = mad(e, N(0.693359375f), mad(N(-0.5f), u, mad(polynomial(c, f) * f, u, e * -2.12194440e-4f)) + f);
  return select(x > 0.0f, select(x < INFINITY, y, x), select(x == 0.0f, N(-INFINITY), N(NAN)));
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

template <class N>
NEURON_INLINE N erf(N x) {
  const N a = least(N(4.0f), magnitude(x)), u = a * a;
  // erf(x) / x on |x| < 1
  static constexpr float c[] = {7.8824974e-05f, -0.00080188555f, 0.0051893122f, -0.026854329f,
                                0.1128359735f,  -0.37612626f,    1.1283791f};
  const N small = a * polynomial(c, u);
  // erfc(a) * e^(a^2) on 1 <= a <= 4
  static constexpr float d[] = {0.012932926f, 0.068530403f, -0.384646f,  0.47981626f,   -0.053793509f,
                                0.32894629f,  0.26410767f,  0.28432578f, -0.0001204024f};
  const N large = 1.0f - polynomial(d, 2.0f / (2.0f + a)) * exp_near(-u);
  return with_sign_of(select(a < 1.0f, small, large), x);
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
  return s + 1.702f * x * s * (1.0f - s);
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
template <class N>
NEURON_INLINE PairOf<N> multiply_pairs(PairOf<N> a, PairOf<N> b) {
  const auto p = two_product(a.high, b.high);
  return {p.high, p.low + (a.high * b.low + a.low * b.high)};
}
// e * (exact + rest + tiny) + b for integers e of a few bits, of which e * exact has no rounding error.
template <class N>
NEURON_INLINE N add_multiple(N e, const float (&c)[3], PairOf<N> b) {
  const auto p = two_product(e, N(c[1]));
  const auto s = two_sum(e * c[0], p.high), t = two_sum(s.high, b.high);
  return t.high + ((t.low + s.low) + ((p.low + e * c[2]) + b.low));
}
// c[0] x^(n-1) + ... + c[n-1], each step rounded.
template <class N, int Terms>
NEURON_INLINE N rounded_polynomial(const float (&c)[Terms], N x) {
  N p = c[0];
  for (int i = 1; i < Terms; ++i) p = p * x + c[i];
  return p;
}

inline constexpr float kLn2[] = {0.693359375f, -2.1219444e-4f, 1.646595e-12f};   // the first one has 9 bits
inline constexpr float kLog2[] = {0.30078125f, 2.4874567e-4f, -1.9043129e-12f};  // to base 10; 7 bits

template <class N>
NEURON_INLINE N expm1(N x) {
  const float magic = 12582912.0f;
  const N limited = least(N(89.0f), greatest(N(-20.0f), x));
  const N t = limited * 1.44269504f + magic, n = t - magic;
  const auto far = two_product(n, N(kLn2[1]));
  const auto near = two_sum(limited - n * kLn2[0], -far.high);
  const PairOf<N> r{near.high, near.low - (far.low + n * kLn2[2])};
  // e^r - 1 = r + r^2 * (1 / 2 + r * (1 / 6 + r * (1 / 24 + ...)))
  static constexpr float c[] = {2.7557319e-6f, 2.4801588e-5f, 1.9841270e-4f,
                                0.0013888889f, 0.0083333338f, 0.041666668f};
  const auto s = fast_sum(N(0.16666667f), rounded_polynomial(c, r.high) * r.high);
  const auto u = multiply_pairs(PairOf<N>{s.high, s.low - 4.967054e-9f}, r);
  const auto v = fast_sum(N(0.5f), u.high);
  const auto w = multiply_pairs(PairOf<N>{v.high, v.low + u.low}, multiply_pairs(r, r));
  const auto e = fast_sum(r.high, w.high);
  const N half = from_bits((to_bits(t) << 23) + 0x3f000000u);  // 2^(n - 1): 2^n may be beyond fp32's range
  const auto less_one = two_sum(half, N(-0.5f)), y = two_sum(less_one.high, half * e.high);
  const N result = 2.0f * (y.high + ((y.low + less_one.low) + half * (e.low + (r.low + w.low))));
  const N small = with_sign_of(x + 0.5f * x * x, x);
  return select(magnitude(x) < 1e-5f, small, select(x == x, result, x));
}

// log(x + low) = exponent * log(2) + rest for positive normal x.
template <class N>
struct LogParts {
  N exponent;
  PairOf<N> rest;
};
template <class N>
NEURON_INLINE LogParts<N> log_parts(N x, N low) {
  const auto shifted = to_bits(x) - 0x3f3504f3u;  // mantissas from sqrt(1/2) to sqrt(2)
  const N exponent = signed_to_float(shift_signed(shifted, 23));
  const N f = from_bits((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  low = low * from_bits(to_bits(12583039.0f - least(exponent, N(127.0f))) << 23);  // times 2^-exponent
  // log(1 + f) = 2 artanh(z), z = f / (2 + f)
  const auto d = fast_sum(N(2.0f), f);
  const N inverse = 1.0f / d.high, q = f * inverse;
  const auto p = two_product(q, d.high);
  const PairOf<N> z{q, (((f - p.high) - p.low) + (low - q * (d.low + low))) * inverse};
  const auto u = multiply_pairs(z, z);
  static constexpr float c[] = {0.15384616f, 0.18181819f, 0.22222222f, 0.2857143f, 0.4f};
  const auto s = fast_sum(N(0.6666667f), rounded_polynomial(c, u.high) * u.high);
  const auto tail = multiply_pairs(multiply_pairs(z, u), PairOf<N>{s.high, s.low - 1.9868216e-8f});
  const auto sum = fast_sum(2.0f * z.high, tail.high);
  return {exponent, {sum.high, sum.low + (2.0f * z.low + tail.low)}};
}
// What a logarithm gives for 0, for infinity, and where there is none; `y` else.
template <class N>
NEURON_INLINE N log_edges(N x, N y) {
  return select(x > 0.0f, select(x < INFINITY, y, x), select(x == 0.0f, N(-INFINITY), N(NAN)));
}
template <class N>
NEURON_INLINE N log1p(N x) {
  const auto s = two_sum(N(1.0f), x);
  const auto l = log_parts(s.high, s.low);
  const N y = add_multiple(l.exponent, kLn2, l.rest);
  const N small = with_sign_of(x - 0.5f * x * x, x);
  return select(magnitude(x) < 1e-5f, small, log_edges(x + 1.0f, y));
}
template <class N>
NEURON_INLINE LogParts<N> log_parts_of_any(N x) {
  const auto tiny = x < 1.17549435e-38f;
  auto l = log_parts(select(tiny, x * 8388608.0f, x), N(0.0f));
  l.exponent = l.exponent - select(tiny, N(23.0f), N(0.0f));
  return l;
}
template <class N>
NEURON_INLINE N log2(N x) {
  const auto l = log_parts_of_any(x);
  const auto rest = multiply_pairs(l.rest, PairOf<N>{N(1.442695f), N(1.925963e-8f)});
  const auto sum = two_sum(l.exponent, rest.high);
  return log_edges(x, sum.high + (sum.low + rest.low));
}
template <class N>
NEURON_INLINE N log10(N x) {
  const auto l = log_parts_of_any(x);
  const auto rest = multiply_pairs(l.rest, PairOf<N>{N(0.4342945f), N(-1.010305e-8f)});
  return log_edges(x, add_multiple(l.exponent, kLog2, rest));
}

// ---- through double precision: results are right to the last place of fp32 but for rare ties ------------------------
inline double from_bits64(uint64_t b) { return std::bit_cast<double>(b); }
inline uint64_t to_bits64(double d) { return std::bit_cast<uint64_t>(d); }

// e^x to 1e-14; beyond fp32's range some number that rounds to 0 or infinity.
inline double exp_wide(double x) {
  const double above = x > -200.0 ? x : -200.0, limited = above < 200.0 ? above : 200.0;
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: the low bits of the sum are the integer
  const double t = limited * 1.4426950408889634 + magic, n = t - magic;
  const double r = mad(n, -1.90821492927058770002e-10, mad(n, -0.693147180369123816490, limited));
  double p = 1.0 / 39916800;  // Taylor: |r| <= ln(2) / 2
  p = mad(p, r, 1.0 / 3628800);
  p = mad(p, r, 1.0 / 362880);
  p = mad(p, r, 1.0 / 40320);
  p = mad(p, r, 1.0 / 5040);
  p = mad(p, r, 1.0 / 720);
  p = mad(p, r, 1.0 / 120);
  p = mad(p, r, 1.0 / 24);
  p = mad(p, r, 1.0 / 6);
  p = mad(p, r, 0.5);
  p = mad(p, r, 1.0);
  p = mad(p, r, 1.0);
  return p * from_bits64((to_bits64(t) + 1023) << 52);
}

// log x to 1e-13 for x that fp32 has, subnormal ones too.
inline double log_wide(double x) {
  const uint64_t bits = to_bits64(x) + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu);  // mantissas from sqrt(1/2)
  const double e = from_bits64((bits >> 52) | 0x4330000000000000u) - (4503599627370496.0 + 1023.0);
  const double m = from_bits64((bits & 0x000fffffffffffffu) + 0x3fe6a09e667f3bcdu);
  const double f = (m - 1.0) / (m + 1.0), u = f * f;
  double p = 1.0 / 17;  // artanh
  p = mad(p, u, 1.0 / 15);
  p = mad(p, u, 1.0 / 13);
  p = mad(p, u, 1.0 / 11);
  p = mad(p, u, 1.0 / 9);
  p = mad(p, u, 1.0 / 7);
  p = mad(p, u, 1.0 / 5);
  p = mad(p, u, 1.0 / 3);
  const double y = mad(e, 0.69314718055994530942, 2.0 * mad(f * u, p, f));
  const double finite = x > 3.5e38 ? x : y;
  const double positive = x == 0.0 ? -HUGE_VAL : finite;
  return x >= 0.0 ? positive : static_cast<double>(NAN);
}

inline float exp2(float x) { return x != x ? x : static_cast<float>(exp_wide(x * 0.69314718055994530942)); }
inline float pow(float x, float y) {
  const float a = std::fabs(x);
  const float r = static_cast<float>(exp_wide(static_cast<double>(y) * log_wide(a)));
  const float b = std::fabs(y), half = b * 0.5f;
  const bool integer = std::trunc(y) == y, odd = integer && std::trunc(half) != half;
  const bool infinite = b > 3.4028235e38f, edge = a == 0.0f || a > 3.4028235e38f;
  const float negative = odd ? -r : (integer || infinite || edge ? r : NAN);
  const float signed_zero = std::copysign(1.0f, x) < 0.0f ? negative : r;
  const float number = x != x ? x : (y != y ? y : signed_zero);
  const float one = a == 1.0f && infinite ? 1.0f : number;
  return y == 0.0f || x == 1.0f ? 1.0f : one;
}

inline constexpr float kReducible = 2e5f;  // larger angles need more digits of pi

// Sine of x + quarter * pi / 2 for |x| < kReducible.
inline double sin_wide(double x, int quarter) {
  const double magic = 6755399441055744.0;
  const double t = x * 0.63661977236758134308 + magic, n = t - magic;
  const double r = mad(n, -6.07710050650619224932e-11, mad(n, -1.57079632673412561417, x)), u = r * r;
  double s = -1.0 / 39916800 + u / 6227020800;
  s = mad(s, u, 1.0 / 362880);
  s = mad(s, u, -1.0 / 5040);
  s = mad(s, u, 1.0 / 120);
  s = mad(s, u, -1.0 / 6);
  s = r * mad(u, s, 1.0);
  double c = -1.0 / 3628800 + u / 479001600;
  c = mad(c, u, 1.0 / 40320);
  c = mad(c, u, -1.0 / 720);
  c = mad(c, u, 1.0 / 24);
  c = mad(c, u, -0.5);
  c = mad(u, c, 1.0);
  const uint64_t q = to_bits64(t) + static_cast<uint64_t>(quarter);
  const double y = q & 1 ? c : s;
  return from_bits64(to_bits64(y) ^ ((q & 2) << 62));
}
inline float sin_any(float x) { return static_cast<float>(sin_wide(x, 0)); }
inline float cos_any(float x) { return static_cast<float>(sin_wide(x, 1)); }
inline float tan_any(float x) { return static_cast<float>(sin_wide(x, 0) / sin_wide(x, 1)); }
// Angles too large for the vector form take libm's.
template <float (*Near)(float), double (*Far)(double)>
inline float any_angle(float x) {
  return std::fabs(x) < kReducible ? Near(x) : static_cast<float>(Far(x));
}

}  // namespace neuron::NEURON_LEVEL::math
