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

#include "../lane_ops.h"
#include "code.h"

namespace neuron {

class TileProgram;

// Whether this machine has loops, and whether they have an operation.
bool has_loops();
bool has_loop_form(LaneOp op);

struct Loop {
  // What the code is called with: numbers of elements, then addresses of inputs, outputs, and running lanes of
  // reductions (kReductionLanes each, written at the end).
  enum Argument { kWhole, kMasks, kPointers = kMasks + 2 };
  using Function = void (*)(const int64_t* arguments);
  static constexpr int64_t kLanes = 16, kReductionLanes = 32;
  static constexpr size_t kMaxInputs = 64;

  std::vector<uint16_t> steps;       // of the program, in order
  std::vector<uint16_t> inputs;      // values that come from elsewhere
  std::vector<uint16_t> outputs;     // values that are used elsewhere
  std::vector<uint16_t> reductions;  // those of the steps

  // Elements that the code takes at once. kWhole is a multiple; the masks are of the lanes of what is left.
  int64_t width() const { return reductions.empty() ? kLanes : kReductionLanes; }
  // The code for inputs of which those in `vectors` have an element for each lane, the others one for all. Made when it
  // is first asked for.
  Function function(const TileProgram& program, uint64_t vectors) const;

 private:
  struct Variant {
    uint64_t vectors;
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
LoopCode emit(const TileProgram& program, const Loop& loop, uint64_t vectors);

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
