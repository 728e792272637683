// Order, events, errors and ownership of StreamQueue, alone and under random programs on many threads.
#include "runtime/stream_queue.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "check.h"

namespace {

using neuron::Event;
using neuron::StreamQueue;
using neuron::Task;
using namespace std::chrono_literals;

struct Call final : Task {
  explicit Call(std::function<void()> f) : f(std::move(f)) {}
  void run() override { f(); }
  std::function<void()> f;
};

std::unique_ptr<Task> call(std::function<void()> f) { return std::make_unique<Call>(std::move(f)); }

// Queues live as long as the process; reachable, so that no leak is reported.
StreamQueue& new_queue() {
  static auto* all = new std::deque<StreamQueue>;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  return all->emplace_back();
}

// Waits for what other threads do, without touching the queue.
template <class F>
bool soon(F condition) {
  for (int i = 0; i < 20000; i++) {
    if (condition()) return true;
    std::this_thread::sleep_for(500us);
  }
  return false;
}

TEST(new_queue_is_idle) {
  StreamQueue& q = new_queue();
  CHECK(q.idle());
  CHECK_EQ(q.enqueued(), 0u);
  q.wait(0);
  q.drain();
  q.kick();
}

TEST(tasks_run_in_order_and_only_as_far_as_asked) {
  StreamQueue& q = new_queue();
  std::vector<int> ran;
  for (int i = 1; i <= 10; i++) CHECK_EQ(q.enqueue(call([&ran, i] { ran.push_back(i); })), uint64_t(i));
  CHECK(ran.empty());
  q.wait(4);
  CHECK_EQ(ran.size(), 4u);
  CHECK(q.done(4) && !q.done(5));
  q.await(5);
  CHECK_EQ(ran.size(), 5u);
  q.drain();
  CHECK(q.idle());
  for (int i = 0; i < 10; i++) CHECK_EQ(ran[i], i + 1);
}

TEST(a_kicked_queue_needs_no_other_call) {
  StreamQueue& q = new_queue();
  std::atomic<int> ran{0};
  for (int i = 0; i < 100; i++) q.enqueue(call([&] { ran++; }), /*kick=*/i == 99);
  CHECK(soon([&] { return ran == 100; }));
  q.enqueue(call([&] { ran++; }));
  q.kick();
  CHECK(soon([&] { return q.idle(); }));
  CHECK_EQ(ran.load(), 101);
}

TEST(an_event_query_starts_the_work_it_asks_for) {
  StreamQueue &a = new_queue(), &b = new_queue();
  std::atomic<int> ran{0};
  a.enqueue(call([&] { ran++; }));
  Event at_a;
  at_a.record(a);
  at_a.block(b);
  b.enqueue(call([&] { ran++; }));
  Event at_b;
  at_b.record(b);
  CHECK(soon([&] { return at_b.query(); }));
  CHECK(at_a.query());
  CHECK_EQ(ran.load(), 2);
  CHECK(at_a.time_ns() <= at_b.time_ns());
}

TEST(the_worker_takes_queues_in_turn) {
  StreamQueue &busy = new_queue(), &other = new_queue();
  std::atomic<bool> stop{false};
  // Work that asks for more work on its own queue each time, as a loop of async copies does.
  std::function<void()> again = [&] {
    if (!stop) busy.enqueue(call(again), true);
  };
  busy.enqueue(call(again), true);
  for (int i = 0; i < 50; i++) {
    std::atomic<bool> ran{false};
    for (StreamQueue* q : {&other, &busy}) {
      uint64_t ticket = q->enqueue(call([&] { ran = true; }), true);
      CHECK(soon([&] { return q->done(ticket); }));
      CHECK(ran.load());
    }
  }
  stop = true;
  CHECK(soon([&] { return busy.idle(); }));
}

TEST(an_event_of_an_idle_queue_is_passed_at_once) {
  StreamQueue& q = new_queue();
  Event e;
  CHECK(!e.recorded() && e.query());
  e.synchronize();
  e.block(q);
  CHECK(q.idle());
  int64_t before = neuron::now_ns();
  e.record(q);
  CHECK(e.recorded() && e.query());
  CHECK(e.time_ns() >= before && e.time_ns() <= neuron::now_ns());
}

TEST(an_event_keeps_the_point_it_was_recorded_at) {
  StreamQueue& q = new_queue();
  std::vector<int> ran;
  q.enqueue(call([&] { ran.push_back(1); }));
  Event e;
  e.record(q);
  Event copy = e;
  q.enqueue(call([&] { ran.push_back(2); }));
  e.record(q);
  copy.synchronize();
  CHECK_EQ(ran.size(), 1u);
  e.synchronize();
  CHECK_EQ(ran.size(), 2u);
  CHECK(copy.time_ns() <= e.time_ns());
}

TEST(a_blocked_queue_runs_the_other_one_first) {
  StreamQueue &a = new_queue(), &b = new_queue();
  std::vector<char> ran;
  a.enqueue(call([&] { ran.push_back('a'); }));
  Event e;
  e.record(a);
  a.enqueue(call([&] { ran.push_back('A'); }));
  e.block(b);
  b.enqueue(call([&] { ran.push_back('b'); }));
  b.drain();
  CHECK_EQ(std::string(ran.begin(), ran.end()), "ab");
  a.drain();
  CHECK_EQ(std::string(ran.begin(), ran.end()), "abA");
}

TEST(blocking_a_queue_on_its_own_event_adds_nothing) {
  StreamQueue& q = new_queue();
  q.enqueue(call([] {}));
  Event e;
  e.record(q);
  e.block(q);
  CHECK_EQ(q.enqueued(), 2u);
  q.drain();
}

struct Oops {
  int n;
};

TEST(an_error_surfaces_once_and_the_queue_works_on) {
  StreamQueue& q = new_queue();
  int ran = 0;
  auto failing = [&](int n) { q.enqueue(call([n] { throw Oops{n}; })); };
  auto error_of = [&](auto wait) {
    try {
      wait();
    } catch (const Oops& e) {
      return e.n;
    }
    return 0;
  };
  failing(1);
  failing(2);
  q.enqueue(call([&] { ran++; }));
  CHECK_EQ(error_of([&] { q.drain(); }), 1);
  CHECK_EQ(ran, 1);
  CHECK_EQ(error_of([&] { q.drain(); }), 0);

  failing(3);
  q.await(q.enqueued());  // does not tell
  CHECK_EQ(error_of([&] { q.wait(0); }), 3);
  CHECK_EQ(error_of([&] { q.drain(); }), 0);

  failing(4);
  q.kick();
  CHECK(soon([&] { return q.idle(); }));
  q.enqueue(call([&] { ran++; }));  // queueing more does not lose it
  CHECK_EQ(error_of([&] { q.drain(); }), 4);
  CHECK_EQ(ran, 2);

  // An event tells, whoever ran the work.
  for (bool kick : {false, true}) {
    failing(5);
    Event e;
    e.record(q);
    if (kick) {
      q.kick();
      CHECK(soon([&] { return q.idle(); }));
    }
    CHECK_EQ(error_of([&] { e.synchronize(); }), 5);
    CHECK_EQ(error_of([&] { e.synchronize(); }), 0);
  }
}

TEST(an_error_stays_on_its_own_queue) {
  StreamQueue &a = new_queue(), &b = new_queue();
  a.enqueue(call([] { throw Oops{1}; }));
  Event e;
  e.record(a);
  e.block(b);
  b.drain();
  CHECK_THROWS(a.drain(), Oops);
}

// Says which thread destroys it.
struct Witness {
  explicit Witness(std::set<std::thread::id>* by, std::atomic<int>* n) : by(by), alive(n) { ++*alive; }
  ~Witness() {
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    by->insert(std::this_thread::get_id());
    --*alive;
  }
  std::set<std::thread::id>* by;
  std::atomic<int>* alive;
};

TEST(tasks_are_destroyed_by_their_users_not_by_the_worker) {
  StreamQueue& q = new_queue();
  std::set<std::thread::id> by;
  std::atomic<int> alive{0};
  auto add = [&](bool fails) {
    auto witness = std::make_shared<Witness>(&by, &alive);
    q.enqueue(call([witness, fails] {
                if (fails) throw witness;
              }),
              true);
  };
  for (int i = 0; i < 2000; i++) {
    add(i % 7 == 0);
    if (i % 100 == 0) CHECK(soon([&] { return q.idle(); }));
    if (i % 250 == 0) CHECK_THROWS(q.drain(), std::shared_ptr<Witness>);
  }
  CHECK_THROWS(q.drain(), std::shared_ptr<Witness>);
  CHECK_EQ(alive.load(), 0);
  CHECK(by == std::set{std::this_thread::get_id()});
}

TEST(a_drained_queue_holds_nothing_whoever_ran_its_work) {
  StreamQueue& q = new_queue();
  auto held = std::make_shared<int>();
  q.enqueue(call([held] {}), true);
  CHECK(soon([&] { return q.idle(); }));
  q.drain();
  CHECK_EQ(held.use_count(), 1);
  q.enqueue(call([held] {}), true);
  CHECK(soon([&] { return q.idle(); }));
  q.release_finished();
  CHECK_EQ(held.use_count(), 1);
}

TEST(several_threads_wait_for_one_queue) {
  for (int round = 0; round < 20; round++) {
    StreamQueue& q = new_queue();
    std::vector<int> ran;
    constexpr int kTasks = 400, kThreads = 4;
    for (int i = 0; i < kTasks; i++) q.enqueue(call([&ran, i] { ran.push_back(i); }), i % 50 == 0);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; t++)
      threads.emplace_back([&, t] {
        for (int i = t; i <= kTasks; i += kThreads) {
          q.wait(i);
          if (!q.done(i)) wrong++;
        }
        q.drain();
      });
    for (auto& t : threads) t.join();
    CHECK_EQ(wrong.load(), 0);
    CHECK_EQ(ran.size(), size_t(kTasks));
    for (int i = 0; i < kTasks; i++) CHECK_EQ(ran[i], i);
  }
}

