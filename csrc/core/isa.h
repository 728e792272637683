// The instruction set: THE table. Validation, executor, clock, disassembler, front end and documentation read it.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dtype.h"

namespace neuron {

// Values of the enumerations are those of the public NKI API where it has them.
enum class Engine : uint8_t { unknown, tensor, scalar, gpsimd, dma, vector, sync, count };
inline constexpr std::array<std::string_view, static_cast<int>(Engine::count)> kEngineNames = {
    "unknown", "tensor", "scalar", "gpsimd", "dma", "vector", "sync"};

enum class Memory : uint8_t { hbm, shared_hbm, sbuf, psum, count };
inline constexpr std::array<std::string_view, static_cast<int>(Memory::count)> kMemoryNames = {"hbm", "shared_hbm",
                                                                                               "sbuf", "psum"};
constexpr bool on_chip(Memory m) { return m == Memory::sbuf || m == Memory::psum; }

inline constexpr int64_t kPartitions = 128;
inline constexpr int64_t kPsumBanks = 8;
inline constexpr int64_t kPsumBankBytes = 2048;  // per partition
inline constexpr int64_t kPsumBytes = kPsumBanks * kPsumBankBytes;

// MX scales: one row for 8 partitions of data (a group), packed at the head of each 32 partitions, dense for data of up
// to 32 partitions.
constexpr int64_t scale_row(int64_t partitions, int64_t group) {
  return partitions > 32 ? 32 * (group / 4) + group % 4 : group;
}

// ---- arithmetic and logic ------------------------------------------------------------------------------------------
enum class AluClass : uint8_t { arithmetic, bitwise, extension };

// name, class, number of inputs, identity of a reduction (NaN: not a reduction)
#define NEURON_ALU_OPS(X)                              \
  X(bypass, arithmetic, 1, NAN)                        \
  X(add, arithmetic, 2, 0.0)                           \
  X(subtract, arithmetic, 2, 0.0)                      \
  X(multiply, arithmetic, 2, 1.0)                      \
  X(maximum, arithmetic, 2, -INFINITY)                 \
  X(minimum, arithmetic, 2, INFINITY)                  \
  X(equal, arithmetic, 2, NAN)                         \
  X(not_equal, arithmetic, 2, NAN)                     \
  X(greater, arithmetic, 2, NAN)                       \
  X(greater_equal, arithmetic, 2, NAN)                 \
  X(less, arithmetic, 2, NAN)                          \
  X(less_equal, arithmetic, 2, NAN)                    \
  X(logical_and, arithmetic, 2, 1.0)                   \
  X(logical_or, arithmetic, 2, 0.0)                    \
  X(logical_xor, arithmetic, 2, 0.0)                   \
  X(logical_not, arithmetic, 1, NAN)                   \
  X(power, arithmetic, 2, NAN)                         \
  X(abs_max, arithmetic, 2, 0.0)                       \
  X(abs_min, arithmetic, 2, INFINITY)                  \
  X(abs, arithmetic, 1, NAN)                           \
  X(square, arithmetic, 1, NAN)                        \
  X(relu, arithmetic, 1, NAN)                          \
  X(rsqrt, arithmetic, 1, NAN)                         \
  X(reciprocal, arithmetic, 1, NAN)                    \
  X(bitwise_and, bitwise, 2, -1.0)                     \
  X(bitwise_or, bitwise, 2, 0.0)                       \
  X(bitwise_xor, bitwise, 2, 0.0)                      \
  X(left_shift, bitwise, 2, NAN)                       \
  X(right_shift, bitwise, 2, NAN)                      \
  X(invert, bitwise, 1, NAN)                           \
  /* what PyTorch and nl.* say and the ISA does not */ \
  X(divide, extension, 2, NAN)                         \
  X(mod, extension, 2, NAN)                            \
  X(fmod, extension, 2, NAN)                           \
  X(average, extension, 2, 0.0)

enum class AluOp : uint8_t {
#define X(name, cls, inputs, identity) name,
  NEURON_ALU_OPS(X)
#undef X
      count,
};
struct AluInfo {
  std::string_view name;
  AluClass cls;
  uint8_t inputs;
  double identity;
};
inline constexpr int kAluOps = static_cast<int>(AluOp::count);
extern const std::array<AluInfo, kAluOps> kAluTable;
inline const AluInfo& info(AluOp op) { return kAluTable[static_cast<int>(op)]; }

// ---- activation functions of ScalarE (name, extension?) ------------------------------------------------------------
#define NEURON_FUNCTIONS(X)       \
  X(copy, false)                  \
  X(square, false)                \
  X(sigmoid, false)               \
  X(relu, false)                  \
  X(prelu, false)                 \
  X(gelu, false)                  \
  X(gelu_dx, false)               \
  X(gelu_apprx_tanh, false)       \
  X(gelu_apprx_sigmoid, false)    \
  X(gelu_apprx_sigmoid_dx, false) \
  X(silu, false)                  \
  X(silu_dx, false)               \
  X(tanh, false)                  \
  X(softplus, false)              \
  X(mish, false)                  \
  X(erf, false)                   \
  X(erf_dx, false)                \
  X(exp, false)                   \
  X(log, false)                   \
  X(sin, false)                   \
  X(arctan, false)                \
  X(sqrt, false)                  \
  X(rsqrt, false)                 \
  X(reciprocal, false)            \
  X(sign, false)                  \
  X(abs, false)                   \
  X(logical_not, true)            \
  X(negative, true)               \
  X(sin_reduced, true)            \
  X(cos_reduced, true)            \
  X(tan_reduced, true)            \
  X(ceil, true)                   \
  X(floor, true)                  \
  X(trunc, true)

enum class Function : uint8_t {
#define X(name, extension) name,
  NEURON_FUNCTIONS(X)
#undef X
      count,
};
struct FunctionInfo {
  std::string_view name;
  bool extension;
};
inline constexpr int kFunctions = static_cast<int>(Function::count);
extern const std::array<FunctionInfo, kFunctions> kFunctionTable;

enum class ReduceCmd : uint8_t { idle, reset, reduce, reset_reduce, load_reduce };
enum class OobMode : uint8_t { error, skip };
enum class DgeMode : uint8_t { unknown, swdge, hwdge, none };
enum class PerfMode : uint8_t { none, double_row };
// What a matmul does with what PSUM holds; automatic: the first write of an element since its tile was allocated
// overwrites, later ones add. quantize_mx: whether its scale's other rows become 0 (overwrite) or stay.
enum class Accumulate : uint8_t { overwrite, add, automatic };

// ---- instructions --------------------------------------------------------------------------------------------------
enum class Role : uint8_t {
  write,       // result
  read,        // input
  read_write,  // both: what the instruction leaves alone keeps its value
  scalar,      // a number, or a tile of one element per partition
  value,       // a number or a whole tile
  index,       // input of offsets
};

using MemorySet = uint8_t;
inline constexpr MemorySet kHbm = 1 << static_cast<int>(Memory::hbm) | 1 << static_cast<int>(Memory::shared_hbm);
inline constexpr MemorySet kSbuf = 1 << static_cast<int>(Memory::sbuf);
inline constexpr MemorySet kPsum = 1 << static_cast<int>(Memory::psum);
inline constexpr MemorySet kOnChip = kSbuf | kPsum;
constexpr bool contains(MemorySet set, Memory m) { return set >> static_cast<int>(m) & 1; }

struct OperandSpec {
  std::string_view name;
  Role role;
  MemorySet memories;
  DtypeSet types;
  int64_t max_free = 1 << 16;  // elements per partition
  bool optional = false;
};

// How operands' shapes agree.
enum class Shape : uint8_t {
  none,      // the instruction's own rule (checks in validate.cpp)
  same,      // partitions and elements per partition of every read, write and read_write operand agree
  elements,  // total number of elements agrees
  rows,      // partitions agree
};

// Whether partition i of the result depends on partition i of the inputs alone.
enum class Locality : uint8_t { row, tile, control };

// Formulas of the clock for what an instruction takes: cycles of its engine, or the DMA engines' time.
enum class CostModel : uint8_t { none, elements, matmul, transpose, gather, topk, dma };

// What a cost may depend on, with the words for it; the clock decides.
#define NEURON_COST_CONDITIONS(X)                            \
  X(on_vector, "on VectorE")                                 \
  X(on_scalar, "on ScalarE")                                 \
  X(on_gpsimd, "on GpSimdE")                                 \
  X(in_sbuf, "all in SBUF")                                  \
  X(inputs_in_sbuf, "inputs in SBUF")                        \
  X(psum_input, "an input in PSUM")                          \
  X(contiguous, "contiguous")                                \
  X(bf16, "all bfloat16")                                    \
  X(two_byte, "all bfloat16 or float16")                     \
  X(fp32_moving, "float32")                                  \
  X(transposes, "transpose mode")                            \
  X(additive, "op0 add, subtract or multiply")               \
  X(add_or_maximum, "op0 add or maximum")                    \
  X(subtract_multiply, "op0 subtract, op1 multiply, N even") \
  X(rsqrt, "op0 or op1 rsqrt")                               \
  X(zero, "value 0")                                         \
  X(reduces, "with reduce_res")                              \
  X(sbuf_to_sbuf, "SBUF to SBUF")                            \
  X(sums_in_sbuf, "dst in SBUF, all bfloat16 or all float32")

enum class Condition : uint8_t {
#define X(name, words) name,
  NEURON_COST_CONDITIONS(X)
#undef X
      count,
};
extern const std::array<std::string_view, static_cast<int>(Condition::count)> kConditionWords;

using ConditionSet = uint32_t;
template <class... T>
constexpr ConditionSet when(T... c) {
  return ((1u << static_cast<int>(c)) | ...);
}

struct Cost {
  CostModel model = CostModel::none;
  double fixed = 0;        // cycles beside the elements
  double per_element = 1;  // cycles per element of a partition; a factor of the other models
  std::string_view source;
  ConditionSet conditions = 0;  // all hold
  int since = 2;                // generation
};

using EngineSet = uint8_t;
template <class... T>
constexpr EngineSet engines(T... e) {
  return ((1 << static_cast<int>(e)) | ...);
}

// Rules beyond operands and shapes, each with its check in validate.cpp.
enum Rule : uint32_t {
  kOnePsumInput = 1,         // of a two-input VectorE instruction
  kBitwiseOrArithmetic = 2,  // op0 and op1 of one class; bitwise on integers
  kArithmeticOnly = 4,
  kSameDtype = 8,  // every tile operand without an index role
};

enum class Opcode : uint8_t {
  dma_copy,
  dma_compute,
  dma_transpose,
  tensor_copy,
  memset,
  tensor_copy_predicated,
  nc_matmul,
  nc_matmul_mx,
  nc_transpose,
  tensor_tensor,
  tensor_scalar,
  scalar_tensor_tensor,
  tensor_reduce,
  tensor_partition_reduce,
  tensor_scalar_reduce,
  tensor_scalar_cumulative,
  tensor_tensor_scan,
  activation,
  activate2,
  exponential,
  reciprocal,
  select_reduce,
  range_select,
  affine_select,
  iota,
  dropout,
  bn_stats,
  bn_aggr,
  max8,
  nc_find_index8,
  nc_match_replace8,
  nc_stream_shuffle,
  local_gather,
  nc_n_gather,
  nonzero_with_count,
  sequence_bounds,
  topk,
  quantize_mx,
  rng,
  rand2,
  set_rng_seed,
  rand_set_state,
  rand_get_state,
  gather_flattened,
  sendrecv,
  core_barrier,
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  all_gather_v,
  all_to_all_v,
  collective_permute,
  register_move,
  register_load,
  register_store,
  loop_begin,
  loop_end,
  while_begin,
  while_end,
  allocate,
  count,
};
inline constexpr int kOpcodes = static_cast<int>(Opcode::count);

struct InstructionSpec {
  Opcode opcode;
  std::string_view name;
  EngineSet engines;  // the first of `prefer` that is in the set runs it when the kernel names none
  Engine prefer;
  int min_generation;  // 2: trn1, 3: trn2, 4: trn3
  Shape shape;
  Locality locality;
  uint32_t rules;
  std::vector<Cost> costs;  // the first that applies; the last always does
  std::vector<OperandSpec> operands;
  std::string_view semantics;
  bool extension = false;   // not in the public ISA
  bool rendezvous = false;  // needs other cores

  int operand_index(std::string_view operand) const;
};
const InstructionSpec& spec(Opcode opcode);
std::span<const InstructionSpec> all_instructions();

}  // namespace neuron
