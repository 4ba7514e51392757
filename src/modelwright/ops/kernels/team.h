// Threads that work through the loops of a decode step together, in place of OpenMP's. A step has dozens of loops of a
// few microseconds, and there is a step every few hundred. OpenMP's threads either wait actively and keep the core from
// the thread that they wait for, where another program wants it, or sleep after so short a time that each step has to
// wake them, which takes longer than the step on virtual machines. These wait actively, yield to whoever wants the core,
// and sleep early for a while when one of them has lost it. docs/log/speed.md has the figures.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace {

using Nanoseconds = int64_t;
constexpr Nanoseconds kSpinTime = 5'000;        // without a call to the system
constexpr Nanoseconds kPollTime = 500'000;      // yielding after each look, before a thread sleeps
constexpr Nanoseconds kLostCore = 1'000'000;    // a yield that takes so long has given the core away
constexpr Nanoseconds kBusyTime = 100'000'000;  // how long threads sleep at once after that

inline Nanoseconds now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline std::atomic<Nanoseconds> busy_until{0};

// The cores that threads of one computation are on. After a sleep the system often starts two of them on one core, where
// they take turns while another core is idle, and on virtual machines leaves them there for a tenth of a second or more:
// half the speed (docs/log/speed.md). The one with the higher number moves then. It is bound to nothing afterwards.
class Cores {
 public:
  explicit Cores(int count) : of_thread(count) {
    for (std::atomic<int>& one : of_thread) one.store(kNone, std::memory_order_relaxed);
  }

  void arrive(int number) {
#if defined(__linux__)
    of_thread[number].store(sched_getcpu(), std::memory_order_relaxed);
#endif
  }

  int count() const { return static_cast<int>(std::set<int>(of_thread.begin(), of_thread.end()).size()); }

  // Moves the calling thread, which has arrived, off the core of a thread with a lower number.
  void leave_shared(int number) {
#if defined(__linux__)
    const int core = of_thread[number].load(std::memory_order_relaxed);
    bool is_shared = false;
    for (int lower = 0; lower < number; ++lower)
      is_shared |= of_thread[lower].load(std::memory_order_relaxed) == core;
    cpu_set_t allowed;
    if (!is_shared || sched_getaffinity(0, sizeof allowed, &allowed)) return;
    const int num_cores = CPU_COUNT(&allowed), num_threads = static_cast<int>(of_thread.size());
    if (num_cores < num_threads) return;
    cpu_set_t free = allowed;
    for (const std::atomic<int>& one : of_thread) {
      const int taken = one.load(std::memory_order_relaxed);
      if (taken != kNone) CPU_CLR(taken, &free);
    }
    // Threads that move at the same time begin their search at different places.
    int left = CPU_COUNT(&free) ? number % CPU_COUNT(&free) : -1;
    for (int other = 0; other < CPU_SETSIZE && left >= 0; ++other) {
      if (!CPU_ISSET(other, &free) || left--) continue;
      cpu_set_t only;
      CPU_ZERO(&only);
      CPU_SET(other, &only);
      if (sched_setaffinity(0, sizeof only, &only)) return;
      sched_setaffinity(0, sizeof allowed, &allowed);
      of_thread[number].store(other, std::memory_order_relaxed);
    }
#endif
  }

 private:
  static constexpr int kNone = -1;
  std::vector<std::atomic<int>> of_thread;
};

// A number that threads wait for to change.
class Signal {
 public:
  void change() {
    number.fetch_add(1);
    if (!num_asleep.load()) return;
    std::lock_guard<std::mutex> lock(mutex);
    changed.notify_all();
  }

  uint32_t value() const { return number.load(); }

