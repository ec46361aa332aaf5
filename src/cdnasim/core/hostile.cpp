// SPDX-License-Identifier: Apache-2.0
// The hostile memory model: what the architecture does not promise does not hold. docs/simulator.md states the
// rules and their source (LLVM's AMDGPU memory model for gfx942 and gfx950).
//
// Three things stand between a wave and memory: its own queue of vector memory operations that have not
// completed (any order, at the latest at an s_waitcnt that covers them), a write-through L1 a compute unit, and
// a write-back L2 an XCD. A plain access sees L1, then L2; an sc0 access passes the L1; an sc1 access passes
// both. Memory that ranks share takes both bits to pass the L2: sc1 alone is the device's scope.
#include <utility>

#include "machine.h"

namespace cdna {

constexpr uint64_t LINE = 128;
constexpr size_t L1_LINES = 128, L2_LINES = 8192;  // powers of two

struct CacheLine {
  uint64_t line = ~0ull;    // in the model's addresses
  uint64_t generation = 0;  // the cache's, when the line was filled
  uint8_t* home = nullptr;
  uint32_t inside = 0;      // bytes of it that its allocation has
  bool listed = false;      // in the cache's list of lines that may be dirty
  uint8_t data[LINE];
  uint64_t dirty[2] = {0, 0};  // a bit per byte

  bool is_dirty() const { return dirty[0] | dirty[1]; }
};

// Direct-mapped. A line of an earlier generation is none.
template <size_t LINES>
struct Cache {
  std::vector<CacheLine> lines;
  std::vector<CacheLine*> maybe_dirty;
  uint64_t generation = 1;

  CacheLine& slot(uint64_t line) { return lines[(line ^ line >> 13) & (LINES - 1)]; }
  bool holds(const CacheLine& c, uint64_t line) const { return c.line == line && c.generation == generation; }
};
using L1 = Cache<L1_LINES>;
using L2 = Cache<L2_LINES>;

struct Hostile {
  std::vector<L1> l1;
  std::vector<L2> l2;
  L1& of_l1(Machine& m, const Workgroup& g) { return grown<L1_LINES>(l1[size_t(g.rank * m.num_cu + g.cu)]); }
  L2& of_l2(Machine& m, const Wave& w) { return grown<L2_LINES>(l2[size_t(w.wg->rank * m.num_xcd + w.wg->xcd)]); }

 private:
  template <size_t LINES>
  static Cache<LINES>& grown(Cache<LINES>& c) {
    if (c.lines.empty()) c.lines.resize(LINES);
    return c;
  }
};

void hostile_init(Machine& m) {
  m.model = new Hostile;
  m.model->l1.resize(size_t(m.ranks * m.num_cu));
  m.model->l2.resize(size_t(m.ranks * m.num_xcd));
}
void hostile_free(Machine& m) {
  delete m.model;
  m.model = nullptr;
}

namespace {

// Where an access goes. The model's addresses depend on nothing but the order of the allocations, so that a seed
// is the same run wherever the host has put them; an allocation begins a line, as it begins a page on the GPU.
struct Place {
  Allocation* a;
  uint64_t at;  // in the model's addresses

