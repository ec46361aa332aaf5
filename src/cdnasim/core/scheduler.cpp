// SPDX-License-Identifier: Apache-2.0
// Dispatch of workgroups to compute units, the choice of the wave that runs next, barriers, deadlock detection.
//
// Every resident workgroup is live: a wave runs for a quantum of instructions, then another is chosen. The
// schedule is a function of the seed.
#include <algorithm>

#include "machine.h"

namespace cdna {

enum Schedule : int32_t { RANDOM, ROUND_ROBIN, SLOWEST_FIRST, ONE_RANK_STALLED };

uint64_t machine_clock(const Wave& w) { return w.m->clock / 16; }

std::string describe(const Wave& w) {
  const Workgroup& g = *w.wg;
  return "rank " + std::to_string(g.rank) + " workgroup (" + std::to_string(g.id[0]) + ", " + std::to_string(g.id[1]) + ", " +
         std::to_string(g.id[2]) + ") wave " + std::to_string(w.wave_in_group);
}

namespace {

struct Scheduler {
  Machine& m;
  std::vector<Wave*> ready;
  std::vector<std::unique_ptr<Workgroup>> live;
  std::vector<std::vector<int>> free_cu;  // per rank: free workgroup slots of each compute unit
  size_t turn = 0;

  explicit Scheduler(Machine& machine) : m(machine) {}

  static int waves_of(const Launch& l) { return (l.block[0] * l.block[1] * l.block[2] + LANES - 1) / LANES; }

  // How many workgroups of this launch a compute unit holds: registers and wave slots a SIMD, LDS.
  int per_cu(const Launch& l) const {
    const int vgprs = std::max(8, (l.kernel->num_vgprs + 7) / 8 * 8);
    const int waves_per_simd = std::min(8, 512 / vgprs);
    const int waves = waves_of(l);
    int n = 4 * waves_per_simd / std::max(1, waves);
    if (l.lds_bytes) n = std::min(n, m.lds_per_cu / l.lds_bytes);
    return n;
  }

  void place(Launch& l) {
    auto g = std::make_unique<Workgroup>();
    const int index = l.next++;
    g->linear = index;
    g->id[0] = index % l.grid[0];
    g->id[1] = index / l.grid[0] % l.grid[1];
    g->id[2] = index / l.grid[0] / l.grid[1];
    g->rank = l.rank;
    g->launch = &l;
    // Workgroups go to the XCDs in turn, and to the compute units of an XCD in turn.
    const int cus = m.num_cu / m.num_xcd;
    std::vector<int>& slots = free_cu[size_t(l.rank)];
    g->xcd = index % m.num_xcd;
    g->cu = -1;
    for (int step = 0; step < m.num_xcd && g->cu < 0; ++step) {
      const int xcd = (index + step) % m.num_xcd;
      for (int i = 0; i < cus; ++i) {
        const int cu = xcd * cus + (index / m.num_xcd + i) % cus;
        if (slots[size_t(cu)] > 0) { g->cu = cu; g->xcd = xcd; break; }
      }
    }
    --slots[size_t(g->cu)];
    g->lds.assign(size_t(l.lds_bytes), 0xa5);
    if (m.check[CHECK_LDS_UNWRITTEN]) g->lds_written.assign(size_t(l.lds_bytes), 0);
    if (m.check[CHECK_LDS_RACE]) g->lds_shadow.assign(size_t(l.lds_bytes + 3) / 4, LdsShadow{});
    const int waves = waves_of(l), vgprs = std::max(1, l.kernel->num_vgprs);
    g->vgprs.assign(size_t(waves) * size_t(vgprs) * LANES + 16, 0x7fbadbadu);
    uint32_t* base = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(g->vgprs.data()) + 63) & ~uintptr_t(63));
    g->waves.resize(size_t(waves));
    const int threads = l.block[0] * l.block[1] * l.block[2];
    for (int i = 0; i < waves; ++i) {
      Wave& w = g->waves[size_t(i)];
      w.v = base + size_t(i) * size_t(vgprs) * LANES;
      w.wave_in_group = i;
      w.wg = g.get();
      w.m = &m;
      w.k = l.kernel;
      if (m.check[CHECK_REGISTER]) w.vdef.assign(size_t(vgprs), 0);
      if (l.kernel->scratch_bytes) w.scratch.assign(size_t(l.kernel->scratch_bytes) * LANES, 0xa5);
      for (int lane = 0; lane < LANES; ++lane) {
        const int t = i * LANES + lane;
        const uint32_t x = uint32_t(t % l.block[0]), y = uint32_t(t / l.block[0] % l.block[1]), z = uint32_t(t / l.block[0] / l.block[1]);
        w.lane(0)[lane] = x | (l.workitem_dims > 0 ? y << 10 : 0) | (l.workitem_dims > 1 ? z << 20 : 0);
      }
      const int active = std::min(LANES, threads - i * LANES);
      w.set_exec(active == LANES ? ~0ull : (1ull << active) - 1);
      if (!w.vdef.empty()) w.vdef[0] = ~0ull;
      start_sgprs(w, l, *g);
      ready.push_back(&w);
    }
    g->live = true;
    live.push_back(std::move(g));
  }

