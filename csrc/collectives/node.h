// What the process has once, whatever the number of groups: its shared memory, the engine, the mapped peers. No torch
// here.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "board.h"
#include "engine.h"
#include "fabric.h"
#include "segment.h"

namespace neuron::collectives {

class Node {
 public:
  // Made at the first use. Throws in a child forked after that.
  static Node& get();
  // Ends the background thread of the process's node, if it has one.
  static void stop();

  const std::shared_ptr<Segment>& segment() const { return segment_; }
  Engine& engine() { return engine_; }
  // A peer's segment; mapped once, also if several groups share the peer.
  std::shared_ptr<Segment> peer(const SegmentAddress& address);
  // The endpoint for other hosts, opened at the first call. Throws if there is no libfabric.
  Fabric& fabric();
  // Identity of this host: ranks with equal identities reach each other's memory.
  const std::string& host() const { return host_; }
  // Takes the board that this process leaves and the block of its segment that the board lies in, until the peers have
  // read what they want.
  void retire(std::unique_ptr<Board> board, uint64_t block);
  // Frees blocks of retired boards that can be.
  void release_retired();
  // Keeps, for good, what the network may still read or write for an operation that failed: transfers cannot all be
  // called back.
  void keep(std::shared_ptr<void> memory);
  // Tells how many ranks this host has, as far as a group knows.
  void note_local_ranks(int ranks);

 private:
  Node();
  static std::atomic<Node*> made_;
  std::string host_;
  std::shared_ptr<Segment> segment_;
  Engine engine_;
  std::mutex mutex_;
  std::map<std::array<uint8_t, 16>, std::weak_ptr<Segment>> peers_;
  std::unique_ptr<Fabric> fabric_;
  std::vector<std::pair<std::unique_ptr<Board>, uint64_t>> retired_;
  std::mutex kept_mutex_;  // of its own: taken by who drives the engine, while fabric() drives it under the other one
  std::vector<std::shared_ptr<void>> kept_;
  int local_ranks_ = 1;
};

}  // namespace neuron::collectives
