// SPDX-License-Identifier: Apache-2.0
// Dispatch of workgroups to compute units, the choice of the wave that runs next, barriers, deadlock detection.
//
// Every resident workgroup is live: a wave runs for a quantum of instructions, then another is chosen. The
// schedule is a function of the seed.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>

#include "machine.h"

namespace cdna {

enum Schedule : int32_t { RANDOM, ROUND_ROBIN, SLOWEST_FIRST, ONE_RANK_STALLED };

uint64_t machine_clock(const Wave& w) { return w.r->clock / 16; }

std::string describe(const Wave& w) {
  const Workgroup& g = *w.wg;
  return "rank " + std::to_string(g.rank) + " workgroup (" + std::to_string(g.id[0]) + ", " + std::to_string(g.id[1]) + ", " +
         std::to_string(g.id[2]) + ") wave " + std::to_string(w.wave_in_group);
}

void pool_free(Rank& r) {
  for (uint8_t* slab : r.slabs) std::free(slab);
  r.slabs.clear();
  r.pool.clear();
}

namespace {

int waves_of(const Launch& l) { return (l.block[0] * l.block[1] * l.block[2] + LANES - 1) / LANES; }

// How many workgroups of this launch a compute unit holds: registers and wave slots a SIMD, LDS.
int per_cu(const Machine& m, const Launch& l) {
  const int vgprs = std::max(8, (l.kernel->num_vgprs + 7) / 8 * 8);
  const int waves_per_simd = std::min(8, 512 / vgprs);
  int n = 4 * waves_per_simd / std::max(1, waves_of(l));
  if (l.lds_bytes) n = std::min(n, m.lds_per_cu / l.lds_bytes);
  return n;
}

// Where the parts of a workgroup's block of memory lie.
struct Block {
  size_t vgprs, vdef, lds, wtag, rtag, bytes;
};
Block block_of(const Machine& m, const Launch& l) {
  const auto up = [](size_t n) { return (n + 63) / 64 * 64; };
  const size_t regs = size_t(waves_of(l)) * size_t(std::max(1, l.kernel->num_vgprs));
  const size_t tags = m.check[CHECK_LDS_UNWRITTEN] || m.check[CHECK_LDS_RACE] ? up(size_t(l.lds_bytes + 3) / 4 * 4) : 0;
  Block b;
  b.vgprs = 0;
  b.vdef = regs * LANES * 4;
  b.lds = b.vdef + (m.check[CHECK_REGISTER] ? up(regs * 8) : 0);
  b.wtag = b.lds + up(size_t(l.lds_bytes));
  b.rtag = b.wtag + tags;
  b.bytes = b.rtag + tags + 64;
  return b;
}

// A block from the rank's pool, which keeps those of ended workgroups: their pages are there already.
uint8_t* take_block(Rank& r, size_t bytes, int wanted) {
  if (r.pool_bytes != bytes && r.live.empty()) {
    pool_free(r);
    r.pool_bytes = bytes;
  }
  if (r.pool_bytes != bytes) throw SimError("internal: blocks of two sizes at once");
  if (r.pool.empty()) {
    constexpr size_t SLAB = size_t(64) << 20, PAGE = size_t(2) << 20;
    const size_t count = std::clamp<size_t>(SLAB / bytes, 1, size_t(wanted)), size = (count * bytes + PAGE - 1) / PAGE * PAGE;
    auto* slab = static_cast<uint8_t*>(std::aligned_alloc(size > PAGE ? PAGE : 4096, size));
    if (!slab) throw SimError("no memory for " + std::to_string(count) + " workgroups of " + std::to_string(bytes) + " bytes");
    if (size > PAGE) madvise(slab, size, MADV_HUGEPAGE);
    r.slabs.push_back(slab);
    for (size_t i = count; i--;) r.pool.push_back(slab + i * bytes);
  }
  uint8_t* out = r.pool.back();
  r.pool.pop_back();
  return out;
}

void start_sgprs(Wave& w, const Launch& l, const Workgroup& g) {
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
}

// Workgroups go to the XCDs in turn, and to the compute units of an XCD in turn.
void choose_unit(const Machine& m, Rank& r, Workgroup& g, int index) {
  const int cus = m.num_cu / m.num_xcd;
  for (int step = 0; step < m.num_xcd; ++step) {
    const int xcd = (index + step) % m.num_xcd;
    for (int i = 0; i < cus; ++i) {
      const int cu = xcd * cus + (index / m.num_xcd + i) % cus;
      if (r.free_cu[size_t(cu)] <= 0) continue;
      --r.free_cu[size_t(cu)];
      g.cu = cu;
      g.xcd = xcd;
      return;
    }
  }
  throw SimError("internal: no free compute unit");
}

void place(Rank& r, Launch& l) {
  Machine& m = *r.m;
  auto g = std::make_unique<Workgroup>();
  const int index = l.next++;
  g->linear = index;
  g->id[0] = index % l.grid[0];
  g->id[1] = index / l.grid[0] % l.grid[1];
  g->id[2] = index / l.grid[0] / l.grid[1];
  g->rank = l.rank;
  g->launch = &l;
  choose_unit(m, r, *g, index);
  const Block b = block_of(m, l);
  const int waves = waves_of(l), vgprs = std::max(1, l.kernel->num_vgprs);
  g->block = take_block(r, b.bytes, l.total - index);
  auto* registers = reinterpret_cast<uint32_t*>(g->block + b.vgprs);
  std::fill(registers, registers + size_t(waves) * size_t(vgprs) * LANES, 0x7fbadbadu);
  std::memset(g->block + b.vdef, 0, b.lds - b.vdef);
  g->lds = g->block + b.lds;
  g->lds_bytes = uint32_t(l.lds_bytes);
  std::memset(g->lds, 0xa5, size_t(l.lds_bytes));
  if (b.rtag > b.wtag) {
    g->lds_wtag = reinterpret_cast<uint32_t*>(g->block + b.wtag);
    g->lds_rtag = reinterpret_cast<uint32_t*>(g->block + b.rtag);
    std::memset(g->lds_wtag, 0, b.bytes - b.wtag);
  }
  g->waves.resize(size_t(waves));
  const int threads = l.block[0] * l.block[1] * l.block[2];
  for (int i = 0; i < waves; ++i) {
    Wave& w = g->waves[size_t(i)];
    w.v = registers + size_t(i) * size_t(vgprs) * LANES;
    w.wave_in_group = i;
    w.wg = g.get();
    w.m = &m;
    w.r = &r;
    w.k = l.kernel;
    w.first_clock = r.clock;
    if (m.check[CHECK_REGISTER]) w.vdef = reinterpret_cast<uint64_t*>(g->block + b.vdef) + size_t(i) * size_t(vgprs);
    if (l.kernel->scratch_bytes) w.scratch.assign(size_t(l.kernel->scratch_bytes) * LANES, 0xa5);
    for (int lane = 0; lane < LANES; ++lane) {
      const int t = i * LANES + lane;
      const uint32_t x = uint32_t(t % l.block[0]), y = uint32_t(t / l.block[0] % l.block[1]), z = uint32_t(t / l.block[0] / l.block[1]);
      w.lane(0)[lane] = x | (l.workitem_dims > 0 ? y << 10 : 0) | (l.workitem_dims > 1 ? z << 20 : 0);
    }
    const int active = std::min(LANES, threads - i * LANES);
    w.set_exec(active == LANES ? ~0ull : (1ull << active) - 1);
    if (w.vdef) w.vdef[0] = ~0ull;
    start_sgprs(w, l, *g);
    r.ready.push_back(&w);
  }
  r.live.push_back(std::move(g));
}

}  // namespace

// One of the waves that can run, taken out of ``ready``.
static Wave* pick_ready(Rank& r) {
  std::vector<Wave*>& ready = r.ready;
  if (ready.empty()) return nullptr;
  size_t pick = r.m->schedule == ROUND_ROBIN ? r.turn++ % ready.size() : r.rng() % ready.size();
  if (r.m->schedule == SLOWEST_FIRST)  // what is ahead runs on, what is behind waits as long as can be
    for (int i = 0; i < 6; ++i) {
      const size_t other = r.rng() % ready.size();
      if (ready[other]->wg->issued > ready[pick]->wg->issued) pick = other;
    }
  Wave* w = ready[pick];
  ready[pick] = ready.back();
  ready.pop_back();
  return w;
}

// The one after it is chosen with it, so that its registers can be fetched; not among few waves, or where the order is
// an adversary's, since the wave that runs could not be chosen again.
Wave* choose(Rank& r) {
  constexpr size_t MANY = 64;
  Wave* w = r.next ? r.next : pick_ready(r);
  r.next = r.ready.size() >= MANY && r.m->schedule != SLOWEST_FIRST ? pick_ready(r) : nullptr;
  return w;
}

void start(Rank& r) {
  if (r.at >= r.queue.size()) return;
  Machine& m = *r.m;
  Launch& l = *r.queue[r.at];
  const int slots = per_cu(m, l);
  l.total = l.grid[0] * l.grid[1] * l.grid[2];
  if (slots < 1)
    throw SimError("launch refused: a workgroup of " + std::to_string(waves_of(l)) + " waves, " + std::to_string(l.kernel->num_vgprs) +
                   " VGPRs and " + std::to_string(l.lds_bytes) + " bytes of LDS does not fit on a compute unit");
  if (l.persistent && l.total > slots * m.num_cu)
    throw SimError("launch refused: " + std::to_string(l.total) + " workgroups must all be resident, but only " +
                   std::to_string(slots * m.num_cu) + " fit (" + std::to_string(slots) + " a compute unit, " + std::to_string(m.num_cu) + " units)");
  r.free_cu.assign(size_t(m.num_cu), slots);
  if (m.hostile) hostile_launch_begin(m, r.id);
  if (!l.total) throw SimError("launch refused: an empty grid");
  l.executed.assign(l.kernel->code.size(), 0);
  while (l.next < l.total && l.next < slots * m.num_cu) place(r, l);
}

namespace {

void record(const Wave& w, Launch& l) {
  Counters& c = l.counters;
  WaveRecord one{};
  one.workgroup = uint64_t(w.wg->linear);
  one.wave = uint64_t(w.wave_in_group);
  one.compute_unit = uint64_t(w.wg->cu);
  one.issued = w.issued;
  one.barriers = w.barrier_count;
  one.polls = w.polls;
  one.depth = w.depth;
  one.first_clock = w.first_clock;
  one.last_clock = w.last_clock;
  for (int i = 0; i < NUM_CLASSES; ++i) c.by_class[i] += one.by_class[i] = w.by_class[i];
  c.longest_wave = std::max(c.longest_wave, w.issued);
  c.handoff_depth = std::max(c.handoff_depth, w.depth);
  ++c.waves;
  l.waves.push_back(one);
}

void finish(Rank& r, Workgroup& g) {
  Launch& l = *g.launch;
  for (const Wave& w : g.waves) record(w, l);
  hostile_forget(r, g);
  ++r.free_cu[size_t(g.cu)];
  r.pool.push_back(g.block);
  ++l.finished;
  for (auto& slot : r.live)
    if (slot.get() == &g) {
      slot = std::move(r.live.back());
      r.live.pop_back();
      break;
    }
  if (l.next < l.total) place(r, l);
  else if (l.finished == l.total) {
    if (r.m->hostile) hostile_launch_end(*r.m, r.id);
    ++r.at;
    start(r);
  }
}

}  // namespace

namespace {

// Where a wave is, and what its last load saw: the waves that wait for one thing have this in common.
std::string place_of(Machine& m, const Wave& w) {
  std::string text = "at line " + std::to_string(w.k->code[size_t(std::max(0, w.pc - 1))].line);
  if (w.state == WAVE_BARRIER) return text + ": a barrier";
  text += ": last load (line " + std::to_string(w.last_load_line) + ") of " + hex(w.last_load_addr);
  if (const Allocation* a = m.find(w.last_load_addr)) text += " ('" + a->name + "' + " + std::to_string(w.last_load_addr - a->base) + ")";
  return text + " saw " + hex(w.last_load_value);
}

}  // namespace

// The rarest places first: what the many wait for is one that is somewhere else.
void deadlock(Machine& m, uint64_t still) {
  struct Group {
    int first, count;
    std::string wave, place;
  };
  constexpr size_t SHOWN = 16;
  std::map<std::string, Group> groups;
  int waiting = 0, others = 0;
  for (const Rank& r : m.rank)
    for (const auto& g : r.live)
      for (const Wave& w : g->waves) {
        if (w.state == WAVE_DONE) continue;
        ++(w.state == WAVE_BARRIER ? waiting : others);
        const std::string place = place_of(m, w);
        Group& group = groups.try_emplace(place, Group{int(groups.size()), 0, describe(w), place}).first->second;
        ++group.count;
      }
  std::vector<Group> sorted;
  for (auto& [place, group] : groups) sorted.push_back(std::move(group));
  std::sort(sorted.begin(), sorted.end(), [](const Group& a, const Group& b) { return std::pair(a.count, a.first) < std::pair(b.count, b.first); });
  std::string text = "deadlock: no memory changed for " + std::to_string(still) + " instructions; " + std::to_string(others) + " waves poll or run, " +
                     std::to_string(waiting) + " wait at a barrier.";
  for (size_t i = 0; i < std::min(SHOWN, sorted.size()); ++i) {
    const Group& g = sorted[i];
    text += "\n  " + g.wave + (g.count > 1 ? " and " + std::to_string(g.count - 1) + " more " : " ") + g.place;
  }
  if (sorted.size() > SHOWN) text += "\n  and waves at " + std::to_string(sorted.size() - SHOWN) + " more places";
  throw SimError(text);
}

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
  w.r->progress_clock = w.r->clock;
  uint64_t depth = 0;
  for (const Wave& other : g.waves)
    if (other.state == WAVE_BARRIER) depth = std::max(depth, other.depth);
  for (Wave& other : g.waves)
    if (other.state == WAVE_BARRIER) {
      other.state = WAVE_READY;
      other.depth = depth;
      if (&other != &w) w.r->woken.push_back(&other);
    }
}

