#include "stream_queue.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace neuron {

namespace {
std::function<void()>& interrupt_check() {
  static auto* check = new std::function<void()>;
  return *check;
}
thread_local bool t_in_task = false;
constexpr int kSpins = 4000;                      // about 10 us: cheaper than being woken up
constexpr int64_t kInterruptPeriod = 50'000'000;  // ns
}  // namespace

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// One thread for all streams: executing needs the machine's cores for the operators themselves. Streams take turns.
class Worker {
 public:
  static Worker& get() {
    static auto* worker = new Worker;  // never destroyed: streams may outlive static destructors
    return *worker;
  }
  // False if the worker was stopped.
  bool kick(StreamQueue* queue) {
    {
      std::lock_guard lock(mutex_);
      if (stopped_) return false;
      if (std::find(ready_.begin(), ready_.end(), queue) == ready_.end()) ready_.push_back(queue);
      if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
    }
    wake_.notify_one();
    return true;
  }
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stopped_ || !ready_.empty(); });
      if (stopped_) return;
      StreamQueue* queue = ready_.front();
      ready_.pop_front();
      lock.unlock();
      const uint64_t last = queue->enqueued();
      while (!stopped_ && !queue->done(last)) queue->await(std::min(last, queue->completed() + 1));
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<StreamQueue*> ready_;
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

void stop_worker() { Worker::get().stop(); }

uint64_t StreamQueue::enqueue(std::unique_ptr<Task> task, bool kick_worker) {
  settle();
  std::vector<std::unique_ptr<Task>> garbage;
  uint64_t ticket;
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    ticket = enqueued_.load(std::memory_order_relaxed) + 1;
    enqueued_.store(ticket, std::memory_order_release);
    garbage.swap(finished_);
  }
  if (kick_worker) kick();
  return ticket;
}

bool StreamQueue::run_some(uint64_t ticket) {
  std::unique_lock lock(mutex_);
  if (executing_) return false;
  executing_ = true;
  while (!done(ticket)) {
    std::unique_ptr<Task> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    const bool outer = std::exchange(t_in_task, true);
    try {
      task->run();
    } catch (...) {
      error = std::current_exception();
    }
    t_in_task = outer;
    lock.lock();
    finished_.push_back(std::move(task));
    if (error) errors_.push_back(std::move(error));
    unsettled_.store(true, std::memory_order_relaxed);
    completed_.fetch_add(1, std::memory_order_release);
    progress_.notify_all();
  }
  executing_ = false;
  progress_.notify_all();
  return true;
}

bool StreamQueue::in_task() { return t_in_task; }

void StreamQueue::pause(uint64_t ticket) {
  auto ready = [&] { return done(ticket) || !executing_; };
  for (int spins = 0; spins < kSpins; spins++)
    if (ready()) return;
  std::unique_lock lock(mutex_);
  progress_.wait_for(lock, std::chrono::nanoseconds(kInterruptPeriod), ready);
}

void StreamQueue::await(uint64_t ticket) {
  while (!done(ticket))
    if (!run_some(ticket)) pause(ticket);
}

void StreamQueue::wait(uint64_t ticket) {
  for (int64_t checked = now_ns(); !done(ticket);) {
    step(ticket);
    if (int64_t now = now_ns(); now - checked >= kInterruptPeriod) {
      if (auto& check = interrupt_check()) check();
      checked = now;
    }
  }
  release_finished();
  rethrow();
}

void StreamQueue::step(uint64_t ticket) {
  Task::Point before;
  {
    std::lock_guard lock(mutex_);
    if (!executing_ && !done(ticket)) before = tasks_.front()->waits_for();
  }
  if (before.queue && !before.queue->done(before.ticket)) return before.queue->step(before.ticket);
  if (!run_some(std::min(ticket, completed() + 1))) pause(ticket);
}

void StreamQueue::release_finished() {
  std::vector<std::unique_ptr<Task>> garbage;
  std::lock_guard lock(mutex_);
  garbage.swap(finished_);
  unsettled_.store(!errors_.empty(), std::memory_order_relaxed);
}

void StreamQueue::rethrow() {
  std::vector<std::exception_ptr> errors;
  {
    std::lock_guard lock(mutex_);
    errors.swap(errors_);
    unsettled_.store(!finished_.empty(), std::memory_order_relaxed);
  }
  if (!errors.empty()) std::rethrow_exception(errors.front());
}

void StreamQueue::kick() {
  settle();
  if (!idle() && !Worker::get().kick(this)) await(enqueued());
}

void StreamQueue::set_interrupt_check(std::function<void()> check) { interrupt_check() = std::move(check); }

struct Event::RecordTask final : Task {
  explicit RecordTask(std::shared_ptr<State> s) : state(std::move(s)) {}
  void run() override { state->time_ns.store(now_ns(), std::memory_order_release); }
  std::shared_ptr<State> state;
};

struct Event::BlockTask final : Task {
  explicit BlockTask(std::shared_ptr<State> s) : state(std::move(s)) {}
  void run() override { state->queue->await(state->ticket); }
  Point waits_for() const override { return {state->queue, state->ticket}; }
  std::shared_ptr<State> state;
};

void Event::record(StreamQueue& queue) {
  queue.settle();
  auto state = std::make_shared<State>();
  state->queue = &queue;
  if (queue.idle()) {
    state->time_ns = now_ns();  // ticket 0 is done
  } else {
    // The ticket is known only once the task is queued; nobody else sees the state before.
    state->ticket = queue.enqueue(std::make_unique<RecordTask>(state));
  }
  state_ = std::move(state);
}

void Event::block(StreamQueue& queue) const {
  if (!state_ || state_->done() || state_->queue == &queue) return;
  queue.enqueue(std::make_unique<BlockTask>(state_));
}

bool Event::query() const {
  if (!state_ || state_->done()) return true;
  state_->queue->kick();
  return false;
}

void Event::synchronize() const {
  if (state_) state_->queue->wait(state_->ticket);  // also if it is done: an error must not depend on who was faster
}

int64_t Event::time_ns() const { return state_->time_ns.load(std::memory_order_acquire); }

}  // namespace neuron
