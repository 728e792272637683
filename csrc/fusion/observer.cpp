#include "observer.h"

#include <algorithm>
#include <atomic>

#include "rows.h"

namespace neuron::fusion {

namespace {

std::atomic<const Observer*> g_observer{nullptr};

// Bytes of the distinct elements of all members.
uint64_t bytes_of(const Graph& graph, uint16_t operand) {
  uint64_t bytes = 0;
  for (int m = 0; m < graph.operands[operand].members; m++) {
    const Place& p = graph.place(operand, m);
    uint64_t elements = 1;
    for (int d = 0; d < p.ndim; d++)
      if (p.stride[d] != 0) elements *= static_cast<uint64_t>(p.size[d]);
    bytes += elements * static_cast<uint64_t>(size_of(p.dtype));
  }
  return bytes;
}

ProgramRun run_of(const Launch& launch, const Graph& graph, uint16_t member, std::span<char* const> memory) {
  ProgramRun run;
  const int64_t count = graph.counts[graph.spaces[launch.space].first + member];
  run.rows = launch.row_space == kNone ? count : graph.counts[graph.spaces[launch.row_space].first + member];
  run.cols = launch.row_space == kNone ? 1 : count / std::max<int64_t>(1, run.rows);
  for (uint16_t operand : launch.operands) {
    run.places.push_back(graph.place(operand, member));
    run.memory.push_back(reinterpret_cast<uintptr_t>(memory[run.places.back().storage]));
  }
  for (auto [n, position] : launch.numbers) {
    const Node& node = graph.nodes[n];
    run.numbers.push_back(graph.scalars[node.first_scalar + member * node.scalars + position]);
  }
  return run;
}

int64_t count_of(const Graph& graph, uint16_t space) {
  int64_t n = 0;
  for (int m = 0; m < graph.spaces[space].members; m++) n += graph.counts[graph.spaces[space].first + m];
  return n;
}

}  // namespace

std::string_view name_of(Closed why) {
  static constexpr std::string_view names[] = {"drained", "nodes", "memory", "thread", "compiled"};
  return names[static_cast<size_t>(why)];
}

std::vector<ProgramFacts> facts_of(const Observer& observer, const Plan& plan, const Graph& graph,
                                   const std::vector<uint32_t>& calls, std::span<char* const> memory) {
  std::vector<ProgramFacts> programs;
  for (const Launch& launch : plan.launches) {
    ProgramFacts& facts = programs.emplace_back();
    facts.elements = count_of(graph, launch.space);
    if (observer.structure) {
      facts.program = launch.program;
      for (uint16_t m = 0; m < graph.spaces[launch.space].members; m++)
        facts.runs.push_back(run_of(launch, graph, m, memory));
    }
    if (launch.row_space != kNone) facts.rows = count_of(graph, launch.row_space);
    for (uint16_t operand : launch.operands) facts.bytes += bytes_of(graph, operand);
    for (uint16_t n : launch.nodes) {
      const Node& node = graph.nodes[n];
      facts.calls.emplace_back(node.row->name, n < calls.size() ? calls[n] : kNobody);
      for (int i = 0; i < node.inputs; i++) facts.bytes_alone += bytes_of(graph, node.in[i]);
      for (int i = 0; i < node.outputs; i++) facts.bytes_alone += bytes_of(graph, node.out[i]);
    }
  }
  return programs;
}

void set_observer(const Observer* observer) { g_observer.store(observer, std::memory_order_release); }
const Observer* observer() { return g_observer.load(std::memory_order_acquire); }

}  // namespace neuron::fusion
