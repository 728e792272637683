// Compiled once per level with NEURON_LEVEL = its name. No contraction to FMA: a level changes speed, never bits.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "math.h"

namespace neuron::NEURON_LEVEL {

void gemm(const float* a, const float* b, int64_t k, int64_t m, int64_t n, float* c, int64_t ldc, bool add);
extern const int64_t kTileM, kTileN;

namespace {

using math::from_bits;
using math::to_bits;

// ---- conversion ----------------------------------------------------------------------------------------------------
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};
struct Tf32 {
  uint32_t bits;
};
template <int Exponent, int Mantissa, bool Infinity>
struct Fp8 {
  uint8_t bits;
};
using E4m3 = Fp8<4, 3, true>;
using E4m3fn = Fp8<4, 3, false>;
using E5m2 = Fp8<5, 2, true>;
struct E8m0 {
  uint8_t bits;
};
struct Bool {
  uint8_t bits;
};

inline float widen(float v) { return v; }
inline float widen(Bfloat v) { return from_bits(static_cast<uint32_t>(v.bits) << 16); }
inline float widen(Tf32 v) { return from_bits(v.bits); }
inline float widen(Bool v) { return v.bits; }
inline float widen(E8m0 v) {
  return v.bits == 255 ? NAN : v.bits == 0 ? from_bits(0x00400000) : from_bits(static_cast<uint32_t>(v.bits) << 23);
}
template <class T>
  requires std::is_integral_v<T>
inline float widen(T v) {
  return static_cast<float>(v);
}
inline float widen(Half v) {
  // Shift exponent and mantissa into place, then rescale; infinities and NaNs get the full exponent.
  const uint32_t magnitude = v.bits & 0x7fffu;
  const float scaled = from_bits(magnitude << 13) * from_bits(0x77800000);  // 2^112
  const float special =
      from_bits(0x7f800000u | (magnitude << 13) | (magnitude > 0x7c00 ? 0x400000u : 0));  // quiet NaNs
  return std::copysign(magnitude >= 0x7c00 ? special : scaled, v.bits & 0x8000 ? -1.0f : 1.0f);
}
template <int E, int M, bool I>
inline float widen(Fp8<E, M, I> v) {
  constexpr int bias = (1 << (E - 1)) - 1;
  constexpr uint32_t top = (1u << (E + M)) - 1;
  const uint32_t magnitude = v.bits & top;
  float x = from_bits(magnitude << (23 - M)) * from_bits(static_cast<uint32_t>(254 - bias) << 23);  // 2^(127 - bias)
  if constexpr (I) {
    constexpr uint32_t infinity = ((1u << E) - 1) << M;
    x = magnitude == infinity ? INFINITY : magnitude > infinity ? NAN : x;
  } else {
    x = magnitude == top ? NAN : x;
  }
  return std::copysign(x, v.bits >> 7 ? -1.0f : 1.0f);
}

template <class T>
inline T narrow(float f);
template <>
inline float narrow(float f) {
  return f;
}
template <>
inline Bfloat narrow(float f) {
  const uint32_t b = to_bits(f);
  const uint32_t rounded = (b + 0x7fffu + (b >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>(f != f ? (b >> 16 | 0x40) : rounded)};
}
template <>
inline Tf32 narrow(float f) {
  const uint32_t b = to_bits(f);
  return {f != f ? b : (b + 0xfffu + (b >> 13 & 1)) & ~0x1fffu};
}
template <>
inline Half narrow(float f) {
  const uint32_t b = to_bits(f), sign = b >> 16 & 0x8000u, magnitude = b & 0x7fffffffu;
  const float scaled = from_bits(magnitude);
  // Normal numbers round in the integer domain, subnormal ones by adding 2^-1 * ulp aligned magic.
  const uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13;
  const uint32_t subnormal = to_bits(scaled + 0.5f) - 0x3f000000u;
  uint32_t h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477ff000u ? 0x7c00u : h;
  h = magnitude > 0x7f800000u ? 0x7e00u : h;
  return {static_cast<uint16_t>(sign | h)};
}
template <int E, int M, bool I>
inline uint8_t narrow_fp8(float f) {
  constexpr int bias = (1 << (E - 1)) - 1;
  constexpr uint32_t top = (1u << (E + M)) - 1, infinity = I ? ((1u << E) - 1) << M : top;
  const uint32_t b = to_bits(f), magnitude = b & 0x7fffffffu;
  const uint8_t sign = static_cast<uint8_t>(b >> 31 << 7);
  constexpr int shift = 23 - M;
  uint32_t r;
  if (magnitude < static_cast<uint32_t>(127 - bias + 1) << 23) {  // subnormal: ulp is 2^(1 - bias - M)
    const float magic = from_bits(static_cast<uint32_t>(127 + 1 - bias - M + 23) << 23);
    r = to_bits(from_bits(magnitude) + magic) - to_bits(magic);
  } else {
    r = (magnitude + ((1u << (shift - 1)) - 1) + (magnitude >> shift & 1) -
         (static_cast<uint32_t>(127 - bias) << 23)) >>
        shift;
  }
  const uint32_t nan = I ? infinity | 1u << (M - 1) : top;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | nan);
  return static_cast<uint8_t>(sign | (r >= infinity ? infinity : r));
}
template <>
inline E4m3 narrow(float f) {
  return {narrow_fp8<4, 3, true>(f)};
}
template <>
inline E4m3fn narrow(float f) {
  return {narrow_fp8<4, 3, false>(f)};
}
template <>
inline E5m2 narrow(float f) {
  return {narrow_fp8<5, 2, true>(f)};
}
template <>
inline E8m0 narrow(float f) {
  const uint32_t b = to_bits(f) & 0x7fffffffu;
  if (b >= 0x7f800000u || f < 0 || f != f) return {255};
  return {static_cast<uint8_t>(std::min<uint32_t>(254, (b + 0x400000u) >> 23))};
}
template <>
inline Bool narrow(float f) {
  return {static_cast<uint8_t>(f != 0.0f)};
}
template <class T>
inline T saturate(float f) {  // nearest even, then the nearest value of the type; NaN becomes 0
  using L = std::numeric_limits<T>;
  constexpr float low = static_cast<float>(L::min());
  constexpr float high =
      sizeof(T) < 4 ? static_cast<float>(L::max()) : (std::is_signed_v<T> ? 2147483520.0f : 4294967040.0f);
  const float r = std::nearbyintf(f);
  const float limited = r < low ? low : (r > high ? high : r);
  const T value = static_cast<T>(limited != limited ? 0.0f : limited);
  return sizeof(T) == 4 && r > high ? L::max() : value;
}
#define INTEGER(T)           \
  template <>                \
  inline T narrow(float f) { \
    return saturate<T>(f);   \
  }
// clang-format off
INTEGER(uint8_t) INTEGER(int8_t) INTEGER(uint16_t) INTEGER(int16_t) INTEGER(uint32_t) INTEGER(int32_t)
// clang-format on
#undef INTEGER