void end_program(Wave& w, const Inst&) {
  Workgroup& g = *w.wg;
  if (w.m->hostile && !w.pending.empty()) {
    // The end of a wave does not wait for its stores; the end of the launch does.
    if (w.r->rng() % 16) {
      --w.pc;
      w.yield = true;
      return;
    }
    hostile_wait(w, 0);
  }
  w.state = WAVE_DONE;
  w.yield = true;
  ++g.done;
  w.r->progress_clock = w.r->clock;
  if (g.at_barrier && g.at_barrier + g.done == int(g.waves.size())) {
    report(w, "barrier-divergence", "a wave ended while " + std::to_string(g.at_barrier) + " waves wait at a barrier");
    g.at_barrier = 0;
    for (Wave& other : g.waves)
      if (other.state == WAVE_BARRIER) {
        other.state = WAVE_READY;
        w.r->woken.push_back(&other);
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
void unpark(Rank& r, Wave* w) {
  w->parked = false;
  for (uint64_t line : w->parked_lines) {
    auto it = r.parked.find(line);
    if (it == r.parked.end()) continue;
    std::erase(it->second, w);
    if (it->second.empty()) r.parked.erase(it);
  }
  w->parked_lines.clear();
  r.woken.push_back(w);
}

void park(Wave& w) {
  w.parked = true;
  w.parked_lines = w.poll_lines;
  for (uint64_t line : w.parked_lines) w.r->parked[line].push_back(&w);
}

void wake(Rank& r, uint64_t addr, uint32_t bytes) {
  if (r.parked.empty()) return;
  for (uint64_t line = addr >> 7; line <= (addr + bytes - 1) >> 7; ++line) {
    auto it = r.parked.find(line);
    if (it == r.parked.end()) continue;
    const std::vector<Wave*> waves = it->second;
    for (Wave* w : waves)
      if (w->parked) unpark(r, w);
  }
}

// A kernel's code is walked once a wave, and is larger than the host's caches near the core.
inline void prefetch(const Inst* code, int32_t pc, uint32_t size) {
  const char* p = reinterpret_cast<const char*>(code + std::min(uint32_t(pc) + 6, size - 1));
  __builtin_prefetch(p);
  __builtin_prefetch(p + 64);
  __builtin_prefetch(p + 128);
}

// The registers that the next wave's instructions name, fetched while this one runs, an instruction for an instruction:
// the waves of a machine have far more registers than the host's caches hold.
class Ahead {
 public:
  explicit Ahead(const Wave* next) {
    if (!next) return;
    w_ = next;
    code_ = next->k->code.data();
    pc_ = uint32_t(next->pc);
    end_ = std::min(uint32_t(next->k->code.size()), pc_ + 80);
    const char* p = reinterpret_cast<const char*>(next);
    for (size_t i = 0; i < sizeof(Wave); i += 64) __builtin_prefetch(p + i);
  }
  void step() {
    if (pc_ >= end_) return;
    const Inst& I = code_[pc_++];
    for (int k = 0; k < I.num_ops; ++k) {
      const Operand& o = I.ops[k];
      if (o.kind != KIND_VGPR) continue;
      const char* p = reinterpret_cast<const char*>(w_->v + size_t(o.reg) * LANES);
      for (int i = 0; i < 4 * o.width; ++i) __builtin_prefetch(p + 64 * i);
      if (w_->vdef) __builtin_prefetch(&w_->vdef[o.reg]);
    }
    prefetch(code_, int32_t(pc_), end_);
  }

 private:
  const Wave* w_ = nullptr;
  const Inst* code_ = nullptr;
  uint32_t pc_ = 0, end_ = 0;
};

// A quantum of one wave, or ``limit`` instructions.
void run_wave(Rank& r, Wave* w, int limit) {
  Machine& m = *r.m;
  int budget = limit ? limit : m.quantum_min + int(r.rng() % uint64_t(m.quantum_max - m.quantum_min + 1));
  const Kernel& k = *w->k;
  const Inst* code = k.code.data();
  uint64_t* executed = w->wg->launch->executed.data();
  const uint32_t size = uint32_t(k.code.size());
  w->yield = false;
  Watch& watch = m.watch;
  const bool watched = r.id == watch.rank && w->wg->linear == watch.workgroup && w->wave_in_group == watch.wave;
  const bool looked_at = m.check[CHECK_WAITS] || m.check[CHECK_NOT_FINITE];
  bool retry = w->retry;
  w->retry = false;
  const uint64_t begin = r.clock;
  int done = 0;
  Ahead ahead(limit ? nullptr : r.next);
  try {
    while (budget-- > 0 && !w->yield) {
      if (uint32_t(w->pc) >= size) throw SimError("the program counter left the kernel");
      const Inst& I = code[w->pc];
      if (watched) observe(watch, *w, I);
      prefetch(code, w->pc, size);
      ahead.step();
      ++executed[w->pc];
      ++w->by_class[I.cls];
      ++w->pc;
      ++done;
      if (__builtin_expect(looked_at, 0)) {
        if (m.check[CHECK_WAITS] && !retry) check_waits(*w, I);
        retry = false;
        const uint64_t bounded = m.check[CHECK_NOT_FINITE] ? bounded_lanes(*w, I) : 0;
        I.fn(*w, I);
        check_born(*w, I, bounded);
      } else I.fn(*w, I);
      if (__builtin_expect(w->again, 0)) {  // it waits for something, and was not run
        w->again = false;
        w->retry = true;
        --w->pc;
        --done;
        --executed[w->pc];
        --w->by_class[I.cls];
      }
    }
  } catch (const SimError& e) {
    const Inst& I = code[std::max(0, std::min(int(size) - 1, w->pc - 1))];
    throw SimError(std::string("@") + std::to_string(I.line) + "@" + describe(*w) + "@" + e.what());
  }
  w->issued += uint64_t(done);
  w->wg->issued += uint64_t(done);
  r.clock += uint64_t(done);
  w->last_clock = r.clock;
  if (!w->poll_lines.empty()) w->preempted = true;  // what it saw may change before it looks again
  const bool slept = w->parked;  // what completes next may wake it, and then it is among the woken
  if (m.hostile) {
    if (w->state == WAVE_BARRIER || slept) hostile_stand_still(*w);
    hostile_tick(*w);
  }
  if (m.timeline) {
    const int kind = w->state == WAVE_BARRIER ? 1 : w->parked ? 2 : w->state == WAVE_DONE ? 3 : w->state == WAVE_ROUND ? 4 : 0;
    r.spans.push_back({begin, r.clock, w->wg->linear, w->wave_in_group, code[std::max(0, w->pc - 1)].line, kind});
  }
  if (w->state == WAVE_DONE) {
    Workgroup& g = *w->wg;
    if (g.done == int(g.waves.size())) finish(r, g);
  } else if (w->state == WAVE_ROUND) r.waiting.push_back(w);
  else if (w->state == WAVE_READY && !slept) r.ready.push_back(w);
}

}  // namespace cdna
