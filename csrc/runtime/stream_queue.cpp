#include "stream_queue.h"

#include <algorithm>
#include <chrono>
#include <map>
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

// One thread for all streams: executing needs the machine's cores for the operators themselves. Streams take turns; one
// whose next task waits at a closed gate is passed over until the gate opens.
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
  void gate_opened() {
    // Both sides change one word, so whoever comes second sees what the first did: the gate open, or somebody waiting.
    if (!passed_over_.fetch_or(0)) return;
    {
      std::lock_guard lock(mutex_);
      for (auto& [queue, gate] : waiting_) ready_.push_back(queue);
      waiting_.clear();
      passed_over_ = 0;
    }
    wake_.notify_one();
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
      while (!stopped_ && !queue->done(last)) {
        const uint64_t next = std::min(last, queue->completed() + 1);
        if (auto gate = queue->closed_gate(next)) {
          pass_over(queue, std::move(gate));
          break;
        }
        if (queue->run_some(next) == StreamQueue::Stop::taken) queue->pause(next);
      }
      lock.lock();
    }
  }
  void pass_over(StreamQueue* queue, std::shared_ptr<Gate> gate) {
    gate->kick();
    {
      std::lock_guard lock(mutex_);
      waiting_.emplace_back(queue, gate);
      passed_over_.exchange(1);
    }
    if (gate->open()) gate_opened();
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<StreamQueue*> ready_;
  std::vector<std::pair<StreamQueue*, std::shared_ptr<Gate>>> waiting_;
  std::atomic<uint8_t> passed_over_{0};  // 1: waiting_ is not empty
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

StreamQueue::Stop StreamQueue::run_some(uint64_t ticket) {
  std::unique_lock lock(mutex_);
  if (executing_) return Stop::taken;
  executing_ = true;
  Stop stop = Stop::done;
  while (!done(ticket)) {
    if (auto gate = tasks_.front()->gate(); gate && !gate->open()) {
      stop = Stop::gate;
      break;
    }
    std::unique_ptr<Task> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      TaskScope scope;
      task->run();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    finished_.push_back(std::move(task));
    if (error) errors_.push_back(std::move(error));
    unsettled_.store(true, std::memory_order_relaxed);
    completed_.fetch_add(1, std::memory_order_release);
    progress_.notify_all();
    gate_opened();
  }
  executing_ = false;
  progress_.notify_all();
  return stop;
}

void StreamQueue::gate_opened() { Worker::get().gate_opened(); }

namespace {
// Queues with a declared failure are few: a table, not a member of every queue.
struct Failures {
  std::mutex mutex;
  std::map<const StreamQueue*, std::exception_ptr> of;
};
Failures& failures() {
  static auto* table = new Failures;
  return *table;
}
}  // namespace

void StreamQueue::set_failure(std::exception_ptr failure) {
  std::lock_guard lock(failures().mutex);
  if (failure)
    failures().of[this] = std::move(failure);
  else
    failures().of.erase(this);
}

std::exception_ptr StreamQueue::failure() const {
  std::lock_guard lock(failures().mutex);
  auto found = failures().of.find(this);
  return found == failures().of.end() ? nullptr : found->second;
}

bool StreamQueue::in_task() { return t_in_task; }
StreamQueue::TaskScope::TaskScope() : outer_(std::exchange(t_in_task, true)) {}
StreamQueue::TaskScope::~TaskScope() { t_in_task = outer_; }

void StreamQueue::pause(uint64_t ticket) {
  auto ready = [&] { return done(ticket) || !executing_; };
  for (int spins = 0; spins < kSpins; spins++)
    if (ready()) return;
  std::unique_lock lock(mutex_);
  progress_.wait_for(lock, std::chrono::nanoseconds(kInterruptPeriod), ready);
}

void StreamQueue::await(uint64_t ticket) {
  while (!done(ticket)) step(ticket);
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

std::shared_ptr<Gate> StreamQueue::closed_gate(uint64_t ticket) const {
  std::lock_guard lock(mutex_);
  if (executing_ || done(ticket)) return nullptr;
  auto gate = tasks_.front()->gate();
  return gate && !gate->open() ? gate : nullptr;
}

void StreamQueue::step(uint64_t ticket) {
  if (auto gate = closed_gate(ticket)) return gate->help();
  if (run_some(std::min(ticket, completed() + 1)) == Stop::taken) pause(ticket);
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
  if (!idle() && !Worker::get().kick(this)) await(enqueued());
}

void StreamQueue::set_interrupt_check(std::function<void()> check) { interrupt_check() = std::move(check); }

struct Event::RecordTask final : Task {
  explicit RecordTask(std::shared_ptr<State> s) : state(std::move(s)) {}
  void run() override {
    state->failure = state->queue->failure();
    state->time_ns.store(now_ns(), std::memory_order_release);
  }
  std::shared_ptr<State> state;
};

struct Event::BlockTask final : Task {
  explicit BlockTask(std::shared_ptr<State> s) : state(std::move(s)) {}
  void run() override {
    if (state->failure) std::rethrow_exception(state->failure);
  }
  std::shared_ptr<Gate> gate() const override { return state; }
  std::shared_ptr<State> state;
};

void Event::record(StreamQueue& queue) {
  queue.settle();
  auto state = std::make_shared<State>();
  state->queue = &queue;
  if (queue.idle()) {
    state->failure = queue.failure();
    state->time_ns = now_ns();  // ticket 0 is done
  } else {
    // The ticket is known only once the task is queued; nobody else sees the state before.
    state->ticket = queue.enqueue(std::make_unique<RecordTask>(state));
  }
  state_ = std::move(state);
}

void Event::block(StreamQueue& queue) const {
  if (!state_ || state_->queue == &queue || (state_->open() && !state_->failure)) return;
  queue.enqueue(std::make_unique<BlockTask>(state_));
}

bool Event::query() const {
  if (!state_ || state_->open()) return true;
  state_->queue->kick();
  return false;
}

void Event::synchronize() const {
  if (!state_) return;
  state_->queue->wait(state_->ticket);  // also if it is done: an error must not depend on who was faster
  if (state_->failure) std::rethrow_exception(state_->failure);
}

int64_t Event::time_ns() const { return state_->time_ns.load(std::memory_order_acquire); }

}  // namespace neuron
