// Compiled once per level with NEURON_LEVEL = its name. No contraction to FMA: a level changes speed, never bits.
#include "lanes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../reductions.h"
#include "math.h"

namespace neuron::NEURON_LEVEL {

namespace {

using math::from_bits;
using math::to_bits;

// Input k of an operation: n lanes in a row, or one for all.
template <class T, bool Vector>
struct Input {
  const T* p;
  T one;
  explicit Input(const char* from) : p(reinterpret_cast<const T*>(from)), one(*p) {}
  T operator[](int64_t i) const {
    if constexpr (Vector)
      return p[i];
    else
      return one;
  }
#ifdef __FMA__
  template <class P>
  P pack(int64_t i) const {
    if constexpr (Vector)
      return P::load(p + i);
    else
      return P(one);
  }
  template <class P>
  P pack(int64_t i, int64_t n) const {
    if constexpr (Vector)
      return P::load(p + i, n);
    else
      return P(one);
  }
#endif
};

#ifdef __FMA__
// The lanes of a result: a comparison of floats gives 1 or 0.
template <class In, class T, int K>
NEURON_INLINE Pack<T, K> lanes_of(const Pack<T, K>& p) {
  if constexpr (std::is_same_v<In, T>)
    return p;
  else
    return p & 1;
}
#endif

// One row. `out` may be an input, element by element, so that no iteration depends on another: the compiler is told.
template <class In, class Out, class F, int Vectors, size_t... K>
NEURON_INLINE void loop(Out* out, int64_t n, std::index_sequence<K...> inputs,
                        Input<In, (Vectors >> K & 1) != 0>... in) {
  int64_t i = 0;
  if constexpr (Vectors == 0) {
    std::fill(out, out + n, static_cast<Out>(F{}(in.one...)));
    return;
  }
#ifdef __FMA__
  using P = Pack<In, 4>;
  using One = Pack<In, 1>;
  if constexpr (requires { F{}(in.template pack<P>(i)...); }) {
    for (; i + P::kLanes <= n; i += P::kLanes) lanes_of<In>(F{}(in.template pack<P>(i)...)).store(out + i);
    for (; i + One::kLanes <= n; i += One::kLanes) lanes_of<In>(F{}(in.template pack<One>(i)...)).store(out + i);
    if (i < n) {
      Out rest[One::kLanes];
      lanes_of<In>(F{}(in.template pack<One>(i, n - i)...)).store(rest);
      std::copy(rest, rest + (n - i), out + i);
    }
    return;
  }
#endif
#pragma GCC ivdep
  for (; i < n; ++i) out[i] = static_cast<Out>(F{}(in[i]...));
}

template <class In, class Out, class F, int Vectors, size_t... K>
void rows_of(void* out, const char* const* in, const LaneRows& rows, std::index_sequence<K...> inputs) {
  for (int64_t r = 0; r < rows.rows; ++r)
    loop<In, Out, F, Vectors>(reinterpret_cast<Out*>(static_cast<char*>(out) + r * rows.out_pitch), rows.n, inputs,
                              Input<In, (Vectors >> K & 1) != 0>(rows.input(K, in[K], r))...);
}

// An operation of Inputs inputs: one loop for each choice of which of them are vectors.
template <class In, class Out, class F, int Inputs>
void map(void* out, const void* a, const void* b, const void* c, int vectors, const LaneRows& rows) {
  const char* in[] = {static_cast<const char*>(a), static_cast<const char*>(b), static_cast<const char*>(c)};
  [&]<size_t... V>(std::index_sequence<V...>) {
    using Loop = void (*)(void*, const char* const*, const LaneRows&, std::make_index_sequence<Inputs>);
    static constexpr Loop loops[] = {rows_of<In, Out, F, V>...};
    loops[vectors & ((1 << Inputs) - 1)](out, in, rows, {});
  }(std::make_index_sequence<1 << Inputs>{});
}

#ifdef __AVX512F__
template <class In, class Out, class F, size_t... K>
NEURON_INLINE void call_with(void* out, std::index_sequence<K...>, const void* const (&in)[3]) {
  using P = Pack<In, LaneKernels::kCallLanes / kVectorLanes>;
  if constexpr (requires(P p) { F{}((static_cast<void>(K), p)...); }) {
    lanes_of<In>(F{}(P::load(in[K])...)).store(out);
  } else {
    In lanes[sizeof...(K)][P::kLanes];
    for (size_t k = 0; k < sizeof...(K); ++k) std::memcpy(lanes[k], in[k], sizeof lanes[k]);
    auto* o = static_cast<Out*>(out);
#pragma GCC ivdep
    for (int i = 0; i < P::kLanes; ++i) o[i] = static_cast<Out>(F{}(lanes[K][i]...));
  }
}
// An operation of kCallLanes lanes.
template <class In, class Out, class F, int Inputs>
void call(void* out, const void* a, const void* b, const void* c) {
  call_with<In, Out, F>(out, std::make_index_sequence<Inputs>{}, {a, b, c});
}
#endif

// ---- what the operations compute -----------------------------------------------------------------------------------
#define F1(NAME, IN, EXPR)                       \
  struct NAME {                                  \
    auto operator()(IN a) const { return EXPR; } \
  };
#define F2(NAME, IN, EXPR)                             \
  struct NAME {                                        \
    auto operator()(IN a, IN b) const { return EXPR; } \
  };
// Of floats or packs.
#define WIDE1(NAME, EXPR)                      \
  struct NAME {                                \
    template <class N>                         \
    NEURON_INLINE auto operator()(N a) const { \
      return EXPR;                             \
    }                                          \
  };
#define WIDE2(NAME, EXPR)                           \
  struct NAME {                                     \
    template <class N>                              \
    NEURON_INLINE auto operator()(N a, N b) const { \
      return EXPR;                                  \
    }                                               \
  };
#define WIDE3(NAME, EXPR)                                \
  struct NAME {                                          \
    template <class N>                                   \
    NEURON_INLINE auto operator()(N a, N b, N c) const { \
      return EXPR;                                       \
    }                                                    \
  };
using U = uint32_t;
using I = int32_t;

inline float bf16(float f) {
  const uint32_t b = to_bits(f), rounded = (b + 0x7fffu + (b >> 16 & 1)) & 0xffff0000u;
  return from_bits(f != f ? (b | 0x400000u) & 0xffff0000u : rounded);
}
inline int32_t integer(float f) {  // as x86 converts
  const bool fits = f >= -2147483648.0f && f < 2147483648.0f;
  const int32_t i = static_cast<int32_t>(fits ? f : 0.0f);
  return fits ? i : INT32_MIN;
}
inline int32_t quotient(int32_t a, int32_t b) { return b == -1 ? static_cast<int32_t>(0u - static_cast<U>(a)) : a / b; }
inline int32_t rest(int32_t a, int32_t b) { return b == -1 ? 0 : a % b; }

// One NaN for all: which of two NaNs an addition hands on depends on the order that the compiler gives its operands,
// and so on the form of the loop.
template <class N>
NEURON_INLINE N one_nan(N r) {
#ifdef __FMA__
  if constexpr (!std::is_same_v<N, float>) {
    if (any_nan(r)) [[unlikely]]
      r = math::select(r == r, r, N(from_bits(0x7fc00000u)));
    return r;
  }
#endif
  return math::select(r == r, r, N(from_bits(0x7fc00000u)));
}

F1(copy, U, a)
WIDE2(add, one_nan(a + b))
WIDE2(sub, one_nan(a - b))
WIDE2(mul, one_nan(a* b))
WIDE2(div, one_nan(a / b))
WIDE2(maximum, math::select(a != a, a, math::greatest(a, b)))
WIDE2(minimum, math::select(a != a, a, math::least(a, b)))
WIDE2(fmax, math::select(b != b, a, math::greatest(a, b)))
WIDE2(fmin, math::select(b != b, a, math::least(a, b)))
WIDE2(pow, one_nan(math::pow(a, b)))
WIDE2(fmod, one_nan(math::fmod(a, b)))
WIDE2(remainder, one_nan(math::remainder(a, b)))
WIDE2(floor_div, one_nan(math::floor_divide(a, b)))
WIDE2(atan2, one_nan(math::atan2(a, b)))
WIDE2(copysign, math::with_sign_of(a, b))
WIDE2(eq, a == b)
WIDE2(ne, a != b)
WIDE2(lt, a < b)
WIDE2(le, a <= b)
WIDE2(gt, a > b)
WIDE2(ge, a >= b)
F2(iadd, U, a + b)
F2(isub, U, a - b)
F2(imul, U, a* b)
WIDE2(imaximum, math::greatest(a, b))
WIDE2(iminimum, math::least(a, b))
F2(ieq, I, a == b)
F2(ine, I, a != b)
F2(ilt, I, a < b)
F2(ile, I, a <= b)
F2(igt, I, a > b)
F2(ige, I, a >= b)
F2(iand, U, a& b)
F2(ior, U, a | b)
F2(ixor, U, a ^ b)
WIDE3(select, math::select(a != 0u, b, c))
WIDE3(mul_add, one_nan(a* b + c))
WIDE3(mul_sub, one_nan(a* b - c))
WIDE3(mul_rsub, one_nan(c - a * b))
WIDE3(mul_mul, one_nan(a * b * c))
WIDE3(add_mul, one_nan((a + b) * c))
WIDE3(add_add, one_nan((a + b) + c))
WIDE3(sub_mul, one_nan((a - b) * c))
WIDE3(sub_add, one_nan((a - b) + c))
WIDE3(div_add, one_nan(c / (a + b)))
WIDE1(exp_neg, math::exp(-a))
WIDE2(exp_sub, math::exp(one_nan(a - b)))
WIDE2(swish, one_nan(a / (b + math::exp(-a))))
WIDE3(swish_mul, one_nan(a / (b + math::exp(-a)) * c))
WIDE1(neg, -a)
WIDE1(abs, math::magnitude(a))
F1(sign, float, static_cast<float>((a > 0.0f) - (a < 0.0f)))
WIDE1(sqrt, math::root(a))
WIDE1(rsqrt, 1.0f / math::root(a))
WIDE1(reciprocal, 1.0f / a)
WIDE1(exp, math::exp(a))
WIDE1(exp2, math::exp2(a))
WIDE1(expm1, math::expm1(a))
WIDE1(log, math::log(a))
WIDE1(log2, math::log2(a))
WIDE1(log10, math::log10(a))
WIDE1(log1p, math::log1p(a))
WIDE1(tanh, math::tanh(a))
WIDE1(sigmoid, math::sigmoid(a))
WIDE1(erf, math::erf(a))
WIDE1(sin, math::sin_any(a))
WIDE1(cos, math::cos_any(a))
WIDE1(tan, math::tan_any(a))
WIDE1(erfc, math::erfc(a))
WIDE1(asin, one_nan(math::asin(a)))
WIDE1(acos, one_nan(math::acos(a)))
WIDE1(atan, math::atan(a))
WIDE1(sinh, math::sinh(a))
WIDE1(cosh, math::cosh(a))
F1(floor, float, std::floor(a))
F1(ceil, float, std::ceil(a))
F1(trunc, float, std::trunc(a))
F1(round, float, std::nearbyint(a))
WIDE1(isnan, a != a)
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
WIDE1(nonzero, a != 0.0f)
F1(inonzero, I, a != 0)
F1(round_bf16, float, bf16(a))
WIDE1(round_f16, math::nearest_half(a))
F1(wrap_i8, I, static_cast<I>(static_cast<int8_t>(a)))
F1(wrap_u8, I, static_cast<I>(static_cast<uint8_t>(a)))
#undef WIDE1
#undef WIDE2
#undef WIDE3
#undef F1
#undef F2

// ---- random bits ---------------------------------------------------------------------------------------------------
// Philox 4x32-10 (Salmon et al., SC11). Counter: offset + i / 4; word i % 4 of its result.
constexpr uint64_t kPhiloxFactors[2] = {0xD2511F53u, 0xCD9E8D57u}, kPhiloxKeys[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int kPhiloxCounters = 8;
constexpr int kPhiloxRounds = 10;
struct PhiloxKeys {
  uint64_t k[kPhiloxRounds][2][4];  // of each round, repeated in the lanes of a vector
  explicit PhiloxKeys(const uint32_t* seed) {
    for (uint64_t r = 0; r < kPhiloxRounds; ++r)
      for (int i = 0; i < 2; ++i) std::fill_n(k[r][i], 4, (seed[i] + r * kPhiloxKeys[i]) & 0xffffffffu);
  }
};
// The words of kPhiloxCounters counters, the first of which is `counter`.
void philox(const PhiloxKeys& keys, uint64_t counter, uint32_t* words) {
#ifdef __AVX2__
  // 32-bit numbers in 64-bit lanes, whose upper halves do not matter: products are of lower halves.
  constexpr int kGroups = kPhiloxCounters / 4;
  auto all = [](uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); };
  const __m256i factor[2] = {all(kPhiloxFactors[0]), all(kPhiloxFactors[1])};
  __m256i w[4][kGroups];
  for (int g = 0; g < kGroups; ++g) {
    w[0][g] = _mm256_add_epi64(all(counter), _mm256_setr_epi64x(4 * g, 4 * g + 1, 4 * g + 2, 4 * g + 3));
    w[1][g] = _mm256_srli_epi64(w[0][g], 32);
    w[2][g] = w[3][g] = _mm256_setzero_si256();
  }
  for (const auto& k : keys.k) {
    const __m256i key[2] = {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(k[0])),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(k[1]))};
    for (int g = 0; g < kGroups; ++g) {
      const __m256i p0 = _mm256_mul_epu32(w[0][g], factor[0]), p1 = _mm256_mul_epu32(w[2][g], factor[1]);
      w[0][g] = _mm256_srli_epi64(p1, 32) ^ w[1][g] ^ key[0];
      w[1][g] = p1;
      w[2][g] = _mm256_srli_epi64(p0, 32) ^ w[3][g] ^ key[1];
      w[3][g] = p0;
    }
  }
  for (int g = 0; g < kGroups; ++g) {
    const __m256i a = _mm256_blend_epi32(w[0][g], _mm256_slli_epi64(w[1][g], 32), 0xaa),
                  b = _mm256_blend_epi32(w[2][g], _mm256_slli_epi64(w[3][g], 32), 0xaa);
    const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
    auto* to = reinterpret_cast<__m256i*>(words + 16 * g);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
  }
#else
  for (int l = 0; l < kPhiloxCounters; ++l) {
    const uint64_t at = counter + static_cast<uint64_t>(l);
    uint32_t c[4] = {static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), 0, 0};
    for (const auto& k : keys.k) {
      const uint64_t p0 = c[0] * kPhiloxFactors[0], p1 = c[2] * kPhiloxFactors[1];
      c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ static_cast<uint32_t>(k[0][0]);
      c[1] = static_cast<uint32_t>(p1);
      c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ static_cast<uint32_t>(k[1][0]);
      c[3] = static_cast<uint32_t>(p0);
    }
    std::copy(c, c + 4, words + 4 * l);
  }
