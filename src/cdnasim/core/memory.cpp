// SPDX-License-Identifier: Apache-2.0
// Device memory: registered allocations, bounds / ownership / never-written checks, traffic counters.
#include <algorithm>

#include "machine.h"

namespace cdna {

Allocation* Machine::find(uint64_t addr) {
  auto it = std::upper_bound(allocations.begin(), allocations.end(), addr,
                             [](uint64_t a, const std::unique_ptr<Allocation>& x) { return a < x->base; });
  if (it == allocations.begin()) return nullptr;
  Allocation* a = std::prev(it)->get();
  return addr < a->end() ? a : nullptr;
}

namespace {

const char* const CHECK_NAMES[NUM_CHECKS] = {"register-never-written", "memory-never-written", "lds-never-written",
                                             "misaligned", "lds-race", "barrier-divergence", "offset-wrap"};

bool owned(const Wave& w, const Allocation& a) { return a.rank == w.wg->rank || a.peer; }

[[noreturn]] void outside(const Wave& w, int lane, uint64_t addr, uint32_t bytes, bool store, const Allocation* near) {
  std::string text = std::string("out-of-bounds: ") + (store ? "store" : "load") + " of " + std::to_string(bytes) + " bytes at " +
                     hex(addr) + (lane >= 0 ? " by lane " + std::to_string(lane) : std::string());
  if (near && !owned(w, *near)) text += ", which is memory of rank " + std::to_string(near->rank) + " ('" + near->name + "') not shared with peers";
  else if (near && addr < near->end()) text += ", which runs past the end of '" + near->name + "' (" + std::to_string(near->bytes) + " bytes) at offset " + std::to_string(addr - near->base);
  else text += ", in no registered allocation";
  if (!near || addr >= near->end()) {
    Machine& m = *w.m;
    auto it = std::upper_bound(m.allocations.begin(), m.allocations.end(), addr,
                               [](uint64_t a, const std::unique_ptr<Allocation>& x) { return a < x->base; });
    if (it != m.allocations.begin()) {
      const Allocation& before = **std::prev(it);
      text += "; the nearest below is '" + before.name + "', " + std::to_string(addr - before.end()) + " bytes past its end";
    }
  }
  fail(w, text);
}

bool all_written(const Allocation& a, uint64_t offset, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes;) {
    const uint64_t bit = offset + i;
    const uint32_t in = uint32_t(bit & 63), n = std::min(bytes - i, 64 - in);
    const uint64_t field = (n == 64 ? ~0ull : (1ull << n) - 1) << in;
    if ((a.written[bit >> 6] & field) != field) return false;
    i += n;
  }
  return true;
}

void mark(Allocation& a, uint64_t offset, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes;) {
    const uint64_t bit = offset + i;
    const uint32_t in = uint32_t(bit & 63), n = std::min(bytes - i, 64 - in);
    a.written[bit >> 6] |= (n == 64 ? ~0ull : (1ull << n) - 1) << in;
    i += n;
  }
}

void touch(Allocation& a, uint64_t addr, uint32_t bytes) {
  const uint64_t first = (addr - a.base) >> 6, last = (addr + bytes - 1 - a.base) >> 6;
  for (uint64_t q = first; q <= last; ++q) a.touched[q >> 6] |= 1ull << (q & 63);
}

}  // namespace

void report(Wave& w, const char* kind, const std::string& text) {
  int level = CHECK_ERROR;
  for (int i = 0; i < NUM_CHECKS; ++i)
    if (!std::strcmp(kind, CHECK_NAMES[i])) level = w.m->check[i];
  if (level == CHECK_OFF) return;
  if (level == CHECK_ERROR) fail(w, std::string(kind) + ": " + text);
  const int pc = w.pc > 0 ? w.pc - 1 : 0;
  const std::string key = std::string(kind) + ": line " + std::to_string(w.k->code[size_t(pc)].line);
  if (w.m->warning_count[key]++ == 0) w.m->warnings.push_back(key + ": " + text);
}

