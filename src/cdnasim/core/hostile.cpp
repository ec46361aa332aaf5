// SPDX-License-Identifier: Apache-2.0
// The hostile memory model: what the architecture does not promise does not hold. docs/simulator.md states the
// rules and their source (LLVM's AMDGPU memory model for gfx942 and gfx950).
//
// Three things stand between a wave and memory: its own queue of vector memory operations that have not
// completed (any order, at the latest at an s_waitcnt that covers them), a write-through L1 a compute unit, and
// a write-back L2 an XCD. A plain access sees L1, then L2; an sc0 access passes the L1; an sc1 access passes
// both. Memory that ranks share takes both bits to pass the L2: sc1 alone is the device's scope.
#include "machine.h"

namespace cdna {

constexpr uint64_t LINE = 128;
constexpr size_t L1_LINES = 128, L2_LINES = 8192;

struct CacheLine {
  uint64_t line = ~0ull;
  uint8_t data[LINE];
  uint64_t dirty[2] = {0, 0};  // a bit per byte
};
using Cache = std::vector<CacheLine>;

struct Hostile {
  std::vector<Cache> l1, l2;
  Cache& of_l1(Machine& m, const Workgroup& g) {
    Cache& c = l1[size_t(g.rank * m.num_cu + g.cu)];
    if (c.empty()) c.resize(L1_LINES);
    return c;
  }
  Cache& of_l2(Machine& m, int rank, int xcd) {
    Cache& c = l2[size_t(rank * m.num_xcd + xcd)];
    if (c.empty()) c.resize(L2_LINES);
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

CacheLine& slot(Cache& c, uint64_t line) { return c[(line ^ line >> 13) % c.size()]; }

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
  if (!(c.dirty[0] | c.dirty[1])) return;
  for (uint32_t i = 0; i < LINE;) {
    if (!(c.dirty[i >> 6] >> (i & 63) & 1)) { ++i; continue; }
    uint32_t n = 1;
    while (i + n < LINE && (c.dirty[(i + n) >> 6] >> ((i + n) & 63) & 1)) ++n;
    to_memory(m, c.line * LINE + i, c.data + i, n);
    i += n;
  }
  c.dirty[0] = c.dirty[1] = 0;
}

void drop(Machine& m, CacheLine& c) {
  clean(m, c);
  c.line = ~0ull;
}

bool is_dirty(const CacheLine& c) { return c.dirty[0] | c.dirty[1]; }

// A line may reach past its allocation; only the part inside is read.
void fill_from_memory(Machine& m, CacheLine& c, uint64_t line) {
  const uint64_t lo = line * LINE, hi = lo + LINE;
  c.line = line;
  for (uint64_t at = lo; at < hi;) {
    Allocation* a = m.find(at);
    if (!a) { ++at; continue; }
    const uint64_t end = std::min(hi, a->end());
    std::memcpy(c.data + (at - lo), reinterpret_cast<void*>(at), end - at);
    at = end;
  }
}

// What the XCD has stored stays, and is nobody else's yet; the rest of the line is as in memory.
void invalidate(Machine& m, CacheLine& c) {
  if (!is_dirty(c)) {
    c.line = ~0ull;
    return;
  }
  CacheLine old = c;
  fill_from_memory(m, c, old.line);
  for (uint32_t i = 0; i < LINE; ++i)
    if (old.dirty[i >> 6] >> (i & 63) & 1) c.data[i] = old.data[i];
}

CacheLine& l2_line(Wave& w, uint64_t line) {
  Machine& m = *w.m;
  CacheLine& c = slot(m.model->of_l2(m, w.wg->rank, w.wg->xcd), line);
  if (c.line != line) {
    clean(m, c);
    fill_from_memory(m, c, line);
  }
  return c;
}

// What the scope bits of an access are worth where it goes.
int reach(Wave& w, int policy, uint64_t addr) {
  constexpr int SYSTEM = CPOL_SC0 | CPOL_SC1;
  if (!(policy & CPOL_SC1) || (policy & SYSTEM) == SYSTEM) return policy;
  Allocation* a = w.r->last_hit;
  if (!a || addr < a->base || addr >= a->end()) a = w.m->find(addr);
  return a && a->peer ? CPOL_SC0 : policy;
}

// One piece of an access, inside one line.
void load_piece(Wave& w, int policy, uint64_t addr, uint32_t bytes, uint8_t* out) {
  Machine& m = *w.m;
  const uint64_t line = addr / LINE;
  policy = reach(w, policy, addr);
  const bool past_l1 = policy & (CPOL_SC0 | CPOL_SC1), past_l2 = policy & CPOL_SC1;
  CacheLine& near = slot(m.model->of_l1(m, *w.wg), line);
  if (past_l2) {
    if (near.line == line) near.line = ~0ull;
    CacheLine& far = slot(m.model->of_l2(m, w.wg->rank, w.wg->xcd), line);
    if (far.line == line) invalidate(m, far);
    if (far.line == line) std::memcpy(out, far.data + addr % LINE, bytes);
    else std::memcpy(out, reinterpret_cast<void*>(addr), bytes);
    return;
  }
  if (near.line != line || past_l1) {
    const CacheLine& far = l2_line(w, line);
    near.line = line;
    std::memcpy(near.data, far.data, LINE);
  }
  std::memcpy(out, near.data + addr % LINE, bytes);
}

void store_piece(Wave& w, int policy, uint64_t addr, uint32_t bytes, const uint8_t* data) {
  Machine& m = *w.m;
  const uint64_t line = addr / LINE, in = addr % LINE;
  policy = reach(w, policy, addr);
  CacheLine& near = slot(m.model->of_l1(m, *w.wg), line);
  if (near.line == line) std::memcpy(near.data + in, data, bytes);
  if (policy & CPOL_SC1) {
    CacheLine& far = slot(m.model->of_l2(m, w.wg->rank, w.wg->xcd), line);
    if (far.line == line) {
      std::memcpy(far.data + in, data, bytes);
      for (uint64_t i = in; i < in + bytes; ++i) far.dirty[i >> 6] &= ~(1ull << (i & 63));
    }
    return to_memory(m, addr, data, bytes);
  }
  CacheLine& far = l2_line(w, line);
  std::memcpy(far.data + in, data, bytes);
  for (uint64_t i = in; i < in + bytes; ++i) far.dirty[i >> 6] |= 1ull << (i & 63);
  w.r->progress_clock = w.r->clock;
}

template <class F>
void by_line(uint64_t addr, uint32_t bytes, F f) {
  for (uint32_t done = 0; done < bytes;) {
    const uint32_t n = uint32_t(std::min<uint64_t>(bytes - done, LINE - (addr + done) % LINE));
    f(addr + done, done, n);
    done += n;
  }
}

void complete(Wave& w, PendingOp& op) {
  if (op.load) {
    auto load = std::move(op.load);
    op.load = nullptr;
    load();
  }
  // The lanes of one store become visible in any order.
  for (size_t left = op.stores.size(); left; --left) {
    const size_t pick = w.r->rng() % left;
    const PendingStore s = op.stores[pick];
    op.stores[pick] = op.stores[left - 1];
    by_line(s.addr, s.bytes, [&](uint64_t a, uint32_t off, uint32_t n) { store_piece(w, s.policy, a, n, s.data + off); });
  }
  op.stores.clear();
}

bool overlap(const PendingOp& op, uint64_t addr, uint32_t bytes) {
  for (const PendingStore& s : op.stores)
    if (s.addr < addr + bytes && addr < s.addr + s.bytes) return true;
  return false;
}

// A wave's own accesses to one address stay in program order.
void settle(Wave& w, uint64_t addr, uint32_t bytes, size_t before) {
  for (size_t i = 0; i < before && i < w.pending.size(); ++i)
    if (overlap(w.pending[i], addr, bytes)) complete(w, w.pending[i]);
}

}  // namespace

void hostile_load(Wave& w, const Inst& I, uint64_t addr, uint32_t bytes, void* out) {
  settle(w, addr, bytes, w.pending.size());
  by_line(addr, bytes, [&](uint64_t a, uint32_t off, uint32_t n) { load_piece(w, I.cpol, a, n, static_cast<uint8_t*>(out) + off); });
}

// Loads fill a register in the order of issue (the ISA's vmcnt returns in order, and compilers leave the wait between two
// loads to one register out for it), whatever the order in which they read memory.
void hostile_issue_load(Wave& w, std::function<void()> load, int reg, int width) {
  for (PendingOp& before : w.pending)
    if (before.load && before.reg < reg + width && reg < before.reg + before.width) complete(w, before);
  PendingOp op;
  op.load = std::move(load);
  op.reg = reg;
  op.width = width;
  if (w.r->rng() & 1) complete(w, op);
  w.pending.push_back(std::move(op));
  if (w.pending.size() > 63) hostile_wait(w, 63);
}

void hostile_issue_store(Wave& w, std::vector<PendingStore> stores) {
  for (const PendingStore& s : stores) settle(w, s.addr, s.bytes, w.pending.size());
  PendingOp op;
  op.stores = std::move(stores);
  w.pending.push_back(std::move(op));
  if (w.pending.size() > 63) hostile_wait(w, 63);
}

// Atomics are performed at memory, after the wave's own earlier accesses of the place.
void hostile_atomic(Wave& w, uint64_t addr, uint32_t bytes) {
  Machine& m = *w.m;
  settle(w, addr, bytes, w.pending.size());
  const uint64_t line = addr / LINE;
  CacheLine& near = slot(m.model->of_l1(m, *w.wg), line);
  if (near.line == line) near.line = ~0ull;
  CacheLine& far = slot(m.model->of_l2(m, w.wg->rank, w.wg->xcd), line);
  if (far.line == line) drop(m, far);
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
    PendingOp op = std::move(w.pending.front());
    w.pending.pop_front();
    complete(w, op);
  }
}

