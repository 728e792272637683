// A tile program: a straight list of lane operations over a space of rows * cols elements, numbered row by row. It is
// what the fuser makes of PyTorch's operators. Structure only: sizes, strides, addresses and numbers come with each run
// (TileRun), so that one program serves all shapes.
//
// Values have an extent: full (rows * cols elements), row (one for each row; only reductions and what follows from
// them) or column (one for each column; only accumulations and what follows from them: they are computed after all
// others). Programs without reductions have one column. A value comes from memory (an access), from a number (a scalar)
// or from a step.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "dtype.h"
#include "lane_ops.h"
#include "loops/loop.h"

namespace neuron {

enum class Extent : uint8_t { full, row, column };
inline constexpr int kExtents = 3;

using ValueId = uint16_t;

class TileProgram {
 public:
  static constexpr int kMaxValues = 512;
  static constexpr ValueId kNone = 0xffff;

  struct Value {
    enum class From : uint8_t { access, scalar, step } from;
    Extent extent;
    uint16_t index;      // of the access, scalar or step
    uint16_t slot = 0;   // buffer; after seal()
    uint16_t last = 0;   // the last step or store that uses it; after seal()
    bool mapped = true;  // all that use it are maps of full extent, or loops; after seal()
    bool looped = true;  // all that use it are loops; after seal()
  };
  // What runs, in order: loads, operations, stores.
  struct Step {
    enum class Kind : uint8_t { load, map, reduce, accumulate, gather, scatter, store, gone } kind;
    LaneOp op = LaneOp::copy;
    Extent extent = Extent::full;  // of the result; of a reduction's result: row; of an accumulation's: column
    ValueId out = kNone;
    ValueId in[3] = {kNone, kNone, kNone};
    uint16_t access = 0;  // of loads and stores
    uint16_t number = 0;  // of reductions and accumulations, among their kind
    bool direct = false;  // of stores: the value may be computed in place of the memory
  };
  struct Access {
    Dtype dtype;
    Extent extent;
    uint16_t memory;  // accesses of equal numbers see the same bytes
  };

  // Building. Lanes of a value are what its dtype needs: f32 for floating types, i32 for integers and booleans.
  uint16_t access(Dtype dtype, Extent extent, uint16_t memory);
  ValueId load(uint16_t access);
  ValueId scalar();                 // the next of the run's numbers
  ValueId constant(uint32_t bits);  // a number that belongs to the program
  ValueId map(LaneOp op, ValueId a, ValueId b = kNone, ValueId c = kNone);
  ValueId reduce(LaneOp op, ValueId a);      // over columns
  ValueId accumulate(LaneOp op, ValueId a);  // a reduction over rows; see accumulate.h
  // The element of each row whose column `index`, a row value, says; 0 if there is no such column.
  ValueId gather(ValueId a, ValueId index);
  // Full: the row value `a` in the column that `index` says, 0 in the others.
  ValueId scatter(ValueId a, ValueId index);
  ValueId expand(ValueId a, Extent extent);  // a number or row value, one for each row or element
  void store(uint16_t access, ValueId value);
  void seal();  // loops, buffers, and which stores are direct

  Extent extent(ValueId v) const { return values_[v].extent; }
  // Extent of steps whose inputs are all numbers.
  void set_extent_of_numbers(Extent e) { extent_of_numbers_ = e; }
  // Whether rows and columns are told apart.
  bool has_rows() const { return reductions_ > 0 || accumulations_ > 0 || full_after_row_; }
  bool full_after_row() const { return full_after_row_; }

  const std::vector<Value>& values() const { return values_; }
  const std::vector<Step>& steps() const { return steps_; }
  const LoopPlan& plan() const { return plan_; }
  const std::vector<Access>& accesses() const { return accesses_; }
  const std::vector<uint32_t>& constants() const { return constants_; }
  int scalars() const { return scalars_; }
  int slots(Extent e) const { return slots_[static_cast<int>(e)]; }
  int reductions() const { return reductions_; }
  int accumulations() const { return accumulations_; }
  size_t size() const { return steps_.size(); }
  // Nanoseconds of one element, roughly.
  double cost() const { return cost_; }

  // One step a line: `v3 = mul v1 v2`. Accesses are m0, m1, ...
  std::string text() const;

 private:
  ValueId add(Value::From from, Extent extent, uint16_t index);
  void merge_pairs();
  void keep_loads();
  void number_steps();  // after their order changed
  void mark_uses();
  void choose_direct_stores();
  void assign_buffers();
  void weigh();

  std::vector<Value> values_;
  std::vector<Step> steps_;
  LoopPlan plan_;
  std::vector<Access> accesses_;
  std::vector<uint32_t> constants_;
  std::vector<std::pair<ValueId, uint16_t>> constant_values_;
  int scalars_ = 0, reductions_ = 0, accumulations_ = 0;
  int slots_[kExtents] = {};
  bool full_after_row_ = false;  // some full value depends on a row value, or a row value on one element
  Extent extent_of_numbers_ = Extent::full;
  double cost_ = 0;
};

// Where an access lies: dims from slow to fast, strides in elements of its dtype. Their product is rows * cols for full
// accesses, rows for row accesses; dims of one element are left out.
inline constexpr int kTileDims = 6;
struct TileAccess {
  char* base = nullptr;
  int ndim = 0;
  int64_t size[kTileDims], stride[kTileDims];
  bool contiguous() const { return ndim == 1 && stride[0] == 1; }
};

struct TileRun {
  int64_t rows = 1, cols = 1;
  const TileAccess* accesses = nullptr;  // one for each access of the program
  const uint32_t* scalars = nullptr;     // lanes, one for each scalar()
};

// Calls body(begin, end) on parts of [0, n), perhaps in several threads.
using TileParallel = std::function<void(int64_t n, const std::function<void(int64_t, int64_t)>& body)>;

// Columns that one reduction step adds up; longer rows are reduced in pieces of this length, then the pieces. Part of
// the definition of every sum.
inline constexpr int64_t kReduceChunk = 4096;
// Longest row that a program may keep whole, for full values that depend on a reduction.
inline constexpr int64_t kMaxResidentCols = 1 << 16;

// Runs the program on each member of `runs`. Bits depend on the program and the data alone.
void run(const TileProgram& program, std::span<const TileRun> runs, const TileParallel& parallel);

}  // namespace neuron
