#include "group.h"

#include <sys/types.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <new>

#include "algorithms/hierarchical.h"
#include "algorithms/link_algorithms.h"
#include "algorithms/mesh.h"

namespace neuron::collectives {

namespace {

constexpr uint32_t kVersion = 3;
constexpr int64_t kWorriedNs = 1'000'000'000;  // before a timeout other hosts are asked what they do
constexpr int64_t kAskAgainNs = 200'000'000;
constexpr int64_t kAnswerNs = 300'000'000;  // how long a rank that fails listens to the others
// Messages of the user are told from those of algorithms by the highest bit.
uint64_t message_tag(int tag) { return 1ull << 63 | static_cast<uint32_t>(tag); }

// What a rank tells the others of its group through the store. Ranks run the same build.
struct Card {
  uint32_t version = kVersion;
  char host[128]{};
  SegmentAddress segment;
  uint64_t flight = 0, board = 0, lanes = 0;
  uint64_t board_token = 0;
  Secret secret{};  // the first rank's is the group's
};

std::string pack(const Card& card) { return {reinterpret_cast<const char*>(&card), sizeof card}; }

Card unpack(const std::string& text, int rank) {
  Card card;
  if (text.size() != sizeof card)
    throw CommunicationError("rank " + std::to_string(rank) +
                             " announced itself in another format: all ranks must run the same version of torchneuron");
  std::memcpy(&card, text.data(), sizeof card);
  if (card.version != kVersion)
    throw CommunicationError("rank " + std::to_string(rank) + " runs another version of torchneuron");
  card.host[sizeof card.host - 1] = 0;
  return card;
}

size_t align(size_t n) { return (n + 63) / 64 * 64; }

// "T (stopped)" -> "stopped"; what the kernel says of a process.
std::string process_state(int pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("State:", 0) == 0) {
      const size_t open = line.find('('), end = line.find(')');
      if (open != std::string::npos && end != std::string::npos) return line.substr(open + 1, end - open - 1);
    }
  return "gone";
}

}  // namespace

namespace {
Task<> after(std::shared_ptr<Start> start, Task<> body) {
  co_await until([&] { return start->open.load(std::memory_order_acquire); });
  co_await std::move(body);
}
}  // namespace

GroupOp::GroupOp(std::shared_ptr<Group> group, Signature signature, uint64_t number, Task<> body, int64_t timeout_ns,
                 Done done, std::shared_ptr<Start> start)
    : Op(run(start ? after(start, std::move(body)) : std::move(body)), clock_ns() + timeout_ns),
      group_(std::move(group)),
      signature_(signature),
      number_(number),
      started_ns_(clock_ns()),
      timeout_ns_(timeout_ns),
      done_(std::move(done)),
      start_(std::move(start)) {
  place_ = flight_begin(*group_->flight_, number_, signature_, started_ns_);
}

Task<> GroupOp::run(Task<> body) {
  std::exception_ptr error;
  try {
    co_await std::move(body);
  } catch (...) {
    error = std::current_exception();
  }
  if (!error) co_return;
  failing_ = true;
  co_await group_->fail(*this, error);
}

std::string GroupOp::what() const {
  return describe(signature_, number_) + " of group '" + group_->name() + "' on rank " + std::to_string(group_->rank());
}

std::exception_ptr GroupOp::health(int64_t now) { return failing_ ? nullptr : group_->health(*this, now); }

std::function<void()> GroupOp::completed() {
  const std::exception_ptr failure = error();
  if (!failure) flight_end(*group_->flight_, place_, clock_ns());
  if (failure && group_->reports_)
    group_->node_.keep(std::make_shared<std::pair<Done, std::shared_ptr<void>>>(done_, group_->scratch_));
  return done_(failure);
}

Group::Group(GroupOptions options) : options_(std::move(options)), node_(Node::get()) {
  const int n = size();
  Segment& own = *node_.segment();
  node_.release_retired();
  // Flight record, board and lanes of this rank, in one block.
  const size_t board_at = align(sizeof(FlightMemory)), lanes_at = board_at + align(sizeof(BoardMemory));
  auto block = own.allocate(lanes_at + n * sizeof(LaneMemory));
  if (!block)
    throw CommunicationError(
        "neuron: no shared memory is left for another process group; destroy groups that are not used any more");
  block_ = *block;
  flight_ = new (own.at<FlightMemory>(block_)) FlightMemory;
  auto* board = new (own.at<BoardMemory>(block_ + board_at)) BoardMemory;
  for (int i = 0; i < n; i++) new (own.at<LaneMemory>(block_ + lanes_at + i * sizeof(LaneMemory))) LaneMemory;

  Card card;
  node_.host().copy(card.host, sizeof card.host - 1);
  card.segment = own.address();
  card.flight = block_;
  card.board = block_ + board_at;
  card.lanes = block_ + lanes_at;
  random_bytes(card.secret.data(), card.secret.size());
  random_bytes(&card.board_token, sizeof card.board_token);
  board->token = card.board_token;
  try {
    join(pack(card));
  } catch (...) {
    own.release(block_);
    throw;
  }
}

