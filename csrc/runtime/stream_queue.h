// In-order queue of deferred device work, and events on it. No torch here. Queues live as long as the process.
//
// The right to execute belongs to the queue, not to a thread: whoever needs a result runs what is queued before it
// (waking a sleeping thread costs about 30 us here). A worker thread takes over when it is kicked: by work big enough
// to pay for a wake-up, or by somebody who asks without waiting (an event query), so that queued work never depends on
// another host call. Most operators never enter a queue: they find it empty and run where they are called.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace neuron {

// Something outside of a queue that its next task waits for: a point of another queue, a collective. The worker, one
// thread for all queues, never waits at a closed gate: it goes on with other queues.
class Gate {
 public:
  virtual ~Gate() = default;
  virtual bool open() const = 0;
  // For a host thread that waits: does part of the work, or waits a while (so that it stays interruptible).
  virtual void help() = 0;
  // Sees to it that the gate opens without a host thread. StreamQueue::gate_opened() is called when it has.
  virtual void kick() = 0;
};

struct Task {
  virtual ~Task() = default;
  virtual void run() = 0;  // exceptions surface at the next host wait on the stream
  // What must be open before `run` is called.
  virtual std::shared_ptr<Gate> gate() const { return nullptr; }
};

int64_t now_ns();  // monotonic clock

// Work that was called but is not queued yet. It comes after everything queued so far, and whoever queues or waits
// runs it first (the fusion window of the stream).
struct Deferred {
  virtual ~Deferred() = default;
  virtual void flush() = 0;
};

class StreamQueue {
 public:
  StreamQueue() = default;
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  // Appends work; returns its ticket (1, 2, ...). `kick` lets the worker thread start on it now.
  uint64_t enqueue(std::unique_ptr<Task> task, bool kick = false);
  uint64_t enqueued() const { return enqueued_.load(std::memory_order_acquire); }
  uint64_t completed() const { return completed_.load(std::memory_order_acquire); }
  bool done(uint64_t ticket) const { return completed() >= ticket; }
  bool idle() const { return done(enqueued()); }

  // Null: there is none (any more).
  void set_deferred(Deferred* work) { deferred_.store(work, std::memory_order_release); }
  void settle() {
    if (Deferred* work = deferred_.load(std::memory_order_acquire)) work->flush();
  }

  // Returns when `ticket` is done; executes queued work in this thread if nobody else does. Rethrows a task's error.
  void wait(uint64_t ticket);
  void drain() {
    settle();
    if (!idle() || unsettled_.load(std::memory_order_acquire)) wait(enqueued());
  }
  // As `wait`, without rethrowing: for one stream that waits for another.
  void await(uint64_t ticket);
  // Destroys what was run.
  void release_finished();
  // Lets the worker thread run what is queued. Any thread may call it: deferred work stays where it is.
  void kick();

  // For whoever opened a gate that is not a point of a queue: the worker looks again at the queues it passed over.
  static void gate_opened();

  // For a task: what events recorded from now on tell the streams that wait for them; null: nothing. Other errors stay
  // with their own queue.
  void set_failure(std::exception_ptr failure);
  std::exception_ptr failure() const;

  // Whether the calling thread is running a task: it must not wait for a queue that may have to run that task first.
  static bool in_task();
  // While one exists, the calling thread counts as running a task: for other threads that streams wait for.
  class TaskScope {
   public:
    TaskScope();
    ~TaskScope();
    TaskScope(const TaskScope&) = delete;

   private:
    bool outer_;
  };

  // Called now and then while a host thread waits; may throw (Ctrl-C).
  static void set_interrupt_check(std::function<void()> check);

 private:
  friend class Worker;
  friend class Event;
  enum class Stop { done, taken, gate };
  // Runs tasks until `ticket` is done, another thread has the right to execute, or a gate is closed.
  Stop run_some(uint64_t ticket);
  std::shared_ptr<Gate> closed_gate(uint64_t ticket) const;  // of the next task, if nobody runs it
  void step(uint64_t ticket);                                // runs the next task, or helps what it waits for
  void pause(uint64_t ticket);  // until `ticket` is done, the right to execute is free, or some time has passed
  void rethrow();

  mutable std::mutex mutex_;
  std::condition_variable progress_;
  std::deque<std::unique_ptr<Task>> tasks_;
  // Run but not yet destroyed: what a task holds is released by a thread that enqueues or waits, never by the worker,
  // because a Python object may hang on it.
  std::vector<std::unique_ptr<Task>> finished_;
  std::vector<std::exception_ptr> errors_;  // of tasks run since the last wait
  std::atomic<uint64_t> enqueued_{0}, completed_{0};
  std::atomic<Deferred*> deferred_{nullptr};
  std::atomic<bool> executing_{false};  // the right to execute is taken
  std::atomic<bool> unsettled_{false};  // there is something in finished_ or errors_
};

// A point in a queue. Copies share the state; recording again makes a new one.
class Event {
 public:
  void record(StreamQueue& queue);
  // `queue` goes on after the point.
  void block(StreamQueue& queue) const;
  bool query() const;
  void synchronize() const;
  bool recorded() const { return state_ != nullptr; }
  int64_t time_ns() const;  // when the point was passed; recorded() and query() must hold

 private:
  struct State final : Gate {
    StreamQueue* queue = nullptr;
    uint64_t ticket = 0;
    std::atomic<int64_t> time_ns{0};
    std::exception_ptr failure;  // known once it is open
    bool open() const override { return queue->done(ticket); }
    void help() override { queue->step(ticket); }
    void kick() override { queue->kick(); }
  };
  struct RecordTask;
  struct BlockTask;
  std::shared_ptr<State> state_;
};

// Stops the worker thread after the task it runs. Work can still be drained afterwards.
void stop_worker();

}  // namespace neuron