    template <class T>
    void load(const char* from, int64_t stride, int64_t n, float* __restrict to) {
  int64_t i = 0;
  if (stride == sizeof(T)) {
    const T* p = reinterpret_cast<const T*>(from);
#ifdef __F16C__
    if constexpr (std::is_same_v<T, Half>)
      for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
#endif
    for (; i < n; ++i) to[i] = widen(p[i]);
    return;
  }
  for (; i < n; ++i) {
    T v;
    std::memcpy(&v, from + i * stride, sizeof v);
    to[i] = widen(v);
  }
}

template <class T>
void store(const float* __restrict from, int64_t n, char* to, int64_t stride) {
  int64_t i = 0;
  if (stride == sizeof(T)) {
    T* p = reinterpret_cast<T*>(to);
#ifdef __F16C__
    if constexpr (std::is_same_v<T, Half>)
      for (; i + 8 <= n; i += 8) {
        const __m256 f = _mm256_loadu_ps(from + i);
        if (_mm256_movemask_ps(_mm256_cmp_ps(f, f, _CMP_UNORD_Q))) [[unlikely]]  // keeps other bits of NaNs
          for (int64_t j = i; j < i + 8; ++j) p[j] = narrow<T>(from[j]);
        else
          _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i), _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
      }
#endif
    for (; i < n; ++i) p[i] = narrow<T>(from[i]);
    return;
  }
  for (; i < n; ++i) {
    const T v = narrow<T>(from[i]);
    std::memcpy(to + i * stride, &v, sizeof v);
  }
}