void Group::join(const std::string& own_card) {
  const int n = size(), me = rank();
  std::vector<Card> cards;
  for (auto& text : options_.exchange("card", own_card)) cards.push_back(unpack(text, static_cast<int>(cards.size())));

  std::vector<std::string> hosts;       // in order of their first rank
  std::vector<std::vector<int>> ranks;  // of each host
  for (int r = 0; r < n; r++) {
    auto host = std::find(hosts.begin(), hosts.end(), cards[r].host);
    if (host == hosts.end()) {
      hosts.push_back(cards[r].host);
      ranks.emplace_back();
      host = hosts.end() - 1;
    }
    ranks[host - hosts.begin()].push_back(r);
  }
  for (auto& of_host : ranks)
    if (std::find(of_host.begin(), of_host.end(), me) != of_host.end()) local_ranks_ = of_host;
  topology_.ranks = n;
  topology_.hosts = static_cast<int>(hosts.size());
  topology_.even = std::all_of(ranks.begin(), ranks.end(), [&](auto& r) { return r.size() == ranks[0].size(); });
  const int place = static_cast<int>(std::find(local_ranks_.begin(), local_ranks_.end(), me) - local_ranks_.begin());
  if (topology_.even)
    for (auto& of_host : ranks) across_ranks_.push_back(of_host[place]);

  std::vector<Board::Member> boards;
  std::vector<Lanes::Member> lanes;
  std::set<int> remote;
  peers_.resize(n);
  for (int r = 0; r < n; r++) {
    if (std::find(local_ranks_.begin(), local_ranks_.end(), r) == local_ranks_.end()) {
      remote.insert(r);
      continue;
    }
    try {
      auto segment = node_.peer(cards[r].segment);
      peers_[r] = {segment, segment->at<FlightMemory>(cards[r].flight)};
      boards.push_back({segment, segment->at<BoardMemory>(cards[r].board), cards[r].board_token});
      lanes.push_back({r, segment, segment->at<LaneMemory>(cards[r].lanes, n)});
    } catch (const std::exception& e) {
      throw CommunicationError("neuron: rank " + std::to_string(me) + " cannot reach rank " + std::to_string(r) + ": " +
                               e.what());
    }
  }
  node_.note_local_ranks(static_cast<int>(local_ranks_.size()));
  board_ = std::make_unique<Board>(std::move(boards), place);

  if (!remote.empty()) {
    // Told to the others also if it fails, so that they do not wait.
    std::string address, problem;
    try {
      address = node_.fabric().address();
    } catch (const std::exception& e) {
      problem = e.what();
    }
    const auto addresses = options_.exchange("address", problem.empty() ? "+" + address : "-" + problem);
    std::map<int, std::string> reached;
    for (int r = 0; r < n; r++) {
      if (addresses[r].empty() || addresses[r][0] != '+')
        throw CommunicationError("neuron: rank " + std::to_string(r) +
                                 " cannot reach other hosts: " + addresses[r].substr(1));
      if (remote.count(r)) reached[r] = addresses[r].substr(1);
    }
    fabric_ = std::make_unique<FabricLink>(node_.fabric(), cards[0].secret, me, reached);
    reports_ = std::make_unique<Reports>(*fabric_, n, std::vector<int>(remote.begin(), remote.end()));
  }
  router_ =
      std::make_unique<Router>(std::make_unique<Lanes>(std::move(lanes), place), fabric_.get(), std::move(remote));
}

Group::~Group() {
  node_.engine().undisturbed([&] {
    if (reports_ && !reports_->sent()) node_.keep(std::move(reports_));
    reports_.reset();
  });
  router_.reset();
  node_.retire(std::move(board_), block_);
}

std::string Group::name_of_rank(int r) const {
  std::string out = "rank " + std::to_string(r);
  if (!options_.global_ranks.empty() && options_.global_ranks[r] != static_cast<uint64_t>(r))
    out += " (rank " + std::to_string(options_.global_ranks[r]) + " of the job)";
  return out;
}

