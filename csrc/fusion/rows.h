// A row: a fusible operator as steps of a tile program. The one statement of what it computes; the single call, the
// window and the compiled graph all run it.
#pragma once

#include <bit>

#include "graph.h"

namespace neuron::fusion {

// A value while a node is lowered: which lanes it has.
struct Lanes {
  ValueId id = TileProgram::kNone;
  bool floating = true;
};

// One node's view of the program under construction.
class Lowering {
 public:
  virtual ~Lowering() = default;
  const Node& node() const { return node_; }
  Dtype compute() const { return node_.compute; }
  bool floating() const { return !is_integer(node_.compute); }

  // Tensor argument i converted to the type in which inputs meet; or as it is.
  Lanes in(int i);
  Lanes raw(int i) { return input(input_index(i)); }
  Dtype dtype(int i) const { return input_dtype(input_index(i)); }
  // Number i of the call, in lanes of the compute type.
  Lanes scalar(int i);
  Lanes constant(float f) { return {program_.constant(std::bit_cast<uint32_t>(f)), true}; }
  Lanes integer(int32_t i) { return {program_.constant(static_cast<uint32_t>(i)), false}; }
  Lanes op(LaneOp op, Lanes a, Lanes b = {}, Lanes c = {});
  Lanes reduce(LaneOp op, Lanes a);
  Lanes accumulate(LaneOp op, Lanes a);
  Lanes gather(Lanes a, Lanes index);
  Lanes scatter(Lanes a, Lanes index);
  // Gives result i its value: rounded to the result type, then to the type in memory.
  void out(int i, Lanes v);
  // The same for a result of another type than the others.
  void out(int i, Lanes v, Dtype type);
  // Numbers [i, i + 4) of the node as they are: seed and offset of Philox. The value stands for all four.
  Lanes seed(int i);
  // A value of type `from` as a value of type `to`, as PyTorch converts.
  Lanes convert(Lanes v, Dtype from, Dtype to);
  // A value in the lanes of the compute type, rounded to it: what an operator of its own would hand on.
  Lanes rounded(Lanes v);

 protected:
  Lowering(TileProgram& program, const Node& node) : program_(program), node_(node) {}
  // Tensor arguments that are numbers (Node::numbers) are no inputs.
  int input_index(int argument) const;
  virtual Lanes input(int i) = 0;
  virtual Dtype input_dtype(int i) const = 0;
  virtual Dtype output_dtype(int i) const = 0;
  virtual ValueId number(int i) = 0;
  virtual void result(int i, Lanes v) = 0;

  TileProgram& program_;
  const Node& node_;
};

// Kinds of compute types that a row has.
enum Types : uint8_t { kFloats = 1, kInts = 2, kBools = 4, kAllTypes = 7 };

struct Row {
  const char* name;
  void (*lower)(Lowering& l, const Row& row);
  uint8_t types = kAllTypes;
  // For rows that are one lane operation: which one, by the kind of the compute type.
  LaneOp floats = LaneOp::copy, ints = LaneOp::copy, bools = LaneOp::copy;
  bool to_float = false;       // integers meet in the default floating type
  bool to_bool = false;        // the result is boolean
  bool overwrites = false;     // in place: does not read what it writes to
  bool contiguous = false;     // a new result is contiguous, whatever the inputs' strides
  uint8_t raw = 0;             // tensor arguments that take no part in promotion (bit i: argument i)
  uint8_t promoting = 0;       // numbers that take part in promotion
  bool reads_float32 = false;  // of lists: a tensor for all members may be float32 whatever the members are
  bool divides = false;        // integers: only by a number that is not 0, since division by 0 is an error there
  // A row for a value of the only number, or null: the same for that value, cheaper or more precise.
  const Row* (*for_number)(double number) = nullptr;
  bool drops_number = false;   // what for_number chose, it needs no number
  const Row* other = nullptr;  // for calls with a flag that is true, or with approximate="tanh"
  // Of reductions: which inputs and outputs have one element a row, and which outputs one a column.
  uint8_t row_inputs = 0, row_outputs = 0, column_outputs = 0;

  LaneOp op(Dtype compute) const { return !is_integer(compute) ? floats : compute == Dtype::boolean ? bools : ints; }
};

// Rounds or wraps lanes to what a type holds.
Lanes narrow(TileProgram& program, Lanes v, Dtype to);

// The number of lanes steps of a float as a run's number.
inline uint32_t lane(float f) { return std::bit_cast<uint32_t>(f); }
inline uint32_t lane(int32_t i) { return static_cast<uint32_t>(i); }

}  // namespace neuron::fusion