template <class T>
void load_int(const char* from, int64_t stride, int64_t n, int32_t* __restrict to) {
  if (stride == sizeof(T)) {
    const T* p = reinterpret_cast<const T*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<int32_t>(p[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    T v;
    std::memcpy(&v, from + i * stride, sizeof v);
    to[i] = static_cast<int32_t>(v);
  }
}
template <class T>
void store_int(const int32_t* __restrict from, int64_t n, char* to, int64_t stride) {
  if (stride == sizeof(T)) {
    T* p = reinterpret_cast<T*>(to);
    for (int64_t i = 0; i < n; ++i) p[i] = static_cast<T>(from[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const T v = static_cast<T>(from[i]);
    std::memcpy(to + i * stride, &v, sizeof v);
  }
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------
// Vectors of GCC and Clang have no ?: between bool and float, so each functor exists for scalars; the reductions that
// matter are written on 32-lane vectors below.
#define OP(NAME, EXPR)                                    \
  struct NAME {                                           \
    static float apply(float a, float b) { return EXPR; } \
  };
#define LINEAR(NAME, EXPR)                                    \
  struct NAME {                                               \
    template <class A, class B>                               \
    NEURON_INLINE static auto of(A a, B b) {                  \
      return EXPR;                                            \
    }                                                         \
    static float apply(float a, float b) { return of(a, b); } \
  };
LINEAR(add, a + b)
LINEAR(subtract, a - b)
LINEAR(multiply, a* b)
#undef LINEAR
OP(bypass, a)
OP(maximum, (a > b || a != a) ? a : b)
OP(minimum, (a < b || a != a) ? a : b)
OP(equal, a == b ? 1.0f : 0.0f)
OP(not_equal, a != b ? 1.0f : 0.0f)
OP(greater, a > b ? 1.0f : 0.0f)
OP(greater_equal, a >= b ? 1.0f : 0.0f)
OP(less, a < b ? 1.0f : 0.0f)
OP(less_equal, a <= b ? 1.0f : 0.0f)
OP(logical_and, (a != 0.0f) & (b != 0.0f) ? 1.0f : 0.0f)
OP(logical_or, (a != 0.0f) | (b != 0.0f) ? 1.0f : 0.0f)
OP(logical_xor, (a != 0.0f) != (b != 0.0f) ? 1.0f : 0.0f)
OP(logical_not, a == 0.0f ? 1.0f : 0.0f)
OP(abs_max, std::fabs(a) > std::fabs(b) ? a : b)
OP(abs_min, std::fabs(a) < std::fabs(b) ? a : b)
OP(abs, std::fabs(a))
OP(square, a* a)
OP(relu, a > 0.0f ? a : 0.0f)
OP(rsqrt, 1.0f / std::sqrt(a))
OP(reciprocal, 1.0f / a)
OP(divide, a / b)
OP(average, a + b)
#undef OP
// Of floats or packs.
#define WIDE_OP(NAME, F)                     \
  struct NAME {                              \
    template <class N>                       \
    NEURON_INLINE static N apply(N a, N b) { \
      return math::F(a, b);                  \
    }                                        \
  };
WIDE_OP(power, pow)
WIDE_OP(fmod, fmod)
WIDE_OP(mod, remainder)
#undef WIDE_OP

template <class Op>
void binary(const float* a, int sa, const float* b, int sb, float* out, int64_t n) {
#ifdef __FMA__
  using P = Floats<4>;
  if constexpr (requires { Op::apply(P(), P()); }) {
    auto pack = [](const float* from, int step, int64_t i, int64_t m) {
      return step ? (m < P::kLanes ? P::load(from + i, m) : P::load(from + i)) : P(*from);
    };
    for (int64_t i = 0; i < n; i += P::kLanes) {
      const int64_t m = std::min<int64_t>(P::kLanes, n - i);
      float lanes[P::kLanes];
      Op::apply(pack(a, sa, i, m), pack(b, sb, i, m)).store(lanes);
      std::copy(lanes, lanes + m, out + i);
    }
    return;
  }
#endif
  if (sa && sb)
    for (int64_t i = 0; i < n; ++i) out[i] = Op::apply(a[i], b[i]);
  else if (sa) {
    const float s = *b;
    for (int64_t i = 0; i < n; ++i) out[i] = Op::apply(a[i], s);
  } else if (sb) {
    const float s = *a;
    for (int64_t i = 0; i < n; ++i) out[i] = Op::apply(s, b[i]);
  } else {
    std::fill(out, out + n, Op::apply(*a, *b));
  }
}

template <class F>
void binary_int(const int32_t* a, int sa, const int32_t* b, int sb, int32_t* out, int64_t n, F f) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int32_t>(f(a[i * sa], b[i * sb]));
}

// T: int32_t or uint32_t; sums and products wrap.
template <class T>
constexpr std::array<Kernels::BinaryInt, kAluOps> int_table() {
  std::array<Kernels::BinaryInt, kAluOps> t{};
#define OP(NAME, EXPR)                                                                                               \
  t[static_cast<int>(AluOp::NAME)] = [](const int32_t* x, int sx, const int32_t* y, int sy, int32_t* o, int64_t n) { \
    binary_int(x, sx, y, sy, o, n, [](int32_t x_, int32_t y_) {                                                      \
      [[maybe_unused]] const T a = static_cast<T>(x_), b = static_cast<T>(y_);                                       \
      [[maybe_unused]] const uint32_t ua = static_cast<uint32_t>(x_), ub = static_cast<uint32_t>(y_);                \
      return EXPR;                                                                                                   \
    });                                                                                                              \
  };
  OP(bypass, ua)
  OP(add, ua + ub)
  OP(subtract, ua - ub)
  OP(multiply, ua * ub)
  OP(maximum, a > b ? a : b)
  OP(minimum, a < b ? a : b)
  OP(abs_max, (a < T{} ? -ua : ua) > (b < T{} ? -ub : ub) ? a : b)
  OP(abs_min, (a < T{} ? -ua : ua) < (b < T{} ? -ub : ub) ? a : b)
  OP(equal, a == b)
  OP(not_equal, a != b)
  OP(greater, a > b)
  OP(greater_equal, a >= b)
  OP(less, a < b)
  OP(less_equal, a <= b)
  OP(logical_and, a && b)
  OP(logical_or, a || b)
  OP(logical_xor, !a != !b)
  OP(logical_not, !a)
  OP(bitwise_and, ua & ub)
  OP(bitwise_or, ua | ub)
  OP(bitwise_xor, ua ^ ub)
  OP(left_shift, ub > 31 ? 0u : ua << ub)
  OP(right_shift, ub > 31 ? 0u : ua >> ub)
  OP(invert, ~ua)
#undef OP
  return t;
}

// 32 lanes, folded in halves: one tree for every width of the machine's vectors.
constexpr int kAccumulators = 32 / kVectorLanes;
typedef float Vec __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));

template <class Op, class Combine>
inline float reduce_lanes(const float* in, int64_t n, float identity, Combine combine) {
  Vec acc[kAccumulators];
  for (Vec& v : acc) v = identity - Vec{};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int k = 0; k < kAccumulators; ++k)
      acc[k] = combine(acc[k], *reinterpret_cast<const Vec*>(in + i + k * kVectorLanes));
  float lane[32];
  std::memcpy(lane, acc, sizeof lane);
  for (int64_t j = 0; i < n; ++i, ++j) lane[j] = Op::apply(lane[j], in[i]);
  for (int width = 16; width; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] = Op::apply(lane[j], lane[j + width]);
  return lane[0];
}
float reduce_add(const float* in, int64_t n) {
  return reduce_lanes<add>(in, n, 0.0f, [](Vec a, Vec b) { return a + b; });
}
float reduce_multiply(const float* in, int64_t n) {
  return reduce_lanes<multiply>(in, n, 1.0f, [](Vec a, Vec b) { return a * b; });
}
float reduce_maximum(const float* in, int64_t n) {
  return reduce_lanes<maximum>(in, n, -INFINITY, [](Vec a, Vec b) { return (a > b) | (a != a) ? a : b; });
}
float reduce_minimum(const float* in, int64_t n) {
  return reduce_lanes<minimum>(in, n, INFINITY, [](Vec a, Vec b) { return (a < b) | (a != a) ? a : b; });
}
float reduce_subtract(const float* in, int64_t n) { return n ? in[0] - reduce_add(in + 1, n - 1) : 0.0f; }
template <class Op>
float reduce_scalar(const float* in, int64_t n, float acc) {
  for (int64_t i = 0; i < n; ++i) acc = Op::apply(acc, in[i]);
  return acc;
}

// ---- functions -----------------------------------------------------------------------------------------------------
constexpr std::array<Kernels::Unary, kFunctions> function_table() {
  std::array<Kernels::Unary, kFunctions> t{};
#define FN(NAME, EXPR)                                                                        \
  t[static_cast<int>(Function::NAME)] = [](const float* in, float p, float* out, int64_t n) { \
    for (int64_t i = 0; i < n; ++i) {                                                         \
      const float x = in[i];                                                                  \
      out[i] = EXPR;                                                                          \
    }                                                                                         \
  };
#define WIDE(NAME, F)                                                                       \
  t[static_cast<int>(Function::NAME)] = [](const float* in, float, float* out, int64_t n) { \
    map_packs(in, out, n, [](auto x) { return math::F(x); });                               \
  };
  WIDE(sigmoid, sigmoid)
  WIDE(gelu, gelu)
  WIDE(gelu_dx, gelu_dx)
  WIDE(gelu_apprx_tanh, gelu_tanh)
  WIDE(gelu_apprx_sigmoid, gelu_sigmoid)
  WIDE(gelu_apprx_sigmoid_dx, gelu_sigmoid_dx)
  WIDE(silu, silu)
  WIDE(silu_dx, silu_dx)
  WIDE(tanh, tanh)
  WIDE(softplus, softplus)
  WIDE(mish, mish)
  WIDE(erf, erf)
  WIDE(erf_dx, erf_dx)
  WIDE(exp, exp)
  WIDE(log, log)
  WIDE(arctan, atan)
  WIDE(sin_reduced, sin_any)
  WIDE(cos_reduced, cos_any)
  WIDE(tan_reduced, tan_any)
#undef WIDE
  FN(copy, x)
  FN(square, x * x)
  FN(relu, x > 0.0f ? x : (x != x ? x : 0.0f))
  FN(prelu, x > 0.0f ? x : p * x)
  FN(sin, math::sin(x))
  FN(sqrt, std::sqrt(x))
  FN(rsqrt, 1.0f / std::sqrt(x))
  FN(reciprocal, 1.0f / x)
  FN(sign, x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : x))
  FN(abs, std::fabs(x))
  FN(logical_not, x == 0.0f ? 1.0f : 0.0f)
  FN(negative, -x)
  FN(ceil, std::ceil(x))
  FN(floor, std::floor(x))
  FN(trunc, std::trunc(x))
#undef FN
  return t;
}