// A thread that needs less must not leave one that needs more asleep.
TEST(the_right_to_execute_is_handed_on) {
  const int64_t start = neuron::now_ns();
  constexpr int kRounds = 40;
  for (int round = 0; round < kRounds; round++) {
    StreamQueue& q = new_queue();
    std::atomic<bool> started{false};
    q.enqueue(call([&] {
      started = true;
      std::this_thread::sleep_for(2ms);  // the other thread goes to sleep meanwhile
    }));
    q.enqueue(call([] {}));
    std::thread first([&] { q.await(1); });
    CHECK(soon([&] { return started.load(); }));
    q.await(2);
    first.join();
  }
  CHECK((neuron::now_ns() - start) / kRounds < 25'000'000);
}

TEST(a_thread_knows_that_it_runs_a_task) {
  StreamQueue& q = new_queue();
  bool inside = false;
  q.enqueue(call([&] { inside = StreamQueue::in_task(); }));
  CHECK(!StreamQueue::in_task());
  q.drain();
  CHECK(inside && !StreamQueue::in_task());
}

TEST(an_interrupt_ends_a_wait_and_the_work_stays) {
  struct Interrupt {};
  StreamQueue& q = new_queue();
  int ran = 0, asked = 0;
  for (int i = 0; i < 6; i++)
    q.enqueue(call([&] {
      std::this_thread::sleep_for(30ms);
      ran++;
    }));
  StreamQueue::set_interrupt_check([&] {
    asked++;
    throw Interrupt();
  });
  CHECK_THROWS(q.drain(), Interrupt);
  CHECK(ran > 0 && ran < 6);
  // Also while another thread executes.
  std::atomic<bool> release{false}, started{false};
  StreamQueue& busy = new_queue();
  busy.enqueue(call([&] {
                 started = true;
                 while (!release) std::this_thread::sleep_for(1ms);
               }),
               true);
  CHECK(soon([&] { return started.load(); }));
  CHECK_THROWS(busy.drain(), Interrupt);
  CHECK_EQ(asked, 2);
  release = true;
  StreamQueue::set_interrupt_check(nullptr);
  q.drain();
  busy.drain();
  CHECK_EQ(ran, 6);
}

