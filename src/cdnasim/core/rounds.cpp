// SPDX-License-Identifier: Apache-2.0
// Ranks side by side. Time goes in rounds: each rank runs for a while on what it saw of its peers' memory at the start
// of the round; then what they stored to each other becomes visible. A wave that waits for such a store, or that
// touches peer memory atomically, waits for the end of the round. Nothing depends on which thread runs which rank.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <numeric>
#include <thread>

#include "machine.h"

namespace cdna {

enum { ONE_RANK_STALLED = 3 };  // of Device's schedules
// Instructions of a rank in a round when several run side by side.
constexpr uint64_t ROUND = 16384;

// One rank's part of a round: ``budget`` instructions, or until nothing of it can run.
static void run_rank(Rank& r, uint64_t budget) {
  const uint64_t end = r.clock + budget;
  try {
    if (r.live.empty()) start(r);
    while (r.clock < end) {
      r.ready.insert(r.ready.end(), r.woken.begin(), r.woken.end());
      r.woken.clear();
      Wave* w = choose(r);
      if (!w) return;
      run_wave(r, w);
    }
  } catch (const SimError& e) {
    r.error = e.what();
  }
}

// The end of a round: every rank sees what the others stored to their peers, in rank order.
static void exchange(Machine& m) {
  ++m.round;
  for (Rank& r : m.rank) {
    for (const Deferred& d : r.deferred) {
      void* p = reinterpret_cast<void*>(d.addr);
      if (m.count_handoffs)
        for (Rank& other : m.rank)
          for (uint32_t q = 0; q < d.bytes && d.workgroup >= 0; q += 8) other.handoffs[(d.addr + q) >> 3] = Handoff{d.depth, r.id, d.workgroup};
      if (!std::memcmp(p, d.data, d.bytes)) continue;
      std::memcpy(p, d.data, d.bytes);
      for (Rank& other : m.rank) wake(other, d.addr, d.bytes);
    }
    r.deferred.clear();
    r.overlay.clear();
  }
  m.defer = 0;
  for (Rank& r : m.rank) {
    const std::vector<Wave*> waiting = std::move(r.waiting);
    r.waiting.clear();
    for (Wave* w : waiting) {
      w->state = WAVE_READY;
      if (w->atomic) {
        w->atomic = false;
        run_wave(r, w, 1);
      } else r.ready.push_back(w);
    }
  }
  m.defer = 1;
}

namespace {

// Runs the ranks of a round on a few threads; which thread runs which rank changes nothing.
class Crew {
 public:
  Crew(Machine& machine, int threads) : m(machine), sync(std::max(1, threads)) {
    for (int i = 1; i < threads; ++i) crew.emplace_back([this] {
      while (true) {
        sync.arrive_and_wait();
        if (over) return;
        work();
        sync.arrive_and_wait();
      }
    });
  }
  ~Crew() {
    over = true;
    if (!crew.empty()) sync.arrive_and_wait();
    for (std::thread& t : crew) t.join();
  }
  void round(const std::vector<uint64_t>& of) {
    budgets = &of;
    order.resize(of.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(), [&of](size_t a, size_t b) { return of[a] > of[b]; });
    next = 0;
    if (!crew.empty()) sync.arrive_and_wait();
    work();
    if (!crew.empty()) sync.arrive_and_wait();
  }