void affine(const float* in, float scale, float bias, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = in[i] * scale + bias;
}

// ---- functions whose results are added up --------------------------------------------------------------------------
template <class N>
NEURON_INLINE N pack_of(const float* in, int64_t i, [[maybe_unused]] int64_t n) {
  if constexpr (std::is_same_v<N, float>)
    return in[i];
  else
    return n < N::kLanes ? N::load(in + i, n) : N::load(in + i);
}
// An input gives pack i of at most n elements, or with N = float element i.
template <bool Scale, bool Shift>
struct Shifted {
  const float* in;
  float scale, bias;
  template <class N>
  NEURON_INLINE N get(int64_t i, int64_t n) const {
    const N x = pack_of<N>(in, i, n);
    if constexpr (Scale) return x * scale + bias;
    if constexpr (Shift) return x + bias;
    return x;
  }
};
template <class F, bool Store, class In>
float map_sum(const In& in, float* out, int64_t n) {
  alignas(64) float lane[32] = {};
  int64_t i = 0;
#ifdef __FMA__
  using P = Floats<4>;
  typename P::Vec acc[kAccumulators] = {};
  for (; i + P::kLanes <= n; i += P::kLanes) {
    const P y = F{}(in.template get<P>(i, P::kLanes));
    if constexpr (Store) y.store(out + i);
    for (int k = 0; k < 4; ++k) acc[k % kAccumulators] += y.v[k];
  }
  std::memcpy(lane, acc, sizeof lane);
  if (i < n) {
    float rest[P::kLanes];
    F{}(in.template get<P>(i, n - i)).store(rest);
    if constexpr (Store) std::copy(rest, rest + (n - i), out + i);
    for (int64_t j = 0; j < n - i; ++j) lane[j % 32] += rest[j];
  }
#else
  for (; i < n; ++i) {
    const float y = F{}(in.template get<float>(i, 1));
    if constexpr (Store) out[i] = y;
    lane[i % 32] += y;
  }
#endif
  for (int width = 16; width; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  return lane[0];
}
template <class F>
float summed(const float* in, float scale, float bias, float* out, int64_t n) {
  auto sum = [&]<class In>(const In& x) { return out ? map_sum<F, true>(x, out, n) : map_sum<F, false>(x, out, n); };
  if (scale != 1.0f) return sum(Shifted<true, true>{in, scale, bias});
  if (bias != 0.0f) return sum(Shifted<false, true>{in, scale, bias});
  return sum(Shifted<false, false>{in, scale, bias});
}
#define WIDE(NAME, EXPR)                    \
  struct NAME##_of {                        \
    template <class N>                      \
    NEURON_INLINE N operator()(N x) const { \
      return EXPR;                          \
    }                                       \
  };
