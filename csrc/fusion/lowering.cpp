// Rule: borders. Each operator's result is rounded to its own type before the next one reads it, also where nothing is
// stored in between.
//
// Reason: alone, the operator's result goes through memory in that type. Without the rounding a fused chain in bfloat16
// would be more precise than the same operators alone, and differ from them.
#include "rows.h"

namespace neuron::fusion {

Lanes narrow(TileProgram& program, Lanes v, Dtype to) {
  switch (to) {
    case Dtype::bfloat16:
      return {program.map(LaneOp::round_bf16, v.id), true};
    case Dtype::float16:
      return {program.map(LaneOp::round_f16, v.id), true};
    case Dtype::int8:
      return {program.map(LaneOp::wrap_i8, v.id), false};
    case Dtype::uint8:
      return {program.map(LaneOp::wrap_u8, v.id), false};
    default:
      return v;
  }
}

Lanes Lowering::op(LaneOp op, Lanes a, Lanes b, Lanes c) {
  const LaneOpInfo& row = info(op);
  const bool floating = row.out == Lane::any ? (op == LaneOp::select ? b.floating : a.floating) : row.out == Lane::f32;
  return {program_.map(op, a.id, b.id, c.id), floating};
}

Lanes Lowering::reduce(LaneOp op, Lanes a) { return {program_.reduce(op, a.id), info(op).out == Lane::f32}; }
Lanes Lowering::accumulate(LaneOp op, Lanes a) { return {program_.accumulate(op, a.id), info(op).out == Lane::f32}; }
Lanes Lowering::gather(Lanes a, Lanes index) { return {program_.gather(a.id, index.id), a.floating}; }
Lanes Lowering::scatter(Lanes a, Lanes index) { return {program_.scatter(a.id, index.id), a.floating}; }

Lanes Lowering::convert(Lanes v, Dtype from, Dtype to) {
  if (from == to) return v;
  const bool wanted = !is_integer(to);
  if (to == Dtype::boolean) return op(v.floating ? LaneOp::nonzero : LaneOp::inonzero, v);
  if (v.floating != wanted) v = op(wanted ? LaneOp::to_float : LaneOp::to_int, v);
  // Booleans fit everywhere, and so does a float16 in a float32.
  if (from == Dtype::boolean || to == Dtype::float32 || to == Dtype::int32) return v;
  return narrow(program_, v, to);
}

Lanes Lowering::rounded(Lanes v) { return narrow(program_, v, node_.compute); }

int Lowering::input_index(int argument) const {
  return argument - std::popcount(node_.numbers & ((1u << argument) - 1));
}

Lanes Lowering::scalar(int i) { return {number(std::popcount(node_.numbers) + i), floating()}; }

Lanes Lowering::in(int i) {
  if (node_.numbers >> i & 1) return {number(std::popcount(node_.numbers & ((1u << i) - 1))), floating()};
  const int index = input_index(i);
  return convert(input(index), input_dtype(index), node_.compute);
}

void Lowering::out(int i, Lanes v, Dtype type) { result(i, convert(narrow(program_, v, type), type, output_dtype(i))); }

void Lowering::out(int i, Lanes v) { out(i, v, node_.result); }

Lanes Lowering::seed(int i) {
  const int first = std::popcount(node_.numbers) + i;
  const ValueId v = number(first);
  for (int k = 1; k < 4; k++) number(first + k);  // consecutive numbers of the run
  return {v, false};
}

}  // namespace neuron::fusion
