#include "isa.h"

#include <cmath>

namespace neuron {

const std::array<AluInfo, kAluOps> kAluTable = {{
#define X(name, cls, inputs, identity) {#name, AluClass::cls, inputs, identity},
    NEURON_ALU_OPS(X)
#undef X
}};

const std::array<FunctionInfo, kFunctions> kFunctionTable = {{
#define X(name, extension) {#name, extension},
    NEURON_FUNCTIONS(X)
#undef X
}};

namespace {

using enum Dtype;
using enum Role;
using E = Engine;
using L = Locality;
using C = CostModel;

constexpr DtypeSet kAll = (1u << kDtypes) - 1;
constexpr DtypeSet kMx = dtypes(float8_e4m3fn_x4, float8_e5m2_x4, float4_e2m1fn_x4);
constexpr DtypeSet kPlain = kAll & ~kMx;
constexpr DtypeSet kInts = dtypes(boolean, uint8, int8, uint16, int16, uint32, int32);
constexpr DtypeSet kFp8 = dtypes(float8_e4m3, float8_e4m3fn, float8_e5m2);
constexpr DtypeSet kMatmulIn = kFp8 | dtypes(float16, bfloat16, float32, tfloat32);
constexpr DtypeSet kFp32 = dtypes(float32, tfloat32);
constexpr DtypeSet kScale = dtypes(uint8, float8_e8m0fnu);
constexpr DtypeSet kIndex16 = dtypes(uint16, int16);
constexpr DtypeSet kIndex32 = dtypes(uint32, int32);
constexpr EngineSet kV = engines(E::vector), kS = engines(E::scalar), kG = engines(E::gpsimd), kPE = engines(E::tensor),
                    kDma = engines(E::dma, E::sync, E::scalar, E::gpsimd, E::vector, E::tensor);
constexpr MemorySet kAnywhere = kHbm | kSbuf;

// Cycle figures: "Estimated instruction cost" of the NKI 2.26 stubs (reference: docs/isa.md).
// clang-format off
const std::vector<InstructionSpec> kInstructions = {
    {Opcode::dma_copy, "dma_copy", kDma, E::dma, 2, Shape::elements, L::row, 0, {C::dma},
     {{"dst", write, kAnywhere, kAll, INT64_MAX}, {"src", read, kAnywhere, kAll, INT64_MAX}},
     "dst = src in element order; differing dtypes go through fp32"},
    {Opcode::dma_compute, "dma_compute", kDma, E::dma, 2, Shape::none, L::tile, 0, {C::dma, 0, 2},
     {{"dst", read_write, kAnywhere, kPlain, INT64_MAX},
      {"src0", read, kAnywhere, kPlain, INT64_MAX},
      {"src1", read, kAnywhere, kPlain, INT64_MAX, true}},
     "dst = src0 + src1 in fp32 (one source: dst = src0); with an indirect dst rows of the same index add up"},
    {Opcode::dma_transpose, "dma_transpose", kDma, E::dma, 2, Shape::none, L::tile, kSameDtype, {C::dma, 0, 1 / 0.9},
     {{"dst", write, kAnywhere, kAll, INT64_MAX}, {"src", read, kAnywhere, kAll, INT64_MAX}},
     "dst = src with its axes permuted (src is given with the permuted pattern)"},
    {Opcode::tensor_copy, "tensor_copy", engines(E::vector, E::scalar, E::gpsimd), E::vector, 2, Shape::same, L::row, 0,
     {C::elements}, {{"dst", write, kOnChip, kAll}, {"src", read, kOnChip, kAll}},
     "dst = src; bit-exact for one dtype, else through fp32"},
    {Opcode::memset, "memset", engines(E::vector, E::gpsimd), E::vector, 2, Shape::none, L::row, 0, {C::elements},
     {{"dst", write, kOnChip, kAll}}, "dst = value"},
    {Opcode::tensor_copy_predicated, "tensor_copy_predicated", kV, E::vector, 2, Shape::same, L::row, kOnePsumInput,
     {C::two_inputs},
     {{"dst", read_write, kOnChip, kAll}, {"src", value, kOnChip, kAll}, {"predicate", read, kOnChip, kInts}},
     "dst = src where predicate is not zero (reverse: is zero); elsewhere dst keeps its value"},
    {Opcode::nc_matmul, "nc_matmul", kPE, E::tensor, 2, Shape::none, L::tile, 0, {C::matmul},
     {{"dst", read_write, kPsum, kAll, 8192},
      {"stationary", read, kSbuf, kMatmulIn | kInts, 256},
      {"moving", read, kSbuf, kMatmulIn | kInts, 16384}},
     "dst[m,n] (+)= sum over k of stationary[k,m] * moving[k,n], products and sums in fp32; transpose mode: "
     "moving passes bit by bit"},
    {Opcode::nc_matmul_mx, "nc_matmul_mx", kPE, E::tensor, 4, Shape::none, L::tile, 0, {C::matmul},
     {{"dst", read_write, kPsum, dtypes(float32, bfloat16), 8192},
      {"stationary", read, kSbuf, kMx, 128},
      {"moving", read, kSbuf, kMx, 8192},
      {"stationary_scale", read, kSbuf, kScale},
      {"moving_scale", read, kSbuf, kScale}},
     "dst[m,n] (+)= sum over k and the four lanes of value * 2^(scale-127) of both inputs"},
    {Opcode::nc_transpose, "nc_transpose", engines(E::tensor, E::vector), E::tensor, 2, Shape::none, L::tile, kSameDtype,
     {C::transpose}, {{"dst", write, kOnChip, kAll}, {"data", read, kOnChip, kAll, 128}}, "dst = data.T"},
    {Opcode::tensor_tensor, "tensor_tensor", engines(E::vector, E::gpsimd), E::vector, 2, Shape::same, L::row,
     kOnePsumInput, {C::two_inputs},
     {{"dst", write, kOnChip, kPlain}, {"data1", read, kOnChip, kPlain}, {"data2", read, kOnChip, kPlain}},
     "dst = data1 op0 data2 in fp32; 32-bit integers on GpSimdE exactly; bitwise on bit patterns"},
    {Opcode::tensor_scalar, "tensor_scalar", engines(E::vector, E::scalar, E::gpsimd), E::vector, 2, Shape::same, L::row,
     kBitwiseOrArithmetic, {C::elements},
     {{"dst", write, kOnChip, kPlain},
      {"data", read, kOnChip, kPlain},
      {"operand0", scalar, kOnChip, kPlain},
      {"operand1", scalar, kOnChip, kPlain, 1, true}},
     "dst = (data op0 operand0) op1 operand1"},
    {Opcode::scalar_tensor_tensor, "scalar_tensor_tensor", kV, E::vector, 2, Shape::same, L::row,
     kOnePsumInput | kArithmeticOnly, {C::elements, 0, 2},
     {{"dst", write, kOnChip, kPlain},
      {"data", read, kOnChip, kPlain},
      {"operand0", scalar, kOnChip, kPlain},
      {"operand1", read, kOnChip, kPlain}},
     "dst = (data op0 operand0) op1 operand1"},
    {Opcode::tensor_reduce, "tensor_reduce", kV, E::vector, 2, Shape::rows, L::row, 0, {C::elements},
     {{"dst", write, kOnChip, kPlain}, {"data", read, kOnChip, kPlain}},
     "dst[p,j] = op0 over the j-th run of data's row"},
    {Opcode::tensor_partition_reduce, "tensor_partition_reduce", kG, E::gpsimd, 2, Shape::none, L::tile, 0,
     {C::elements, 150}, {{"dst", write, kSbuf, kPlain}, {"data", read, kSbuf, kPlain}},
     "dst[0,j] = op0 over the partitions of data[:,j]"},
    {Opcode::tensor_scalar_reduce, "tensor_scalar_reduce", kV, E::vector, 2, Shape::same, L::row, kArithmeticOnly,
     {C::elements, 64},
     {{"dst", write, kOnChip, kPlain},
      {"data", read, kOnChip, kPlain},
      {"operand0", scalar, kOnChip, kPlain},
      {"reduce_res", write, kOnChip, kPlain, 1, true},
      {"reduce_init", scalar, kOnChip, kPlain, 1, true}},
     "dst = data op0 operand0; register = reduce_op(register, dst); reduce_res = register"},
    {Opcode::tensor_scalar_cumulative, "tensor_scalar_cumulative", kV, E::vector, 2, Shape::same, L::row,
     kArithmeticOnly, {C::elements, 0, 2},
     {{"dst", write, kOnChip, kPlain & ~kIndex32},
      {"src", read, kOnChip, kPlain & ~kIndex32},
      {"imm0", scalar, kOnChip, kPlain},
      {"imm1", scalar, kOnChip, kPlain, 1, true}},
     "register = op1(op0(src[i], imm0), register); dst[i] = register"},
    {Opcode::tensor_tensor_scan, "tensor_tensor_scan", kV, E::vector, 2, Shape::same, L::row,
     kOnePsumInput | kArithmeticOnly, {C::elements, 0, 2},
     {{"dst", write, kOnChip, kPlain},
      {"data0", read, kOnChip, kPlain},
      {"data1", read, kOnChip, kPlain},
      {"initial", scalar, kOnChip, kPlain}},
     "r[i] = op1(op0(data0[i], r[i-1]), data1[i]) with r[-1] = initial; dst = r"},
    {Opcode::activation, "activation", kS, E::scalar, 2, Shape::same, L::row, 0, {C::elements},
     {{"dst", write, kOnChip, kPlain},
      {"data", read, kOnChip, kPlain},
      {"bias", scalar, kOnChip, kPlain, 1, true},
      {"scale", scalar, kOnChip, kPlain},
      {"reduce_res", write, kOnChip, kPlain, 1, true}},
     "dst = function(data * scale + bias); register = reduce_op(register, dst); reduce_res = register"},
    {Opcode::activate2, "activate2", kS, E::scalar, 4, Shape::same, L::row, kArithmeticOnly, {C::elements},
     {{"dst", write, kOnChip, kPlain},
      {"data", read, kOnChip, kPlain},
      {"imm0", scalar, kOnChip, kPlain},
      {"imm1", scalar, kOnChip, kPlain},
      {"relu_param", scalar, kOnChip, kPlain},
      {"reduce_res", write, kOnChip, kPlain, 1, true}},
     "dst = function((data op0 imm0) op1 imm1); register = reduce_op(register, dst); reduce_res = register"},
    {Opcode::exponential, "exponential", kV, E::vector, 4, Shape::same, L::row, 0, {C::elements, 0, 0.25},
     {{"dst", write, kOnChip, kPlain},
      {"src", read, kOnChip, kPlain},
      {"max_value", scalar, kOnChip, kPlain},
      {"reduce_res", write, kOnChip, kPlain, 1, true},
      {"reduce_init", scalar, kOnChip, kPlain, 1, true}},
     "dst = exp(src - max_value); register += dst; reduce_res = register"},
    {Opcode::reciprocal, "reciprocal", kV, E::vector, 2, Shape::same, L::row, 0, {C::elements, 0, 8},
     {{"dst", write, kOnChip, kPlain}, {"data", read, kOnChip, kPlain}}, "dst = 1 / data"},
    {Opcode::select_reduce, "select_reduce", kV, E::vector, 2, Shape::same, L::row, kOnePsumInput, {C::two_inputs},
     {{"dst", write, kOnChip, kPlain},
      {"predicate", read, kOnChip, kInts},
      {"on_true", read, kOnChip, kPlain & ~(kIndex32 | dtypes(tfloat32))},
      {"on_false", scalar, kOnChip, kPlain},
      {"reduce_res", write, kOnChip, kPlain, 1, true}},
     "dst = on_true where predicate is not zero (reverse: is zero), else on_false; register = max(register, dst)"},
    {Opcode::range_select, "range_select", kV, E::vector, 3, Shape::same, L::row, 0, {C::elements},
     {{"dst", write, kOnChip, kPlain},
      {"on_true_tile", read, kOnChip, kPlain},
      {"bound0", scalar, kOnChip, kFp32},
      {"bound1", scalar, kOnChip, kFp32},
      {"reduce_res", write, kOnChip, kPlain, 1, true}},
     "i = range_start + free index; dst = on_true where (i op0 bound0) and (i op1 bound1), else -3.4028235e38; "
     "register = max(register, dst)"},
    {Opcode::affine_select, "affine_select", kG, E::gpsimd, 2, Shape::same, L::row, 0, {C::elements, 150},
     {{"dst", write, kSbuf, kPlain}, {"on_true_tile", read, kSbuf, kPlain}},
     "v = offset + p * channel_multiplier + sum of index * step; dst = on_true_tile where v op0 0, else on_false_value"},
    {Opcode::iota, "iota", kG, E::gpsimd, 2, Shape::none, L::row, 0, {C::elements, 150},
     {{"dst", write, kSbuf, kPlain}},
     "dst = offset + p * channel_multiplier + sum of index * step, in int32"},
    {Opcode::dropout, "dropout", kV, E::vector, 2, Shape::same, L::row, kSameDtype, {C::elements},
     {{"dst", write, kOnChip, kPlain}, {"data", read, kOnChip, kPlain}, {"prob", scalar, kOnChip, kPlain}},
     "dst = 0 with probability prob, else data"},
    {Opcode::bn_stats, "bn_stats", kV, E::vector, 2, Shape::rows, L::row, 0, {C::elements},
     {{"dst", write, kOnChip, kPlain, 6}, {"data", read, kOnChip, kPlain, 512}},
     "dst[p] = count, mean, count * variance of the even, then of the odd elements"},
    {Opcode::bn_aggr, "bn_aggr", kV, E::vector, 2, Shape::rows, L::row, 0, {C::elements, 0, 13.0 / 3},
     {{"dst", write, kOnChip, kPlain, 2}, {"data", read, kOnChip, kPlain}},
     "dst[p] = mean and variance of the merged (count, mean, count * variance) triples"},
    {Opcode::max8, "max8", kV, E::vector, 2, Shape::rows, L::row, 0, {C::elements},
     {{"dst", write, kOnChip, kPlain, 8}, {"src", read, kOnChip, kPlain, 16384}},
     "dst[p] = the 8 largest of src[p], descending"},
    {Opcode::nc_find_index8, "nc_find_index8", kV, E::vector, 2, Shape::rows, L::row, 0, {C::elements},
     {{"dst", write, kOnChip, dtypes(uint16, uint32), 8},
      {"data", read, kOnChip, kPlain, 16384},
      {"vals", read, kOnChip, kPlain, 8}},
     "dst[p,i] = first index of vals[p,i] in data[p]; equal values take later indices; all ones where missing"},
    {Opcode::nc_match_replace8, "nc_match_replace8", kV, E::vector, 2, Shape::rows, L::row, 0, {C::elements},
     {{"dst", write, kOnChip, kPlain, 16384},
      {"data", read, kOnChip, kPlain, 16384},
      {"vals", read, kOnChip, kPlain, 8},
      {"dst_idx", write, kOnChip, dtypes(uint16, uint32), 8, true}},
     "dst = data with the first match of each value replaced by imm; values go from 7 to 0"},
    {Opcode::nc_stream_shuffle, "nc_stream_shuffle", kV, E::vector, 2, Shape::none, L::tile, kSameDtype, {C::elements},
     {{"dst", read_write, kOnChip, kAll}, {"src", read, kOnChip, kAll}},
     "in each group of 32 partitions dst[i] = src[mask[i]]; 255 keeps dst[i]"},
    {Opcode::local_gather, "local_gather", kG, E::gpsimd, 2, Shape::none, L::tile, 0, {C::gather, 150},
     {{"dst", read_write, kSbuf, kPlain}, {"src_buffer", read, kSbuf, kPlain}, {"index", index, kSbuf, kIndex16}},
     "each group of 16 partitions gathers runs of num_elem_per_idx elements at its own indices, read column by column"},
    {Opcode::nc_n_gather, "nc_n_gather", kG, E::gpsimd, 2, Shape::none, L::row, 0, {C::elements, 150},
     {{"dst", write, kSbuf, kPlain}, {"data", read, kSbuf, kPlain}, {"indices", index, kSbuf, kIndex32 | kIndex16}},
     "dst[p,i] = data[p, indices[p,i]]"},
    {Opcode::nonzero_with_count, "nonzero_with_count", kG, E::gpsimd, 3, Shape::none, L::tile, 0, {C::elements, 150},
     {{"dst", read_write, kSbuf, dtypes(int32)}, {"src", read, kSbuf, dtypes(float32, int32)}},
     "every 16th partition: indices of what is not zero plus index_offset, padding_val, and the count in the last place"},
    {Opcode::sequence_bounds, "sequence_bounds", kG, E::gpsimd, 2, Shape::none, L::tile, 0, {C::elements, 150},
     {{"dst", write, kSbuf, dtypes(float32, int32)}, {"segment_ids", read, kSbuf, dtypes(float32, int32)}},
     "start and end of the run of equal ids around each element; id 0: n and -1"},
    {Opcode::topk, "topk", kG, E::gpsimd, 2, Shape::none, L::tile, 0, {C::elements, 0, 4},
     {{"val_dst", write, kSbuf, kPlain}, {"idx_dst", write, kSbuf, kIndex32 | kIndex16}, {"src", read, kSbuf, kPlain}},
     "the K largest of n elements in a 16-partition snake, ascending, with their indices"},
    {Opcode::quantize_mx, "quantize_mx", kV, E::vector, 4, Shape::none, L::tile, 0, {C::elements, 0, 0.25},
     {{"dst", write, kSbuf, dtypes(float8_e4m3fn_x4, float8_e5m2_x4)},
      {"src", read, kSbuf, dtypes(float16, bfloat16)},
      {"dst_scale", write, kSbuf, kScale}},
     "groups of 8 partitions by 4 elements share a power-of-two scale"},
    {Opcode::rng, "rng", engines(E::vector, E::gpsimd, E::scalar), E::vector, 2, Shape::none, L::tile, 0, {C::elements},
     {{"dst", write, kOnChip, kPlain}}, "32 random bits, truncated to dst's type"},
    {Opcode::rand2, "rand2", kV, E::vector, 4, Shape::none, L::tile, 0, {C::elements},
     {{"dst", write, kOnChip, kPlain}, {"min", scalar, kOnChip, kPlain}, {"max", scalar, kOnChip, kPlain}},
     "uniform between min and max"},
    {Opcode::set_rng_seed, "set_rng_seed", engines(E::gpsimd, E::vector), E::gpsimd, 2, Shape::none, L::tile, 0,
     {C::elements}, {{"src_seeds", read, kOnChip, kIndex32}}, "seeds every generator"},
    {Opcode::rand_set_state, "rand_set_state", engines(E::gpsimd, E::vector), E::gpsimd, 2, Shape::none, L::tile, 0,
     {C::elements}, {{"src_seeds", read, kOnChip, kIndex32, 24}}, "state of each partition's generator = its row"},
    {Opcode::rand_get_state, "rand_get_state", engines(E::gpsimd, E::vector), E::gpsimd, 2, Shape::none, L::tile, 0,
     {C::elements}, {{"dst", write, kOnChip, kIndex32, 24}}, "row = state of the partition's generator"},
    {Opcode::gather_flattened, "gather_flattened", kG, E::gpsimd, 2, Shape::none, L::row, 0, {C::elements, 150},
     {{"dst", write, kSbuf, kPlain}, {"data", read, kSbuf, kPlain}, {"indices", index, kSbuf, kIndex32 | kIndex16}},
     "dst[p,i] = data[p, indices[p,i]]", true},
    {Opcode::sendrecv, "sendrecv", engines(E::dma, E::gpsimd), E::dma, 3, Shape::elements, L::tile, kSameDtype, {C::dma},
     {{"src", read, kSbuf, kAll}, {"dst", write, kSbuf, kAll}}, "dst = the peer core's src", false, true},
    {Opcode::core_barrier, "core_barrier", engines(E::gpsimd, E::vector, E::scalar, E::tensor, E::sync), E::gpsimd, 3,
     Shape::none, L::control, 0, {C::elements}, {{"data", read, kHbm | kSbuf, kAll, INT64_MAX}},
     "goes on when every core has arrived", false, true},
#define NEURON_COLLECTIVE(NAME, TEXT)                                                                             \
  {Opcode::NAME, #NAME, engines(E::dma), E::dma, 2, Shape::none, L::tile, 0, {C::dma},                             \
   {{"dst", write, kAnywhere, kAll, INT64_MAX}, {"src", read, kAnywhere, kAll, INT64_MAX},                         \
    {"metadata", read_write, kHbm, kIndex32, INT64_MAX, true}}, TEXT, false, true}
    NEURON_COLLECTIVE(all_reduce, "dst = op0 over the ranks' src"),
    NEURON_COLLECTIVE(all_gather, "dst = the ranks' src, side by side along the collective dimension"),
    NEURON_COLLECTIVE(reduce_scatter, "dst = this rank's part of op0 over the ranks' src"),
    NEURON_COLLECTIVE(all_to_all, "part j of dst = rank j's part for this rank"),
    NEURON_COLLECTIVE(all_gather_v, "like all_gather with counts and displacements per rank"),
    NEURON_COLLECTIVE(all_to_all_v, "like all_to_all with counts and displacements per rank"),
    NEURON_COLLECTIVE(collective_permute, "dst = src of the rank that names this one as its target"),
#undef NEURON_COLLECTIVE
    {Opcode::register_move, "register_move", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, {}, {},
     "register = start + stop, each a number or register * scale + number"},
    {Opcode::register_load, "register_load", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, {},
     {{"src", read, kHbm | kOnChip, kInts | dtypes(float32)}}, "register = one element"},
    {Opcode::register_store, "register_store", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, {},
     {{"dst", write, kHbm | kOnChip, kInts | dtypes(float32)}}, "one element = register"},
    {Opcode::loop_begin, "loop_begin", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, {}, {},
     "for register = start; register < stop; register += step"},
    {Opcode::loop_end, "loop_end", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, {}, {}, ""},
    {Opcode::while_begin, "while_begin", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, {}, {},
     "while register is not zero"},
    {Opcode::while_end, "while_end", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, {}, {}, ""},
    {Opcode::allocate, "allocate", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, {}, {},
     "the life of a buffer begins; nothing has been written"},
};
// clang-format on

}  // namespace

int InstructionSpec::operand_index(std::string_view operand) const {
  for (size_t i = 0; i < operands.size(); ++i)
    if (operands[i].name == operand) return static_cast<int>(i);
  return -1;
}

const InstructionSpec& spec(Opcode opcode) { return kInstructions[static_cast<size_t>(opcode)]; }

std::span<const InstructionSpec> all_instructions() { return kInstructions; }

}  // namespace neuron