WIDE(copy, x)
WIDE(square, x* x)
WIDE(exp, math::exp(x))
#undef WIDE

// ---- operators in one pass -----------------------------------------------------------------------------------------
template <class F>
NEURON_INLINE void with_bool(bool b, F&& f) {
  if (b)
    f(std::true_type{});
  else
    f(std::false_type{});
}

template <class Op, class Op2, bool Reversed>
void chain(const float* a, const float* b, int sb, const float* c, int sc, float* out, int64_t n) {
  auto loop = [&]<bool B, bool C>(std::bool_constant<B>, std::bool_constant<C>) {
    const float one_b = *b, one_c = *c;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const float x = Op::apply(a[i], B ? b[i] : one_b), y = C ? c[i] : one_c;
      out[i] = Reversed ? Op2::apply(y, x) : Op2::apply(x, y);
    }
  };
  with_bool(sb, [&](auto vb) { with_bool(sc, [&](auto vc) { loop(vb, vc); }); });
}

// What an operator gives, which is stored, too.
template <class Op, bool Vector>
struct Kept {
  const float *a, *b;
  float* out;
  template <class N>
  NEURON_INLINE N get(int64_t i, int64_t n) const {
    const N x = pack_of<N>(a, i, n);
    N y;
    if constexpr (Vector)
      y = Op::of(x, pack_of<N>(b, i, n));
    else
      y = Op::of(x, *b);
    if constexpr (std::is_same_v<N, float>) {
      out[i] = y;
    } else if (n < N::kLanes) {
      float part[N::kLanes];
      y.store(part);
      std::copy(part, part + n, out + i);
    } else {
      y.store(out + i);
    }
    return y;
  }
};
template <class Op, class F>
float binary_sum(const float* a, const float* b, int sb, float* out, int64_t n) {
  return sb ? map_sum<F, false>(Kept<Op, true>{a, b, out}, nullptr, n)
            : map_sum<F, false>(Kept<Op, false>{a, b, out}, nullptr, n);
}

