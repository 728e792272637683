// A pack: K vector registers of 32-bit lanes that go through a function together. The processor works on one while
// results of the others are under way; a function of one register alone waits for itself. Operators act lane by lane
// and round as those of float do, so a function template gives the same bits for float and for a pack. Only machines
// with vectors of fused multiply-adds have packs; elsewhere map_packs() goes lane by lane.
#pragma once
#include <algorithm>
#include <cstdint>

#ifdef __FMA__
#include <immintrin.h>
#endif

namespace neuron::NEURON_LEVEL {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
inline constexpr int kVectorLanes = kVectorBytes / 4;

#define NEURON_INLINE [[gnu::always_inline]] inline

#ifdef __FMA__
template <class T, int K>
struct Pack {
  typedef T Vec __attribute__((vector_size(kVectorBytes)));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  static constexpr int kLanes = K * kVectorLanes;
  Vec v[K];

  Pack() = default;
  // Register by register: GCC copies aggregates by way of memory.
  NEURON_INLINE Pack(const Pack& p) {
    for (int k = 0; k < K; ++k) v[k] = p.v[k];
  }
  NEURON_INLINE Pack& operator=(const Pack& p) {
    for (int k = 0; k < K; ++k) v[k] = p.v[k];
    return *this;
  }
  NEURON_INLINE Pack(T all) {
    for (Vec& x : v) x = all - Vec{};
  }
  NEURON_INLINE static Pack load(const void* from) {
    Pack p;
    for (int k = 0; k < K; ++k) p.v[k] = static_cast<const Unaligned*>(from)[k];
    return p;
  }
  NEURON_INLINE static Pack load(const T* from, int64_t n) {  // n lanes; the others are 0
    T lanes[kLanes] = {};
    std::copy(from, from + n, lanes);
    return load(lanes);
  }
  NEURON_INLINE void store(void* to) const {
    for (int k = 0; k < K; ++k) static_cast<Unaligned*>(to)[k] = v[k];
  }
};
template <int K>
using Floats = Pack<float, K>;
template <int K>
using Bits = Pack<uint32_t, K>;
template <int K>
using Mask = Pack<int32_t, K>;  // of comparisons: all bits of a lane, or none

#define NEURON_BINARY(OP)                                                   \
  template <class T, int K>                                                 \
  NEURON_INLINE Pack<T, K> operator OP(Pack<T, K> a, const Pack<T, K>& b) { \
    for (int k = 0; k < K; ++k) a.v[k] = a.v[k] OP b.v[k];                  \
    return a;                                                               \
  }                                                                         \
  template <class T, int K>                                                 \
  NEURON_INLINE Pack<T, K> operator OP(const Pack<T, K>& a, T b) {          \
    return a OP Pack<T, K>(b);                                              \
  }                                                                         \
  template <class T, int K>                                                 \
  NEURON_INLINE Pack<T, K> operator OP(T a, const Pack<T, K>& b) {          \
    return Pack<T, K>(a) OP b;                                              \
  }
NEURON_BINARY(+)
NEURON_BINARY(-)
NEURON_BINARY(*)
NEURON_BINARY(/)
NEURON_BINARY(&)
NEURON_BINARY(|)
NEURON_BINARY(^)
#undef NEURON_BINARY

#define NEURON_COMPARISON(OP)                                                   \
  template <class T, int K>                                                     \
  NEURON_INLINE Mask<K> operator OP(const Pack<T, K>& a, const Pack<T, K>& b) { \
    Mask<K> m;                                                                  \
    for (int k = 0; k < K; ++k) m.v[k] = a.v[k] OP b.v[k];                      \
    return m;                                                                   \
  }                                                                             \
  template <class T, int K>                                                     \
  NEURON_INLINE Mask<K> operator OP(const Pack<T, K>& a, T b) {                 \
    return a OP Pack<T, K>(b);                                                  \
  }
NEURON_COMPARISON(<)
NEURON_COMPARISON(>)
NEURON_COMPARISON(<=)
NEURON_COMPARISON(>=)
NEURON_COMPARISON(==)
NEURON_COMPARISON(!=)
#undef NEURON_COMPARISON

template <int K>
NEURON_INLINE Floats<K> operator-(Floats<K> a) {
  for (auto& x : a.v) x = -x;
  return a;
}
template <int K>
NEURON_INLINE Mask<K> operator!(Mask<K> a) {
  for (auto& x : a.v) x = ~x;
  return a;
}
template <int K>
NEURON_INLINE Bits<K> operator<<(Bits<K> a, int n) {
  for (auto& x : a.v) x <<= n;
  return a;
}

namespace math {

template <int K>
NEURON_INLINE Bits<K> to_bits(const Floats<K>& a) {
  Bits<K> b;
  for (int k = 0; k < K; ++k) b.v[k] = reinterpret_cast<typename Bits<K>::Vec>(a.v[k]);
  return b;
}
template <int K>
NEURON_INLINE Floats<K> from_bits(const Bits<K>& a) {
  Floats<K> b;
  for (int k = 0; k < K; ++k) b.v[k] = reinterpret_cast<typename Floats<K>::Vec>(a.v[k]);
  return b;
}
template <int K>
NEURON_INLINE Bits<K> shift_signed(Bits<K> a, int n) {
  for (auto& x : a.v) x = reinterpret_cast<typename Bits<K>::Vec>(reinterpret_cast<typename Mask<K>::Vec>(x) >> n);
  return a;
}
template <int K>
NEURON_INLINE Floats<K> signed_to_float(const Bits<K>& a) {
  Floats<K> r;
  for (int k = 0; k < K; ++k)
    r.v[k] = __builtin_convertvector(reinterpret_cast<typename Mask<K>::Vec>(a.v[k]), typename Floats<K>::Vec);
  return r;
}
template <class T, int K>
NEURON_INLINE Pack<T, K> select(const Mask<K>& m, Pack<T, K> a, const Pack<T, K>& b) {
  for (int k = 0; k < K; ++k) a.v[k] = m.v[k] ? a.v[k] : b.v[k];
  return a;
}
#ifdef __AVX512F__
#define NEURON_FLOATS(NAME, ...) _mm512_maskz_##NAME##_ps(0xffff, __VA_ARGS__)  // GCC 12 warns of the plain forms
#else
#define NEURON_FLOATS(NAME, ...) _mm256_##NAME##_ps(__VA_ARGS__)
#endif
template <int K>
NEURON_INLINE Floats<K> least(Floats<K> a, const Floats<K>& b) {
  for (int k = 0; k < K; ++k) a.v[k] = NEURON_FLOATS(min, a.v[k], b.v[k]);
  return a;
}
template <int K>
NEURON_INLINE Floats<K> greatest(Floats<K> a, const Floats<K>& b) {
  for (int k = 0; k < K; ++k) a.v[k] = NEURON_FLOATS(max, a.v[k], b.v[k]);
  return a;
}
template <int K>
NEURON_INLINE Mask<K> least(Mask<K> a, const Mask<K>& b) {
  for (int k = 0; k < K; ++k) a.v[k] = a.v[k] < b.v[k] ? a.v[k] : b.v[k];
  return a;
}
template <int K>
NEURON_INLINE Mask<K> greatest(Mask<K> a, const Mask<K>& b) {
  for (int k = 0; k < K; ++k) a.v[k] = a.v[k] > b.v[k] ? a.v[k] : b.v[k];
  return a;
}
template <int K>
NEURON_INLINE Floats<K> root(Floats<K> a) {
  for (int k = 0; k < K; ++k) a.v[k] = NEURON_FLOATS(sqrt, a.v[k]);
  return a;
}
template <int K>
NEURON_INLINE Floats<K> floor(Floats<K> a) {
#ifdef __AVX512F__
  for (auto& x : a.v) x = _mm512_maskz_roundscale_ps(0xffff, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  for (auto& x : a.v) x = _mm256_floor_ps(x);
#endif
  return a;
}
template <int K>
NEURON_INLINE Floats<K> mad(Floats<K> a, const Floats<K>& b, const Floats<K>& c) {
  for (int k = 0; k < K; ++k) a.v[k] = NEURON_FLOATS(fmadd, a.v[k], b.v[k], c.v[k]);
  return a;
}
#undef NEURON_FLOATS
#ifdef __AVX512F__
// a * 2^n, rounded once.
template <int K>
NEURON_INLINE Floats<K> times_power(Floats<K> a, const Floats<K>& n) {
  for (int k = 0; k < K; ++k) a.v[k] = _mm512_maskz_scalef_ps(0xffff, a.v[k], n.v[k]);
  return a;
}
#endif
// table[a & 15] of each lane.
template <int K>
NEURON_INLINE Floats<K> lookup(const float (&table)[16], const Bits<K>& a) {
  Floats<K> r;
  for (int k = 0; k < K; ++k) {
#ifdef __AVX512F__
    r.v[k] = _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(a.v[k]), _mm512_loadu_ps(table));
#else
    const auto i = reinterpret_cast<__m256i>(a.v[k]);
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), i),
                 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), i);
    r.v[k] = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