Task<> Group::collective(const Call& call, uint64_t number) {
  const size_t bytes = call.signature.count * size_of(call.signature.dtype);
  const Algorithm algorithm = choose(call.signature.kind, bytes, topology_);
  if (algorithm == Algorithm::mesh)
    co_await mesh::run(*board_, number, call);  // members of the board are the ranks
  else
    co_await over_link(algorithm, call, number);
}

Task<> Group::over_link(Algorithm algorithm, const Call& call, uint64_t number) {
  // Space for the steps of one algorithm lies between the tags of two collectives.
  Party party{*router_, {}, rank(), number << 16, *scratch_};
  for (int r = 0; r < size(); r++) party.ranks.push_back(r);
  const int n = size(), me = rank();
  if (n > 1) {
    // Each rank compares with its neighbour what they are about to do.
    constexpr uint64_t kCompare = 0xffff;
    auto* ours = new (scratch_->take(sizeof(Signature))) Signature(call.signature);
    auto* theirs = new (scratch_->take(sizeof(Signature))) Signature;
    co_await exchange(party, (me + 1) % n, reinterpret_cast<std::byte*>(ours), sizeof *ours, (me + n - 1) % n,
                      reinterpret_cast<std::byte*>(theirs), sizeof *theirs, kCompare);
    if (*theirs != *ours) throw Mismatch{(me + n - 1) % n, *theirs};
  }
  switch (algorithm) {
    case Algorithm::ring:
      if (call.signature.kind == Kind::all_reduce)
        co_await ring::all_reduce(party, call);
      else if (call.signature.kind == Kind::all_gather)
        co_await ring::all_gather(party, call);
      else
        co_await ring::reduce_scatter(party, call);
      break;
    case Algorithm::doubling:
      if (call.signature.kind == Kind::all_reduce)
        co_await doubling::all_reduce(party, call);
      else
        co_await doubling::barrier(party);
      break;
    case Algorithm::tree:
      if (call.signature.kind == Kind::broadcast)
        co_await tree::broadcast(party, call);
      else
        co_await tree::reduce(party, call);
      break;
    case Algorithm::hierarchical: {
      const int place =
          static_cast<int>(std::find(across_ranks_.begin(), across_ranks_.end(), me) - across_ranks_.begin());
      Party across{*router_, across_ranks_, place, number << 16, *scratch_};
      co_await hierarchical::all_reduce(*board_, across, number, call, n);
      break;
    }
    default:
      co_await direct::exchange_all(party, call);
  }
}

Task<> Group::in_turn(std::vector<Call> calls, uint64_t number) {
  co_await until([&] { return turn_ == number; });
  for (const Call& call : calls) {
    co_await collective(call, number);
    scratch_->reset();
  }
  turn_++;
}

std::shared_ptr<GroupOp> Group::start(std::vector<Call> calls, int64_t timeout_ns, Done done,
                                      std::shared_ptr<Start> start) {
  std::lock_guard lock(submit_mutex_);
  const uint64_t number = collectives_++;
  const Signature signature = calls.at(0).signature;
  auto op = std::make_shared<GroupOp>(shared_from_this(), signature, number, in_turn(std::move(calls), number),
                                      timeout_ns, std::move(done), std::move(start));
  node_.engine().submit(op);
  return op;
}

std::shared_ptr<GroupOp> Group::send(int to, int tag, DataType dtype, Piece data, int64_t timeout_ns, Done done,
                                     std::shared_ptr<Start> start) {
  std::lock_guard lock(submit_mutex_);
  const Signature signature{Kind::send, dtype, Reduction::sum, to, data.bytes / size_of(dtype)};
  auto op = std::make_shared<GroupOp>(shared_from_this(), signature, messages_++,
                                      router_->send(to, message_tag(tag), data.data, data.bytes), timeout_ns,
                                      std::move(done), std::move(start));
  node_.engine().submit(op);
  return op;
}

Task<> Group::receive_into(int from, uint64_t tag, Piece data, std::shared_ptr<int> source) {
  *source = co_await router_->receive(from, tag, data.data, data.bytes);
}

std::shared_ptr<GroupOp> Group::receive(int from, int tag, DataType dtype, Piece data, int64_t timeout_ns,
                                        std::shared_ptr<int> source, Done done, std::shared_ptr<Start> start) {
  std::lock_guard lock(submit_mutex_);
  const Signature signature{Kind::recv, dtype, Reduction::sum, from, data.bytes / size_of(dtype)};
  auto op = std::make_shared<GroupOp>(shared_from_this(), signature, messages_++,
                                      receive_into(from, message_tag(tag), data, std::move(source)), timeout_ns,
                                      std::move(done), std::move(start));
  node_.engine().submit(op);
  return op;
}