template <class Op, class Op2, class Op3>
void chain3(const float* a, const float* b, int sb, const float* c, int sc, const float* d, int sd, float* out,
            int64_t n) {
  auto loop = [&]<bool B, bool C, bool D>(std::bool_constant<B>, std::bool_constant<C>, std::bool_constant<D>) {
    const float one_b = *b, one_c = *c, one_d = *d;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i)
      out[i] = Op3::apply(Op2::apply(Op::apply(a[i], B ? b[i] : one_b), C ? c[i] : one_c), D ? d[i] : one_d);
  };
  with_bool(sb, [&](auto vb) { with_bool(sc, [&](auto vc) { with_bool(sd, [&](auto vd) { loop(vb, vc, vd); }); }); });
}

// ---- transposes ----------------------------------------------------------------------------------------------------
template <class T>
void transpose_block(const char* from, int64_t from_pitch, char* to, int64_t to_pitch, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(to + c * to_pitch + r * sizeof(T), from + r * from_pitch + c * sizeof(T), sizeof(T));
}

#ifdef __AVX2__
inline void transpose_8x8(const char* from, int64_t from_pitch, char* to, int64_t to_pitch) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * from_pitch));
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {  // rows 4i .. 4i + 3 of each half
    a[4 * i] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0x44);
    a[4 * i + 1] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0xee);
    a[4 * i + 2] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0x44);
    a[4 * i + 3] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to + i * to_pitch), _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(reinterpret_cast<float*>(to + (i + 4) * to_pitch), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}
