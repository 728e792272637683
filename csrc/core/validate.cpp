// The limits of the hardware, read from the instruction table. What no table column says has one function per rule.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "error.h"
#include "program.h"
#include "simd/kernels.h"

namespace neuron {
namespace {

[[noreturn]] void fail(const Instruction& in, std::string_view operand, const std::string& limit) {
  throw ValidationError(in.spec().name, operand, limit);
}

template <class... T>
std::string text(const T&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// That numbers of elements and bytes can be computed.
void check_extent(const Instruction& in, std::string_view name, const Access& a) {
  if (a.offset > kMostElements || a.offset < -kMostElements)
    fail(in, name, text("offset ", a.offset, " is not supported"));
  for (int d = 0; d < a.ndim; ++d) {
    int64_t extent;
    if (a.dims[d].size < 1 || __builtin_mul_overflow(a.dims[d].size, a.dims[d].stride, &extent) ||
        std::max(a.dims[d].size, std::abs(extent)) > kMostElements)
      fail(
          in, name,
          text("dimension ", d, " of ", a.dims[d].size, " elements with step ", a.dims[d].stride, " is not supported"));
  }
}

// The tensor of indices of an operand.
void check_index(const Instruction& in, const OperandSpec& o, const Access& a, const std::vector<Storage>& storages) {
  const Access& index = *a.index;
  const Storage& s = storages[index.storage];
  const auto name = text(o.name, "'s index");
  check_extent(in, name, index);
  if (!is_integer(index.dtype)) fail(in, name, text("dtype ", info(index.dtype).name, " is not an integer"));
  if (index.index) fail(in, name, "is itself taken by an index");
  if (const Box box = bounding_box(s, index);
      !index.is_dynamic() &&
      (box.begin < 0 || box.end > s.row_bytes || box.partition_begin < 0 || box.partition_end > s.partitions))
    throw OutOfBounds(in.spec().name, name, text("is out of bounds of ", s.name));
  if (a.indexing != Access::Indexing::rows) return;
  if (on_chip(storages[a.storage].memory)) fail(in, o.name, "on chip cannot take rows by an index");
  if (index.elements() < a.dims[0].size)
    fail(in, name, text("has ", index.elements(), " elements, fewer than the ", a.dims[0].size, " rows"));
}

void check_operand(const Instruction& in, const OperandSpec& o, const Operand& operand,
                   const std::vector<Storage>& storages) {
  if (operand.kind == Operand::Kind::none) {
    if (!o.optional) fail(in, o.name, "is missing");
    return;
  }
  if (!operand.is_tile()) {
    if (o.role != Role::scalar && o.role != Role::value) fail(in, o.name, "must be a tensor");
    return;
  }
  const Access& a = operand.access;
  const Storage& s = storages[a.storage];
  check_extent(in, o.name, a);
  if (a.index) check_index(in, o, a, storages);
  if (a.indexing == Access::Indexing::elements)
    if (const Access& i = *a.index;
        a.partitions() % 16 || i.partitions() != a.partitions() || i.free_size() * a.index_stride < a.free_size())
      fail(in, o.name,
           text("of ", a.partitions(), " partitions cannot take ", a.free_size(), " elements by an index of shape (",
                i.partitions(), ", ", i.free_size(),
                "): partitions in groups of 16, as many in the index, and an index for each element"));
  if (!contains(o.memories, s.memory))
    fail(in, o.name, text("cannot be in ", kMemoryNames[static_cast<int>(s.memory)]));
  if (!contains(o.types, a.dtype)) fail(in, o.name, text("dtype ", info(a.dtype).name, " is not supported"));
  if (!on_chip(s.memory)) return;
  if (a.partitions() > kPartitions)
    fail(in, o.name, text("partition dimension ", a.partitions(), " exceeds maximum ", kPartitions));
  if (const int64_t row = s.row_bytes / size_of(a.dtype); a.partitions() > 1 && a.dims[0].stride != row)
    fail(in, o.name,
         text("steps ", a.dims[0].stride, " elements from partition to partition; it must take each, so ", row));
  if (o.role == Role::scalar && a.free_size() != 1)
    fail(in, o.name, text("must have one element per partition, has ", a.free_size()));
  if (a.free_size() > o.max_free) fail(in, o.name, text("free size ", a.free_size(), " exceeds maximum ", o.max_free));
}

// Compute engines address partitions in groups: P > 64 starts at 0, P > 32 at 0 or 64, others at multiples of 32. Of MX
// scales each 32 partitions hold 4 rows, from row 0, 4, 8 or 12 on.
void check_start_partition(const Instruction& in, const OperandSpec& o, const Access& a, const Storage& s) {
  const int64_t start = s.partition_start + a.offset / std::max<int64_t>(1, s.row_bytes / size_of(a.dtype));
  if (o.types == dtypes(Dtype::uint8, Dtype::float8_e8m0fnu)) {
    if (start % 4 || start % 32 > 12)
      fail(in, o.name,
           text("start partition ", start, " is not allowed; it must be 0, 4, 8 or 12 within 32 partitions"));
    return;
  }
  const int64_t unit = a.partitions() > 64 ? 128 : a.partitions() > 32 ? 64 : 32;
  if (start % unit)
    fail(in, o.name,
         text("start partition ", start, " is not allowed for ", a.partitions(),
              " partitions; it must be a multiple of ", unit));
}

void check_shapes(const Instruction& in, const std::vector<Storage>& storages) {
  const InstructionSpec& sp = in.spec();
  if (sp.shape == Shape::none) return;
  const Access* first = nullptr;
  std::string_view first_name;
  for (size_t i = 0; i < in.operands.size(); ++i) {
    const Operand& o = in.operands[i];
    const OperandSpec& os = sp.operands[i];
    if (!o.is_tile()) continue;
    const Access& a = o.access;
    const bool per_partition = os.role == Role::scalar || os.max_free == 1;
    if (!first) {
      first = &a, first_name = os.name;
      continue;
    }
    if (sp.shape == Shape::elements) {
      if (a.elements() != first->elements())
        fail(in, os.name, text("has ", a.elements(), " elements, ", first_name, " has ", first->elements()));
      continue;
    }
    if (a.partitions() != first->partitions())
      fail(in, os.name,
           text("partition dimension ", a.partitions(), " differs from ", first_name, "'s ", first->partitions()));
    if (sp.shape == Shape::same && !per_partition && a.free_size() != first->free_size())
      fail(in, os.name, text("free size ", a.free_size(), " differs from ", first_name, "'s ", first->free_size()));
  }
}

// Operators that an operand's place takes; those without a row take all that the other rules allow.
struct Operators {
  Opcode opcode;
  std::string_view name;
  AluOp Instruction::* op;
  std::vector<AluOp> allowed;
};
const std::vector<Operators> kOperators = {
    {Opcode::activation, "reduce_op", &Instruction::reduce_op, {AluOp::add}},
    {Opcode::activate2,
     "reduce_op",
     &Instruction::reduce_op,
     {AluOp::add, AluOp::maximum, AluOp::minimum, AluOp::abs_max, AluOp::abs_min}},
    {Opcode::tensor_scalar_reduce,
     "reduce_op",
     &Instruction::reduce_op,
     {AluOp::add, AluOp::multiply, AluOp::maximum, AluOp::minimum}},
    {Opcode::tensor_scalar_cumulative,
     "op1",
     &Instruction::op1,
     {AluOp::add, AluOp::subtract, AluOp::multiply, AluOp::maximum, AluOp::minimum}},
    {Opcode::tensor_reduce,
     "op",
     &Instruction::op0,
     {AluOp::add, AluOp::subtract, AluOp::multiply, AluOp::maximum, AluOp::minimum, AluOp::logical_and,
      AluOp::logical_or, AluOp::logical_xor, AluOp::abs_max, AluOp::abs_min, AluOp::bitwise_and, AluOp::bitwise_or,
      AluOp::bitwise_xor, AluOp::average}},
    {Opcode::tensor_partition_reduce,
     "op",
     &Instruction::op0,
     {AluOp::add, AluOp::average, AluOp::maximum, AluOp::bitwise_or, AluOp::bitwise_and}},
    {Opcode::all_reduce, "op", &Instruction::op0, {AluOp::add, AluOp::minimum, AluOp::maximum}},
    {Opcode::reduce_scatter, "op", &Instruction::op0, {AluOp::add, AluOp::minimum, AluOp::maximum}},
    {Opcode::affine_select,
     "cmp_op",
     &Instruction::op0,
     {AluOp::equal, AluOp::not_equal, AluOp::greater, AluOp::greater_equal, AluOp::less, AluOp::less_equal}},
    {Opcode::select_reduce, "reduce_op", &Instruction::reduce_op, {AluOp::maximum}},
    {Opcode::range_select, "reduce_op", &Instruction::reduce_op, {AluOp::maximum}},
};

void check_operators(const Instruction& in, int generation) {
  for (const Operators& o : kOperators)
    if (in.opcode == o.opcode && std::ranges::find(o.allowed, in.*o.op) == o.allowed.end())
      fail(in, o.name, text(info(in.*o.op).name, " is not supported"));
  if (in.opcode == Opcode::activation && in.reduce_cmd == ReduceCmd::load_reduce)
    fail(in, "reduce_cmd", "load_reduce is not supported");
  if (in.opcode == Opcode::tensor_copy && in.engine == Engine::scalar && generation < 3)
    fail(in, "engine", "scalar cannot run it before trn2");
  if (in.opcode == Opcode::tensor_tensor && in.op0 == AluOp::power && in.engine != Engine::gpsimd)
    fail(in, "engine",
         text(kEngineNames[static_cast<int>(in.engine)], " has no power, GpSimdE has (and reads no PSUM)"));
  if (in.opcode == Opcode::activation && generation < 3) {
    const int bias = in.spec().operand_index("bias");
    if (in.operand(bias).kind == Operand::Kind::immediate) fail(in, "bias", "must be a tensor before trn2");
    if (in.operand(bias).is_tile() && in.function == Function::reciprocal)
      fail(in, "bias", "of reciprocal is not supported before trn2");
  }
  // Until trn2 ScalarE multiplies and adds only.
  if (in.opcode == Opcode::tensor_scalar && in.engine == Engine::scalar && generation < 4) {
    const bool first = in.op0 == AluOp::multiply || in.op0 == AluOp::add;
    if (!first || !(in.op1 == AluOp::bypass || (in.op0 == AluOp::multiply && in.op1 == AluOp::add)))
      fail(in, "engine",
           text("scalar computes multiply, add, and both in this order, not ", info(in.op0).name,
                in.op1 == AluOp::bypass ? "" : " and ", in.op1 == AluOp::bypass ? "" : info(in.op1).name));
  }
}

void check_rules(const Instruction& in, const std::vector<Storage>& storages) {
  const InstructionSpec& sp = in.spec();
  auto memory = [&](const Operand& o) { return storages[o.access.storage].memory; };
  if (sp.rules & kOnePsumInput && in.engine == Engine::vector) {
    bool psum = false;
    for (size_t i = 1; i < in.operands.size(); ++i) {
      if (!in.operands[i].is_tile() || sp.operands[i].role == Role::scalar || sp.operands[i].role == Role::write)
        continue;
      const bool here = memory(in.operands[i]) == Memory::psum;
      if (psum && here)
        fail(in, sp.operands[i].name, "is in PSUM, and another input: cannot read both inputs from PSUM");
      psum = psum || here;
    }
  }
  const bool bitwise0 = info(in.op0).cls == AluClass::bitwise, bitwise1 = info(in.op1).cls == AluClass::bitwise;
  if (sp.rules & kArithmeticOnly && (bitwise0 || bitwise1)) fail(in, "op", "must be arithmetic");
  if (sp.rules & kBitwiseOrArithmetic && in.op1 != AluOp::bypass && in.op0 != AluOp::bypass && bitwise0 != bitwise1)
    fail(in, "op1", "mixes bitwise and arithmetic operators");
  if (bitwise0 || bitwise1)
    for (size_t i = 0; i < in.operands.size(); ++i)
      if (in.operands[i].is_tile() && !is_integer(in.operands[i].access.dtype) && sp.operands[i].role != Role::index)
        fail(in, sp.operands[i].name,
             text("dtype ", info(in.operands[i].access.dtype).name, " is not supported by bitwise operators"));
  if (sp.rules & kSameDtype) {
    const Access* first = nullptr;
    for (size_t i = 0; i < in.operands.size(); ++i) {
      if (!in.operands[i].is_tile() || sp.operands[i].role == Role::scalar) continue;
      const Access& a = in.operands[i].access;
      if (first && a.dtype != first->dtype)
        fail(in, sp.operands[i].name, text("dtype ", info(a.dtype).name, " differs from ", info(first->dtype).name));
      if (!first) first = &a;
    }
  }
  if (in.engine == Engine::gpsimd && sp.prefer != Engine::dma && sp.locality != Locality::control)
    for (size_t i = 0; i < in.operands.size(); ++i)
      if (in.operands[i].is_tile() && memory(in.operands[i]) == Memory::psum)
        fail(in, sp.operands[i].name, "cannot be in psum: GpSimdE has no access to it");
}

void check_multiple(const Instruction& in, int operand, int64_t unit) {
  const Access& a = in.operand(operand).access;
  if (a.partitions() % unit)
    fail(in, in.spec().operands[operand].name,
         text("partition dimension ", a.partitions(), " is not a multiple of ", unit));
}

// MX scales of values on so many partitions, with so many words on each.
void check_scale(const Instruction& in, int operand, int64_t partitions, int64_t words) {
  const Access& a = in.operand(operand).access;
  const int64_t needed = scale_row(partitions, partitions / 8 - 1) + 1;
  if (a.partitions() < needed || a.free_size() < words)
    fail(in, in.spec().operands[operand].name,
         text("shape (", a.partitions(), ", ", a.free_size(), ") is smaller than (", needed, ", ", words,
              "), which holds a scale for each 8 partitions"));
}

void check_matmul(const Instruction& in, int generation) {
  const Access &dst = in.operand(0).access, &stationary = in.operand(1).access, &moving = in.operand(2).access;
  const int64_t rows = in.perf_mode == PerfMode::double_row ? 2 : 1;
  const int64_t m = stationary.free_size() / rows, n = moving.free_size() / rows;
  if (stationary.partitions() != moving.partitions())
    fail(in, "moving",
         text("partition dimension ", moving.partitions(), " differs from stationary's ", stationary.partitions()));
  if (m > 128) fail(in, "stationary", text("free size ", m, " exceeds maximum 128"));
  const int64_t limit = generation < 4 ? 512 : size_of(dst.dtype) == 2 ? 8192 : 4096;
  if (n > limit) fail(in, "moving", text("free size ", n, " exceeds maximum ", limit));
  if (dst.partitions() != m || dst.free_size() != n)
    fail(in, "dst", text("shape (", dst.partitions(), ", ", dst.free_size(), ") is not (", m, ", ", n, ")"));
  if (in.opcode == Opcode::nc_matmul_mx) {
    check_multiple(in, 1, 32);
    if (m % 2) fail(in, "stationary", text("free size ", m, " must be even"));
    check_scale(in, 3, stationary.partitions(), m);
    return check_scale(in, 4, moving.partitions(), n);
  }
  if (in.transpose) {
    if (n != stationary.partitions())
      fail(in, "moving", text("free size ", n, " must be ", stationary.partitions(), ", as of an identity"));
    if (size_of(dst.dtype) < size_of(moving.dtype))
      fail(in, "dst", text("dtype ", info(dst.dtype).name, " must be that of moving"));
    return;
  }
  if (is_integer(stationary.dtype) || is_integer(moving.dtype))
    fail(in, "stationary", "integers are only allowed in transpose mode");
  auto wide = [](Dtype t) { return t == Dtype::float32 || t == Dtype::tfloat32; };
  if (wide(stationary.dtype) != wide(moving.dtype))
    fail(in, "moving", text("dtype ", info(moving.dtype).name, " does not go with ", info(stationary.dtype).name));
  if (dst.dtype != Dtype::float32 && !(generation >= 4 && dst.dtype == Dtype::bfloat16))
    fail(in, "dst", text("dtype ", info(dst.dtype).name, " is not supported; it must be float32"));
  if (rows == 2 && size_of(moving.dtype) != 1) fail(in, "moving", "must be an 8-bit float in double_row mode");
  if (rows == 2 && generation < 3) fail(in, "perf_mode", "double_row is not supported before trn2");
  const bool fn = stationary.dtype == Dtype::float8_e4m3fn;
  for (const auto& [name, a] : {std::pair{"stationary", &stationary}, std::pair{"moving", &moving}})
    if (a->dtype == Dtype::float8_e4m3fn && generation < 4)
      fail(in, name, "dtype float8_e4m3fn is not supported before trn3");
  if (moving.dtype == (fn ? Dtype::float8_e4m3 : Dtype::float8_e4m3fn) &&
      stationary.dtype == (fn ? Dtype::float8_e4m3fn : Dtype::float8_e4m3))
    fail(in, "moving", text("dtype ", info(moving.dtype).name, " cannot be mixed with ", info(stationary.dtype).name));
}

void check_transpose(const Instruction& in) {
  const Access &dst = in.operand(0).access, &data = in.operand(1).access;
  const int64_t limit = in.engine == Engine::vector ? 32 : 128;
  if (data.partitions() > limit || data.free_size() > limit)
    fail(in, "data", text("shape (", data.partitions(), ", ", data.free_size(), ") exceeds ", limit, " x ", limit));
  if (dst.partitions() != data.free_size() || dst.free_size() != data.partitions())
    fail(in, "dst", text("shape (", dst.partitions(), ", ", dst.free_size(), ") is not that of the transpose"));
}

void check_free(const Instruction& in, int operand, int64_t want) {
  const Access& a = in.operand(operand).access;
  if (a.free_size() != want)
    fail(in, in.spec().operands[operand].name, text("free size ", a.free_size(), " must be ", want));
}

void check_partitions(const Instruction& in, int operand, int64_t want) {
  const Access& a = in.operand(operand).access;
  if (a.partitions() != want)
    fail(in, in.spec().operands[operand].name, text("partition dimension ", a.partitions(), " must be ", want));
}

// (step, count) pairs that give a number for each element of a partition.
void check_pattern(const Instruction& in) {
  constexpr size_t kPairs = 8;
  const int64_t free = in.operand(0).access.free_size();
  if (in.list.size() > 2 * kPairs) fail(in, "pattern", text("has more than ", kPairs, " pairs"));
  int64_t count = 1;
  for (size_t i = 1; i < in.list.size() && count <= free; i += 2) count *= std::max<int64_t>(0, in.list[i]);
  if (count != free) fail(in, "pattern", text("gives ", count, " numbers, a partition of dst has ", free, " elements"));
}

// Before trn3 TensorE writes within one bank.
void check_bank(const Instruction& in, const Storage& s) {
  const Access& dst = in.operand(0).access;
  const Box box = bounding_box(s, dst);
  if (dst.is_dynamic() || box.end - box.begin != dst.free_size() * size_of(dst.dtype)) return;
  const int64_t begin = std::max<int64_t>(s.address, 0) + box.begin, last = begin + box.end - box.begin - 1;
  if (begin / kPsumBankBytes != last / kPsumBankBytes)
    fail(in, "dst",
         text("bytes ", begin, " to ", last, " of a partition cross a PSUM bank (", kPsumBankBytes, " bytes)"));
}

void check_opcode(const Instruction& in, int generation) {
  switch (in.opcode) {
    case Opcode::nc_matmul:
    case Opcode::nc_matmul_mx:
      return check_matmul(in, generation);
    case Opcode::nc_transpose:
      return check_transpose(in);
    case Opcode::bn_stats:
      return check_free(in, 0, 6);
    case Opcode::bn_aggr:
      if (in.operand(1).access.free_size() % 3) fail(in, "data", "free size must be a multiple of 3");
      return check_free(in, 0, 2);
    case Opcode::max8:
      if (in.operand(1).access.free_size() < 8) fail(in, "src", "free size must be at least 8");
      return check_free(in, 0, 8);
    case Opcode::nc_find_index8:
      check_free(in, 0, 8);
      return check_free(in, 2, 8);
    case Opcode::nc_match_replace8:
      check_free(in, 0, in.operand(1).access.free_size());
      return check_free(in, 2, 8);
    case Opcode::local_gather:
      if (in.count < 0 || in.count > 32 || (in.count & (in.count - 1)))
        fail(in, "num_elem_per_idx", text(in.count, " must be 1, 2, 4, 8, 16 or 32"));
      check_partitions(in, 0, in.operand(1).access.partitions());
      check_partitions(in, 2, in.operand(1).access.partitions());
      return check_multiple(in, 1, 16);
    case Opcode::nc_n_gather:
      check_partitions(in, 1, in.operand(0).access.partitions());
      check_partitions(in, 2, in.operand(0).access.partitions());
      if (in.operand(2).access.dtype != Dtype::uint32)
        fail(in, "indices", text("dtype ", info(in.operand(2).access.dtype).name, " must be uint32"));
      return check_free(in, 2, in.operand(0).access.free_size());
    case Opcode::nc_stream_shuffle:
      for (const int64_t lane : in.list)
        if ((lane < 0 || lane > 31) && lane != 255) fail(in, "shuffle_mask", text(lane, " must be 0 to 31, or 255"));
      return check_free(in, 1, in.operand(0).access.free_size());
    case Opcode::sequence_bounds:
      check_partitions(in, 1, 1);
      check_partitions(in, 0, in.operand(1).access.partitions());
      return check_free(in, 0, 2 * in.operand(1).access.free_size());
    case Opcode::topk: {
      const Access &values = in.operand(0).access, &src = in.operand(2).access;
      const int64_t lanes = std::min<int64_t>(16, src.partitions());
      check_partitions(in, 1, values.partitions());
      check_free(in, 1, values.free_size());
      if (values.partitions() > src.partitions())
        fail(in, "val_dst", text("partition dimension ", values.partitions(), " exceeds src's ", src.partitions()));
      if (in.count > lanes * src.free_size())
        fail(in, "n", text(in.count, " exceeds the ", lanes * src.free_size(), " elements of src"));
      return;
    }
    case Opcode::quantize_mx: {
      const Access& src = in.operand(1).access;
      check_multiple(in, 1, 32);
      check_partitions(in, 0, src.partitions());
      check_free(in, 0, src.free_size() / 4);
      return check_scale(in, 2, src.partitions(), src.free_size() / 4);
    }
    case Opcode::dma_compute:
      for (int i = 1; i < 3; ++i) {
        const Operand& o = in.operand(i);
        if (!o.is_tile()) continue;
        const Access& dst = in.operand(0).access;
        const std::string_view name = in.spec().operands[i].name;
        if (o.access.elements() != dst.elements())
          fail(in, name, text("has ", o.access.elements(), " elements, dst has ", dst.elements()));
        if ((o.access.is_dynamic() || dst.is_dynamic()) && o.access.dims[0].size != dst.dims[0].size)
          fail(in, name, text("has ", o.access.dims[0].size, " rows, dst has ", dst.dims[0].size));
      }
      return;
    case Opcode::register_load:
    case Opcode::register_store:
      if (const int64_t n = in.operand(0).access.elements(); n != 1)
        fail(in, in.spec().operands[0].name, text("has ", n, " elements; a register holds one"));
      return;
    case Opcode::affine_select:
    case Opcode::iota:
      return check_pattern(in);
    case Opcode::nonzero_with_count:
      check_partitions(in, 0, in.operand(1).access.partitions());
      return check_free(in, 0, in.operand(1).access.free_size() + 1);
    case Opcode::tensor_reduce: {
      const int64_t run = in.count, out = in.operand(0).access.free_size(), n = in.operand(1).access.free_size();
      if (out * run != n) fail(in, "dst", text("free size ", out, " is not ", n, " / ", run));
      return;
    }
    default:
      return;
  }
}

}  // namespace

void Program::validate(Instruction& in) const {
  const InstructionSpec& sp = in.spec();
  if (generation_ < sp.min_generation)
    fail(in, "target",
         text("of generation ", generation_, " has no such instruction: it needs generation ", sp.min_generation));
  if (in.engine == Engine::unknown) in.engine = sp.prefer;
  if (!(sp.engines >> static_cast<int>(in.engine) & 1))
    fail(in, "engine", text(kEngineNames[static_cast<int>(in.engine)], " cannot run it"));
  if (in.operands.size() > sp.operands.size()) fail(in, "", "has too many operands");
  in.operands.resize(sp.operands.size());
  for (size_t i = 0; i < in.operands.size(); ++i) {
    check_operand(in, sp.operands[i], in.operands[i], storages_);
    if (!in.operands[i].is_tile()) continue;
    const Access& a = in.operands[i].access;
    const Storage& s = storages_[a.storage];
    const Box box = bounding_box(s, a);
    if (!a.is_dynamic() &&
        (box.begin < 0 || box.end > s.row_bytes || box.partition_begin < 0 || box.partition_end > s.partitions))
      throw OutOfBounds(
          sp.name, sp.operands[i].name,
          text("is out of bounds: partitions ", box.partition_begin, "..", box.partition_end, ", bytes ", box.begin,
               "..", box.end, " of ", s.name, " with ", s.partitions, " partitions of ", s.row_bytes, " bytes"));
    if (on_chip(s.memory) && sp.prefer != Engine::dma && sp.locality != Locality::control)
      check_start_partition(in, sp.operands[i], a, s);
  }
  check_shapes(in, storages_);
  check_rules(in, storages_);
  check_operators(in, generation_);
  check_opcode(in, generation_);
  if (generation_ < 4 && in.engine == Engine::tensor && !in.operands.empty() && in.operand(0).is_tile() &&
      storages_[in.operand(0).access.storage].memory == Memory::psum)
    check_bank(in, storages_[in.operand(0).access.storage]);

  // A result that overlaps an input in another pattern must not be seen by the input.
  for (size_t d = 0; d < in.operands.size(); ++d) {
    const Role role = sp.operands[d].role;
    if (!in.operands[d].is_tile() || (role != Role::write && role != Role::read_write)) continue;
    const Access& dst = in.operands[d].access;
    const Storage& sd = storages_[dst.storage];
    for (size_t i = 0; i < in.operands.size(); ++i) {
      if (i == d || !in.operands[i].is_tile() || sp.operands[i].role == Role::write) continue;
      const Access& a = in.operands[i].access;
      const Storage& ss = storages_[a.storage];
      const bool same = a.storage == dst.storage;
      const bool aliased = !same && sd.memory == ss.memory && sd.address >= 0 && ss.address >= 0;
      if (!same && !aliased) continue;
      // A second operator's operand is read after the first one's result is written.
      const bool late = in.opcode == Opcode::tensor_scalar && i == 3;
      if (same && !late && a.offset == dst.offset && a.dtype == dst.dtype && a.ndim == dst.ndim && !a.is_dynamic() &&
          !dst.is_dynamic() && std::equal(a.dims.begin(), a.dims.begin() + a.ndim, dst.dims.begin()))
        continue;
      Box x = bounding_box(sd, dst), y = bounding_box(ss, a);
      for (auto [box, s] : {std::pair{&x, &sd}, std::pair{&y, &ss}}) {
        if (same) continue;
        box->begin += s->address, box->end += s->address;
        box->partition_begin += s->partition_start, box->partition_end += s->partition_start;
      }
      if (x.overlaps(y)) in.stage |= 1 << i;
    }
  }
}

}  // namespace neuron