#endif
}
void uniform_row(uint32_t* out, const uint32_t* seed, int64_t n, int64_t index) {
  const uint64_t offset = seed[2] | static_cast<uint64_t>(seed[3]) << 32;
  const PhiloxKeys keys(seed);
  constexpr int64_t kWords = 4 * kPhiloxCounters;
  const int64_t last = index + n;
  for (int64_t first = index / 4 * 4; first < last; first += kWords) {
    const uint64_t counter = offset + static_cast<uint64_t>(first / 4);
    if (first >= index && first + kWords <= last) {
      philox(keys, counter, out + (first - index));
    } else {
      uint32_t words[kWords];
      philox(keys, counter, words);
      const int64_t from = std::max(index, first), to = std::min(last, first + kWords);
      std::copy(words + (from - first), words + (to - first), out + (from - index));
    }
  }
}
void uniform_bits(void* out, const void* a, const void*, const void*, int, const LaneRows& rows) {
  for (int64_t r = 0; r < rows.rows; ++r)
    uniform_row(reinterpret_cast<uint32_t*>(static_cast<char*>(out) + r * rows.out_pitch),
                reinterpret_cast<const uint32_t*>(rows.input(0, a, r)), rows.n, rows.index + r * rows.n);
}

// ---- reductions ----------------------------------------------------------------------------------------------------
struct plus {
  template <class N>
  NEURON_INLINE N operator()(N a, N b) const {
    return a + b;
  }
};
#ifdef __FMA__
template <int By, class V, size_t... I>
NEURON_INLINE V rotate(V v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, ((I + By) % sizeof...(I))...);
}
// Folds a pack in halves to one lane.
template <class F, int Width = 0, class T, int K>
NEURON_INLINE T halves(const Pack<T, K>& p) {
  if constexpr (K > 1) {
    Pack<T, K / 2> a, b;
    for (int k = 0; k < K / 2; ++k) a.v[k] = p.v[k], b.v[k] = p.v[K / 2 + k];
    return halves<F>(F{}(a, b));
  } else if constexpr (Width == 1) {
    return p.v[0][0];
  } else {
    constexpr int kHalf = (Width ? Width : kVectorLanes) / 2;
    Pack<T, 1> b;
    b.v[0] = rotate<kHalf>(p.v[0], std::make_index_sequence<kVectorLanes>{});
    return halves<F, kHalf>(F{}(p, b));
  }
}
#endif
// 32 running lanes, folded in halves: one tree for every width of the machine's vectors.
template <class T, class F>
NEURON_INLINE T fold_row(const T* x, int64_t n, T identity) {
  int64_t i = 0;
#ifdef __FMA__
  using P = Pack<T, 32 / kVectorLanes>;
  P total = identity;
  for (; i + 32 <= n; i += 32) total = F{}(total, P::load(x + i));
  if (i < n) {
    T rest[32];
    std::fill(std::copy(x + i, x + n, rest), rest + 32, identity);
    total = F{}(total, P::load(rest));
  }
  T result = halves<F>(total);
#else
  T lane[32];
  for (T& l : lane) l = identity;
  for (; i + 32 <= n; i += 32)
    for (int j = 0; j < 32; ++j) lane[j] = F{}(lane[j], x[i + j]);
  for (int j = 0; i + j < n; ++j) lane[j] = F{}(lane[j], x[i + j]);
  for (int width = 16; width; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] = F{}(lane[j], lane[j + width]);
  T result = lane[0];
#endif
  if constexpr (std::is_same_v<T, float>) result = one_nan(result);
  return result;
}
template <class T, class F>
void fold(void* out, const void* a, int64_t n, int64_t rows, int64_t pitch, T identity) {
  for (int64_t r = 0; r < rows; ++r)
    static_cast<T*>(out)[r] =
        fold_row<T, F>(reinterpret_cast<const T*>(static_cast<const char*>(a) + r * pitch), n, identity);
}