#endif
  }
  return r;
}
template <int K>
NEURON_INLINE bool any(const Mask<K>& a) {
  auto all = a.v[0];
  for (int k = 1; k < K; ++k) all |= a.v[k];
#ifdef __AVX512F__
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(all), reinterpret_cast<__m512i>(all));
#else
  return _mm256_movemask_ps(reinterpret_cast<__m256>(all));
#endif
}
// Converted to float16 and back.
template <int K>
NEURON_INLINE Floats<K> through_half(Floats<K> a) {
  for (int k = 0; k < K; ++k) {
#ifdef __AVX512F__
    a.v[k] = _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtps_ph(0xffff, a.v[k], _MM_FROUND_TO_NEAREST_INT));
#else
    a.v[k] = _mm256_cvtph_ps(_mm256_cvtps_ph(a.v[k], _MM_FROUND_TO_NEAREST_INT));
#endif
  }
  return a;
}
// f of each lane.
template <class F, int K, class... Rest>
NEURON_INLINE Floats<K> lane_by_lane(F f, const Floats<K>& a, const Rest&... rest) {
  constexpr int n = Floats<K>::kLanes;
  float lanes[sizeof...(Rest) + 1][n];
  int at = 0;
  a.store(lanes[at]);
  (rest.store(lanes[++at]), ...);
  for (int i = 0; i < n; ++i) {
    if constexpr (sizeof...(Rest) == 0)
      lanes[0][i] = f(lanes[0][i]);
    else
      lanes[0][i] = f(lanes[0][i], lanes[1][i]);
  }
  return Floats<K>::load(lanes[0]);
}
}  // namespace math

