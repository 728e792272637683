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

const std::array<std::string_view, static_cast<int>(Condition::count)> kConditionWords = {
#define X(name, words) words,
    NEURON_COST_CONDITIONS(X)
#undef X
};

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

#define X(name, words) using Condition::name;
NEURON_COST_CONDITIONS(X)
#undef X

// What states a cost.
constexpr std::string_view kStubs = "NKI 2.26 API stubs, \"Estimated instruction cost\"";
constexpr std::string_view kTrn2 = "Trainium2 architecture guide";
constexpr std::string_view kTrn3Quad = "Trainium3 architecture guide: 4 per partition and cycle";
constexpr std::string_view kDmaGuide = "NKI DMA overview and bandwidth guide";
constexpr std::string_view kStubsNoGpsimd =
    "NKI 2.26 API stubs, \"Estimated instruction cost\" (VectorE, ScalarE); GpSimdE assumed alike";
constexpr std::string_view kAsGpsimd = "assumed as affine_select: no source states it";
constexpr std::string_view kAsActivation = "assumed as activation: no source states it";
constexpr std::string_view kAsScan = "assumed as tensor_tensor_scan: no source states it";
constexpr std::string_view kAsPredicated = "assumed as tensor_copy_predicated: no source states it";
constexpr std::string_view kAsStream = "assumed, one element per partition and cycle: no source states it";
constexpr std::string_view kAsShortest = "assumed: the shortest; the wait for others is not on the timeline";
constexpr std::string_view kAsCopy = "assumed as dma_copy: the wait for others is not on the timeline";

// Cycles: fixed + per_element N.
constexpr Cost cycles(std::string_view source, double per_element = 1, double fixed = 0, ConditionSet conditions = 0,
                      int since = 2) {
  return {C::elements, fixed, per_element, source, conditions, since};
}
constexpr Cost model(C formula, std::string_view source, double factor = 1, ConditionSet conditions = 0,
                     int since = 2) {
  return {formula, 0, factor, source, conditions, since};
}
const std::vector<Cost> kControl = {model(C::none, "assumed: the sequencers' times are not published")};

// tensor_copy and tensor_scalar stream one input; VectorE's and ScalarE's modes for 16-bit data speed them up.
std::vector<Cost> one_input(std::vector<Cost> others) {
  std::vector<Cost> costs = {
      cycles(kTrn2, 0.25, 0, when(on_vector, two_byte, in_sbuf, contiguous), 3),
      cycles(kTrn2, 0.5, 0, when(on_vector, two_byte, in_sbuf), 3),
      cycles(kTrn2, 0.5, 0, when(on_vector, two_byte, contiguous), 3),
      cycles("Trainium3 architecture guide (up to)", 0.5, 0, when(on_scalar, two_byte), 4),
  };
  costs.insert(costs.end(), others.begin(), others.end());
  return costs;
}