std::string Group::flight_report() const {
  std::string out;
  const int64_t now = clock_ns();
  for (int r = 0; r < size(); r++) {
    out += "\n  " + name_of_rank(r);
    if (const Peer& peer = peers_[r]; peer.segment) {
      const int pid = peer.segment->address().pid;
      out += " (process " + std::to_string(pid);
      if (r != rank()) out += ", " + (peer.segment->alive() ? process_state(pid) : std::string("gone"));
      out += "): " + flight_summary(*peer.flight, now);
    } else if (const auto heard = reports_->heard(r)) {
      out += " (on another host): " + std::string(heard->report.doing);
    } else {
      out += " (on another host): it has told nothing";
    }
  }
  return out;
}

std::vector<int> Group::waiting_for(const GroupOp& op) const {
  std::vector<int> out;
  if (op.is_collective()) {
    out = router_->busy();
    for (int member : board_->missing()) out.push_back(local_ranks_[member]);
    return out;
  }
  for (int r = 0; r < size(); r++)
    if (r != rank() && (op.signature_.root == r || op.signature_.root == kAnySource)) out.push_back(r);
  return out;
}

std::vector<int> Group::awaited_by(int r, int64_t now) const {
  std::vector<int> out;
  if (const Peer& peer = peers_[r]; peer.segment) {
    if (peer.segment->alive() && process_state(peer.segment->address().pid) != "stopped")
      out = flight_awaited(*peer.flight, now);
  } else if (const auto heard = reports_->heard(r); heard && now - heard->at_ns < kLatelyNs) {
    out.assign(heard->report.waits_for.begin(), heard->report.waits_for.end());
  }
  std::erase_if(out, [&](int rank) { return rank < 0 || rank >= size(); });
  return out;
}

std::vector<int> Group::awaited_in_the_end(const std::vector<int>& awaited, int64_t now) const {
  std::vector<int> ends, open = awaited;
  std::set<int> seen{rank()};
  while (!open.empty()) {
    const int r = open.back();
    open.pop_back();
    if (!seen.insert(r).second) continue;
    const std::vector<int> next = awaited_by(r, now);
    if (next.empty()) ends.push_back(r);
    open.insert(open.end(), next.begin(), next.end());
  }
  std::sort(ends.begin(), ends.end());
  return ends.empty() ? awaited : ends;  // or they wait for each other
}

std::string Group::names_of(const std::vector<int>& ranks) const {
  std::string out;
  for (int r : ranks) out += (out.empty() ? "" : ", ") + name_of_rank(r);
  return out;
}

Report Group::report(bool asks) const {
  const int64_t now = clock_ns();
  Report out;
  out.rank = rank();
  out.asks = asks;
  out.failed = failed_;
  const auto awaited = flight_awaited(*flight_, now);
  for (size_t i = 0; i < kMostAwaited; i++) out.waits_for[i] = i < awaited.size() ? awaited[i] : -1;
  flight_summary(*flight_, now).copy(out.doing, sizeof out.doing - 1);
  if (out.failed) std::memcpy(out.reason, flight_->reason, sizeof out.reason);
  return out;
}

void Group::exchange_reports(GroupOp& op, int64_t now) {
  if (!reports_) return;
  if (const auto askers = reports_->step(); !askers.empty()) reports_->send(report(false), askers);
  if (now < op.deadline_ns - std::min(op.timeout_ns_ / 4, kWorriedNs) || now < op.asked_ns_ + kAskAgainNs) return;
  op.asked_ns_ = now;
  reports_->send(report(true), reports_->ranks());
}

