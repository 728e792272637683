// A group of ranks: who they are, how they are reached, and the operations they do together. No torch here.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/link_algorithms.h"
#include "board.h"
#include "call.h"
#include "engine.h"
#include "flight.h"
#include "node.h"
#include "reports.h"
#include "router.h"
#include "select.h"

namespace neuron::collectives {

// A peer died, hung, or called something else; the message says who and what.
struct CommunicationError : std::runtime_error {
  using runtime_error::runtime_error;
};

struct GroupOptions {
  std::string name;
  int rank = 0, size = 1;
  std::vector<uint64_t> global_ranks;  // empty: the group's ranks are the job's
  // Gives this rank's text to all ranks of the group and returns everyone's, in rank order; `what` tells exchanges
  // apart.
  std::function<std::vector<std::string>(const std::string& what, const std::string& text)> exchange;
};

class Group;

// What precedes an operation in its process: it starts when `open` is true. Whoever opens it kicks the engine.
struct Start {
  std::atomic<bool> open{false};
};

// Called once, in any thread, with the error of an operation or null; see Op::completed for what it returns.
using Done = std::function<std::function<void()>(std::exception_ptr)>;

class GroupOp final : public Op {
 public:
  GroupOp(std::shared_ptr<Group> group, Signature signature, uint64_t number, Task<> body, int64_t timeout_ns,
          Done done, std::shared_ptr<Start> start);
  std::exception_ptr health(int64_t now) override;
  std::function<void()> completed() override;
  std::string what() const;
  bool is_collective() const { return signature_.kind != Kind::send && signature_.kind != Kind::recv; }

 private:
  friend class Group;
  Task<> run(Task<> body);
  std::shared_ptr<Group> group_;
  Signature signature_;
  uint64_t number_, place_;
  int64_t started_ns_, timeout_ns_;
  Done done_;
  std::shared_ptr<Start> start_;
  bool failing_ = false;  // it only tells the other hosts
  int64_t asked_ns_ = 0;  // when it last asked them what they do
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  explicit Group(GroupOptions options);
  ~Group();

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::string& name() const { return options_.name; }
  Node& node() { return node_; }
  // Collectives started so far.
  uint64_t collectives_started() const { return collectives_; }

  // Starts collectives that run one after the other as one operation. The memory of their pieces must stay valid until
  // `done` was called; what `done` holds is released by a host thread later.
  // `start` may be null.
  std::shared_ptr<GroupOp> start(std::vector<Call> calls, int64_t timeout_ns, Done done,
                                 std::shared_ptr<Start> start = nullptr);
  std::shared_ptr<GroupOp> send(int to, int tag, DataType dtype, Piece data, int64_t timeout_ns, Done done,
                                std::shared_ptr<Start> start = nullptr);
  // `source` is set before `done` is called.
  std::shared_ptr<GroupOp> receive(int from, int tag, DataType dtype, Piece data, int64_t timeout_ns,
                                   std::shared_ptr<int> source, Done done, std::shared_ptr<Start> start = nullptr);

  bool failed() const { return failed_; }
  const Topology& topology() const { return topology_; }
  // Ends all operations of this rank with an error and refuses new ones.
  void abort(const std::string& reason);
  // Waits until what was sent has arrived, or the group has failed and all operations have ended, at most `ns`.
  void drain(int64_t ns);
  // What each rank was doing, one a line; of other hosts, what they told when something went wrong.
  std::string flight_report() const;

 private:
  friend class GroupOp;
  Task<> in_turn(std::vector<Call> calls, uint64_t number);
  Task<> collective(const Call& call, uint64_t number);
  Task<> over_link(Algorithm algorithm, const Call& call, uint64_t number);
  void join(const std::string& card);
  Task<> receive_into(int from, uint64_t tag, Piece data, std::shared_ptr<int> source);
  std::string name_of_rank(int rank) const;
  // Why an operation failed.
  struct Failure {
    std::string text;
    std::string cause{};       // what others are told, if it is not the text
    bool of_the_group = true;  // which cannot be used any more
  };
  // Why `op` cannot go on, or nothing.
  std::exception_ptr health(GroupOp& op, int64_t now);
  // The same for what algorithms throw, which know members and numbers; here they get names.
  Failure explain(const GroupOp& op, std::exception_ptr error) const;
  // Tells the other ranks, hears what they do, and throws.
  Task<> fail(const GroupOp& op, std::exception_ptr error);
  std::vector<int> waiting_for(const GroupOp& op) const;
  std::vector<int> awaited_by(int rank, int64_t now) const;
  // Whom `awaited` wait for in the end: ranks that do not wait themselves.
  std::vector<int> awaited_in_the_end(const std::vector<int>& awaited, int64_t now) const;
  std::string names_of(const std::vector<int>& ranks) const;
  Report report(bool asks) const;
  void exchange_reports(GroupOp& op, int64_t now);
  void mark_failed(const std::string& cause);

  GroupOptions options_;
  Node& node_;
  uint64_t block_ = 0;  // offset of this rank's memory of the group
  struct Peer {
    std::shared_ptr<Segment> segment;
    FlightMemory* flight;
  };
  std::vector<Peer> peers_;  // by rank; null for ranks of other hosts
  FlightMemory* flight_ = nullptr;
  Topology topology_;
  std::vector<int> local_ranks_;   // of this host, in order; the board's members
  std::vector<int> across_ranks_;  // of each host the rank in this rank's place
  std::unique_ptr<Board> board_;
  std::unique_ptr<FabricLink> fabric_;
  std::unique_ptr<Reports> reports_;  // null if the group has one host
  std::unique_ptr<Router> router_;
  std::mutex submit_mutex_;  // numbers are given in the order of submission
  std::atomic<uint64_t> collectives_{0}, messages_{0};
  uint64_t turn_ = 0;  // the collective that runs; under the engine's right to drive
  const std::shared_ptr<Scratch> scratch_ = std::make_shared<Scratch>();  // of the collective that runs
  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  std::string failure_;
  bool told_ = false;  // the other hosts, of the failure
};

}  // namespace neuron::collectives
