#include "lanes.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>

namespace neuron::collectives {

namespace {
constexpr size_t kEagerBytes = 8 << 10;     // travels with the envelope
constexpr size_t kWindowBytes = 512 << 10;  // of a message under way

std::byte* eager_data(FlowMemory* flow) { return reinterpret_cast<std::byte*>(flow + 1); }

// Streams through a ring buffer: calls move(offset in the buffer, offset in the message, bytes).
template <class F>
void through_ring(uint64_t begin, uint64_t end, uint64_t ring, F move) {
  while (begin < end) {
    const uint64_t at = begin % ring, n = std::min(end - begin, ring - at);
    move(at, begin, n);
    begin += n;
  }
}
}  // namespace

Lanes::Lanes(std::vector<Member> members, int me) : members_(std::move(members)), me_(me), turns_(members_.size()) {
  for (size_t i = 0; i < members_.size(); i++) member_of_[members_[i].rank] = static_cast<int>(i);
}

Lanes::~Lanes() {
  for (auto& flow : flows_) {
    if (flow.window) own().release(*flow.window);
    own().release(flow.offset);
  }
}

void Lanes::reap() {
  std::erase_if(flows_, [&](Flow& flow) {
    if (!flow.eager || flow.memory->state.load(std::memory_order_acquire) == FlowMemory::kOffered) return false;
    own().release(flow.offset);
    return true;
  });
}

bool Lanes::drained() {
  reap();
  return flows_.empty();
}

Task<> Lanes::send(int to, uint64_t tag, const std::byte* data, size_t bytes) {
  const int member = member_of(to);
  LaneMemory& lane = members_[me_].lanes[member];
  const uint64_t ticket = turns_[member].next++;
  const bool eager = bytes <= kEagerBytes;
  std::optional<uint64_t> offset;
  co_await until([&] {
    if (turns_[member].now != ticket ||
        lane.head.load(std::memory_order_relaxed) - lane.tail.load(std::memory_order_acquire) == LaneMemory::kDepth)
      return false;
    reap();
    offset = own().allocate(sizeof(FlowMemory) + (eager ? bytes : 0));
    return offset.has_value();
  });
  auto* flow = new (own().at<FlowMemory>(*offset)) FlowMemory;
  if (eager && bytes) std::memcpy(eager_data(flow), data, bytes);
  const uint64_t head = lane.head.load(std::memory_order_relaxed);
  lane.ring[head % LaneMemory::kDepth] = {tag, bytes, *offset};
  lane.head.store(head + 1, std::memory_order_release);
  turns_[member].now++;
  flows_.push_back({*offset, flow, eager});
  wake(member);
  if (eager) co_return;  // reap() releases the flow

  co_await until([&] { return flow->state.load(std::memory_order_acquire) != FlowMemory::kOffered; });
  if (flow->state.load(std::memory_order_relaxed) == FlowMemory::kRefused)
    throw LengthMismatch{members_[me_].rank, bytes, flow->expected};
  const uint64_t ring = std::min<uint64_t>(bytes, kWindowBytes);
  std::optional<uint64_t> window;
  co_await until([&] { return (window = own().allocate(ring)).has_value(); });
  std::byte* base = own().at<std::byte>(*window, ring);
  std::find_if(flows_.begin(), flows_.end(), [&](Flow& f) { return f.memory == flow; })->window = window;
  flow->window = *window;
  flow->window_bytes = ring;
  const uint64_t step = std::max<uint64_t>(ring / 2, 1);
  for (uint64_t sent = 0; sent < bytes;) {
    co_await until([&] { return sent - flow->consumed.load(std::memory_order_acquire) + step <= ring; });
    const uint64_t end = std::min(bytes, sent + step);
    through_ring(sent, end, ring,
                 [&](uint64_t at, uint64_t from, uint64_t n) { writer_.write(base + at, data + from, n); });
    sent = end;
    flow->produced.store(sent, std::memory_order_release);
    wake(member);
  }
  co_await until([&] { return flow->consumed.load(std::memory_order_acquire) == bytes; });
  own().release(*window);
  std::erase_if(flows_, [&](Flow& f) { return f.memory == flow; });
  own().release(*offset);
}

void Lanes::pump() {
  for (size_t i = 0; i < members_.size(); i++) {
    LaneMemory& lane = members_[i].lanes[me_];
    uint64_t tail = lane.tail.load(std::memory_order_relaxed);
    const uint64_t head = lane.head.load(std::memory_order_acquire);
    if (tail == head) continue;
    if (head - tail > LaneMemory::kDepth)
      throw std::runtime_error(std::string("Rank ")
                                   .append(std::to_string(members_[i].rank))
                                   .append(" announced more messages than it can have"));
    for (; tail != head; tail++) {
      Arrival arrival{static_cast<int>(i), lane.ring[tail % LaneMemory::kDepth]};
      auto it = std::find_if(posted_.begin(), posted_.end(), [&](Posted* p) { return p->wants(arrival); });
      if (it == posted_.end()) {
        arrivals_.push_back(arrival);
      } else {
        (*it)->arrival = arrival;
        (*it)->matched = true;
        posted_.erase(it);
      }
    }
    lane.tail.store(tail, std::memory_order_release);
    wake(static_cast<int>(i));
  }
}

Task<int> Lanes::receive(int from, uint64_t tag, std::byte* data, size_t bytes) {
  Posted posted{from == kAnySource ? kAnySource : member_of(from), tag};
  auto it = std::find_if(arrivals_.begin(), arrivals_.end(), [&](auto& a) { return posted.wants(a); });
  if (it != arrivals_.end()) {
    posted.arrival = *it;
    posted.matched = true;
    arrivals_.erase(it);
  } else {
    posted_.push_back(&posted);
  }
  struct Unpost {
    std::list<Posted*>& list;
    Posted* posted;
    ~Unpost() { list.remove(posted); }
  } unpost{posted_, &posted};
  co_await until([&] {
    if (!posted.matched) pump();
    return posted.matched;
  });

  const int member = posted.arrival.member, rank = members_[member].rank;
  const Envelope envelope = posted.arrival.envelope;
  Segment& segment = *members_[member].segment;
  auto* flow = segment.at<FlowMemory>(envelope.flow);
  if (envelope.bytes != bytes) {
    flow->expected = bytes;
    flow->state.store(FlowMemory::kRefused, std::memory_order_release);
    wake(member);
    throw LengthMismatch{rank, envelope.bytes, bytes};
  }
  if (bytes <= kEagerBytes) {
    if (bytes) {
      segment.at<std::byte>(envelope.flow, sizeof(FlowMemory) + bytes);
      std::memcpy(data, eager_data(flow), bytes);
    }
    flow->state.store(FlowMemory::kAccepted, std::memory_order_release);
    wake(member);
    co_return rank;
  }
  flow->state.store(FlowMemory::kAccepted, std::memory_order_release);
  wake(member);
  const std::byte* base = nullptr;
  uint64_t ring = 0;
  for (uint64_t received = 0; received < bytes;) {
    co_await until([&] { return flow->produced.load(std::memory_order_acquire) > received; });
    if (!base) {
      ring = std::min<uint64_t>(bytes, kWindowBytes);
      base = segment.at<std::byte>(flow->window, ring);
    }
    const uint64_t end = std::min<uint64_t>(flow->produced.load(std::memory_order_acquire), bytes);
    through_ring(received, end, ring,
                 [&](uint64_t at, uint64_t to, uint64_t n) { std::memcpy(data + to, base + at, n); });
    received = end;
    flow->consumed.store(received, std::memory_order_release);
    wake(member);
  }
  co_return rank;
}

bool Lanes::probe(uint64_t tag, int& from) {
  pump();
  for (auto& a : arrivals_)
    if (a.envelope.tag == tag) {
      from = members_[a.member].rank;
      return true;
    }
  return false;
}

}  // namespace neuron::collectives