  static void start_sgprs(Wave& w, const Launch& l, const Workgroup& g) {
    const auto set = [&](int reg, uint32_t value) { w.s[reg] = value; w.sdef[reg >> 5] |= 1u << (reg & 31); };
    const auto set64 = [&](int reg, uint64_t value) { if (reg >= 0) { set(reg, uint32_t(value)); set(reg + 1, uint32_t(value >> 32)); } };
    set64(l.kernarg_sgpr, l.kernarg);
    set64(l.dispatch_sgpr, l.dispatch_packet);
    set64(l.queue_sgpr, 0);
    set64(l.dispatch_id_sgpr, 0);
    if (l.private_size_sgpr >= 0) set(l.private_size_sgpr, uint32_t(l.kernel->scratch_bytes));
    for (int i = 0; i < l.preload_dwords; ++i) {
      uint32_t value;
      std::memcpy(&value, reinterpret_cast<void*>(l.kernarg + 4 * uint64_t(l.preload_offset + i)), 4);
      set(l.preload_first + i, value);
    }
    int next = l.user_sgprs;
    if (l.id_x) set(next++, uint32_t(g.id[0]));
    if (l.id_y) set(next++, uint32_t(g.id[1]));
    if (l.id_z) set(next++, uint32_t(g.id[2]));
    if (l.workgroup_info) set(next++, 0);
    w.sdef[REG_VCC >> 5] |= 0;
  }

  Wave* choose() {
    if (ready.empty()) return nullptr;
    size_t pick = 0;
    switch (m.schedule) {
      case ROUND_ROBIN:
        pick = turn++ % ready.size();
        break;
      case SLOWEST_FIRST: {  // the workgroups that have issued least wait longest: prefer the ones ahead
        pick = m.rng() % ready.size();
        for (int i = 0; i < 6; ++i) {
          const size_t other = m.rng() % ready.size();
          if (ready[other]->wg->linear < ready[pick]->wg->linear) pick = other;
        }
        break;
      }
      case ONE_RANK_STALLED: {  // rank 0 gets a turn in sixty-four
        pick = m.rng() % ready.size();
        for (int i = 0; i < 8 && ready[pick]->wg->rank == 0 && m.rng() % 64; ++i) pick = m.rng() % ready.size();
        break;
      }
      default:
        pick = m.rng() % ready.size();
    }
    Wave* w = ready[pick];
    ready[pick] = ready.back();
    ready.pop_back();
    return w;
  }

  void finish(Workgroup& g, std::vector<std::vector<Launch*>>& queues, std::vector<size_t>& at);
  void start(std::vector<std::vector<Launch*>>& queues, std::vector<size_t>& at, int rank);
  [[noreturn]] void deadlock();
};

void Scheduler::start(std::vector<std::vector<Launch*>>& queues, std::vector<size_t>& at, int rank) {
  if (at[size_t(rank)] >= queues[size_t(rank)].size()) return;
  Launch& l = *queues[size_t(rank)][at[size_t(rank)]];
  const int slots = per_cu(l);
  l.total = l.grid[0] * l.grid[1] * l.grid[2];
  if (slots < 1)
    throw SimError("launch refused: a workgroup of " + std::to_string(waves_of(l)) + " waves, " + std::to_string(l.kernel->num_vgprs) +
                   " VGPRs and " + std::to_string(l.lds_bytes) + " bytes of LDS does not fit on a compute unit");
  if (l.persistent && l.total > slots * m.num_cu)
    throw SimError("launch refused: " + std::to_string(l.total) + " workgroups must all be resident, but only " +
                   std::to_string(slots * m.num_cu) + " fit (" + std::to_string(slots) + " a compute unit, " + std::to_string(m.num_cu) + " units)");
  free_cu[size_t(rank)].assign(size_t(m.num_cu), slots);
  if (m.hostile) hostile_launch_begin(m, rank);
  if (!l.total) throw SimError("launch refused: an empty grid");
  while (l.next < l.total && l.next < slots * m.num_cu) place(l);
}

