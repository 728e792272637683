// Predicts when each instruction of a program would start and end on Trainium.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "program.h"

namespace neuron {

// A hardware generation. Values and their sources are in torchneuron/perf/targets.
struct Target {
  int generation = 3;
  std::array<double, static_cast<int>(Engine::count)> clock_ghz{};  // by Engine
  int64_t sbuf_bytes = 0;                                           // per partition
  int dma_engines = 16;
  double dma_bytes_per_ns = 0;  // one engine, sustained
  double dma_row_ns = 0;        // least time of one contiguous row on its engine
  double dma_row_overhead_ns = 0;
  double dma_start_ns = 0;      // semaphore to first byte
  double instruction_ns = 0;    // issue of a compute instruction that waits for another engine
  double min_cycles = 64;       // initiation interval of compute instructions
  double access_cycles = 160;   // from the end of an instruction to the start of one that depends on it
  double hbm_bytes_per_ns = 0;  // per core
  double stride_bytes = 16;     // an innermost stride above it halves the rate
  bool shared_ports = false;    // VectorE and GpSimdE take turns in SBUF, VectorE and ScalarE in PSUM
  double pe_warm_ns = 0;        // time at half rate after idling
};

struct Event {
  uint32_t instruction;
  Engine engine;
  double start_ns, end_ns, busy_ns;
  int64_t bytes;      // DMA: moved
  int64_t hbm_bytes;  // of these read from HBM, and written to it
  double flops;       // TensorE
  int32_t waits_for;  // event that decided the start; -1: none
  int64_t times;      // how many of the instruction's runs it stands for
};

// A loop whose trips are not all on the timeline.
struct LoopNote {
  uint32_t source;       // its line
  int64_t trips, shown;  // trips 0: as many as a register or a tensor says when it runs, which is not known
};

struct Timeline {
  std::vector<Event> events;
  std::vector<LoopNote> loops;
  double latency_ns = 0;
  std::array<double, static_cast<int>(Engine::count)> busy_ns{};  // per engine; dma: mean over its engines
};

// Loops run as often as their bounds say, as far as registers are known. Of long ones the first trips are replayed; the
// others take as long as the later half of those.
Timeline predict(const Program& program, const Target& target);

// How the clock computes a cost, in words of docs/isa.md; and what holds for many instructions.
std::string formula(const Cost& cost, const Target& target);
std::span<const std::string_view> clock_rules();

}  // namespace neuron