// clang-format off
const std::vector<InstructionSpec> kInstructions = {
    {Opcode::dma_copy, "dma_copy", kDma, E::dma, 2, Shape::elements, L::row, 0, {model(C::dma, kDmaGuide)},
     {{"dst", write, kAnywhere, kAll, INT64_MAX}, {"src", read, kAnywhere, kAll, INT64_MAX}},
     "dst = src in element order; differing dtypes go through fp32"},
    {Opcode::dma_compute, "dma_compute", kDma, E::dma, 2, Shape::none, L::tile, 0,
     {model(C::dma, "Trainium3 architecture guide: read-add-write at a copy's rate", 1, when(sums_in_sbuf), 4),
      model(C::dma, "Trainium3 architecture guide: else half of a copy's rate", 2)},
     {{"dst", read_write, kAnywhere, kPlain, INT64_MAX},
      {"src0", read, kAnywhere, kPlain, INT64_MAX},
      {"src1", read, kAnywhere, kPlain, INT64_MAX, true}},
     "dst = src0 + src1 in fp32 (one source: dst = src0); with an indirect dst rows of the same index add up"},
    {Opcode::dma_transpose, "dma_transpose", kDma, E::dma, 2, Shape::none, L::tile, kSameDtype,
     {model(C::dma, "Trainium2 architecture guide: up to 50 % of a copy's rate; assumed for every target", 2,
            when(sbuf_to_sbuf)),
      model(C::dma, "Trainium2 architecture guide: up to 90 % of a copy's rate; assumed for every target", 1 / 0.9)},
     {{"dst", write, kAnywhere, kAll, INT64_MAX}, {"src", read, kAnywhere, kAll, INT64_MAX}},
     "dst = src with its axes permuted (src is given with the permuted pattern)"},
    {Opcode::tensor_copy, "tensor_copy", engines(E::vector, E::scalar, E::gpsimd), E::vector, 2, Shape::same, L::row, 0,
     one_input({cycles(kStubs)}), {{"dst", write, kOnChip, kAll}, {"src", read, kOnChip, kAll}},
     "dst = src; bit-exact for one dtype, else through fp32"},
    {Opcode::memset, "memset", engines(E::vector, E::gpsimd), E::vector, 2, Shape::none, L::row, 0,
     {cycles(kStubs, 0.5, 0, when(on_vector, zero, two_byte)), cycles(kStubsNoGpsimd)},
     {{"dst", write, kOnChip, kAll}}, "dst = value"},
    {Opcode::tensor_copy_predicated, "tensor_copy_predicated", kV, E::vector, 2, Shape::same, L::row, kOnePsumInput,
     {cycles(kStubs, 1, 0, when(psum_input)), cycles(kStubs, 2)},
     {{"dst", read_write, kOnChip, kAll}, {"src", value, kOnChip, kAll}, {"predicate", read, kOnChip, kInts}},
     "dst = src where predicate is not zero (reverse: is zero); elsewhere dst keeps its value"},
    {Opcode::nc_matmul, "nc_matmul", kPE, E::tensor, 2, Shape::none, L::tile, 0,
     {model(C::matmul, "Trainium2 architecture guide: twice as fast as without transpose mode", 2,
            when(fp32_moving, transposes), 3),
      model(C::matmul, kStubs, 4, when(fp32_moving)), model(C::matmul, kStubs)},
     {{"dst", read_write, kPsum, kAll, 8192},
      {"stationary", read, kSbuf, kMatmulIn | kInts, 256},
      {"moving", read, kSbuf, kMatmulIn | kInts, 16384}},
     "dst[m,n] (+)= sum over k of stationary[k,m] * moving[k,n], products and sums in fp32; transpose mode: "
     "moving passes bit by bit"},
    {Opcode::nc_matmul_mx, "nc_matmul_mx", kPE, E::tensor, 4, Shape::none, L::tile, 0,
     {model(C::matmul, "Trainium3 architecture guide: contracts 512 in the time of 128")},
     {{"dst", read_write, kPsum, dtypes(float32, bfloat16), 8192},
      {"stationary", read, kSbuf, kMx, 128},
      {"moving", read, kSbuf, kMx, 8192},
      {"stationary_scale", read, kSbuf, kScale},
      {"moving_scale", read, kSbuf, kScale}},
     "dst[m,n] (+)= sum over k and the four lanes of value * 2^(scale-127) of both inputs"},
    {Opcode::nc_transpose, "nc_transpose", engines(E::tensor, E::vector), E::tensor, 2, Shape::none, L::tile, kSameDtype,
     {cycles(kStubs, 1, 0, when(on_vector)), model(C::transpose, kStubs)},
     {{"dst", write, kOnChip, kAll}, {"data", read, kOnChip, kAll, 128}}, "dst = data.T"},
    {Opcode::tensor_tensor, "tensor_tensor", engines(E::vector, E::gpsimd), E::vector, 2, Shape::same, L::row,
     kOnePsumInput,
     {cycles("assumed as VectorE's general case: the stubs state VectorE's alone", 2, 0, when(on_gpsimd)),
      cycles(kStubs, 1, 0, when(psum_input)), cycles(kTrn2, 1, 0, when(inputs_in_sbuf, two_byte), 3),
      cycles(kStubs, 1, 0, when(inputs_in_sbuf, bf16, additive, contiguous)), cycles(kStubs, 2)},
     {{"dst", write, kOnChip, kPlain}, {"data1", read, kOnChip, kPlain}, {"data2", read, kOnChip, kPlain}},
     "dst = data1 op0 data2 in fp32; 32-bit integers on GpSimdE exactly; bitwise on bit patterns"},
    {Opcode::tensor_scalar, "tensor_scalar", engines(E::vector, E::scalar, E::gpsimd), E::vector, 2, Shape::same, L::row,
     kBitwiseOrArithmetic,
     one_input({cycles("NKI API, engine selection: a quarter of ScalarE's rate", 4, 0, when(on_gpsimd, rsqrt)),
                cycles(kStubsNoGpsimd)}),
     {{"dst", write, kOnChip, kPlain},
      {"data", read, kOnChip, kPlain},
      {"operand0", scalar, kOnChip, kPlain},
      {"operand1", scalar, kOnChip, kPlain, 1, true}},
     "dst = (data op0 operand0) op1 operand1"},
    {Opcode::scalar_tensor_tensor, "scalar_tensor_tensor", kV, E::vector, 2, Shape::same, L::row,
     kOnePsumInput | kArithmeticOnly, {cycles(kStubs, 1, 0, when(bf16, subtract_multiply)), cycles(kStubs, 2)},
     {{"dst", write, kOnChip, kPlain},
      {"data", read, kOnChip, kPlain},
      {"operand0", scalar, kOnChip, kPlain},
      {"operand1", read, kOnChip, kPlain}},
     "dst = (data op0 operand0) op1 operand1"},
    {Opcode::tensor_reduce, "tensor_reduce", kV, E::vector, 2, Shape::rows, L::row, 0,
     {cycles(kStubs, 0.5, 0, when(bf16, add_or_maximum)), cycles(kStubs)},
     {{"dst", write, kOnChip, kPlain}, {"data", read, kOnChip, kPlain}},
     "dst[p,j] = op0 over the j-th run of data's row"},
    {Opcode::tensor_partition_reduce, "tensor_partition_reduce", kG, E::gpsimd, 2, Shape::none, L::tile, 0,
     {cycles(kAsGpsimd, 1, 150)}, {{"dst", write, kSbuf, kPlain}, {"data", read, kSbuf, kPlain}},
     "dst[0,j] = op0 over the partitions of data[:,j]"},
    {Opcode::tensor_scalar_reduce, "tensor_scalar_reduce", kV, E::vector, 2, Shape::same, L::row, kArithmeticOnly,
     {cycles(kStubs, 1, 64)},
     {{"dst", write, kOnChip, kPlain},
      {"data", read, kOnChip, kPlain},
      {"operand0", scalar, kOnChip, kPlain},
      {"reduce_res", write, kOnChip, kPlain, 1, true},
      {"reduce_init", scalar, kOnChip, kPlain, 1, true}},
     "dst = data op0 operand0; register = reduce_op(register, dst); reduce_res = register"},
    {Opcode::tensor_scalar_cumulative, "tensor_scalar_cumulative", kV, E::vector, 2, Shape::same, L::row,
     kArithmeticOnly, {cycles(kAsScan, 2)},
     {{"dst", write, kOnChip, kPlain & ~kIndex32},
      {"src", read, kOnChip, kPlain & ~kIndex32},
      {"imm0", scalar, kOnChip, kPlain},
      {"imm1", scalar, kOnChip, kPlain, 1, true}},
     "register = op1(op0(src[i], imm0), register); dst[i] = register"},
    {Opcode::tensor_tensor_scan, "tensor_tensor_scan", kV, E::vector, 2, Shape::same, L::row,
     kOnePsumInput | kArithmeticOnly, {cycles(kStubs, 2)},
     {{"dst", write, kOnChip, kPlain},
      {"data0", read, kOnChip, kPlain},
      {"data1", read, kOnChip, kPlain},
      {"initial", scalar, kOnChip, kPlain}},
     "r[i] = op1(op0(data0[i], r[i-1]), data1[i]) with r[-1] = initial; dst = r"},
    {Opcode::activation, "activation", kS, E::scalar, 2, Shape::same, L::row, 0,
     {cycles(kStubs, 1, 64, when(reduces)), cycles(kStubs)},
     {{"dst", write, kOnChip, kPlain},
      {"data", read, kOnChip, kPlain},
      {"bias", scalar, kOnChip, kPlain, 1, true},
      {"scale", scalar, kOnChip, kPlain},
      {"reduce_res", write, kOnChip, kPlain, 1, true}},
     "dst = function(data * scale + bias); register = reduce_op(register, dst); reduce_res = register"},
    {Opcode::activate2, "activate2", kS, E::scalar, 4, Shape::same, L::row, kArithmeticOnly,
     {cycles(kAsActivation, 1, 64, when(reduces)), cycles(kAsActivation)},
     {{"dst", write, kOnChip, kPlain},
      {"data", read, kOnChip, kPlain},
      {"imm0", scalar, kOnChip, kPlain},
      {"imm1", scalar, kOnChip, kPlain},
      {"relu_param", scalar, kOnChip, kPlain},
      {"reduce_res", write, kOnChip, kPlain, 1, true}},
     "dst = function((data op0 imm0) op1 imm1); register = reduce_op(register, dst); reduce_res = register"},
    {Opcode::exponential, "exponential", kV, E::vector, 4, Shape::same, L::row, 0,
     {cycles("Trainium3 architecture guide: 4 times activation's rate at the same clock", 0.25)},
     {{"dst", write, kOnChip, kPlain},
      {"src", read, kOnChip, kPlain},
      {"max_value", scalar, kOnChip, kPlain},
      {"reduce_res", write, kOnChip, kPlain, 1, true},
      {"reduce_init", scalar, kOnChip, kPlain, 1, true}},
     "dst = exp(src - max_value); register += dst; reduce_res = register"},
    {Opcode::reciprocal, "reciprocal", kV, E::vector, 2, Shape::same, L::row, 0, {cycles(kStubs, 8)},
     {{"dst", write, kOnChip, kPlain}, {"data", read, kOnChip, kPlain}}, "dst = 1 / data"},
    {Opcode::select_reduce, "select_reduce", kV, E::vector, 2, Shape::same, L::row, kOnePsumInput,
     {cycles(kAsPredicated, 1, 0, when(psum_input)), cycles(kAsPredicated, 2)},
     {{"dst", write, kOnChip, kPlain},
      {"predicate", read, kOnChip, kInts},
      {"on_true", read, kOnChip, kPlain & ~(kIndex32 | dtypes(tfloat32))},
      {"on_false", scalar, kOnChip, kPlain},
      {"reduce_res", write, kOnChip, kPlain, 1, true}},
     "dst = on_true where predicate is not zero (reverse: is zero), else on_false; register = max(register, dst)"},
    {Opcode::range_select, "range_select", kV, E::vector, 3, Shape::same, L::row, 0, {cycles(kStubs)},
     {{"dst", write, kOnChip, kPlain},
      {"on_true_tile", read, kOnChip, kPlain},
      {"bound0", scalar, kOnChip, kFp32},
      {"bound1", scalar, kOnChip, kFp32},
      {"reduce_res", write, kOnChip, kPlain, 1, true}},
     "i = range_start + free index; dst = on_true where (i op0 bound0) and (i op1 bound1), else -3.4028235e38; "
     "register = max(register, dst)"},
    {Opcode::affine_select, "affine_select", kG, E::gpsimd, 2, Shape::same, L::row, 0, {cycles(kStubs, 1, 150)},
     {{"dst", write, kSbuf, kPlain}, {"on_true_tile", read, kSbuf, kPlain}},
     "v = offset + p * channel_multiplier + sum of index * step; dst = on_true_tile where v op0 0, else on_false_value"},
    {Opcode::iota, "iota", kG, E::gpsimd, 2, Shape::none, L::row, 0, {cycles(kStubs, 1, 150)},
     {{"dst", write, kSbuf, kPlain}},
     "dst = offset + p * channel_multiplier + sum of index * step, in int32"},
    {Opcode::dropout, "dropout", kV, E::vector, 2, Shape::same, L::row, kSameDtype, {cycles(kStubs)},
     {{"dst", write, kOnChip, kPlain}, {"data", read, kOnChip, kPlain}, {"prob", scalar, kOnChip, kPlain}},
     "dst = 0 with probability prob, else data"},
    {Opcode::bn_stats, "bn_stats", kV, E::vector, 2, Shape::rows, L::row, 0, {cycles(kStubs)},
     {{"dst", write, kOnChip, kPlain, 6}, {"data", read, kOnChip, kPlain, 512}},
     "dst[p] = count, mean, count * variance of the even, then of the odd elements"},
    {Opcode::bn_aggr, "bn_aggr", kV, E::vector, 2, Shape::rows, L::row, 0, {cycles(kStubs, 13.0 / 3)},
     {{"dst", write, kOnChip, kPlain, 2}, {"data", read, kOnChip, kPlain}},
     "dst[p] = mean and variance of the merged (count, mean, count * variance) triples"},
    {Opcode::max8, "max8", kV, E::vector, 2, Shape::rows, L::row, 0,
     {cycles("NKI 2.26 API stubs: N; the least of the others is assumed")},
     {{"dst", write, kOnChip, kPlain, 8}, {"src", read, kOnChip, kPlain, 16384}},
     "dst[p] = the 8 largest of src[p], descending"},
    {Opcode::nc_find_index8, "nc_find_index8", kV, E::vector, 2, Shape::rows, L::row, 0,
     {cycles("NKI 2.26 API stubs: N; the least of the others is assumed")},
     {{"dst", write, kOnChip, dtypes(uint16, uint32), 8},
      {"data", read, kOnChip, kPlain, 16384},
      {"vals", read, kOnChip, kPlain, 8}},
     "dst[p,i] = first index of vals[p,i] in data[p]; equal values take later indices; all ones where missing"},
    {Opcode::nc_match_replace8, "nc_match_replace8", kV, E::vector, 2, Shape::rows, L::row, 0,
     {cycles("NKI 2.26 API stubs: min(64, N), read as max(64, N)")},
     {{"dst", write, kOnChip, kPlain, 16384},
      {"data", read, kOnChip, kPlain, 16384},
      {"vals", read, kOnChip, kPlain, 8},
      {"dst_idx", write, kOnChip, dtypes(uint16, uint32), 8, true}},
     "dst = data with the first match of each value replaced by imm; values go from 7 to 0"},
    {Opcode::nc_stream_shuffle, "nc_stream_shuffle", kV, E::vector, 2, Shape::none, L::tile, kSameDtype,
     {cycles(kStubs)},
     {{"dst", read_write, kOnChip, kAll}, {"src", read, kOnChip, kAll}},
     "in each group of 32 partitions dst[i] = src[mask[i]]; 255 keeps dst[i]"},
    {Opcode::local_gather, "local_gather", kG, E::gpsimd, 2, Shape::none, L::tile, 0, {{C::gather, 150, 1, kStubs}},
     {{"dst", read_write, kSbuf, kPlain}, {"src_buffer", read, kSbuf, kPlain}, {"index", index, kSbuf, kIndex16}},
     "each group of 16 partitions gathers runs of num_elem_per_idx elements at its own indices, read column by column"},
    {Opcode::nc_n_gather, "nc_n_gather", kG, E::gpsimd, 2, Shape::none, L::row, 0, {cycles(kAsGpsimd, 1, 150)},
     {{"dst", write, kSbuf, kPlain}, {"data", read, kSbuf, kPlain}, {"indices", index, kSbuf, kIndex32 | kIndex16}},
     "dst[p,i] = data[p, indices[p,i]]"},
    {Opcode::nonzero_with_count, "nonzero_with_count", kG, E::gpsimd, 3, Shape::none, L::tile, 0,
     {cycles(kAsGpsimd, 1, 150)},
     {{"dst", read_write, kSbuf, dtypes(int32)}, {"src", read, kSbuf, dtypes(float32, int32)}},
     "every 16th partition: indices of what is not zero plus index_offset, padding_val, and the count in the last place"},
    {Opcode::sequence_bounds, "sequence_bounds", kG, E::gpsimd, 2, Shape::none, L::tile, 0, {cycles(kAsGpsimd, 1, 150)},
     {{"dst", write, kSbuf, dtypes(float32, int32)}, {"segment_ids", read, kSbuf, dtypes(float32, int32)}},
     "start and end of the run of equal ids around each element; id 0: n and -1"},
    {Opcode::topk, "topk", kG, E::gpsimd, 2, Shape::none, L::tile, 0,
     {model(C::topk, "NKI 0.6 API stubs, \"Estimated instruction cost\"")},
     {{"val_dst", write, kSbuf, kPlain}, {"idx_dst", write, kSbuf, kIndex32 | kIndex16}, {"src", read, kSbuf, kPlain}},
     "the K largest of n elements in a 16-partition snake, ascending, with their indices"},
    {Opcode::quantize_mx, "quantize_mx", kV, E::vector, 4, Shape::none, L::tile, 0, {cycles(kTrn3Quad, 0.25)},
     {{"dst", write, kSbuf, dtypes(float8_e4m3fn_x4, float8_e5m2_x4)},
      {"src", read, kSbuf, dtypes(float16, bfloat16)},
      {"dst_scale", write, kSbuf, kScale}},
     "groups of 8 partitions by 4 elements share a power-of-two scale"},
    {Opcode::rng, "rng", engines(E::vector, E::gpsimd, E::scalar), E::vector, 2, Shape::none, L::tile, 0,
     {cycles(kTrn3Quad, 0.25, 0, when(on_vector), 4), cycles(kAsStream)},
     {{"dst", write, kOnChip, kPlain}}, "32 random bits, truncated to dst's type"},
    {Opcode::rand2, "rand2", kV, E::vector, 4, Shape::none, L::tile, 0, {cycles(kTrn3Quad, 0.25)},
     {{"dst", write, kOnChip, kPlain}, {"min", scalar, kOnChip, kPlain}, {"max", scalar, kOnChip, kPlain}},
     "uniform between min and max"},
    {Opcode::set_rng_seed, "set_rng_seed", engines(E::gpsimd, E::vector), E::gpsimd, 2, Shape::none, L::tile, 0,
     {cycles(kAsStream)}, {{"src_seeds", read, kOnChip, kIndex32}}, "seeds every generator"},
    {Opcode::rand_set_state, "rand_set_state", engines(E::gpsimd, E::vector), E::gpsimd, 2, Shape::none, L::tile, 0,
     {cycles(kAsStream)},
     {{"src_seeds", read, kOnChip, kIndex32, 24}}, "state of each partition's generator = its row"},
    {Opcode::rand_get_state, "rand_get_state", engines(E::gpsimd, E::vector), E::gpsimd, 2, Shape::none, L::tile, 0,
     {cycles(kAsStream)}, {{"dst", write, kOnChip, kIndex32, 24}}, "row = state of the partition's generator"},
    {Opcode::gather_flattened, "gather_flattened", kG, E::gpsimd, 2, Shape::none, L::row, 0,
     {cycles(kAsGpsimd, 1, 150)},
     {{"dst", write, kSbuf, kPlain}, {"data", read, kSbuf, kPlain}, {"indices", index, kSbuf, kIndex32 | kIndex16}},
     "dst[p,i] = data[p, indices[p,i]]", true},
    {Opcode::sendrecv, "sendrecv", engines(E::dma, E::gpsimd), E::dma, 3, Shape::elements, L::tile, kSameDtype,
     {model(C::dma, kAsCopy)},
     {{"src", read, kSbuf, kAll}, {"dst", write, kSbuf, kAll}}, "dst = the peer core's src", false, true},
    {Opcode::core_barrier, "core_barrier", engines(E::gpsimd, E::vector, E::scalar, E::tensor, E::sync), E::gpsimd, 3,
     Shape::none, L::control, 0, {cycles(kAsShortest)}, {{"data", read, kHbm | kSbuf, kAll, INT64_MAX}},
     "goes on when every core has arrived", false, true},
#define NEURON_COLLECTIVE(NAME, TEXT)                                                                             \
  {Opcode::NAME, #NAME, engines(E::dma), E::dma, 2, Shape::none, L::tile, 0, {model(C::dma, kAsCopy)},              \
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
    {Opcode::register_move, "register_move", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, kControl, {},
     "register = start + stop, each a number or register * scale + number"},
    {Opcode::register_load, "register_load", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, kControl,
     {{"src", read, kHbm | kOnChip, kInts | dtypes(float32)}}, "register = one element"},
    {Opcode::register_store, "register_store", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, kControl,
     {{"dst", write, kHbm | kOnChip, kInts | dtypes(float32)}}, "one element = register"},
    {Opcode::loop_begin, "loop_begin", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, kControl, {},
     "for register = start; register < stop; register += step"},
    {Opcode::loop_end, "loop_end", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, kControl, {}, ""},
    {Opcode::while_begin, "while_begin", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, kControl, {},
     "while register is not zero"},
    {Opcode::while_end, "while_end", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, kControl, {}, ""},
    {Opcode::allocate, "allocate", engines(E::sync), E::sync, 2, Shape::none, L::control, 0, kControl, {},
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
