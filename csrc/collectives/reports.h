// What the ranks of other hosts tell of themselves when something goes wrong: what they do, whom they wait for, why
// they gave up. Nobody sends anything while all is well. No torch here.
//
// Everything but table() is called by whoever has the engine's right to drive.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "fabric.h"
#include "flight.h"

namespace neuron::collectives {

// As it travels. What arrives is checked before it is used.
struct Report {
  int32_t rank = 0;
  bool asks = false;    // for the receiver's report
  bool failed = false;  // the sender has given up
  std::array<int32_t, kMostAwaited> waits_for{};
  char doing[256]{};
  char reason[sizeof(FlightMemory::reason)]{};
};

class Reports {
 public:
  struct Heard {
    Report report;
    int64_t at_ns;
  };
  // Waits for reports of `ranks`, the ranks of a group on other hosts.
  Reports(FabricLink& link, int ranks_of_group, std::vector<int> ranks);

  const std::vector<int>& ranks() const { return ranks_; }
  // Takes what has arrived and goes on with what is being sent. Returns who asked.
  std::set<int> step();
  // Starts to send a report, except to ranks that one is still on its way to.
  template <class Ranks>
  void send(const Report& report, const Ranks& to) {
    for (int rank : to) send_to(rank, report);
  }
  // Whether nothing is on its way.
  bool sent() const { return senders_.empty(); }
  // The last report of a rank, from any thread.
  std::optional<Heard> heard(int rank) const;

 private:
  Task<> listen();
  void send_to(int rank, const Report& report);

  FabricLink& link_;
  int ranks_of_group_;
  std::vector<int> ranks_;
  std::set<int> askers_;
  mutable std::mutex mutex_;
  std::map<int, Heard> heard_;
  Strand listener_;
  std::map<int, Strand> senders_;
};

}  // namespace neuron::collectives