void Scheduler::finish(Workgroup& g, std::vector<std::vector<Launch*>>& queues, std::vector<size_t>& at) {
  Launch& l = *g.launch;
  for (Wave& w : g.waves) {
    Counters& c = l.counters;
    for (int i = 0; i < NUM_CLASSES; ++i) c.by_class[i] += w.by_class[i];
    c.longest_wave = std::max(c.longest_wave, w.issued);
    c.handoff_depth = std::max(c.handoff_depth, w.depth);
    ++c.waves;
  }
  ++free_cu[size_t(l.rank)][size_t(g.cu)];
  ++l.finished;
  for (auto& slot : live)
    if (slot.get() == &g) {
      slot = std::move(live.back());
      live.pop_back();
      break;
    }
  if (l.next < l.total) place(l);
  else if (l.finished == l.total) {
    if (m.hostile) hostile_launch_end(m, l.rank);
    ++at[size_t(l.rank)];
    start(queues, at, l.rank);
  }
}

void Scheduler::deadlock() {
  std::string text = "deadlock: no memory changed for " + std::to_string(m.clock - m.progress_clock) + " instructions;";
  int polling = 0, waiting = 0, shown = 0;
  for (const auto& g : live)
    for (const Wave& w : g->waves) {
      if (w.state == WAVE_BARRIER) ++waiting;
      else if (w.state == WAVE_READY) ++polling;
    }
  text += " " + std::to_string(polling) + " waves poll or run, " + std::to_string(waiting) + " wait at a barrier.";
  for (const auto& g : live)
    for (const Wave& w : g->waves) {
      if (w.state != WAVE_READY || shown >= 12) continue;
      ++shown;
      text += "\n  " + describe(w) + " at line " + std::to_string(w.k->code[size_t(std::max(0, w.pc - 1))].line) + ": last load (line " +
              std::to_string(w.last_load_line) + ") of " + hex(w.last_load_addr);
      if (Allocation* a = m.find(w.last_load_addr)) text += " ('" + a->name + "' + " + std::to_string(w.last_load_addr - a->base) + ")";
      text += " saw " + hex(w.last_load_value);
    }
  throw SimError(text);
}

}  // namespace

void barrier(Wave& w, const Inst& I) {
  Workgroup& g = *w.wg;
  (void)I;
  ++w.barrier_count;
  w.state = WAVE_BARRIER;
  w.yield = true;
  ++g.at_barrier;
  if (g.at_barrier + g.done < int(g.waves.size())) return;
  int32_t pc = -1;
  for (Wave& other : g.waves) {
    if (other.state != WAVE_BARRIER) continue;
    if (pc >= 0 && other.pc != pc)
      report(w, "barrier-divergence", "waves of one workgroup meet at different barriers: lines " + std::to_string(w.k->code[size_t(pc - 1)].line) +
                                          " and " + std::to_string(w.k->code[size_t(other.pc - 1)].line));
    pc = other.pc;
  }
  if (g.done)
    report(w, "barrier-divergence", std::to_string(g.done) + " of " + std::to_string(g.waves.size()) + " waves ended before this barrier");
  g.at_barrier = 0;
  w.m->progress_clock = w.m->clock;
  uint64_t depth = 0;
  for (const Wave& other : g.waves)
    if (other.state == WAVE_BARRIER) depth = std::max(depth, other.depth);
  for (Wave& other : g.waves)
    if (other.state == WAVE_BARRIER) {
      other.state = WAVE_READY;
      other.depth = depth;
      if (&other != &w) w.m->woken.push_back(&other);
    }
}