// ---- tables --------------------------------------------------------------------------------------------------------
template <Lane L>
using Type = std::conditional_t<L == Lane::f32, float, std::conditional_t<L == Lane::i32, int32_t, uint32_t>>;

LaneKernels make() {
  LaneKernels k{};
  auto set = [&](LaneOp op, LaneKernels::Map f) { k.map[static_cast<int>(op)] = f; };
  auto reduce = [&](LaneOp op, LaneKernels::Reduce f) { k.reduce[static_cast<int>(op)] = f; };
#ifdef __AVX512F__
#define CALL(...) call<__VA_ARGS__>
#else
#define CALL(...) nullptr
#endif
#define FUNCTION(NAME) Type<info(LaneOp::NAME).in>, Type<info(LaneOp::NAME).out>, NAME, info(LaneOp::NAME).inputs
#define OP(NAME)                          \
  set(LaneOp::NAME, map<FUNCTION(NAME)>); \
  k.call[static_cast<int>(LaneOp::NAME)] = CALL(FUNCTION(NAME));
  // clang-format off
  OP(copy) OP(exp) OP(log) OP(tanh) OP(sigmoid) OP(erf) OP(select) OP(add) OP(sub) OP(mul) OP(div) OP(maximum) OP(minimum) OP(fmax) OP(fmin) OP(pow) OP(fmod) OP(remainder)
  OP(floor_div) OP(atan2) OP(copysign) OP(eq) OP(ne) OP(lt) OP(le) OP(gt) OP(ge) OP(iadd) OP(isub) OP(imul) OP(imaximum)
  OP(iminimum) OP(ieq) OP(ine) OP(ilt) OP(ile) OP(igt) OP(ige) OP(iand) OP(ior) OP(ixor) OP(neg) OP(abs) OP(sign)
  OP(sqrt) OP(rsqrt) OP(reciprocal) OP(exp2) OP(expm1) OP(log2) OP(log10) OP(log1p) OP(sin) OP(cos) OP(tan)
  OP(erfc) OP(asin) OP(acos) OP(atan) OP(sinh) OP(cosh) OP(floor) OP(ceil) OP(trunc) OP(round)
  OP(mul_add) OP(mul_sub) OP(mul_rsub) OP(mul_mul) OP(add_mul) OP(add_add) OP(sub_mul) OP(sub_add) OP(div_add) OP(exp_neg) OP(exp_sub) OP(swish) OP(swish_mul)
  OP(isnan) OP(isinf) OP(ineg) OP(iabs) OP(isign) OP(inot) OP(iszero) OP(iremainder) OP(ifmod) OP(ifloor_div)
  OP(itrunc_div) OP(to_float) OP(to_int) OP(nonzero) OP(inonzero) OP(round_bf16) OP(round_f16) OP(wrap_i8) OP(wrap_u8)
  // clang-format on
#undef OP
#undef FUNCTION
#undef CALL
                                      set(LaneOp::uniform_bits, uniform_bits);
  reduce(LaneOp::sum, [](void* o, const void* a, int64_t n, int64_t rows, int64_t pitch) {
    fold<float, plus>(o, a, n, rows, pitch, std::bit_cast<float>(reduction(LaneOp::sum).identity));
  });
  reduce(LaneOp::amax, [](void* o, const void* a, int64_t n, int64_t rows, int64_t pitch) {
    fold<float, maximum>(o, a, n, rows, pitch, std::bit_cast<float>(reduction(LaneOp::amax).identity));
  });
  reduce(LaneOp::amin, [](void* o, const void* a, int64_t n, int64_t rows, int64_t pitch) {
    fold<float, minimum>(o, a, n, rows, pitch, std::bit_cast<float>(reduction(LaneOp::amin).identity));
  });
  reduce(LaneOp::iamax, [](void* o, const void* a, int64_t n, int64_t rows, int64_t pitch) {
    fold<int32_t, imaximum>(o, a, n, rows, pitch, std::bit_cast<int32_t>(reduction(LaneOp::iamax).identity));
  });
  reduce(LaneOp::iamin, [](void* o, const void* a, int64_t n, int64_t rows, int64_t pitch) {
    fold<int32_t, iminimum>(o, a, n, rows, pitch, std::bit_cast<int32_t>(reduction(LaneOp::iamin).identity));
  });
  return k;
}

}  // namespace

const LaneKernels& lane_table() {
  static const LaneKernels k = make();
  return k;
}

}  // namespace neuron::NEURON_LEVEL
