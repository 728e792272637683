// Element types of the NeuronCore: one row per type, read by everything that needs a size, a name or a kind.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace neuron {

enum class Dtype : uint8_t {
  boolean,
  uint8,
  int8,
  uint16,
  int16,
  uint32,
  int32,
  float16,
  bfloat16,
  float32,
  tfloat32,
  float8_e4m3,
  float8_e4m3fn,
  float8_e5m2,
  float8_e8m0fnu,
  float8_e4m3fn_x4,
  float8_e5m2_x4,
  float4_e2m1fn_x4,
  count,
};

enum class Kind : uint8_t { integer, floating, packed };

struct DtypeInfo {
  std::string_view name;
  uint8_t size;  // bytes
  Kind kind;
  Dtype lane;  // of packed types: what each of the four lanes holds
};

inline constexpr int kDtypes = static_cast<int>(Dtype::count);
inline constexpr std::array<DtypeInfo, kDtypes> kDtypeTable = {{
    {"bool_", 1, Kind::integer, Dtype::boolean},
    {"uint8", 1, Kind::integer, Dtype::uint8},
    {"int8", 1, Kind::integer, Dtype::int8},
    {"uint16", 2, Kind::integer, Dtype::uint16},
    {"int16", 2, Kind::integer, Dtype::int16},
    {"uint32", 4, Kind::integer, Dtype::uint32},
    {"int32", 4, Kind::integer, Dtype::int32},
    {"float16", 2, Kind::floating, Dtype::float16},
    {"bfloat16", 2, Kind::floating, Dtype::bfloat16},
    {"float32", 4, Kind::floating, Dtype::float32},
    {"tfloat32", 4, Kind::floating, Dtype::tfloat32},
    {"float8_e4m3", 1, Kind::floating, Dtype::float8_e4m3},
    {"float8_e4m3fn", 1, Kind::floating, Dtype::float8_e4m3fn},
    {"float8_e5m2", 1, Kind::floating, Dtype::float8_e5m2},
    {"float8_e8m0fnu", 1, Kind::floating, Dtype::float8_e8m0fnu},
    {"float8_e4m3fn_x4", 4, Kind::packed, Dtype::float8_e4m3fn},
    {"float8_e5m2_x4", 4, Kind::packed, Dtype::float8_e5m2},
    {"float4_e2m1fn_x4", 2, Kind::packed, Dtype::float4_e2m1fn_x4},
}};

constexpr const DtypeInfo& info(Dtype t) { return kDtypeTable[static_cast<int>(t)]; }
constexpr int64_t size_of(Dtype t) { return info(t).size; }
constexpr bool is_integer(Dtype t) { return info(t).kind == Kind::integer; }
constexpr bool is_packed(Dtype t) { return info(t).kind == Kind::packed; }
constexpr bool is_32bit_integer(Dtype t) { return t == Dtype::int32 || t == Dtype::uint32; }

// Sets of types, as bit masks, for the instruction table.
using DtypeSet = uint32_t;
template <class... T>
constexpr DtypeSet dtypes(T... t) {
  return ((1u << static_cast<int>(t)) | ...);
}
constexpr bool contains(DtypeSet set, Dtype t) { return set >> static_cast<int>(t) & 1; }

}  // namespace neuron
