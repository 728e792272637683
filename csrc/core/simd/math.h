// Elementary functions in fp32 without branches, so that compilers vectorise loops over them. Polynomials are Chebyshev
// fits over the stated intervals; tests/core/test_kernels.cpp bounds the error of each function against libm.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace neuron::math {

inline float from_bits(uint32_t b) { return std::bit_cast<float>(b); }
inline uint32_t to_bits(float f) { return std::bit_cast<uint32_t>(f); }

// a * b + c rounded once, on every machine: polynomials are twice as fast where there is an instruction for it.
inline float mad(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double mad(double a, double b, double c) { return __builtin_fma(a, b, c); }

inline float round_even(float x) {  // |x| < 2^22
  const float magic = 12582912.0f;  // 1.5 * 2^23: the sum has no fraction bits left
  return (x + magic) - magic;
}

inline float exp(float x) {
  const float above = x > -104.0f ? x : -104.0f;  // in this order a comparison and a choice are one instruction
  const float limited = above < 89.0f ? above : 89.0f;
  const float n = round_even(limited * 1.44269504f);
  const float r = mad(n, 2.12194440e-4f, mad(n, -0.693359375f, limited));  // ln 2 in two parts
  float p = 0.00019899367f;                                                // (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2
  p = mad(p, r, 0.0013933654f);
  p = mad(p, r, 0.0083332984f);
  p = mad(p, r, 0.041666463f);
  p = mad(p, r, 0.16666667f);
  p = mad(p, r, 0.5f);
  p = mad(p * r, r, r) + 1.0f;
  const int32_t k = static_cast<int32_t>(n), half = k >> 1;
  const float y =
      p * from_bits(static_cast<uint32_t>(half + 127) << 23) * from_bits(static_cast<uint32_t>(k - half + 127) << 23);
  return x != x ? x : y;
}

inline float log(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const uint32_t bits = to_bits(tiny ? x * 8388608.0f : x);
  const uint32_t shifted = bits - 0x3f3504f3u;  // sqrt(1/2): mantissas from there to sqrt(2)
  const float e = static_cast<float>(static_cast<int32_t>(shifted) >> 23) - (tiny ? 23.0f : 0.0f);
  const float f = from_bits((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  float p = 0.07150066f;  // (log(1 + f) - f + f^2 / 2) / f^3
  p = mad(p, f, -0.11572523f);
  p = mad(p, f, 0.11661972f);
  p = mad(p, f, -0.12410901f);
  p = mad(p, f, 0.14249881f);
  p = mad(p, f, -0.16668485f);
  p = mad(p, f, 0.2000071f);
  p = mad(p, f, -0.2499999f);
  p = mad(p, f, 0.33333331f);
  const float u = f * f;
  const float y = mad(e, 0.693359375f, mad(-0.5f, u, mad(p * f, u, e * -2.12194440e-4f)) + f);
  const float finite = x > 3.4e38f ? (x > 3.4028235e38f ? x : y) : y;
  return x > 0.0f ? finite : (x == 0.0f ? -INFINITY : NAN);
}

inline float tanh(float x) {
  const float a = std::fabs(x), u = x * x;
  float p = 0.0022956324f;  // (tanh(x) / x - 1) / x^2 on |x| < 0.625
  p = mad(p, u, -0.008346744f);
  p = mad(p, u, 0.021769864f);
  p = mad(p, u, -0.05395939f);
  p = mad(p, u, 0.13333304f);
  p = mad(p, u, -0.33333334f);
  const float small = mad(x * u, p, x);
  // Near 1 the error must be that of the distance from 1: tanh forms of GELU subtract there.
  const float large = 1.0f - 2.0f / (exp(2.0f * (a > 20.0f ? 20.0f : a)) + 1.0f);
  return x != x ? x : std::copysign(a < 0.625f ? small : large, x);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// A quotient of polynomials in x^2, fitted for the least relative error over the interval where the function is not 1.
inline float erf(float x) {
  const float low = x > -3.95f ? x : -3.95f, c = low < 3.95f ? low : 3.95f, u = c * c;
  float p = 2.02582145e-06f;
  p = mad(p, u, 0.000284673947f);
  p = mad(p, u, 0.0038079521f);
  p = mad(p, u, 0.0528747925f);
  p = mad(p, u, 0.191546695f);
  p = mad(p, u, 1.12837914f);
  float q = 3.7830173e-05f;
  q = mad(q, u, 0.00117065752f);
  q = mad(q, u, 0.0150546859f);
  q = mad(q, u, 0.114557968f);
  q = mad(q, u, 0.503086517f);
  q = mad(q, u, 1.0f);
  const float y = c * p / q, below = y < 1.0f ? y : 1.0f;
  return x != x ? x : (below > -1.0f ? below : -1.0f);
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

inline float gelu(float x) { return 0.5f * x * (1.0f + erf(x * 0.70710678f)); }
inline float erf_dx(float x) { return 1.12837917f * exp(-x * x); }
inline float gelu_dx(float x) { return 0.5f * (1.0f + erf(x * 0.70710678f)) + x * 0.39894228f * exp(-0.5f * x * x); }
inline float gelu_tanh(float x) { return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x))); }
inline float gelu_sigmoid(float x) { return x * sigmoid(1.702f * x); }
inline float gelu_sigmoid_dx(float x) {
  const float s = sigmoid(1.702f * x);
  return s + 1.702f * x * s * (1.0f - s);
}
inline float silu(float x) { return x * sigmoid(x); }
inline float silu_dx(float x) {
  const float s = sigmoid(x);
  return s + x * s * (1.0f - s);
}
inline float softplus(float x) {  // max(x, 0) + log(1 + e^-|x|)
  const float e = exp(-std::fabs(x));
  const float w = 1.0f + e;
  const float l = w == 1.0f ? e : log(w) * (e / (w - 1.0f));  // log1p
  return (x > 0.0f ? x : 0.0f) + l;
}
inline float mish(float x) { return x * tanh(softplus(x)); }

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
inline float log2(float x) { return static_cast<float>(log_wide(x) * 1.4426950408889634074); }
inline float log10(float x) { return static_cast<float>(log_wide(x) * 0.43429448190325182765); }
inline float expm1(float x) {
  const float y = static_cast<float>(exp_wide(x) - 1.0);
  const float small = std::copysign(x + 0.5f * x * x, x);
  return std::fabs(x) < 1e-5f ? small : (x != x ? x : y);
}
inline float log1p(float x) {
  const float y = static_cast<float>(log_wide(1.0 + x));
  const float small = std::copysign(x - 0.5f * x * x, x);
  return std::fabs(x) < 1e-5f ? small : y;
}
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

}  // namespace neuron::math
