#include "engine.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

namespace neuron::collectives {

namespace {
constexpr int64_t kSpinNs = 60'000;             // a wake-up costs about 30 us
constexpr int64_t kNetworkSpinNs = 500'000;     // which rings no bell
constexpr int64_t kAloneNs = 5'000;             // of which it keeps its core
constexpr int kCrowdedYields = 30;              // turns that a driver gives its core away before it sleeps
constexpr int64_t kCheckPeriodNs = 20'000'000;  // how often deadlines and peers are looked at
constexpr int64_t kPollNs = 50'000;             // longest sleep while the network has to be polled
}  // namespace

int64_t clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Engine::~Engine() { stop(); }

void Engine::stop() {
  {
    std::lock_guard lock(state_mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  doorbell_.ring();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void Engine::submit(std::shared_ptr<Op> op) {
  release_retired();
  {
    std::lock_guard lock(inbox_mutex_);
    inbox_.push_back(std::move(op));
  }
  pending_.fetch_add(1);
  inbox_filled_.store(true, std::memory_order_release);
}

void Engine::kick() {
  {
    std::lock_guard lock(state_mutex_);
    kicked_ = true;
    if (!stopped_ && threads_.size() == away_) threads_.emplace_back([this] { loop(); });
  }
  wake_.notify_one();
  doorbell_.ring();
}

bool Engine::step_all(Finished& finished) {
  const uint64_t before = Strand::resumptions();
  if (inbox_filled_.exchange(false, std::memory_order_acquire)) {
    std::lock_guard lock(inbox_mutex_);
    std::move(inbox_.begin(), inbox_.end(), std::back_inserter(active_));
    inbox_.clear();
  }
  bool ended = false;
  for (auto& op : active_) {
    op->step();
    ended |= op->finished();
  }
  if (ended) {
    auto rest = std::stable_partition(active_.begin(), active_.end(), [](auto& op) { return !op->finished(); });
    pending_.fetch_sub(active_.end() - rest);
    std::move(rest, active_.end(), std::back_inserter(finished));
    active_.erase(rest, active_.end());
  }
  bool moved = poller_ && poller_();
  return moved || Strand::resumptions() != before;
}

void Engine::check_health(Finished& finished, int64_t now) {
  next_check_ns_ = now + kCheckPeriodNs;
  for (auto& op : active_) {
    std::exception_ptr error = op->health(now);
    if (!error) continue;
    // What the peer did before it died counts.
    while (op->step()) {
    }
    op->fail(error);
  }
  step_all(finished);
}

void Engine::turn(Finished& finished, bool background, int64_t end) {
  if (step_all(finished) || !finished.empty()) {
    idle_since_ns_ = 0;
    return;
  }
  const int64_t now = clock_ns();
  if (now >= next_check_ns_) return check_health(finished, now);
  if (!background && !crowded_) {
    if (!idle_since_ns_) idle_since_ns_ = now;
    if (now - idle_since_ns_ < (poller_ ? kNetworkSpinNs : kSpinNs)) {
      // The peer may be waiting for this very core, on a machine with other things to do.
      if (now - idle_since_ns_ > kAloneNs) sched_yield();
      return;
    }
  } else if (!background && idle_since_ns_ < kCrowdedYields) {
    idle_since_ns_++;
    sched_yield();
    return;
  }
  const uint32_t seen = doorbell_.announce();
  if (step_all(finished) || inbox_filled_.load(std::memory_order_acquire)) {
    doorbell_.stay_awake();
  } else {
    doorbell_.sleep(seen, poller_ ? kPollNs : std::max<int64_t>(std::min(next_check_ns_, end) - now, 1000));
  }
}

void Engine::deliver(Finished& finished, bool background) {
  if (finished.empty()) return;
  std::vector<std::function<void()>> calls;
  for (auto& op : finished) {
    if (auto call = op->completed()) calls.push_back(std::move(call));
    op->done_.store(true, std::memory_order_release);
  }
  if (observer_) observer_();
  {
    std::lock_guard lock(state_mutex_);
    progress_.notify_all();
  }
  if (!calls.empty()) {
    // Meanwhile another thread may have to drive.
    {
      std::lock_guard lock(state_mutex_);
      if (background)
        away_++;
      else
        waiters_.fetch_sub(1);
    }
    if (pending_.load() > 0) kick();
    for (auto& call : calls) call();
    calls.clear();
    std::lock_guard lock(state_mutex_);
    if (background)
      away_--;
    else
      waiters_.fetch_add(1);
  }
  std::lock_guard lock(inbox_mutex_);
  std::move(finished.begin(), finished.end(), std::back_inserter(retired_));
  finished.clear();
}

void Engine::wait(const Op& op) {
  while (!wait_for(op, INT64_MAX)) {
  }
}

bool Engine::wait_for(const Op& op, int64_t ns) {
  if (op.done()) return true;
  const int64_t start = clock_ns(), end = ns < INT64_MAX - start ? start + ns : INT64_MAX;
  int64_t next_interrupt = start + kCheckPeriodNs;
  struct Waiter {
    Engine& engine;
    explicit Waiter(Engine& e) : engine(e) { engine.waiters_.fetch_add(1); }
    ~Waiter() {
      if (engine.waiters_.fetch_sub(1) == 1 && engine.pending_.load() > 0) engine.kick();
    }
  } waiter(*this);
  Finished finished;
  while (!op.done()) {
    {
      std::unique_lock right(drive_, std::try_to_lock);
      if (right) {
        turn(finished, false, end);
      } else {
        doorbell_.ring();  // the background thread gives way
        std::unique_lock lock(state_mutex_);
        progress_.wait_for(lock, std::chrono::microseconds(200), [&] { return op.done() || !driving_; });
      }
    }
    deliver(finished, false);
    const int64_t now = clock_ns();
    if (now >= end) return op.done();
    if (now >= next_interrupt) {
      next_interrupt = now + kCheckPeriodNs;
      if (interrupt_check_) interrupt_check_();
    }
  }
  release_retired();
  return true;
}

void Engine::release_retired() {
  Finished garbage;
  std::lock_guard lock(inbox_mutex_);
  garbage.swap(retired_);
}

void Engine::undisturbed(const std::function<void()>& what) {
  std::lock_guard right(drive_);
  what();
}

void Engine::set_poller(std::function<bool()> poller) {
  std::lock_guard right(drive_);
  poller_ = std::move(poller);
}

void Engine::loop() {
  Finished finished;
  std::unique_lock lock(state_mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopped_ || (kicked_ && waiters_.load() == 0 && !driving_); });
    if (stopped_) return;
    if (pending_.load() == 0) {
      kicked_ = false;
      continue;
    }
    driving_ = true;
    lock.unlock();
    {
      std::lock_guard right(drive_);
      if (waiters_.load() == 0) turn(finished, true, INT64_MAX);
    }
    lock.lock();
    driving_ = false;
    if (waiters_.load() > 0) progress_.notify_all();
    if (finished.empty()) continue;
    lock.unlock();
    deliver(finished, true);
    lock.lock();
  }
}

}  // namespace neuron::collectives