// buffer_inv with sc1: the L1 and the XCD's L2 (lines it has not written). Without sc1 it does nothing: sc0 alone acts
// only where a workgroup is spread over compute units (tgsplit).
void hostile_invalidate(Wave& w, const Inst& I) {
  Machine& m = *w.m;
  if (!(I.cpol & CPOL_SC1)) return;
  for (CacheLine& c : m.model->of_l1(m, *w.wg)) c.line = ~0ull;
  for (CacheLine& c : m.model->of_l2(m, w.wg->rank, w.wg->xcd))
    if (c.line != ~0ull) invalidate(m, c);
}

// buffer_wbl2 with sc1 writes the wave's stores and the XCD's dirty lines back, at the latest when vmcnt is waited for;
// without sc1 it does nothing.
void hostile_write_back(Wave& w, const Inst& I) {
  if (!(I.cpol & CPOL_SC1)) return;
  PendingOp op;
  op.load = [&w] {
    for (PendingOp& other : w.pending)
      if (!other.stores.empty()) complete(w, other);
    for (CacheLine& c : w.m->model->of_l2(*w.m, w.wg->rank, w.wg->xcd))
      if (c.line != ~0ull) clean(*w.m, c);
  };
  w.pending.push_back(std::move(op));
  if (w.pending.size() > 63) hostile_wait(w, 63);
}

