// Predicts when each instruction of a program would start and end on Trainium.
#pragma once
#include <string>
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
  double dma_start_ns = 0;     // semaphore to first byte
  double instruction_ns = 0;   // issue of a compute instruction that waits for another engine
  double min_cycles = 64;      // initiation interval of compute instructions
  double access_cycles = 160;  // from the end of an instruction to the start of one that depends on it
  double fp32_matmul_passes = 4;
  double hbm_bytes_per_ns = 0;     // per core
  bool vector_fast_modes = false;  // 4x/2x modes for 16-bit data
  double pe_warm_ns = 0;           // time at half rate after idling
};

struct Event {
  uint32_t instruction;
  Engine engine;
  double start_ns, end_ns, busy_ns;
  int64_t bytes;      // DMA: moved
  double flops;       // TensorE
  int32_t waits_for;  // event that decided the start; -1: none
  int32_t core;
};

struct Timeline {
  std::vector<Event> events;
  double latency_ns = 0;
  std::array<double, static_cast<int>(Engine::count)> busy_ns{};  // per engine; dma: mean over its engines
};

// `programs`: one per core; trips[i]: instruction indices in the order they ran (dynamic loops unrolled).
Timeline predict(const Program& program, const Target& target);

}  // namespace neuron