  uint64_t line() const { return at / LINE; }
  uint64_t in() const { return at % LINE; }
  uint8_t* host() const { return reinterpret_cast<uint8_t*>(a->base + (at - a->model_base)); }
};

// The access was permitted, so that it lies in an allocation.
Place place(Wave& w, uint64_t addr) {
  Allocation* a = w.r->last_hit;
  if (!a || addr < a->base || addr >= a->end()) w.r->last_hit = a = w.m->find(addr);
  return {a, a->model_base + (addr - a->base)};
}

// Memory changes here, and only here.
void to_memory(Machine& m, uint64_t addr, const uint8_t* data, uint32_t bytes) {
  void* p = reinterpret_cast<void*>(addr);
  if (!std::memcmp(p, data, bytes)) return;
  std::memcpy(p, data, bytes);
  for (Rank& r : m.rank) {
    r.progress_clock = r.clock;
    wake(r, addr, bytes);
  }
}

void clean(Machine& m, CacheLine& c) {
  if (!c.is_dirty()) return;
  for (uint32_t i = 0; i < LINE;) {
    if (!(c.dirty[i >> 6] >> (i & 63) & 1)) { ++i; continue; }
    uint32_t n = 1;
    while (i + n < LINE && (c.dirty[(i + n) >> 6] >> ((i + n) & 63) & 1)) ++n;
    to_memory(m, reinterpret_cast<uint64_t>(c.home + i), c.data + i, n);
    i += n;
  }
  c.dirty[0] = c.dirty[1] = 0;
}

void clean_all(Machine& m, L2& cache) {
  for (CacheLine* c : cache.maybe_dirty) {
    clean(m, *c);
    c->listed = false;
  }
  cache.maybe_dirty.clear();
}

// A line may reach past its allocation; only the part inside is read.
void fill_from_memory(CacheLine& c, const Place& p, uint64_t generation) {
  const uint64_t first = p.line() * LINE - p.a->model_base;
  c.line = p.line();
  c.generation = generation;
  c.home = reinterpret_cast<uint8_t*>(p.a->base + first);
  c.inside = uint32_t(std::min(LINE, p.a->bytes - first));
  std::memcpy(c.data, c.home, c.inside);
}

// What the XCD has stored stays, and is nobody else's yet; the rest of the line is as in memory.
void invalidate(CacheLine& c) {
  if (!c.is_dirty()) {
    c.line = ~0ull;
    return;
  }
  for (uint32_t i = 0; i < c.inside; ++i)
    if (!(c.dirty[i >> 6] >> (i & 63) & 1)) c.data[i] = c.home[i];
}

CacheLine& l2_line(Wave& w, const Place& p) {
  Machine& m = *w.m;
  L2& cache = m.model->of_l2(m, w);
  CacheLine& c = cache.slot(p.line());
  if (!cache.holds(c, p.line())) {
    clean(m, c);
    fill_from_memory(c, p, cache.generation);
  }
  return c;
}

// The XCD's line of a place, or none.
CacheLine* in_l2(Wave& w, const Place& p) {
  L2& cache = w.m->model->of_l2(*w.m, w);
  CacheLine& c = cache.slot(p.line());
  return cache.holds(c, p.line()) ? &c : nullptr;
}

// The compute unit's line of a place, or none.
CacheLine* in_l1(Wave& w, const Place& p) {
  L1& cache = w.m->model->of_l1(*w.m, *w.wg);
  CacheLine& c = cache.slot(p.line());
  return cache.holds(c, p.line()) ? &c : nullptr;
}

// The compute unit's line, filled from the XCD's.
CacheLine& fill_l1(Wave& w, const Place& p) {
  L1& cache = w.m->model->of_l1(*w.m, *w.wg);
  CacheLine& c = cache.slot(p.line());
  c.line = p.line();
  c.generation = cache.generation;
  std::memcpy(c.data, l2_line(w, p).data, LINE);
  return c;
}

// What the scope bits of an access are worth where it goes.
int reach(int policy, const Allocation& a) {
  constexpr int SYSTEM = CPOL_SC0 | CPOL_SC1;
  if (!(policy & CPOL_SC1) || (policy & SYSTEM) == SYSTEM) return policy;
  return a.peer ? CPOL_SC0 : policy;
}

// One piece of an access, inside one line. What no launch may write is read where it is: no cache can be stale.
void load_piece(Wave& w, int policy, const Place& p, uint32_t bytes, uint8_t* out) {
  if (p.a->read_only) {
    std::memcpy(out, p.host(), bytes);
    return;
  }
  policy = reach(policy, *p.a);
  const bool past_l1 = policy & (CPOL_SC0 | CPOL_SC1), past_l2 = policy & CPOL_SC1;
  CacheLine* near = in_l1(w, p);
  if (past_l2) {
    if (near) near->line = ~0ull;
    CacheLine* far = in_l2(w, p);
    if (far) invalidate(*far);
    std::memcpy(out, far && far->is_dirty() ? far->data + p.in() : p.host(), bytes);
    return;
  }
  if (!near || past_l1) near = &fill_l1(w, p);
  std::memcpy(out, near->data + p.in(), bytes);
}

void store_piece(Wave& w, int policy, const Place& p, uint32_t bytes, const uint8_t* data) {
  Machine& m = *w.m;
  const uint64_t in = p.in();
  policy = reach(policy, *p.a);
  if (CacheLine* near = in_l1(w, p)) std::memcpy(near->data + in, data, bytes);
  if (policy & CPOL_SC1) {
    if (CacheLine* far = in_l2(w, p)) {
      std::memcpy(far->data + in, data, bytes);
      for (uint64_t i = in; i < in + bytes; ++i) far->dirty[i >> 6] &= ~(1ull << (i & 63));
    }
    return to_memory(m, reinterpret_cast<uint64_t>(p.host()), data, bytes);
  }
  CacheLine& far = l2_line(w, p);
  std::memcpy(far.data + in, data, bytes);
  for (uint64_t i = in; i < in + bytes; ++i) far.dirty[i >> 6] |= 1ull << (i & 63);
  if (!far.listed) m.model->of_l2(m, w).maybe_dirty.push_back(&far);
  far.listed = true;
  w.r->progress_clock = w.r->clock;
}

template <class F>
void by_line(Wave& w, uint64_t addr, uint32_t bytes, F f) {
  for (uint32_t done = 0; done < bytes;) {
    const Place p = place(w, addr + done);
    const uint64_t in_line = std::min<uint64_t>(bytes - done, LINE - p.in());
    const uint32_t n = uint32_t(std::min(in_line, p.a->end() - (addr + done)));  // the host may put two side by side
    f(p, done, n);
    done += n;
  }
}

void complete(Wave& w, PendingOp& op) {
  if (op.load) std::exchange(op.load, nullptr)->complete(w);
  if (std::exchange(op.writes_back, false)) --w.pending_stores;
  if (op.stores.empty()) return;
  // The lanes of one store become visible in any order.
  for (size_t left = op.stores.size(); left; --left) {
    const size_t pick = w.r->rng() % left;
    const PendingStore s = op.stores[pick];
    op.stores[pick] = op.stores[left - 1];
    by_line(w, s.addr, s.bytes, [&](const Place& p, uint32_t off, uint32_t n) { store_piece(w, s.policy, p, n, s.data + off); });
  }
  op.stores.clear();
  op.first = ~0ull;
  op.end = 0;
  --w.pending_stores;
}

bool overlap(const PendingOp& op, uint64_t addr, uint32_t bytes) {
  if (addr >= op.end || addr + bytes <= op.first) return false;
  for (const PendingStore& s : op.stores)
    if (s.addr < addr + bytes && addr < s.addr + s.bytes) return true;
  return false;
}

// A wave's own accesses to one address stay in program order.
void settle(Wave& w, uint64_t addr, uint32_t bytes, size_t before) {
  if (!w.pending_stores) return;
  for (size_t i = 0; i < before && i < w.pending.size(); ++i)
    if (overlap(w.pending[i], addr, bytes)) complete(w, w.pending[i]);
}

}  // namespace

void hostile_load(Wave& w, const Inst& I, uint64_t addr, uint32_t bytes, void* out) {
  settle(w, addr, bytes, w.pending.size());
  by_line(w, addr, bytes, [&](const Place& p, uint32_t off, uint32_t n) { load_piece(w, I.cpol, p, n, static_cast<uint8_t*>(out) + off); });
}

// Loads fill a register in the order of issue (the ISA's vmcnt returns in order, and compilers leave the wait between two
// loads to one register out for it), whatever the order in which they read memory.
//
// Whether a load into these registers, issued now, is read later; if not, it is read before ``hostile_loaded``.
bool hostile_load_waits(Wave& w, int reg, int width) {
  for (PendingOp& before : w.pending)
    if (before.load && before.reg < reg + width && reg < before.reg + before.width) complete(w, before);
  return !(w.r->rng() & 1);
}

// A load takes its place in line; ``load`` is none where it has been read.
void hostile_loaded(Wave& w, std::unique_ptr<PendingLoad> load, int reg, int width) {
  PendingOp op;
  op.load = std::move(load);
  op.reg = reg;
  op.width = width;
  w.pending.push_back(std::move(op));
  if (w.pending.size() > 63) hostile_wait(w, 63);
}

void hostile_issue_store(Wave& w, std::vector<PendingStore> stores) {
  for (const PendingStore& s : stores) settle(w, s.addr, s.bytes, w.pending.size());
  PendingOp op;
  op.stores = std::move(stores);
  for (const PendingStore& s : op.stores) {
    op.first = std::min(op.first, s.addr);
    op.end = std::max(op.end, s.addr + s.bytes);
  }
  if (!op.stores.empty()) ++w.pending_stores;
  w.pending.push_back(std::move(op));
  if (w.pending.size() > 63) hostile_wait(w, 63);
}

// Atomics are performed at memory, after the wave's own earlier accesses of the place.
void hostile_atomic(Wave& w, uint64_t addr, uint32_t bytes) {
  Machine& m = *w.m;
  settle(w, addr, bytes, w.pending.size());
  const Place p = place(w, addr);
  if (CacheLine* near = in_l1(w, p)) near->line = ~0ull;
  if (CacheLine* far = in_l2(w, p)) {
    clean(m, *far);
    far->line = ~0ull;
  }
}

// A wait for several stores may find one of them done while others are under way, and the other waves see that.
bool hostile_straggle(Wave& w, int outstanding) {
  std::vector<PendingOp*> stores;
  for (size_t i = 0; i + size_t(outstanding) < w.pending.size(); ++i)
    if (!w.pending[i].stores.empty()) stores.push_back(&w.pending[i]);
  if (stores.size() < 2 || w.r->rng() & 1) return false;
  complete(w, *stores[w.r->rng() % stores.size()]);
  return true;
}

void hostile_wait(Wave& w, int outstanding) {
  while (w.pending.size() > size_t(outstanding)) {
    PendingOp op = w.pending.pop_front();
    complete(w, op);
  }
}

// buffer_inv with sc1: the L1 and the XCD's L2 (lines it has not written). Without sc1 it does nothing: sc0 alone acts
// only where a workgroup is spread over compute units (tgsplit).
void hostile_invalidate(Wave& w, const Inst& I) {
  Machine& m = *w.m;
  if (!(I.cpol & CPOL_SC1)) return;
  ++m.model->of_l1(m, *w.wg).generation;
  L2& far = m.model->of_l2(m, w);
  ++far.generation;
  std::erase_if(far.maybe_dirty, [&](CacheLine* c) {
    c->listed = c->is_dirty();
    if (!c->listed) return true;
    invalidate(*c);
    c->generation = far.generation;
    return false;
  });
}

// buffer_wbl2 with sc1 writes the wave's stores and the XCD's dirty lines back, at the latest when vmcnt is waited for;
// without sc1 it does nothing.
void hostile_write_back(Wave& w, const Inst& I) {
  if (!(I.cpol & CPOL_SC1)) return;
  PendingOp op;
  op.load = pending_load([&w] {
    for (PendingOp& other : w.pending)
      if (!other.stores.empty()) complete(w, other);
    clean_all(*w.m, w.m->model->of_l2(*w.m, w));
  });
  op.writes_back = true;
  ++w.pending_stores;
  w.pending.push_back(std::move(op));
  if (w.pending.size() > 63) hostile_wait(w, 63);
}

namespace {

// A line of memory that the launch may write comes to the caches though nobody asked for it.
void fetch_some_line(Wave& w) {
  Machine& m = *w.m;
  auto& rng = w.r->rng;
  Allocation& a = *m.in_order[rng() % m.in_order.size()];
  if (a.read_only || (a.rank != w.wg->rank && !a.peer) || !a.bytes) return;
  const Place p{&a, a.model_base + rng() % a.bytes};
  const CacheLine* near = in_l1(w, p);
  l2_line(w, p);
  if (!near) fill_l1(w, p);
}

}  // namespace

// A wave that stands at a barrier or sleeps issues nothing that would complete its stores, and they complete all the
// same, some time.
void hostile_stand_still(Wave& w) {
  if (!w.pending_stores || w.draining) return;
  w.draining = true;
  w.r->draining.push_back(&w);
}

namespace {

// One of a wave's stores and write-backs; whether it had one.
bool drain(Wave& w) {
  std::vector<PendingOp*> stores;
  for (PendingOp& op : w.pending)
    if (!op.stores.empty() || op.writes_back) stores.push_back(&op);
  if (!stores.empty()) complete(w, *stores[w.r->rng() % stores.size()]);
  return !stores.empty();
}

}  // namespace

// A store of a wave of the rank that stands still, where there is one.
void hostile_drain_one(Rank& r) {
  if (r.draining.empty()) return;
  Wave*& pick = r.draining[r.rng() % r.draining.size()];
  if (drain(*pick)) return;
  pick->draining = false;
  pick = r.draining.back();
  r.draining.pop_back();
}

// When nobody can run: whether a store was under way, which is then there.
bool hostile_drain(Rank& r) {
  bool any = false;
  for (Wave* w : r.draining) {
    while (drain(*w)) any = true;
    w->draining = false;
  }
  r.draining.clear();
  return any;
}

// What a run that failed has left in the caches is nobody's: its memory may be gone.
void hostile_forget_caches(Machine& m) {
  for (L1& near : m.model->l1) ++near.generation;
  for (L2& far : m.model->l2) {
    ++far.generation;
    for (CacheLine* c : far.maybe_dirty) {
      c->dirty[0] = c->dirty[1] = 0;
      c->listed = false;
    }
    far.maybe_dirty.clear();
  }
}

void hostile_forget(Rank& r, const Workgroup& g) {
  std::erase_if(r.draining, [&](const Wave* w) { return w->wg == &g; });
}

// Now and then something completes, or a line is fetched or evicted, without anybody waiting for it.
void hostile_tick(Wave& w) {
  Machine& m = *w.m;
  auto& rng = w.r->rng;
  if (!w.pending.empty() && rng() % 8 == 0) {
    const size_t pick = rng() % w.pending.size();
    complete(w, w.pending[pick]);
  }
  if (!w.r->draining.empty() && rng() % 16 == 0) hostile_drain_one(*w.r);
  if (m.unasked && rng() % 8 == 0 && !m.in_order.empty()) fetch_some_line(w);
  if (rng() % 64 == 0) {
    m.model->of_l1(m, *w.wg).lines[rng() % L1_LINES].line = ~0ull;
  }
}

void hostile_launch_begin(Machine& m, int rank) {
  for (int i = 0; i < m.num_cu; ++i) ++m.model->l1[size_t(rank * m.num_cu + i)].generation;
  for (int i = 0; i < m.num_xcd; ++i) {
    L2& far = m.model->l2[size_t(rank * m.num_xcd + i)];
    clean_all(m, far);
    ++far.generation;
  }
}
void hostile_launch_end(Machine& m, int rank) { hostile_launch_begin(m, rank); }

}  // namespace cdna
