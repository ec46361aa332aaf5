// SPDX-License-Identifier: Apache-2.0
// Device memory: registered allocations, bounds / ownership / never-written checks, traffic counters.
#include <algorithm>
#include <atomic>

#include "machine.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

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
                                             "misaligned", "lds-race", "barrier-divergence", "offset-wrap", "register-before-wait", "not-finite"};

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

bool all_written(const Allocation& a, uint64_t offset, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes;) {
    const uint64_t bit = offset + i;
    const uint64_t in = bit & 63, n = std::min(bytes - i, 64 - in);
    const uint64_t field = (n == 64 ? ~0ull : (1ull << n) - 1) << in;
    if ((a.written[bit >> 6] & field) != field) return false;
    i += n;
  }
  return true;
}

// Memory that ranks share is marked by several threads.
void set_bits(const Allocation& a, uint64_t& word, uint64_t field) {
  if ((word & field) == field) return;
  if (a.peer) std::atomic_ref(word).fetch_or(field, std::memory_order_relaxed);
  else word |= field;
}

void mark(Allocation& a, uint64_t offset, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes;) {
    const uint64_t bit = offset + i;
    const uint64_t in = bit & 63, n = std::min(bytes - i, 64 - in);
    set_bits(a, a.written[bit >> 6], (n == 64 ? ~0ull : (1ull << n) - 1) << in);
    i += n;
  }
}

void touch(Allocation& a, uint64_t addr, uint64_t bytes) {
  const uint64_t first = (addr - a.base) >> 6, last = (addr + bytes - 1 - a.base) >> 6;
  for (uint64_t q = first; q <= last; ++q) set_bits(a, a.touched[q >> 6], 1ull << (q & 63));
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
  for (const auto& seen : w.r->warnings)
    if (seen.first == key) return;
  w.r->warnings.emplace_back(key, text);
}

namespace {

// Whether an allocation is this wave's to use in this way; throws when not.
void permit(Wave& w, const Allocation* a, int lane, uint64_t addr, uint32_t bytes, bool store) {
  if (!a || addr < a->base || addr + bytes > a->end() || !owned(w, *a)) outside(w, lane, addr, bytes, store, a);
  if (store && a->read_only) fail(w, "read-only: store to '" + a->name + "' at offset " + std::to_string(addr - a->base));
}

// Bytes in one allocation: written or read, and touched. ``lane`` for messages.
void account(Wave& w, Allocation& a, int lane, uint64_t addr, uint64_t span, uint32_t bytes, bool store) {
  if (!a.written.empty()) {
    if (store) mark(a, addr - a.base, span);
    else if (w.m->check[CHECK_MEMORY_UNWRITTEN] && !all_written(a, addr - a.base, span)) {
      uint64_t at = addr;
      while (at + bytes < addr + span && all_written(a, at - a.base, bytes)) at += bytes;
      report(w, "memory-never-written", "lane " + std::to_string(lane + int((at - addr) / bytes)) + " reads " + std::to_string(bytes) +
                                           " bytes at offset " + std::to_string(at - a.base) + " of '" + a.name + "', not all of which were ever written");
    }
  }
  if (w.m->count_traffic) touch(a, addr, span);
}

}  // namespace

