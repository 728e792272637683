// Loops: consecutive steps of a tile program on full values, as machine code that goes through all of them lane by lane
// with the values between in registers. What the steps compute, bit by bit, is what their kernels compute.
//
// Only machines with AVX-512 have loops; elsewhere, and for what no loop can do, steps run one after the other.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../dtype.h"
#include "../lane_ops.h"
#include "code.h"

namespace neuron {

class TileProgram;

// Whether this machine has loops, and whether they have an operation.
bool has_loops();
bool has_loop_form(LaneOp op);
bool is_loop_call(LaneOp op);  // by a function, not by instructions

// Whether loops read and write elements of a type narrower than a lane.
bool has_loop_form(Dtype narrow);

struct Loop {
  // What the code is called with: rows, elements of each, addresses of inputs, outputs, and running lanes of reductions
  // (kReductionLanes each for a row, written at its end), and after all of them the bytes from row to row of each. Of
  // an input whose rows lie anywhere that is where a table of their addresses stands. The code counts in place.
  static constexpr int kMostBlocks = 4;  // of a function, see blocks()
  enum Argument { kRows, kWhole, kMasks, kPointers = kMasks + kMostBlocks };
  using Function = void (*)(int64_t* arguments);
  static constexpr int64_t kLanes = 16, kReductionLanes = 32;
  static constexpr size_t kMaxInputs = 40;

  struct Output {
    static constexpr uint16_t kLanes = 0xffff;
    uint16_t value;
    uint16_t store = kLanes;  // the step that stores it in a narrower type, which the loop can do
  };
  std::vector<uint16_t> steps;       // of the program, in order
  std::vector<uint16_t> inputs;      // values that come from elsewhere
  std::vector<Output> outputs;       // values that are used elsewhere
  std::vector<uint16_t> reductions;  // those of the steps
  bool calls = false;                // some operation is a function

  // Registers of lanes that the code takes at once. A function works on as many as it takes to hide how long each of
  // its instructions takes.
  int64_t blocks() const { return calls ? kMostBlocks : reductions.empty() ? 1 : kReductionLanes / kLanes; }
  // kWhole is a multiple of the elements of these; the masks are of the lanes of what is left.
  int64_t width() const { return blocks() * kLanes; }

  // Which inputs have an element for each lane (the others have one for all), and which inputs and, after them, outputs
  // are memory of the narrower type of their access. Of which inputs there is a table.
  struct Layout {
    uint64_t vectors = 0, narrow = 0, tables = 0;
    static constexpr size_t kMost = 64;  // outputs after these are lanes
    bool is_narrow(size_t k) const { return k < kMost && narrow >> k & 1; }
    bool operator==(const Layout&) const = default;
  };
  // The code for a layout. Made when it is first asked for.
  Function function(const TileProgram& program, const Layout& layout) const;

 private:
  struct Variant {
    Layout layout;
    Code code;
    Function function;
    Variant* next;
  };
  struct Variants {
    std::atomic<Variant*> first{nullptr};
    std::mutex mutex;
    ~Variants();
  };
  std::shared_ptr<Variants> variants_ = std::make_shared<Variants>();
};

// Machine code of a loop, and where in it the function starts.
struct LoopCode {
  std::vector<uint8_t> bytes;
  size_t entry;
};
LoopCode emit(const TileProgram& program, const Loop& loop, const Loop::Layout& layout);

// How a program runs: steps and loops in order.
struct LoopPlan {
  struct Item {
    static constexpr uint16_t kNone = 0xffff;
    uint16_t step, loop = kNone;  // one of them
  };
  std::vector<Item> items;
  std::vector<Loop> loops;
};
LoopPlan plan_loops(const TileProgram& program);

}  // namespace neuron