TEST(an_interrupt_reaches_a_wait_through_other_queues) {
  struct Interrupt {};
  StreamQueue &a = new_queue(), &b = new_queue(), &c = new_queue();
  int ran = 0;
  for (int i = 0; i < 6; i++)
    a.enqueue(call([&] {
      std::this_thread::sleep_for(30ms);
      ran++;
    }));
  Event at_a, at_b;
  at_a.record(a);
  at_a.block(b);
  at_b.record(b);
  at_b.block(c);
  StreamQueue::set_interrupt_check([] { throw Interrupt(); });
  CHECK_THROWS(c.drain(), Interrupt);
  StreamQueue::set_interrupt_check(nullptr);
  CHECK(ran > 0 && ran < 6);
  c.drain();
  CHECK_EQ(ran, 6);
}

TEST(short_waits_do_not_ask_for_interrupts) {
  StreamQueue& q = new_queue();
  int asked = 0;
  StreamQueue::set_interrupt_check([&] { asked++; });
  for (int i = 0; i < 1000; i++) q.enqueue(call([] {}));
  int64_t start = neuron::now_ns();
  q.drain();
  int64_t ms = (neuron::now_ns() - start) / 1'000'000;
  StreamQueue::set_interrupt_check(nullptr);
  CHECK(asked <= ms / 50);
}