std::exception_ptr Group::health(GroupOp& op, int64_t now) {
  auto because = [](std::string text, std::string cause = "", bool of_the_group = true) {
    return std::make_exception_ptr(Failure{std::move(text), std::move(cause), of_the_group});
  };
  const bool started = !op.start_ || op.start_->open.load(std::memory_order_acquire);
  const std::vector<int> awaited = started ? waiting_for(op) : std::vector<int>{};
  flight_wait(*flight_, op.place_, awaited, now);
  exchange_reports(op, now);
  if (failed_) {
    std::lock_guard lock(failure_mutex_);
    // Empty while the operation that failed hears what the others do.
    if (failure_.empty()) return nullptr;
    return because("the group cannot be used any more since: " + failure_, "", false);
  }
  for (int r = 0; r < size(); r++) {
    const bool remote = !peers_[r].segment;
    if (const auto heard = remote ? reports_->heard(r) : std::nullopt; heard && heard->report.failed)
      return because(name_of_rank(r) + " has given up: " + heard->report.reason, heard->report.reason);
  }
  for (int r : awaited) {
    const Peer& peer = peers_[r];
    if (!peer.segment) continue;  // on another host
    const bool alive = peer.segment->alive();
    if (peer.flight->failed.load(std::memory_order_acquire)) {
      char reason[sizeof peer.flight->reason];
      std::memcpy(reason, peer.flight->reason, sizeof reason);
      reason[sizeof reason - 1] = 0;
      return because(name_of_rank(r) + " has given up: " + reason, reason);
    }
    if (!alive)
      return because(name_of_rank(r) + " (process " + std::to_string(peer.segment->address().pid) +
                     ") has died or left");
    const auto member = std::find(local_ranks_.begin(), local_ranks_.end(), r) - local_ranks_.begin();
    if (op.is_collective() && board_->deserted_by(static_cast<int>(member)))
      return because(name_of_rank(r) + " has destroyed the group already");
  }
  if (now < op.deadline_ns) return nullptr;
  const std::string late = "timed out after " + std::to_string(op.timeout_ns_ / 1'000'000) + " ms while it waited for ";
  if (!started) return because(late + "what this rank's stream does before it");
  if (awaited.empty()) return because(late + "earlier operations");
  const auto ends = awaited_in_the_end(awaited, now);
  return because(late + names_of(awaited) + (ends == awaited ? "" : ", in the end for " + names_of(ends)));
}

Group::Failure Group::explain(const GroupOp& op, std::exception_ptr error) const {
  try {
    std::rethrow_exception(error);
  } catch (const Failure& failure) {
    return failure;
  } catch (const Mismatch& e) {
    return {"the ranks called different collectives: " + name_of_rank(e.member) + " called " +
            describe(e.theirs, op.number_)};
  } catch (const SizeMismatch& e) {
    return {name_of_rank(e.member) + " sends " + std::to_string(e.theirs) + " bytes, but this rank expects " +
            std::to_string(e.ours) + " from it"};
  } catch (const LengthMismatch& e) {
    return {name_of_rank(e.sender) + " sends " + std::to_string(e.sent) + " bytes, but the receiver expects " +
                std::to_string(e.expected) + ". Tensors of both ends must have one size.",
            "", false};
  } catch (const std::exception& e) {
    return {e.what()};
  }
}

void Group::mark_failed(const std::string& cause) {
  if (failed_.exchange(true)) return;
  cause.copy(flight_->reason, sizeof flight_->reason - 1);
  flight_->failed.store(true, std::memory_order_release);
}

Task<> Group::fail(const GroupOp& op, std::exception_ptr error) {
  Failure failure = explain(op, error);
  failure.text = "neuron: " + op.what() + " failed: " + failure.text;
  if (failure.of_the_group) {
    mark_failed(failure.cause.empty() ? failure.text : failure.cause);
    if (reports_ && !std::exchange(told_, true)) {
      const int64_t asked = clock_ns();
      reports_->send(report(true), reports_->ranks());
      co_await until([&] {
        if (const auto askers = reports_->step(); !askers.empty()) reports_->send(report(false), askers);
        const auto& others = reports_->ranks();
        return clock_ns() > asked + kAnswerNs ||
               (reports_->sent() && std::all_of(others.begin(), others.end(), [&](int r) {
                  const auto heard = reports_->heard(r);
                  return heard && heard->at_ns > asked;
                }));
      });
    }
    failure.text += ". What each rank was doing:" + flight_report();
    std::lock_guard lock(failure_mutex_);
    if (failure_.empty()) failure_ = failure.text;
  }
  throw CommunicationError(failure.text);
}

void Group::abort(const std::string& reason) {
  {
    std::lock_guard lock(failure_mutex_);
    if (failure_.empty()) failure_ = reason;
  }
  mark_failed(reason);
  node_.engine().kick();
}

namespace {
// Waits for the receivers of what was sent.
class Drain final : public Op {
 public:
  Drain(std::shared_ptr<Group> group, Task<> body, int64_t ns)
      : Op(std::move(body), clock_ns() + ns), group_(std::move(group)) {}
  std::exception_ptr health(int64_t now) override {
    if (!group_->failed() && now < deadline_ns) return nullptr;
    return std::make_exception_ptr(CommunicationError("not drained"));
  }
  std::function<void()> completed() override { return nullptr; }

 private:
  std::shared_ptr<Group> group_;
};
}  // namespace

void Group::drain(int64_t ns) {
  auto body = [](Router& router) -> Task<> { co_await until([&] { return router.drained(); }); };
  auto op = std::make_shared<Drain>(shared_from_this(), body(*router_), ns);
  node_.engine().submit(op);
  node_.engine().wait_for(*op, ns);
}

}  // namespace neuron::collectives