#endif

void transpose(const char* from, int64_t from_pitch, char* to, int64_t to_pitch, int64_t rows, int64_t columns,
               int64_t item) {
  constexpr int64_t kBlock = 8;
  for (int64_t r = 0; r < rows; r += kBlock)
    for (int64_t c = 0; c < columns; c += kBlock) {
      const char* p = from + r * from_pitch + c * item;
      char* q = to + c * to_pitch + r * item;
      const int64_t m = std::min(kBlock, rows - r), n = std::min(kBlock, columns - c);
#ifdef __AVX2__
      if (item == 4 && m == kBlock && n == kBlock) {
        transpose_8x8(p, from_pitch, q, to_pitch);
        continue;
      }
#endif
      if (item == 4)
        transpose_block<uint32_t>(p, from_pitch, q, to_pitch, m, n);
      else if (item == 2)
        transpose_block<uint16_t>(p, from_pitch, q, to_pitch, m, n);
      else
        transpose_block<uint8_t>(p, from_pitch, q, to_pitch, m, n);
    }
}

constexpr std::array<Kernels::Binary, kAluOps> binary_table() {
  std::array<Kernels::Binary, kAluOps> t{};
#define OP(NAME) t[static_cast<int>(AluOp::NAME)] = binary<NAME>;
  // clang-format off
  OP(bypass) OP(add) OP(subtract) OP(multiply) OP(maximum) OP(minimum) OP(equal) OP(not_equal) OP(greater)
  OP(greater_equal) OP(less) OP(less_equal) OP(logical_and) OP(logical_or) OP(logical_xor) OP(logical_not) OP(power)
  OP(abs_max) OP(abs_min) OP(abs) OP(square) OP(relu) OP(rsqrt) OP(reciprocal) OP(divide) OP(mod) OP(fmod) OP(average)
  // clang-format on
#undef OP
              return t;
}