 private:
  void work() {
    for (size_t i = next++; i < order.size(); i = next++) run_rank(m.rank[order[i]], (*budgets)[order[i]]);
  }
  Machine& m;
  std::barrier<> sync;
  std::atomic<size_t> next{0};
  std::atomic<bool> over{false};
  const std::vector<uint64_t>* budgets = nullptr;
  std::vector<size_t> order;  // the longest part first, so that the threads end together
  std::vector<std::thread> crew;
};

void reset(Machine& m, std::vector<std::vector<Launch*>>& queues) {
  if (m.hostile) hostile_forget_caches(m);
  for (Rank& r : m.rank) {
    for (auto& g : r.live) r.pool.push_back(g->block);  // left by a run that failed
    r.live.clear();
    r.ready.clear();
    r.next = nullptr;
    r.woken.clear();
    r.waiting.clear();
    r.parked.clear();
    r.draining.clear();
    r.handoffs.clear();
    r.deferred.clear();
    r.overlay.clear();
    r.spans.clear();
    r.error.clear();
    r.last_hit = nullptr;
    r.queue = queues[size_t(r.id)];
    r.at = 0;
  }
}

bool can_run(const Rank& r) { return r.next || !r.ready.empty() || !r.woken.empty(); }

// How long each rank runs in the next round. Ranks that run side by side see each other at the end of a round; with
// hostile memory a round is a quantum or so, one rank after another in any order.
void plan(Machine& m, std::vector<uint64_t>& budgets) {
  bool others = false;
  for (const Rank& r : m.rank) others |= r.id != 0 && (can_run(r) || (r.live.empty() && r.at < r.queue.size()));
  for (Rank& r : m.rank) {
    uint64_t& b = budgets[size_t(r.id)];
    b = m.defer ? ROUND - ROUND / 4 + m.rng() % (ROUND / 2) : m.rank.size() == 1 ? ROUND : m.rng() % 3 * uint64_t(m.quantum_max);
    if (m.schedule == ONE_RANK_STALLED && r.id == 0 && others && m.rng() % 64) b = 0;
  }
}

// Instructions since any memory changed, by rank. A schedule may give one rank a turn in many: what the others poll
// meanwhile says nothing of it, so that a deadlock is only what every rank that can run has had its share of.
class Stillness {
 public:
  explicit Stillness(Machine& m) : m_(m), from_(m.rank.size()) { moved(); }
  void moved() {
    for (const Rank& r : m_.rank) from_[size_t(r.id)] = r.clock;
  }
  uint64_t total() const {
    uint64_t n = 0;
    for (const Rank& r : m_.rank) n += of(r);
    return n;
  }
  bool deadlock() const {
    if (total() <= m_.stall_bound) return false;
    for (const Rank& r : m_.rank)
      if (can_run(r) && of(r) < m_.stall_bound / m_.rank.size()) return false;
    return true;
  }

 private:
  uint64_t of(const Rank& r) const { return r.clock - from_[size_t(r.id)]; }
  Machine& m_;
  std::vector<uint64_t> from_;
};

}  // namespace

static void rounds(Machine& m) {
  int active = 0;
  for (const Rank& r : m.rank) active += !r.queue.empty();
  m.defer = active > 1 && !m.hostile;
  Crew crew(m, m.defer ? std::min(m.threads, active) : 1);
  std::vector<uint64_t> budgets(m.rank.size());
  Stillness still(m);
  while (true) {
    const uint64_t before = m.clock();
    for (Rank& r : m.rank) r.progress_clock = ~0ull;
    plan(m, budgets);
    crew.round(budgets);
    if (m.hostile)
      for (Rank& r : m.rank)
        if (!can_run(r) && m.rng() % 16 == 0) hostile_drain_one(r);  // no wave's tick would, and a peer may poll for it
    bool stored = false, live = false, ready = false;
    for (Rank& r : m.rank) {
      if (!r.error.empty()) throw SimError(r.error);
      stored |= !r.deferred.empty() || r.progress_clock != ~0ull;
      ready |= !r.waiting.empty();
    }
    if (m.defer) exchange(m);
    for (Rank& r : m.rank) {
      live |= !r.live.empty();
      ready |= can_run(r);
    }
    if (!live) return;
    if (stored) still.moved();
    if (!ready && m.clock() == before) {
      // Everybody sleeps or waits: stores arrive and a sleep ends by themselves, whatever memory holds.
      bool woke = false;
      for (Rank& r : m.rank) woke |= hostile_drain(r);
      for (Rank& r : m.rank)
        for (const auto& g : r.live)
          for (Wave& sleeper : g->waves)
            if (sleeper.parked) {
              unpark(r, &sleeper);
              woke = true;
            }
      if (!woke) deadlock(m, still.total());
    }
    if (still.deadlock()) deadlock(m, still.total());
  }
}

void run_launches(Machine& m, std::vector<std::vector<Launch*>>& queues) {
  reset(m, queues);
  const auto leave = [&m] {
    m.defer = 0;
    for (Rank& r : m.rank) {
      for (Launch* l : r.queue)
        for (size_t i = 0; i < l->executed.size(); ++i) l->kernel->executed[i] += l->executed[i];
      for (auto& [key, text] : r.warnings)
        if (m.warning_count[key]++ == 0) m.warnings.push_back(key + ": " + text);
      r.warnings.clear();
      for (auto& g : r.live) r.pool.push_back(g->block);
      r.live.clear();
    }
  };
  try {
    rounds(m);
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

}  // namespace cdna