void check_access(Wave& w, const Inst& I, const uint64_t* addr, uint64_t mask, uint32_t bytes, bool store, int align) {
  if (!mask) return;
  Machine& m = *w.m;
  uint64_t lo = ~0ull, hi = 0, low_bits = 0;
  for (int l = 0; l < LANES; ++l) {
    const bool on = mask >> l & 1;
    lo = on && addr[l] < lo ? addr[l] : lo;
    hi = on && addr[l] > hi ? addr[l] : hi;
    low_bits |= on ? addr[l] : 0;
  }
  if (align > 1 && (low_bits & uint64_t(align - 1)) && m.check[CHECK_MISALIGNED])
    report(w, "misaligned", std::string(store ? "store" : "load") + " of " + std::to_string(bytes) + " bytes, lowest address " + hex(lo));
  Allocation* a = m.last_hit;
  if (!a || lo < a->base || hi + bytes > a->end()) a = m.find(lo);
  const bool one = a && hi + bytes <= a->end();
  if (one) m.last_hit = a;
  if (one && !owned(w, *a)) outside(w, -1, lo, bytes, store, a);
  if (one && store && a->read_only) fail(w, "read-only: store to '" + a->name + "' at offset " + std::to_string(lo - a->base));
  const bool track = m.count_traffic;
  if (!one || !a->written.empty() || track) {
    for (int l = 0; l < LANES; ++l) {
      if (!(mask >> l & 1)) continue;
      if (!one) {
        if (!a || addr[l] < a->base || addr[l] + bytes > a->end()) a = m.find(addr[l]);
        if (!a || addr[l] + bytes > a->end() || !owned(w, *a)) outside(w, l, addr[l], bytes, store, a);
        if (store && a->read_only) fail(w, "read-only: store to '" + a->name + "' at offset " + std::to_string(addr[l] - a->base));
      }
      if (!a->written.empty()) {
        if (store) mark(*a, addr[l] - a->base, bytes);
        else if (m.check[CHECK_MEMORY_UNWRITTEN] && !all_written(*a, addr[l] - a->base, bytes))
          report(w, "memory-never-written", "lane " + std::to_string(l) + " reads " + std::to_string(bytes) + " bytes at offset " +
                                               std::to_string(addr[l] - a->base) + " of '" + a->name + "', not all of which were ever written");
      }
      if (track && (l == 0 || !(mask >> (l - 1) & 1) || (addr[l] ^ addr[l - 1]) >> 6 || (addr[l] & 63) + bytes > 64)) touch(*a, addr[l], bytes);
    }
  }
  if (track) {
    Counters& c = w.wg->launch->counters;
    const int scope = (I.cpol & CPOL_SC0 ? 1 : 0) | (I.cpol & CPOL_SC1 ? 2 : 0);
    const uint64_t total = uint64_t(bytes) * uint64_t(__builtin_popcountll(mask));
    (store ? c.traffic.store_bytes : c.traffic.load_bytes)[scope] += total;
    if (I.cpol & CPOL_NT) c.nontemporal_bytes += total;
  }
}

void check_scalar_access(Wave& w, uint64_t addr, uint32_t bytes) {
  Machine& m = *w.m;
  Allocation* a = m.last_hit;
  if (!a || addr < a->base || addr + bytes > a->end()) a = m.find(addr);
  if (!a || addr + bytes > a->end() || !owned(w, *a)) outside(w, -1, addr, bytes, false, a);
  if (!a->written.empty() && m.check[CHECK_MEMORY_UNWRITTEN] && !all_written(*a, addr - a->base, bytes))
    report(w, "memory-never-written", "scalar load at offset " + std::to_string(addr - a->base) + " of '" + a->name + "'");
  if (m.count_traffic) touch(*a, addr, bytes);
}

void write_bytes(Wave& w, uint64_t addr, const void* data, uint32_t bytes) {
  void* p = reinterpret_cast<void*>(addr);
  if (std::memcmp(p, data, bytes)) {
    std::memcpy(p, data, bytes);
    w.m->progress_clock = w.m->clock;
    if (!w.m->parked.empty()) wake(*w.m, addr, bytes);
  }
}

// A wave that reads what another workgroup handed over comes one hand-off after it.
void note_handoff_store(Wave& w, uint64_t addr) {
  w.m->handoffs[addr >> 3] = Handoff{uint32_t(w.depth), w.wg->rank, w.wg->linear};
}
void note_handoff_load(Wave& w, uint64_t addr) {
  const auto it = w.m->handoffs.find(addr >> 3);
  if (it == w.m->handoffs.end()) return;
  const Handoff& h = it->second;
  const uint64_t depth = h.depth + (h.rank != w.wg->rank || h.workgroup != w.wg->linear);
  if (depth > w.depth) w.depth = depth;
}

}  // namespace cdna
