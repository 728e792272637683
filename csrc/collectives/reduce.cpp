#include "reduce.h"

#include <algorithm>
#include <array>
#include <complex>
#include <cstring>
#include <type_traits>

// The same loops compiled for several instruction sets; the loader picks one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define NEURON_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define NEURON_CLONES
#endif

namespace neuron::collectives {

namespace {

constexpr size_t kBlock = 2048;  // elements that stay in the first-level cache while the sources pass

struct bfloat16 {
  uint16_t bits;
};
using float16 = _Float16;
struct bool8 {
  uint8_t value;
};

inline float to_accumulator(bfloat16 v) {
  uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline float to_accumulator(float16 v) { return static_cast<float>(v); }
inline bool to_accumulator(bool8 v) { return v.value != 0; }
template <class T>
inline T to_accumulator(T v) {
  return v;
}

inline void from_accumulator(float v, bfloat16& out) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  out.bits = static_cast<uint16_t>(v != v ? (bits >> 16) | 0x40 : rounded);
}
inline void from_accumulator(float v, float16& out) { out = static_cast<float16>(v); }
inline void from_accumulator(bool v, bool8& out) { out.value = v; }
template <class T>
inline void from_accumulator(T v, T& out) {
  out = v;
}

template <class A>
struct Sum {
  static A apply(A a, A b) {
    if constexpr (std::is_same_v<A, bool>)
      return a || b;
    else if constexpr (std::is_integral_v<A>)
      return static_cast<A>(static_cast<std::make_unsigned_t<A>>(a) + static_cast<std::make_unsigned_t<A>>(b));
    else
      return a + b;
  }
};
template <class A>
struct Product {
  static A apply(A a, A b) {
    if constexpr (std::is_same_v<A, bool>) return a && b;
    // 64 bits: what 16-bit factors are promoted to must not overflow as signed.
    else if constexpr (std::is_integral_v<A>)
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    else
      return a * b;
  }
};
template <class A>
struct Min {
  static A apply(A a, A b) { return (b < a || b != b) ? b : a; }  // NaN wins
};
template <class A>
struct Max {
  static A apply(A a, A b) { return (a < b || b != b) ? b : a; }
};
template <class A>
struct And {
  static A apply(A a, A b) { return static_cast<A>(a & b); }
};
template <class A>
struct Or {
  static A apply(A a, A b) { return static_cast<A>(a | b); }
};
template <class A>
struct Xor {
  static A apply(A a, A b) { return static_cast<A>(a ^ b); }
};

template <class A>
inline A divide(A v, int by) {
  if constexpr (std::is_same_v<A, bool>)
    return v;
  else if constexpr (std::is_integral_v<A>)
    return static_cast<A>(v / static_cast<A>(by));
  else
    return v / static_cast<A>(static_cast<float>(by));
}

template <class T, template <class> class F>
inline __attribute__((always_inline)) void kernel(void* dst, const void* const* sources, int n, size_t count, int by) {
  using A = decltype(to_accumulator(std::declval<T>()));
  A acc[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t m = std::min(kBlock, count - begin);
    auto source = [&](int s) { return static_cast<const T*>(sources[s]) + begin; };
    const T *first = source(0), *second = n > 1 ? source(1) : nullptr;
    if (n == 1)
      for (size_t i = 0; i < m; i++) acc[i] = to_accumulator(first[i]);
    else
      for (size_t i = 0; i < m; i++) acc[i] = F<A>::apply(to_accumulator(first[i]), to_accumulator(second[i]));
    int s = 2;
    for (; s + 1 < n; s += 2) {  // two in a pass over the accumulators
      const T *a = source(s), *b = source(s + 1);
      for (size_t i = 0; i < m; i++)
        acc[i] = F<A>::apply(F<A>::apply(acc[i], to_accumulator(a[i])), to_accumulator(b[i]));
    }
    if (s < n) {
      const T* a = source(s);
      for (size_t i = 0; i < m; i++) acc[i] = F<A>::apply(acc[i], to_accumulator(a[i]));
    }
    T* out = static_cast<T*>(dst) + begin;
    if (by != 1) {
      for (size_t i = 0; i < m; i++) acc[i] = divide(acc[i], by);
    }
    for (size_t i = 0; i < m; i++) from_accumulator(acc[i], out[i]);
  }
}

using Kernel = void (*)(void*, const void* const*, int, size_t, int);

// target_clones wants ordinary functions: one for each pair of type and reduction.
#define NEURON_KERNEL(type, functor)                                                                         \
  NEURON_CLONES void reduce_##type##_##functor(void* d, const void* const* s, int n, size_t count, int by) { \
    kernel<type, functor>(d, s, n, count, by);                                                               \
  }
#define NEURON_ARITHMETIC(type) NEURON_KERNEL(type, Sum) NEURON_KERNEL(type, Product)
#define NEURON_ORDERED(type) NEURON_ARITHMETIC(type) NEURON_KERNEL(type, Min) NEURON_KERNEL(type, Max)
#define NEURON_BITS(type) NEURON_ORDERED(type) NEURON_KERNEL(type, And) NEURON_KERNEL(type, Or) NEURON_KERNEL(type, Xor)

using uint8 = uint8_t;
using int8 = int8_t;
using int16 = int16_t;
using uint16 = uint16_t;
using int32 = int32_t;
using uint32 = uint32_t;
using int64 = int64_t;
using uint64 = uint64_t;
using float32 = float;
using float64 = double;
using complex64 = std::complex<float>;
using complex128 = std::complex<double>;

NEURON_BITS(uint8)
NEURON_BITS(int8)
NEURON_BITS(bool8)
NEURON_BITS(int16)
NEURON_BITS(uint16)
NEURON_BITS(int32)
NEURON_BITS(uint32)
NEURON_BITS(int64)
NEURON_BITS(uint64)
NEURON_ORDERED(float16)
NEURON_ORDERED(bfloat16)
NEURON_ORDERED(float32)
NEURON_ORDERED(float64)
NEURON_ARITHMETIC(complex64)
NEURON_ARITHMETIC(complex128)

// Columns in the order of Reduction.
#define ROW_ARITHMETIC(t) {reduce_##t##_Sum, reduce_##t##_Sum, reduce_##t##_Product}
#define ROW_ORDERED(t) {reduce_##t##_Sum, reduce_##t##_Sum, reduce_##t##_Product, reduce_##t##_Min, reduce_##t##_Max}
#define ROW_BITS(t)                                                            \
  {reduce_##t##_Sum, reduce_##t##_Sum, reduce_##t##_Product, reduce_##t##_Min, \
   reduce_##t##_Max, reduce_##t##_And, reduce_##t##_Or,      reduce_##t##_Xor}

// Rows in the order of DataType.
constexpr std::array<std::array<Kernel, 8>, 16> kKernels = {{
    ROW_BITS(uint8),
    ROW_BITS(int8),
    ROW_BITS(bool8),
    ROW_BITS(int16),
    ROW_BITS(uint16),
    ROW_BITS(int32),
    ROW_BITS(uint32),
    ROW_BITS(int64),
    ROW_BITS(uint64),
    ROW_ORDERED(float16),
    ROW_ORDERED(bfloat16),
    ROW_ORDERED(float32),
    ROW_ORDERED(float64),
    ROW_ARITHMETIC(complex64),
    ROW_ARITHMETIC(complex128),
    {},
}};

Kernel find(DataType dtype, Reduction op) { return kKernels[static_cast<size_t>(dtype)][static_cast<size_t>(op)]; }

}  // namespace

bool reducible(DataType dtype, Reduction op) { return find(dtype, op) != nullptr; }

void reduce(void* dst, const void* const* sources, int n, size_t count, DataType dtype, Reduction op,
            int average_over) {
  find(dtype, op)(dst, sources, n, count, op == Reduction::avg ? average_over : 1);
}

}  // namespace neuron::collectives