constexpr std::array<Kernels::Reduce, kAluOps> reduce_table() {
  std::array<Kernels::Reduce, kAluOps> t{};
  auto set = [&](AluOp op, Kernels::Reduce f) { t[static_cast<int>(op)] = f; };
  set(AluOp::add, reduce_add);
  set(AluOp::average, reduce_add);
  set(AluOp::subtract, reduce_subtract);
  set(AluOp::multiply, reduce_multiply);
  set(AluOp::maximum, reduce_maximum);
  set(AluOp::minimum, reduce_minimum);
#define OP(NAME, IDENTITY) \
  set(AluOp::NAME, [](const float* in, int64_t n) { return reduce_scalar<NAME>(in, n, IDENTITY); });
  // clang-format off
  OP(logical_and, 1.0f) OP(logical_or, 0.0f) OP(logical_xor, 0.0f) OP(abs_max, 0.0f) OP(abs_min, INFINITY)
  // clang-format on
#undef OP
      return t;
}

template <class F>
constexpr void for_linear(F&& f) {  // the operators that go into one pass with others
  f(AluOp::add, add{});
  f(AluOp::subtract, subtract{});
  f(AluOp::multiply, multiply{});
}
constexpr void set_passes(Kernels& k) {
  for_linear([&]<class Op>(AluOp op, Op) {
    auto& sums = k.binary_sum[static_cast<int>(op)];
    sums[static_cast<int>(Function::copy)] = binary_sum<Op, copy_of>;
    sums[static_cast<int>(Function::square)] = binary_sum<Op, square_of>;
    for_linear([&]<class Op2>(AluOp op2, Op2) {
      k.chain[static_cast<int>(op)][static_cast<int>(op2)] = {chain<Op, Op2, false>, chain<Op, Op2, true>};
      for_linear([&]<class Op3>(AluOp op3, Op3) {
        k.chain3[static_cast<int>(op)][static_cast<int>(op2)][static_cast<int>(op3)] = chain3<Op, Op2, Op3>;
      });
    });
  });
}

constexpr Kernels make() {
  Kernels k{};
  auto set = [&]<class T>(Dtype t, T) {
    const int i = static_cast<int>(t);
    k.load[i] = load<T>;
    k.store[i] = store<T>;
    if constexpr (std::is_integral_v<T>) {
      k.load_int[i] = load_int<T>;
      k.store_int[i] = store_int<T>;
    }
  };
  set(Dtype::boolean, Bool{});
  k.load_int[static_cast<int>(Dtype::boolean)] = load_int<uint8_t>;
  k.store_int[static_cast<int>(Dtype::boolean)] = store_int<uint8_t>;
  set(Dtype::uint8, uint8_t{});
  set(Dtype::int8, int8_t{});
  set(Dtype::uint16, uint16_t{});
  set(Dtype::int16, int16_t{});
  set(Dtype::uint32, uint32_t{});
  set(Dtype::int32, int32_t{});
  set(Dtype::float16, Half{});
  set(Dtype::bfloat16, Bfloat{});
  set(Dtype::float32, float{});
  set(Dtype::tfloat32, Tf32{});
  set(Dtype::float8_e4m3, E4m3{});
  set(Dtype::float8_e4m3fn, E4m3fn{});
  set(Dtype::float8_e5m2, E5m2{});
  set(Dtype::float8_e8m0fnu, E8m0{});
  k.binary = binary_table();
  k.binary_int = int_table<int32_t>();
  k.binary_uint = int_table<uint32_t>();
  k.reduce = reduce_table();
  k.function = function_table();
  k.summed[static_cast<int>(Function::copy)] = summed<copy_of>;
  k.summed[static_cast<int>(Function::square)] = summed<square_of>;
  k.summed[static_cast<int>(Function::exp)] = summed<exp_of>;
  set_passes(k);
  k.affine = affine;
  k.transpose = transpose;
  k.gemm = gemm;
  return k;
}

}  // namespace

const Kernels& table() {
  static const Kernels k = [] {
    Kernels t = make();
#define NAME_OF(X) #X
#define NAME(X) NAME_OF(X)
    t.name = NAME(NEURON_LEVEL);
    t.tile_m = kTileM;
    t.tile_n = kTileN;
    return t;
  }();
  return k;
}

}  // namespace neuron::NEURON_LEVEL
