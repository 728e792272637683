// The one place that makes communication of this process progress. No torch here.
//
// The right to drive belongs to nobody: a host thread that waits for an operation steps all operations itself (waking
// another thread would cost tens of microseconds), and a background thread does so while nobody waits. A driver spins
// only while the ranks of this host fit its cores; then it sleeps on the process's doorbell.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "doorbell.h"
#include "task.h"

namespace neuron::collectives {

int64_t clock_ns();  // monotonic

// An operation in flight.
class Op : public Strand {
 public:
  Op(Task<> body, int64_t deadline_ns) : Strand(std::move(body)), deadline_ns(deadline_ns) {}
  virtual ~Op() = default;
  // Called by the driver now and then while the operation waits; returns why it can never end, or null.
  virtual std::exception_ptr health(int64_t now) = 0;
  // Called once by the driver, outside its lock, in whatever thread drives. Returns what is to be called once the
  // operation counts as done: code of users, which may take any time and wait for other operations.
  virtual std::function<void()> completed() = 0;

  bool done() const { return done_.load(std::memory_order_acquire); }
  const int64_t deadline_ns;

 private:
  friend class Engine;
  std::atomic<bool> done_{false};
};

class Engine {
 public:
  // `doorbell` is rung by peers; `crowded`: more ranks than cores, so never spin.
  explicit Engine(Doorbell& doorbell) : doorbell_(doorbell) {}
  ~Engine();

  // Ends the background thread; operations then progress only while somebody waits.
  void stop();

  void submit(std::shared_ptr<Op> op);
  // Lets the background thread work on what was submitted.
  void kick();
  // Returns when the operation is done, driving if nobody else does. May throw what the interrupt check throws.
  void wait(const Op& op);
  // As `wait`, for at most `ns` nanoseconds; returns whether it is done.
  bool wait_for(const Op& op, int64_t ns);

  // Calls `what` while nobody drives.
  void undisturbed(const std::function<void()>& what);
  // Something that must be polled (network completions); returns whether it moved.
  void set_poller(std::function<bool()> poller);
  void set_crowded(bool crowded) { crowded_ = crowded; }
  void set_interrupt_check(std::function<void()> check) { interrupt_check_ = std::move(check); }
  // Called when operations have become done.
  void set_observer(std::function<void()> observer) { observer_ = std::move(observer); }

 private:
  using Finished = std::vector<std::shared_ptr<Op>>;
  // One pass over all operations, and a pause, until `end` at most, if none moved. `drive_` is held.
  void turn(Finished& finished, bool background, int64_t end);
  bool step_all(Finished& finished);
  void check_health(Finished& finished, int64_t now);
  void deliver(Finished& finished, bool background);
  void release_retired();
  void loop();

  Doorbell& doorbell_;
  std::mutex drive_;                         // the right to drive
  std::vector<std::shared_ptr<Op>> active_;  // under drive_
  int64_t next_check_ns_ = 0, idle_since_ns_ = 0;
  std::function<bool()> poller_;

  std::mutex inbox_mutex_;
  std::deque<std::shared_ptr<Op>> inbox_;
  std::atomic<bool> inbox_filled_{false};
  // Completed operations: a host thread that submits or waits releases what they hold, because a Python object may hang
  // on it, which the background thread must not destroy.
  Finished retired_;

  std::mutex state_mutex_;
  std::condition_variable wake_, progress_;
  std::atomic<int> waiters_{0};
  std::atomic<size_t> pending_{0};  // submitted and not finished
  bool kicked_ = false, stopped_ = false;
  // One of the threads drives in the background; there are others only while some run code of users.
  bool driving_ = false;
  size_t away_ = 0;  // threads that run code of users
  std::vector<std::thread> threads_;
  std::atomic<bool> crowded_{false};
  std::function<void()> interrupt_check_, observer_;
};

}  // namespace neuron::collectives
