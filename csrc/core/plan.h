// What the executor runs for a program: instructions without the copies that only rename data, cut into parts that
// share nothing (each runs on one thread) and into segments of row-local instructions (partitions run independently).
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "row_steps.h"

namespace neuron {

class Program;

struct CodeSegment {
  uint32_t begin, end;  // of Plan::code
  bool row_local;
  uint32_t first_group = 0,
           last_group = 0;  // of Plan::groups: what the segment is in steps; none: its instructions run
  bool gives_way = false;   // lets other cores run afterwards
  int64_t block_rows = 16;  // partitions that go through at once, so that what they touch stays in the L2 cache
};

struct Part {
  uint32_t begin, end;             // of Plan::segments
  std::vector<uint32_t> storages;  // on-chip buffers
};

struct Plan {
  std::vector<Instruction> code;
  std::vector<CodeSegment> segments;
  std::vector<Part> parts;
  std::vector<int64_t> placement;  // of each storage: byte offset within a partition of its part's arena, or -1
  std::array<int64_t, 2> pitch{};  // bytes per partition of an SBUF and a PSUM arena
  std::vector<RowStep> steps;
  std::vector<RowGroup> groups;
  std::vector<int64_t> row_offset;  // of each storage: byte offset in a thread's memory of one row, if a segment of
                                    // steps is all that touches it, or -1
  int64_t row_bytes = 0;            // that memory; then the lines
  int64_t line_bytes = 0, lines = 0;
  int64_t work = 0;   // elements that instructions visit, roughly
  int32_t packs = 0;  // matmul factors that occur more than once: numbered by Instruction::pack
};

// `several`: other cores see what this one writes to shared HBM, in order with their own writes: each such write ends a
// segment. Programs with control flow, several cores or meetings run as they stand, as one part.
Plan make_plan(const Program& program, bool several);

}  // namespace neuron