// Random programs: threads put tasks on queues, record events, make queues wait for events, and wait themselves.
// Each event carries what had to be done at its point; whoever passes it checks.
TEST(a_declared_failure_reaches_the_streams_that_wait) {
  StreamQueue &source = new_queue(), &before = new_queue(), &behind = new_queue(), &later = new_queue();
  Event good, bad, again;
  source.enqueue(call([] {}));
  good.record(source);
  source.enqueue(call([&] { source.set_failure(std::make_exception_ptr(std::runtime_error("lost"))); }));
  bad.record(source);
  source.enqueue(call([&] { source.set_failure(nullptr); }));
  again.record(source);
  good.block(before);
  bad.block(behind);
  again.block(later);
  source.drain();
  before.drain();
  later.drain();
  for (int i = 0; i < 2; i++) {  // recorded before, and passed already
    std::string told;
    try {
      behind.drain();
    } catch (const std::runtime_error& e) {
      told = e.what();
    }
    CHECK_EQ(told, std::string("lost"));
    behind.drain();
    bad.block(behind);
  }
}

struct Door final : neuron::Gate {
  bool open() const override { return opened; }
  void help() override {
    helped++;
    std::this_thread::sleep_for(1ms);
    if (opens_when_helped) opened = true;
  }
  void kick() override { kicked++; }
  std::atomic<bool> opened{false};
  std::atomic<int> helped{0}, kicked{0};
  bool opens_when_helped = false;
};

struct Guarded final : Task {
  Guarded(std::shared_ptr<neuron::Gate> g, std::function<void()> f) : closed(std::move(g)), f(std::move(f)) {}
  void run() override { f(); }
  std::shared_ptr<neuron::Gate> gate() const override { return closed; }
  std::shared_ptr<neuron::Gate> closed;
  std::function<void()> f;
};

TEST(the_worker_passes_over_a_closed_gate) {
  auto door = std::make_shared<Door>();
  StreamQueue &shut = new_queue(), &after = new_queue(), &other = new_queue();
  std::atomic<int> through{0}, rest{0}, elsewhere{0}, behind{0};
  shut.enqueue(std::make_unique<Guarded>(door, [&] { through++; }), true);
  shut.enqueue(call([&] { rest++; }), true);
  Event event;
  event.record(shut);
  event.block(after);
  after.enqueue(call([&] { behind++; }), true);
  CHECK(soon([&] { return door->kicked > 0; }));
  for (int i = 1; i <= 20; i++) {
    other.enqueue(call([&] { elsewhere++; }), true);
    CHECK(soon([&] { return elsewhere == i; }));
  }
  CHECK_EQ(through + rest + behind, 0);
  CHECK(door->helped == 0);
  door->opened = true;
  StreamQueue::gate_opened();
  CHECK(soon([&] { return behind == 1; }));
  CHECK_EQ(through + rest, 2);
}

TEST(the_worker_leaves_deferred_work_to_host_threads) {
  struct Window final : neuron::Deferred {
    void flush() override { flushes++; }
    std::atomic<int> flushes{0};
  } window;
  auto door = std::make_shared<Door>();
  StreamQueue &shut = new_queue(), &after = new_queue();
  std::atomic<int> behind{0};
  shut.enqueue(std::make_unique<Guarded>(door, [] {}));
  Event event;
  event.record(shut);
  shut.set_deferred(&window);
  event.block(after);
  after.enqueue(call([&] { behind++; }), true);
  CHECK(soon([&] { return door->kicked > 0; }));
  door->opened = true;
  StreamQueue::gate_opened();
  CHECK(soon([&] { return behind == 1; }));
  CHECK_EQ(window.flushes.load(), 0);
  shut.drain();
  CHECK_EQ(window.flushes.load(), 1);
  shut.set_deferred(nullptr);
}

TEST(a_host_thread_helps_what_its_queue_waits_for) {
  auto door = std::make_shared<Door>();
  door->opens_when_helped = true;
  StreamQueue &q = new_queue(), &other = new_queue();
  int ran = 0;
  q.enqueue(std::make_unique<Guarded>(door, [&] { ran++; }));
  Event event;
  event.record(q);
  event.block(other);
  other.enqueue(call([&] { ran++; }));
  other.drain();
  CHECK_EQ(ran, 2);
  CHECK(door->helped == 1);
}

TEST(fuzz_gates_opened_by_another_thread) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; round++) {
    std::vector<std::shared_ptr<Door>> doors;
    std::atomic<int> ran{0};
    std::vector<StreamQueue*> queues = {&new_queue(), &new_queue(), &new_queue()};
    for (int i = 0; i < 30; i++) {
      StreamQueue& q = *queues[random() % 3];
      if (random() % 2) {
        doors.push_back(std::make_shared<Door>());
        q.enqueue(std::make_unique<Guarded>(doors.back(), [&] { ran++; }), random() % 2);
      } else {
        q.enqueue(call([&] { ran++; }), random() % 2);
      }
    }
    std::thread opener([&] {
      for (auto& door : doors) {
        door->opened = true;
        StreamQueue::gate_opened();
      }
    });
    for (StreamQueue* q : queues) q->kick();
    CHECK(soon([&] { return ran == 30; }));
    opener.join();
  }
}