namespace {

// The lowest and the highest address of the lanes that are on, and every bit that is set in one of them.
struct Extent { uint64_t lo, hi, bits; };
Extent extent(const uint64_t* addr, uint64_t mask) {
#if defined(__AVX512F__)
  __m512i lo = _mm512_set1_epi64(-1), hi = _mm512_setzero_si512(), bits = hi;
  for (int i = 0; i < LANES; i += 8) {
    const __mmask8 on = __mmask8(mask >> i);
    const __m512i a = _mm512_maskz_loadu_epi64(on, addr + i);
    lo = _mm512_mask_min_epu64(lo, on, lo, a);
    hi = _mm512_max_epu64(hi, a);
    bits = _mm512_or_si512(bits, a);
  }
  return {uint64_t(_mm512_reduce_min_epu64(lo)), uint64_t(_mm512_reduce_max_epu64(hi)), uint64_t(_mm512_reduce_or_epi64(bits))};
#else
  Extent e{~0ull, 0, 0};
  for (int l = 0; l < LANES; ++l) {
    const uint64_t on = -(mask >> l & 1);
    e.lo = std::min(e.lo, addr[l] | ~on);
    e.hi = std::max(e.hi, addr[l] & on);
    e.bits |= addr[l] & on;
  }
  return e;
#endif
}

// The lines of lanes that lie in one allocation, none across two lines: false, and nothing done, where some do.
bool touch_lanes(Allocation& a, const uint64_t* addr, uint64_t mask, uint32_t bytes) {
  if (bytes & (bytes - 1)) return false;
#if defined(__AVX512F__)
  const __m512i base = _mm512_set1_epi64(int64_t(a.base));
  __m512i before = _mm512_setzero_si512(), apart = before, line[LANES / 8];
  for (int i = 0; i < LANES; i += 8) {
    const __m512i offset = _mm512_sub_epi64(_mm512_loadu_si512(addr + i), base);
    apart = _mm512_mask_or_epi64(apart, __mmask8(mask >> i), apart, offset);
    line[i / 8] = _mm512_srli_epi64(offset, 6);
  }
  if (uint64_t(_mm512_reduce_or_epi64(apart)) & (bytes - 1)) return false;
  uint64_t changes = 0;  // lanes whose line is another than that of the lane before them
  for (int i = 0; i < LANES; i += 8) {
    const __m512i previous = _mm512_alignr_epi64(line[i / 8], before, 7);
    changes |= uint64_t(_mm512_cmpneq_epi64_mask(line[i / 8], previous)) << i;
    before = line[i / 8];
  }
  changes = (changes | ~(mask << 1)) & mask;
#else
  for (int l = 0; l < LANES; ++l)
    if ((mask >> l & 1) && ((addr[l] - a.base) & (bytes - 1))) return false;
  const uint64_t changes = mask;
#endif
  for (uint64_t left = changes; left; left &= left - 1) {
    const uint64_t q = (addr[__builtin_ctzll(left)] - a.base) >> 6;
    set_bits(a, a.touched[q >> 6], 1ull << (q & 63));
  }
  return true;
}

}  // namespace

bool check_access(Wave& w, const Inst& I, const uint64_t* addr, uint64_t mask, uint32_t bytes, bool store, int align) {
  if (!mask) return false;
  Machine& m = *w.m;
  const auto [lo, hi, low_bits] = extent(addr, mask);
  if (align > 1 && (low_bits & uint64_t(align - 1)) && m.check[CHECK_MISALIGNED])
    report(w, "misaligned", std::string(store ? "store" : "load") + " of " + std::to_string(bytes) + " bytes, lowest address " + hex(lo));
  Allocation* a = w.r->last_hit;
  if (!a || lo < a->base || hi + bytes > a->end()) a = m.find(lo);
  const bool one = a && hi + bytes <= a->end();
  bool peer = false;
  if (one) {
    w.r->last_hit = a;
    permit(w, a, -1, lo, bytes, store);
    peer = a->peer;
  }
  if (!one || !a->written.empty() || m.count_traffic) {
    uint64_t apart = ~mask;
    for (int l = 0; l < LANES; ++l) apart |= addr[l] ^ (lo + uint64_t(l) * bytes);
    if (one && a->written.empty() && touch_lanes(*a, addr, mask, bytes)) apart = 0;
    else if (one && !apart) account(w, *a, 0, lo, uint64_t(bytes) * LANES, bytes, store);
    // Lanes that follow each other, or read the same place, are accounted for together.
    for (uint64_t left = one && !apart ? 0 : mask; left;) {
      const int l = __builtin_ctzll(left);
      uint64_t end = addr[l] + bytes;
      left &= left - 1;
      if (!one && (!a || addr[l] < a->base || addr[l] + bytes > a->end())) a = m.find(addr[l]);
      if (!one) permit(w, a, l, addr[l], bytes, store);
      while (left) {
        const int next = __builtin_ctzll(left);
        if (addr[next] == end && addr[next] + bytes <= a->end()) end += bytes;
        else if (addr[next] + bytes != end) break;
        left &= left - 1;
      }
      peer |= bool(a->peer);
      account(w, *a, l, addr[l], end - addr[l], bytes, store);
    }
  }
  if (m.count_traffic) {
    Traffic& t = w.wg->launch->counters.traffic;
    const int policy = (I.cpol & CPOL_SC0 ? 1 : 0) | (I.cpol & CPOL_SC1 ? 2 : 0) | (I.cpol & CPOL_NT ? 4 : 0);
    (store ? t.store_bytes : t.load_bytes)[policy] += uint64_t(bytes) * uint64_t(__builtin_popcountll(mask));
  }
  return peer;
}