void end_program(Wave& w, const Inst&) {
  Workgroup& g = *w.wg;
  if (w.m->hostile && !w.pending.empty()) {
    // The end of a wave does not wait for its stores; the end of the launch does.
    if (w.m->rng() % 16) {
      --w.pc;
      w.yield = true;
      return;
    }
    hostile_wait(w, 0);
  }
  w.state = WAVE_DONE;
  w.yield = true;
  ++g.done;
  w.m->progress_clock = w.m->clock;
  if (g.at_barrier && g.at_barrier + g.done == int(g.waves.size())) {
    report(w, "barrier-divergence", "a wave ended while " + std::to_string(g.at_barrier) + " waves wait at a barrier");
    g.at_barrier = 0;
    for (Wave& other : g.waves)
      if (other.state == WAVE_BARRIER) {
        other.state = WAVE_READY;
        w.m->woken.push_back(&other);
      }
  }
}

static void observe(Watch& watch, const Wave& w, const Inst& I) {
  if (watch.lines.size() < watch.limit) watch.lines.push_back(I.line);
  if (watch.dumped || I.line != watch.dump_line) return;
  watch.dumped = true;
  watch.vgprs.assign(w.v, w.v + size_t(w.k->num_vgprs) * LANES);
  watch.sgprs.assign(w.s, w.s + SGPR_FILE);
}

// Take a sleeping wave out of every line it watches.
static void unpark(Machine& m, Wave* w) {
  w->parked = false;
  for (uint64_t line : w->parked_lines) {
    auto it = m.parked.find(line);
    if (it == m.parked.end()) continue;
    std::erase(it->second, w);
    if (it->second.empty()) m.parked.erase(it);
  }
  w->parked_lines.clear();
  m.woken.push_back(w);
}

void wake(Machine& m, uint64_t addr, uint32_t bytes) {
  for (uint64_t line = addr >> 7; line <= (addr + bytes - 1) >> 7; ++line) {
    auto it = m.parked.find(line);
    if (it == m.parked.end()) continue;
    const std::vector<Wave*> waves = it->second;
    for (Wave* w : waves)
      if (w->parked) unpark(m, w);
  }
}

void run_launches(Machine& m, std::vector<std::vector<Launch*>>& queues) {
  Scheduler s(m);
  m.parked.clear();
  m.woken.clear();
  m.handoffs.clear();
  m.progress_clock = m.clock;
  s.free_cu.resize(size_t(m.ranks));
  std::vector<size_t> at(size_t(m.ranks), 0);
  for (int r = 0; r < m.ranks; ++r) s.start(queues, at, r);
  while (true) {
    for (Wave* w : m.woken) s.ready.push_back(w);
    m.woken.clear();
    Wave* w = s.choose();
    if (!w) {
      // Everybody sleeps or waits: a sleep ends by itself, whatever memory holds.
      for (const auto& g : s.live)
        for (Wave& sleeper : g->waves)
          if (sleeper.parked) unpark(m, &sleeper);
      if (!m.woken.empty()) continue;
      if (s.live.empty()) break;
      s.deadlock();
    }
    if (m.clock - m.progress_clock > m.stall_bound) s.deadlock();
    const int span = m.quantum_max - m.quantum_min + 1;
    int budget = m.quantum_min + int(m.rng() % uint64_t(span));
    const Kernel& k = *w->k;
    const Inst* code = k.code.data();
    uint64_t* executed = const_cast<uint64_t*>(k.executed.data());
    const int size = int(k.code.size());
    w->yield = false;
    Watch& watch = m.watch;
    const bool watched = w->wg->rank == watch.rank && w->wg->linear == watch.workgroup && w->wave_in_group == watch.wave;
    int done = 0;
    try {
      while (budget-- > 0 && !w->yield) {
        if (w->pc < 0 || w->pc >= size) throw SimError("the program counter left the kernel");
        const Inst& I = code[w->pc];
        if (watched) observe(watch, *w, I);
        ++executed[w->pc];
        ++w->by_class[I.cls];
        ++w->pc;
        ++done;
        I.fn(*w, I);
      }
    } catch (const SimError& e) {
      const Inst& I = code[std::max(0, std::min(size - 1, w->pc - 1))];
      throw SimError(std::string("@") + std::to_string(I.line) + "@" + describe(*w) + "@" + e.what());
    }
    w->issued += uint64_t(done);
    m.clock += uint64_t(done);
    if (!w->yield) w->preempted = true;
    if (m.hostile) hostile_tick(*w);
    if (w->state == WAVE_DONE) {
      Workgroup& g = *w->wg;
      if (g.done == int(g.waves.size())) s.finish(g, queues, at);
      continue;
    }
    if (w->state == WAVE_READY && !w->parked) s.ready.push_back(w);
  }
}

}  // namespace cdna