namespace {

// A line of memory that the launch may write comes to the caches though nobody asked for it.
void fetch_some_line(Wave& w) {
  Machine& m = *w.m;
  auto& rng = w.r->rng;
  const Allocation& a = *m.allocations[rng() % m.allocations.size()];
  if (a.read_only || (a.rank != w.wg->rank && !a.peer) || !a.bytes) return;
  const uint64_t line = (a.base + rng() % a.bytes) / LINE;
  const CacheLine& far = l2_line(w, line);
  CacheLine& near = slot(m.model->of_l1(m, *w.wg), line);
  if (near.line == line) return;
  near.line = line;
  std::memcpy(near.data, far.data, LINE);
}

}  // namespace

// Now and then something completes, or a line is fetched or evicted, without anybody waiting for it.
void hostile_tick(Wave& w) {
  Machine& m = *w.m;
  auto& rng = w.r->rng;
  if (!w.pending.empty() && rng() % 8 == 0) {
    const size_t pick = rng() % w.pending.size();
    complete(w, w.pending[pick]);
  }
  if (rng() % 8 == 0 && !m.allocations.empty()) fetch_some_line(w);
  if (rng() % 64 == 0) {
    Cache& c = m.model->of_l1(m, *w.wg);
    c[rng() % c.size()].line = ~0ull;
  }
}

void hostile_launch_begin(Machine& m, int rank) {
  for (int i = 0; i < m.num_cu; ++i)
    for (CacheLine& c : m.model->l1[size_t(rank * m.num_cu + i)]) c.line = ~0ull;
  for (int i = 0; i < m.num_xcd; ++i)
    for (CacheLine& c : m.model->l2[size_t(rank * m.num_xcd + i)])
      if (c.line != ~0ull) drop(m, c);
}
void hostile_launch_end(Machine& m, int rank) { hostile_launch_begin(m, rank); }

}  // namespace cdna
