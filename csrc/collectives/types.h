// Data types, reductions and operations as collectives know them. No torch here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace neuron::collectives {

// X(name, bytes)
// clang-format off
#define NEURON_DATA_TYPES(X)                                                                                     \
  X(uint8, 1) X(int8, 1) X(bool8, 1) X(int16, 2) X(uint16, 2) X(int32, 4) X(uint32, 4) X(int64, 8) X(uint64, 8) \
  X(float16, 2) X(bfloat16, 2) X(float32, 4) X(float64, 8) X(complex64, 8) X(complex128, 16) X(opaque, 1)
// clang-format on

enum class DataType : uint8_t {
#define X(name, bytes) name,
  NEURON_DATA_TYPES(X)
#undef X
};

inline size_t size_of(DataType t) {
  static constexpr size_t sizes[] = {
#define X(name, bytes) bytes,
      NEURON_DATA_TYPES(X)
#undef X
  };
  return sizes[static_cast<size_t>(t)];
}

// Names of values that a peer sent, which may be none of ours.
template <class E, size_t n>
const char* name_in(const char* const (&names)[n], E value) {
  return static_cast<size_t>(value) < n ? names[static_cast<size_t>(value)] : "unknown";
}

inline const char* name_of(DataType t) {
  static constexpr const char* names[] = {
#define X(name, bytes) #name,
      NEURON_DATA_TYPES(X)
#undef X
  };
  return name_in(names, t);
}

enum class Reduction : uint8_t { sum, avg, product, min, max, band, bor, bxor };
inline const char* name_of(Reduction r) {
  static constexpr const char* names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  return name_in(names, r);
}

enum class Kind : uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  barrier,
  send,
  recv
};
inline const char* name_of(Kind k) {
  static constexpr const char* names[] = {"all_reduce",     "reduce",     "broadcast", "all_gather",
                                          "reduce_scatter", "all_to_all", "gather",    "scatter",
                                          "barrier",        "send",       "recv"};
  return name_in(names, k);
}

// What the ranks of a collective must agree on.
struct Signature {
  Kind kind = Kind::barrier;
  DataType dtype = DataType::opaque;
  Reduction reduction = Reduction::sum;
  int32_t root = -1;   // rank of the group, or -1; the peer for send and recv
  uint64_t count = 0;  // elements: of the whole buffer, or of each rank's part
  bool operator==(const Signature&) const = default;
};

}  // namespace neuron::collectives
