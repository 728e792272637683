// Who watches fusion, for `torchneuron explain`: told of each call when it is recorded, and of the programs that a
// window became when it has run.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "fuser.h"

namespace neuron::fusion {

// Why a window closed.
enum class Closed : uint8_t {
  drained,   // somebody reads a result, or queues work that is not fusible
  nodes,     // kMaxWindowNodes
  memory,    // kMaxOrphanBytes
  thread,    // another thread records on the stream
  compiled,  // the end of a fused step of a compiled graph
};
std::string_view name_of(Closed why);

inline constexpr uint32_t kNobody = 0xffffffff;

// What a program ran on: a member of its lists of tensors.
struct ProgramRun {
  int64_t rows, cols;
  std::vector<Place> places;      // of each access
  std::vector<uintptr_t> memory;  // of each access: where its storage lies
  std::vector<uint32_t> numbers;  // lanes, one for each scalar
};
struct ProgramFacts {
  std::vector<std::pair<const char*, uint32_t>> calls;  // the row's name, the observer's number of the call
  int64_t elements = 0, rows = 0;                       // rows: 0 without reductions
  uint64_t bytes = 0, bytes_alone = 0;                  // that the program moves; that the calls would, one by one
  TileProgram program;
  std::vector<ProgramRun> runs;
};
struct Observer {
  bool structure;          // whether it wants the programs themselves and what they ran on
  uint32_t (*recorded)();  // the number of a call
  void (*closed)(Closed why, const std::vector<ProgramFacts>& programs);
};
void set_observer(const Observer* observer);  // lives as long as the process; null: nobody watches
const Observer* observer();

std::vector<ProgramFacts> facts_of(const Observer& observer, const Plan& plan, const Graph& graph,
                                   const std::vector<uint32_t>& calls, std::span<char* const> memory);

}  // namespace neuron::fusion
