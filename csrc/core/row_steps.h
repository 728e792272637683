// Row steps: a run of row-local instructions as calls of the vector kernels, row by row, so that what one instruction
// leaves is still in the L1 cache when the next one reads it. They give the bits that the instructions give one by one.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "isa.h"

namespace neuron {

struct Instruction;
struct Storage;

inline constexpr int64_t kChunk = 1024;  // elements of a row that go through the kernels at once: stays in L1

// Where a row's elements lie.
struct RowOperand {
  enum class Place : uint8_t { none, memory, line, number, scalar_register, vector_register };
  Place place = Place::none;
  bool one = false;       // one element, for all of the row
  uint32_t storage = 0;   // or number of the line: a thread's memory for one chunk of a row
  int64_t offset = 0;     // bytes from the start of row 0
  int64_t partition = 0;  // row 0's in its buffer (on chip)
  int64_t pitch = 0;      // bytes from row to row (HBM)
  int64_t stride = 0;     // bytes from element to element
  float number = 0;
  bool operator==(const RowOperand&) const = default;
};

struct RowStep {
  enum class Kind : uint8_t {
    copy,        // to = a, bytes
    load,        // to = a, of type `dtype`, as fp32
    store,       // to, of type `dtype`, = a
    binary,      // to = a op b
    chain,       // to = (a op b) op2 c; reversed: c op2 (a op b)
    chain3,      // to = ((a op b) op2 c) op3 d
    binary_sum,  // to = a op b, and sum = sum + what function(to) adds up to
    activate,    // to = function(a * b + c), as activation says
    summed,      // the same, and sum = sum + what it adds up to; `to` may be nowhere
    reduce,      // to[j] = op over a[j * n ...], `count` times; negated if `negate`
    accumulate,  // to = to op (op over a)
  };
  Kind kind = Kind::copy;
  AluOp op = AluOp::bypass, op2 = AluOp::bypass, op3 = AluOp::bypass;
  Function function = Function::copy;
  Dtype dtype = Dtype::float32;
  bool negate = false, reversed = false;
  bool fresh = false;  // a sum starts with the row: before its first chunk it holds nothing
  bool whole = false;  // the row is not cut into chunks
  int64_t n = 1, count = 1;
  float parameter = 0;
  RowOperand to, a, b, c, d, sum;
  bool streams = false;  // `to` goes around the caches: see stream_results
  RowOperand ahead;      // what the next row will read first, asked for meanwhile
};

// Steps that go through a row together, chunk by chunk: [begin, end) of the steps, for partitions [first, last).
struct RowGroup {
  uint32_t begin, end;
  int64_t n, chunk;
  int64_t first, last;
};

// The steps of an instruction; nothing if it has none: its rows must be run by the instruction itself.
std::optional<std::vector<RowStep>> row_steps(const std::vector<Storage>& storages, const Instruction& instruction);

// Adds steps [begin, steps.size()) of an instruction on partitions [first, last) to a segment's groups.
void group_steps(std::span<const RowStep> steps, uint32_t begin, int64_t first, int64_t last,
                 std::vector<RowGroup>& groups, size_t first_group);

// Makes one step of neighbours that go through a row together, where the second one alone needs what the first one
// gives, or adds it up. unread(storage, step): nobody reads the storage's row after that step.
void merge_row_steps(std::vector<RowStep>& steps, std::vector<RowGroup>& groups,
                     const std::function<bool(uint32_t, uint32_t)>& unread);

// Results too large for the caches are written around them: a store through the caches reads each line first and puts
// out others that would still be read. The row's input that comes from HBM is fetched for the next row meanwhile, as no
// row's first pass has anything else to do. steps: of one segment.
void stream_results(std::span<RowStep> steps, const std::vector<Storage>& storages);

// An operand in memory: element i of row r is at base + r * pitch + i * element.
struct RowPointer {
  char* base = nullptr;
  int64_t pitch = 0, element = 0;
};
struct ResolvedStep {
  const RowStep* step;
  RowPointer to, a, b, c, d, sum;
  RowPointer streamed, ahead;  // where `to`, which holds one chunk, goes at once, if the step streams
};
// Runs the groups on partitions [begin, end); resolved: of step groups[0].begin and on.
void run_row_steps(std::span<const RowGroup> groups, std::span<const ResolvedStep> resolved, int64_t begin,
                   int64_t end);

// out = function(in * scale + bias); what is neither scaled nor shifted keeps its bits, the sign of 0 too.
void activate(Function function, const float* in, float scale, float bias, float parameter, float* out, int64_t n);

}  // namespace neuron
