// The flight record of a rank in a group: its last operations, where its peers can read them, also after its death.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace neuron::collectives {

constexpr size_t kMostAwaited = 8;            // ranks that a record names
constexpr int64_t kLatelyNs = 1'000'000'000;  // what a rank said longer ago is not known to be so

struct alignas(64) FlightMemory {
  struct Entry {
    uint64_t number;
    Signature signature;
    int64_t started_ns;
    std::atomic<int64_t> ended_ns;                             // 0 while it runs
    std::array<std::atomic<int32_t>, kMostAwaited> waits_for;  // ranks, then -1
  };
  static constexpr uint64_t kEntries = 32;
  std::atomic<uint64_t> count{0};
  Entry entries[kEntries]{};
  std::atomic<int64_t> noted_ns{0};  // when the rank last said whom it waits for
  std::atomic<bool> failed{false};   // the rank has given the group up, for the reason below
  char reason[512]{};
};

// Records an operation; returns its place for the others.
uint64_t flight_begin(FlightMemory& record, uint64_t number, const Signature& signature, int64_t now);
void flight_end(FlightMemory& record, uint64_t place, int64_t now);
// Notes whom the operation waits for.
void flight_wait(FlightMemory& record, uint64_t place, const std::vector<int>& ranks, int64_t now);
// Whom the rank's operations wait for; nobody if it has not said so lately, as a rank does that waits.
std::vector<int> flight_awaited(const FlightMemory& record, int64_t now);
// "in all_reduce #3 (1024 x float32, sum) for 2.0 s, waiting for rank 1" or what it did last.
std::string flight_summary(const FlightMemory& record, int64_t now);
// "all_reduce #3 (1024 x float32, sum)"
std::string describe(const Signature& signature, uint64_t number);

}  // namespace neuron::collectives
