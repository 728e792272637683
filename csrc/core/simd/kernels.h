// Vector kernels, compiled once per instruction-set level (see CMakeLists.txt) and chosen at run time.
// Lanes are fp32 or 32-bit integers in contiguous buffers; strides are in bytes.
#pragma once
#include <array>
#include <cstdint>

#include "../isa.h"

namespace neuron {

struct Kernels {
  const char* name;
  using Load = void (*)(const char* from, int64_t stride, int64_t n, float* to);
  using Store = void (*)(const float* from, int64_t n, char* to, int64_t stride);
  using LoadInt = void (*)(const char* from, int64_t stride, int64_t n, int32_t* to);
  using StoreInt = void (*)(const int32_t* from, int64_t n, char* to, int64_t stride);
  // out[i] = a[i * sa] op b[i * sb], sa and sb in {0, 1}
  using Binary = void (*)(const float* a, int sa, const float* b, int sb, float* out, int64_t n);
  using BinaryInt = void (*)(const int32_t* a, int sa, const int32_t* b, int sb, int32_t* out, int64_t n);
  using Unary = void (*)(const float* in, float parameter, float* out, int64_t n);
  // The tree depends on n alone: 32 running lanes, folded in halves.
  using Reduce = float (*)(const float* in, int64_t n);

  std::array<Load, kDtypes> load;
  std::array<Store, kDtypes> store;
  std::array<LoadInt, kDtypes> load_int;
  std::array<StoreInt, kDtypes> store_int;
  std::array<Binary, kAluOps> binary;
  std::array<BinaryInt, kAluOps> binary_int;
  std::array<BinaryInt, kAluOps> binary_uint;  // where the sign matters: comparison, shift, maximum
  std::array<Reduce, kAluOps> reduce;
  std::array<Unary, kFunctions> function;
  // out[i] = function(in[i] * scale + bias) unless out is null; the sum as `reduce` adds it. Null: not for this
  // function. What is neither scaled nor shifted keeps its bits, the sign of 0 too.
  using Summed = float (*)(const float* in, float scale, float bias, float* out, int64_t n);
  std::array<Summed, kFunctions> summed;
  // out[i] = (a[i] op b[i * sb]) op2 c[i * sc], each operator rounded; reversed: c op2 (a op b). Null: not for these.
  using Chain = void (*)(const float* a, const float* b, int sb, const float* c, int sc, float* out, int64_t n);
  std::array<std::array<std::array<Chain, 2>, kAluOps>, kAluOps> chain;  // [op][op2][reversed]
  // out[i] = ((a[i] op b[i * sb]) op2 c[i * sc]) op3 d[i * sd]. Null: not for these.
  using Chain3 = void (*)(const float* a, const float* b, int sb, const float* c, int sc, const float* d, int sd,
                          float* out, int64_t n);
  std::array<std::array<std::array<Chain3, kAluOps>, kAluOps>, kAluOps> chain3;
  // out[i] = a[i] op b[i * sb]; gives the sum of function(out[i]) as `reduce` adds it. Null: not for these.
  using BinarySum = float (*)(const float* a, const float* b, int sb, float* out, int64_t n);
  std::array<std::array<BinarySum, kFunctions>, kAluOps> binary_sum;                // [op][function]
  void (*affine)(const float* in, float scale, float bias, float* out, int64_t n);  // in * scale + bias, two roundings

  // to[c][r] = from[r][c] for elements of 4, 2 or 1 bytes; pitches in bytes.
  void (*transpose)(const char* from, int64_t from_pitch, char* to, int64_t to_pitch, int64_t rows, int64_t columns,
                    int64_t item);

  // c[m, n] (+)= sum over k of a[k, m] * b[k, n], k in order. a and b are packed in panels of tile_m and tile_n columns
  // (panel j holds k rows of tile columns, zero-padded); c has row stride ldc in elements.
  int64_t tile_m, tile_n;
  void (*gemm)(const float* a, const float* b, int64_t k, int64_t m, int64_t n, float* c, int64_t ldc, bool add);
  // The same of bfloat16 factors, whose elements are pairs of rows (the first in the low half); null: not on this
  // machine. The second product of a pair is added first; denormal factors count as 0.
  void (*gemm_bf16)(const uint32_t* a, const uint32_t* b, int64_t k, int64_t m, int64_t n, float* c, int64_t ldc,
                    bool add);
};

const Kernels& kernels();  // the best the machine has; NEURON_SIMD=baseline|avx2|avx512 chooses lower

}  // namespace neuron