TEST(fuzz_events_between_queues) {
  constexpr int kQueues = 5, kThreads = 3, kSteps = 250;
  for (uint64_t seed : check::seeds(200)) {
    struct Lane {
      StreamQueue& queue = new_queue();
      std::mutex mutex;    // makes "enqueue and count" one step of the model
      int64_t queued = 0;  // tasks of the model put on it
      std::atomic<int64_t> ran{0};
    };
    struct Mark {
      Event event;
      std::vector<int64_t> after;  // tasks of each lane that ran before the event
    };
    std::vector<std::unique_ptr<Lane>> lanes;
    for (int i = 0; i < kQueues; i++) lanes.push_back(std::make_unique<Lane>());
    std::vector<std::vector<int64_t>> seen(kQueues, std::vector<int64_t>(kQueues));  // guarded by the lane's mutex
    std::mutex marks_mutex;
    std::vector<Mark> marks;
    std::atomic<int> wrong{0};
    auto passed = [&](const std::vector<int64_t>& after) {
      for (int i = 0; i < kQueues; i++)
        if (lanes[i]->ran < after[i]) wrong++;
    };
    auto work = [&](uint64_t stream) {
      std::mt19937_64 random(seed * 100 + stream);
      for (int step = 0; step < kSteps; step++) {
        const int at = random() % kQueues;
        Lane& lane = *lanes[at];
        switch (random() % 8) {
          case 0:
          case 1:
          case 2: {  // a task: in order, after all that its lane waits for
            std::lock_guard lock(lane.mutex);
            int64_t number = lane.queued++;
            lane.queue.enqueue(call([&, number, after = seen[at]] {
                                 if (lane.ran != number) wrong++;
                                 passed(after);
                                 lane.ran = number + 1;
                               }),
                               random() % 16 == 0);
            break;
          }
          case 3:
          case 4: {  // an event
            Mark mark;
            {
              std::lock_guard lock(lane.mutex);
              mark.event.record(lane.queue);
              mark.after = seen[at];
              mark.after[at] = lane.queued;
            }
            std::lock_guard lock(marks_mutex);
            marks.push_back(std::move(mark));
            break;
          }
          default: {
            Mark mark;
            {
              std::lock_guard lock(marks_mutex);
              if (marks.empty()) break;
              mark = marks[random() % marks.size()];
            }
            switch (random() % 4) {
              case 0:
                mark.event.synchronize();
                passed(mark.after);
                break;
              case 1:
                if (mark.event.query()) passed(mark.after);
                break;
              default: {  // the lane goes on after the event
                std::lock_guard lock(lane.mutex);
                mark.event.block(lane.queue);
                for (int i = 0; i < kQueues; i++) seen[at][i] = std::max(seen[at][i], mark.after[i]);
              }
            }
          }
        }
      }
    };
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; t++) threads.emplace_back(work, t);
    for (auto& t : threads) t.join();
    std::vector<std::thread> drains;
    for (int i = kQueues; i-- > 0;) drains.emplace_back([&, i] { lanes[i]->queue.drain(); });
    for (auto& t : drains) t.join();
    for (auto& lane : lanes) CHECK_EQ(lane->ran.load(), lane->queued);
    if (wrong) check::fail(__FILE__, __LINE__, "seed ", seed, ": ", wrong.load(), " orders broken");
  }
}

// The last test: there is one worker a process.
TEST(after_the_worker_was_stopped_work_is_still_done) {
  StreamQueue &a = new_queue(), &b = new_queue();
  std::atomic<int> ran{0};
  for (int i = 0; i < 50; i++) {
    a.enqueue(call([&] {
                std::this_thread::sleep_for(2ms);
                ran++;
              }),
              true);
    b.enqueue(call([&] { ran++; }));
  }
  neuron::stop_worker();
  neuron::stop_worker();
  CHECK(ran < 50);  // it did not stay for the rest
  b.drain();
  a.drain();
  CHECK_EQ(ran.load(), 100);
  a.enqueue(call([&] { ran++; }), true);
  Event e;
  e.record(a);
  CHECK(soon([&] { return e.query(); }));
  CHECK_EQ(ran.load(), 101);
}

}  // namespace
