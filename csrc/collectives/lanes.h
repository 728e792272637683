// Messages through shared memory. The sender puts an envelope into a short queue of the receiver and streams the data
// through a window in its own segment once the receiver has matched it; a small message travels with its envelope. So
// what nobody receives holds no window, and any number of sends may be open.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "link.h"
#include "segment.h"
#include "writer.h"

namespace neuron::collectives {

struct Envelope {
  uint64_t tag, bytes, flow;
};

// Envelopes from one rank to another, in the sender's segment.
struct alignas(64) LaneMemory {
  static constexpr uint64_t kDepth = 8;
  alignas(64) std::atomic<uint64_t> head{0};  // written by the sender
  alignas(64) std::atomic<uint64_t> tail{0};  // by the receiver
  Envelope ring[kDepth];
};

// One message under way, in the sender's segment; data that travels with the envelope follows it.
struct alignas(64) FlowMemory {
  enum : uint32_t { kOffered, kAccepted, kRefused };
  std::atomic<uint32_t> state{kOffered};
  uint64_t expected = 0;  // by a receiver that refused
  uint64_t window = 0, window_bytes = 0;
  alignas(64) std::atomic<uint64_t> produced{0};
  alignas(64) std::atomic<uint64_t> consumed{0};
};

class Lanes final : public Link {
 public:
  struct Member {
    int rank;  // in the group
    std::shared_ptr<Segment> segment;
    LaneMemory* lanes;  // one for each member, of this member's messages
  };
  Lanes(std::vector<Member> members, int me);
  ~Lanes() override;

  Task<> send(int to, uint64_t tag, const std::byte* data, size_t bytes) override;
  Task<int> receive(int from, uint64_t tag, std::byte* data, size_t bytes) override;

  // Whether a message of any member with this tag has arrived and nobody waits for it.
  bool probe(uint64_t tag, int& from);
  // Whether everything sent has been taken by its receiver.
  bool drained();

 private:
  struct Arrival {
    int member;
    Envelope envelope;
  };
  struct Posted {
    int member;  // or kAnySource
    uint64_t tag;
    bool matched = false;
    Arrival arrival{};
    bool wants(const Arrival& a) const { return a.envelope.tag == tag && (member == kAnySource || a.member == member); }
  };
  struct Turn {
    uint64_t next = 0, now = 0;
  };
  void pump();  // takes envelopes from the queues and matches them
  void reap();  // releases flows whose message has been taken
  Segment& own() { return *members_[me_].segment; }
  void wake(int member) { members_[member].segment->doorbell().ring(); }
  int member_of(int rank) const { return member_of_.at(rank); }

  std::vector<Member> members_;
  std::map<int, int> member_of_;
  int me_;
  Writer writer_;
  std::vector<Turn> turns_;       // sends to a member go in order
  std::list<Posted*> posted_;     // receives that wait, oldest first
  std::deque<Arrival> arrivals_;  // messages nobody waits for yet, oldest first
  struct Flow {
    uint64_t offset;
    FlowMemory* memory;
    bool eager;
    std::optional<uint64_t> window{};  // not read back from memory that peers can write
  };
  std::vector<Flow> flows_;  // sent, perhaps not yet taken
};

}  // namespace neuron::collectives