template <int K>
NEURON_INLINE bool any_nan(const Floats<K>& a) {
#ifdef __AVX512F__
  __mmask16 m = 0;
  for (int k = 0; k < K; k += 2) m |= _mm512_cmp_ps_mask(a.v[k], a.v[k + 1 < K ? k + 1 : k], _CMP_UNORD_Q);
  return m;
#else
  __m256 m = _mm256_setzero_ps();
  for (int k = 0; k < K; k += 2) m = _mm256_or_ps(m, _mm256_cmp_ps(a.v[k], a.v[k + 1 < K ? k + 1 : k], _CMP_UNORD_Q));
  return _mm256_movemask_ps(m);
#endif
}
#endif  // __FMA__

// out[i] = f(in[i]) by packs, the last of which may be partly filled. `out` may be `in`.
template <class F>
NEURON_INLINE void map_packs(const float* in, float* out, int64_t n, F f) {
#ifdef __FMA__
  using P = Floats<4>;
  int64_t i = 0;
  for (; i + P::kLanes <= n; i += P::kLanes) f(P::load(in + i)).store(out + i);
  if (i == n) return;
  float rest[P::kLanes];
  f(P::load(in + i, n - i)).store(rest);
  std::copy(rest, rest + (n - i), out + i);
#else
  for (int64_t i = 0; i < n; ++i) out[i] = f(in[i]);
#endif
}

}  // namespace neuron::NEURON_LEVEL