  // within_step: the other threads of the team are at work. Between steps a lost core says nothing: the threads that read
  // the next prompt may have taken it.
  void wait(uint32_t old, bool within_step) {
    if (has_changed(old, within_step)) return;
    num_asleep.fetch_add(1);
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return number.load() != old; });
    lock.unlock();
    num_asleep.fetch_sub(1);
  }

 private:
  // Whether it changes while the thread waits actively.
  bool has_changed(uint32_t old, bool within_step) const {
    const auto is_new = [&] { return number.load(std::memory_order_acquire) != old; };
    const Nanoseconds start = now();
    Nanoseconds last = start;
    for (; last < start + kSpinTime; last = now())
      for (int turn = 0; turn < 16; ++turn) {
        if (is_new()) return true;
        pause();
      }
    while (last < start + kPollTime && last >= busy_until.load(std::memory_order_relaxed)) {
      sched_yield();
      if (is_new()) return true;
      const Nanoseconds after = now();
      if (within_step && after > last + kLostCore)
        busy_until.store(after + kBusyTime, std::memory_order_relaxed);
      last = after;
    }
    return is_new();
  }

  std::atomic<uint32_t> number{0};
  std::atomic<int> num_asleep{0};
  std::mutex mutex;
  std::condition_variable changed;
};

class Team;

// One of the `count` threads of a team, with what all of them do at the same places of a step.
struct Member {
  Team* team;  // null for a thread that works alone
  int number, count;

  void barrier() const;

  // Each member takes the same share of a loop's turns, one after another.
  template <class Body>
  void each(int64_t total, Body body) const {
    for (int64_t turn = total * number / count, end = total * (number + 1) / count; turn < end; ++turn) body(turn);
    barrier();
  }

  // Members take turns as they come, which may differ in length.
  template <class Body>
  void each_as_it_comes(int64_t total, Body body) const;
};

class Team {
 public:
  // Calls `body(member)` on `count` threads, this one among them, and returns when all have.
  template <class Body>
  static void run(int count, const Body& body) {
    if (count <= 1) return body(Member{nullptr, 0, 1});
    Team& team = of_this_thread(count);
    team.body = &body;
    team.call = [](const void* given, const Member& member) { (*static_cast<const Body*>(given))(member); };
    team.cores.arrive(0);
    team.start.change();
    const Member own{&team, 0, count};
    body(own);
    own.barrier();  // after which no thread reads what belongs to this call
  }

  explicit Team(int count) : count(count), process(getpid()), cores(count) {
    for (int number = 1; number < count; ++number) threads.emplace_back([this, number] { work(number); });
  }

  ~Team() {
    is_over = true;
    start.change();
    for (std::thread& one : threads) one.join();
  }

 private:
  friend struct Member;

  // A copy of the process has none of the threads, and would wait for them forever to destroy what they sleep on. There
  // the team is left as it is.
  struct Deleter {
    void operator()(Team* team) const {
      if (team->process == getpid()) delete team;
    }
  };

  static Team& of_this_thread(int count) {
    thread_local std::unique_ptr<Team, Deleter> own;
    if (!own || own->count != count || own->process != getpid()) own.reset(new Team(count));
    return *own;
  }

  void work(int number) {
    for (uint32_t step = 0;; ++step) {
      start.wait(step, false);
      if (is_over) return;
      cores.arrive(number);
      cores.leave_shared(number);
      const Member own{this, number, count};
      call(body, own);
      own.barrier();
    }
  }

  const int count;
  const pid_t process;
  const void* body = nullptr;
  void (*call)(const void*, const Member&) = nullptr;
  bool is_over = false;
  Cores cores;
  Signal start, arrival;
  std::atomic<int> num_arrived{0};
  std::atomic<int64_t> next_turn{0};
  std::vector<std::thread> threads;  // after what they use
};

inline void Member::barrier() const {
  if (!team) return;
  const uint32_t before = team->arrival.value();
  if (team->num_arrived.fetch_add(1) + 1 < count) return team->arrival.wait(before, true);
  team->num_arrived.store(0);
  team->next_turn.store(0);
  team->arrival.change();
}

template <class Body>
void Member::each_as_it_comes(int64_t total, Body body) const {
  if (!team) {
    for (int64_t turn = 0; turn < total; ++turn) body(turn);
    return;
  }
  for (int64_t turn; (turn = team->next_turn.fetch_add(1)) < total;) body(turn);
  barrier();
}

}  // namespace