void check_scalar_access(Wave& w, uint64_t addr, uint32_t bytes) {
  Machine& m = *w.m;
  Allocation* a = w.r->last_hit;
  if (!a || addr < a->base || addr + bytes > a->end()) a = m.find(addr);
  permit(w, a, -1, addr, bytes, false);
  if (!a->written.empty() && m.check[CHECK_MEMORY_UNWRITTEN] && !all_written(*a, addr - a->base, bytes))
    report(w, "memory-never-written", "scalar load at offset " + std::to_string(addr - a->base) + " of '" + a->name + "'");
  if (m.count_traffic) touch(*a, addr, bytes);
}

void write_bytes(Wave& w, uint64_t addr, const void* data, uint32_t bytes) {
  void* p = reinterpret_cast<void*>(addr);
  if (!std::memcmp(p, data, bytes)) return;
  std::memcpy(p, data, bytes);
  w.r->progress_clock = w.r->clock;
  memory_changed(w, addr, bytes);
}

// Sleepers that look at the place wake: this rank's, and everybody's where peers may look.
void memory_changed(Wave& w, uint64_t addr, uint32_t bytes) {
  wake(*w.r, addr, bytes);
  if (w.m->defer || w.m->rank.size() == 1) return;
  for (Rank& r : w.m->rank)
    if (&r != w.r) wake(r, addr, bytes);
}

void peer_store(Wave& w, uint64_t addr, const void* data, uint32_t bytes, bool handoff) {
  Rank& r = *w.r;
  Deferred d{addr, bytes, uint32_t(w.depth), handoff ? w.wg->linear : -1, {}};
  std::memcpy(d.data, data, bytes);
  r.deferred.push_back(d);
  for (uint64_t q = addr & ~3ull; q < addr + bytes; q += 4) {
    uint32_t word;
    if (const uint32_t* mine = r.overlay.find(q >> 2)) word = *mine;
    else std::memcpy(&word, reinterpret_cast<void*>(q), 4);
    for (uint64_t i = std::max(q, addr); i < std::min(q + 4, addr + bytes); ++i)
      reinterpret_cast<uint8_t*>(&word)[i - q] = d.data[i - addr];
    r.overlay.put(q >> 2, word);
  }
  w.peer_round = w.m->round;
  r.progress_clock = r.clock;
  wake(r, addr, bytes);
}

void peer_load(Wave& w, uint64_t addr, uint32_t bytes, void* out) {
  std::memcpy(out, reinterpret_cast<void*>(addr), bytes);
  for (uint64_t q = addr & ~3ull; q < addr + bytes; q += 4) {
    const uint32_t* mine = w.r->overlay.find(q >> 2);
    if (!mine) continue;
    for (uint64_t i = std::max(q, addr); i < std::min(q + 4, addr + bytes); ++i)
      static_cast<uint8_t*>(out)[i - addr] = reinterpret_cast<const uint8_t*>(mine)[i - q];
  }
}

// A wave that reads what another workgroup handed over comes one hand-off after it.
void note_handoff_store(Wave& w, uint64_t addr) {
  w.r->handoffs[addr >> 3] = Handoff{uint32_t(w.depth), w.wg->rank, w.wg->linear};
}
void note_handoff_load(Wave& w, uint64_t addr) {
  const auto it = w.r->handoffs.find(addr >> 3);
  if (it == w.r->handoffs.end()) return;
  const Handoff& h = it->second;
  const uint64_t depth = h.depth + (h.rank != w.wg->rank || h.workgroup != w.wg->linear);
  if (depth > w.depth) w.depth = depth;
}

}  // namespace cdna
