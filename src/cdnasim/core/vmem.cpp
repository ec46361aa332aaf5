// SPDX-License-Identifier: Apache-2.0
// Vector memory: global, flat, scratch and buffer loads and stores, loads into LDS.
#include <algorithm>

#include "addresses.h"
#include "lds_shadow.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;
using u16 = uint16_t;

// ---- element access. KIND: how a loaded element becomes a register.
enum Narrow { WHOLE, UBYTE, SBYTE, USHORT, SSHORT, UBYTE_LO, UBYTE_HI, SBYTE_LO, SBYTE_HI, SHORT_LO, SHORT_HI };
constexpr u32 bytes_of(Narrow n, int words) {
  return n == WHOLE ? 4 * u32(words) : n == USHORT || n == SSHORT || n == SHORT_LO || n == SHORT_HI ? 2 : 1;
}
inline u32 widen(Narrow n, u32 raw, u32 old) {
  switch (n) {
    case SBYTE: return u32(int32_t(int8_t(raw)));
    case SSHORT: return u32(int32_t(int16_t(raw)));
    case UBYTE_LO: case SHORT_LO: return (old & 0xffff0000u) | raw;
    case UBYTE_HI: case SHORT_HI: return (old & 0xffffu) | raw << 16;
    case SBYTE_LO: return (old & 0xffff0000u) | u16(int16_t(int8_t(raw)));
    case SBYTE_HI: return (old & 0xffffu) | u32(u16(int16_t(int8_t(raw)))) << 16;
    default: return raw;
  }
}

// More than a wave's polls look at: 64 lanes at a line each, and control words.
constexpr size_t MOST_POLL_LINES = 128;

}  // namespace

bool distinct_poll_lines(Wave& w) {
  std::vector<u64>& lines = w.poll_lines;
  std::sort(lines.begin(), lines.end());
  lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
  w.poll_overflow |= lines.size() > MOST_POLL_LINES;
  return !w.poll_overflow;
}

namespace {

void note_poll(Wave& w, const Inst& I, const Lanes& at) {
  if (w.poll_overflow || !(I.cpol & (CPOL_SC0 | CPOL_SC1))) return;
  std::vector<u64>& lines = w.poll_lines;
  for (u64 left = at.mask; left; left &= left - 1) {
    const u64 line = at.addr[__builtin_ctzll(left)] >> 7;
    if (!lines.empty() && lines.back() == line) continue;
    lines.push_back(line);
    if (lines.size() == 2 * MOST_POLL_LINES && !distinct_poll_lines(w)) return;
  }
}

// Where a load's dwords lie: all of a lane's inside, or (a bounded buffer) only some of them.
struct LoadPlan {
  Lanes at;
  u64 whole, exec;
  u64 inside[4];
  Narrow narrow;
  int words, dst;
  bool peer;  // this rank's own stores, which others do not see yet, may lie over memory
  bool model; // through the hostile memory model
  bool plain; // whole dwords of memory that is the same for everybody
};

// Lanes whose places follow each other, from ``l`` on, are read together, a row of bytes at most. Nothing of it depends on
// where the host has put an allocation.
constexpr u32 ROW = 128;
int neighbours(const LoadPlan& p, int l, u32 bytes) {
  int n = 1;
  while (l + n < LANES && (p.whole >> (l + n) & 1) && p.at.addr[l + n] == p.at.addr[l + n - 1] + bytes && u32(n + 1) * bytes <= ROW) ++n;
  return n;
}

// Whole lanes through the hostile memory model, into ``r``.
void model_lanes(Wave& w, const Inst& I, const LoadPlan& p, u32 (*r)[LANES]) {
  const u32* old = w.lane(I.ops[p.dst].reg);
  const u32 bytes = bytes_of(p.narrow, p.words);
  uint8_t row[ROW];
  for (int l = 0; l < LANES;) {
    if (!(p.whole >> l & 1)) { ++l; continue; }
    const int n = neighbours(p, l, bytes);
    hostile_load(w, I, p.at.addr[l], u32(n) * bytes, row);
    for (int i = 0; i < n; ++i) {
      u32 got[4] = {};
      std::memcpy(got, row + size_t(i) * bytes, bytes);
      if (p.narrow == WHOLE) for (int q = 0; q < p.words; ++q) r[q][l + i] = got[q];
      else r[0][l + i] = widen(p.narrow, got[0], old[l + i]);
    }
    l += n;
  }
}

void perform_load(Wave& w, const Inst& I, const LoadPlan& p) {
  const u32 bytes = bytes_of(p.narrow, p.words);
  u32 r[4][LANES] = {};
  const u32* old = w.lane(I.ops[p.dst].reg);
  if (p.narrow != WHOLE)  // a lane outside the buffer loads zero, into its part of the register
    for (u64 left = p.exec & ~p.at.mask; left; left &= left - 1) {
      const int l = __builtin_ctzll(left);
      r[0][l] = widen(p.narrow, 0, old[l]);
    }
  if (p.model) model_lanes(w, I, p, r);
  for (u64 left = p.model ? p.at.mask & ~p.whole : p.at.mask; left; left &= left - 1) {
    const int l = __builtin_ctzll(left);
    u32 got[4] = {};
    void* from = reinterpret_cast<void*>(p.at.addr[l]);
    if (p.whole >> l & 1) {
      if (p.peer) peer_load(w, p.at.addr[l], bytes, got);
      else if (bytes == 16) std::memcpy(got, from, 16);
      else if (bytes == 8) std::memcpy(got, from, 8);
      else if (bytes == 4) std::memcpy(got, from, 4);
      else if (bytes == 2) std::memcpy(got, from, 2);
      else if (bytes == 1) std::memcpy(got, from, 1);
      else std::memcpy(got, from, bytes);
    } else {
      for (int q = 0; q < p.words; ++q)
        if (p.inside[q] >> l & 1) {
          if (p.model) hostile_load(w, I, p.at.addr[l] + 4 * u64(q), 4, &got[q]);
          else if (p.peer) peer_load(w, p.at.addr[l] + 4 * u64(q), 4, &got[q]);
          else std::memcpy(&got[q], reinterpret_cast<void*>(p.at.addr[l] + 4 * u64(q)), 4);
        }
    }
    if (p.narrow == WHOLE) for (int q = 0; q < p.words; ++q) r[q][l] = got[q];
    else r[0][l] = widen(p.narrow, got[0], old[l]);
  }
  if (p.at.mask) {
    const int first = __builtin_ctzll(p.at.mask);
    w.last_load_addr = p.at.addr[first];
    w.last_load_value = r[p.words > 1 ? 1 : 0][first];
    w.last_load_line = I.line;
  }
  for (int q = 0; q < p.words; ++q) {
    blend(w.lane(I.ops[p.dst].reg + q), r[q], p.exec);
    mark_written(w, I.ops[p.dst].reg + q, p.exec);
  }
}

// The plain case: whole dwords, exact memory.
template <int WORDS>
void load_now(Wave& w, const Inst& I, const Lanes& at, int dst, u64 exec) {
  u32 r[WORDS][LANES];
  u64 step = 0;
  for (int l = 0; l < LANES; ++l) step |= at.addr[l] ^ (at.addr[0] + u64(l) * 4 * WORDS);
  if (!step && !~at.mask) {
    const u32* from = reinterpret_cast<const u32*>(at.addr[0]);
    if constexpr (WORDS == 1) std::memcpy(r[0], from, sizeof r[0]);
    else if constexpr (WORDS == 4) load_quads([&](int l) { return from + 4 * l; }, r);
    else
      for (int l = 0; l < LANES; ++l)
        for (int q = 0; q < WORDS; ++q) r[q][l] = from[l * WORDS + q];
  } else if (WORDS == 4 && !~at.mask) {
    if constexpr (WORDS == 4) load_quads([&](int l) { return reinterpret_cast<const void*>(at.addr[l]); }, r);
  } else {
    if (~at.mask) std::memset(r, 0, sizeof r);
    for (u64 left = at.mask; left; left &= left - 1) {
      const int l = __builtin_ctzll(left);
      u32 got[WORDS];
      std::memcpy(got, reinterpret_cast<const void*>(at.addr[l]), sizeof got);
      for (int q = 0; q < WORDS; ++q) r[q][l] = got[q];
    }
  }
  for (int q = 0; q < WORDS; ++q) {
    blend(w.lane(I.ops[dst].reg + q), r[q], exec);
    mark_written(w, I.ops[dst].reg + q, exec);
  }
  const int first = __builtin_ctzll(at.mask);
  w.last_load_addr = at.addr[first];
  w.last_load_value = r[WORDS > 1 ? 1 : 0][first];
  w.last_load_line = I.line;
}

void load_now(Wave& w, const Inst& I, const Lanes& at, int words, int dst, u64 exec) {
  if (words == 4) return load_now<4>(w, I, at, dst, exec);
  if (words == 2) return load_now<2>(w, I, at, dst, exec);
  if (words == 1) return load_now<1>(w, I, at, dst, exec);
  return load_now<3>(w, I, at, dst, exec);
}

// Whether all lanes read one allocation that no launch may write: no cache can hold anything else.
bool constant(const Wave& w, const Lanes& at, u32 bytes) {
  const Allocation* a = w.r->last_hit;
  if (!a || !a->read_only) return false;
  u64 outside = 0;
  for (int l = 0; l < LANES; ++l) outside |= u64(at.addr[l] < a->base || at.addr[l] + bytes > a->end()) << l;
  return !(outside & at.mask);
}

void perform(Wave& w, const Inst& I, const LoadPlan& p) {
  if (p.plain) load_now(w, I, p.at, p.words, p.dst, p.exec);
  else perform_load(w, I, p);
}

struct Later : PendingLoad {
  const Inst& I;
  const LoadPlan plan;
  Later(const Inst& inst, const LoadPlan& p) : I(inst), plan(p) {}
  void complete(Wave& w) override { perform(w, I, plan); }
};

void load_lanes(Wave& w, const Inst& I, const Lanes& at, const u64* inside, Narrow n, int words, int dst) {
  const u32 bytes = bytes_of(n, words);
  u64 whole = at.mask;
  if (inside) for (int q = 1; q < words; ++q) whole &= inside[q];
  bool peer = check_access(w, I, at.addr, whole, bytes, false, n == WHOLE ? 4 : int(bytes));
  if (whole != at.mask) {  // the last lanes of a bounded buffer: only their dwords inside
    for (int q = 0; q < words; ++q) {
      u64 part[LANES];
      for (int l = 0; l < LANES; ++l) part[l] = at.addr[l] + 4 * u64(q);
      peer |= check_access(w, I, part, inside[q] & ~whole, 4, false, 4);
    }
  }
  peer = peer && w.m->defer && w.r->overlay.may_hold(at.addr, at.mask, bytes);
  note_poll(w, I, at);
  if (w.m->count_handoffs && (I.cpol & CPOL_SC1))
    for (int l = 0; l < LANES; ++l)
      if (at.mask >> l & 1)
        for (u32 q = 0; q < bytes; q += 8) note_handoff_load(w, at.addr[l] + q);
  const bool model = w.m->hostile && !constant(w, at, bytes);
  const bool plain = !model && !peer && whole == at.mask && n == WHOLE && whole;
  if (plain && !w.m->hostile) return load_now(w, I, at, words, dst, w.exec());
  LoadPlan plan{at, whole, w.exec(), {}, n, words, dst, peer, model, plain};
  if (inside) std::memcpy(plan.inside, inside, sizeof plan.inside);
  if (!w.m->hostile) return perform_load(w, I, plan);
  if (!hostile_load_waits(w, dst, words)) {
    perform(w, I, plan);
    return hostile_loaded(w, nullptr, dst, words);
  }
  if (plain)  // it is read when it completes: by then the lines are near
    for (u64 left = at.mask; left; left &= left - 1) __builtin_prefetch(reinterpret_cast<const void*>(at.addr[__builtin_ctzll(left)]));
  hostile_loaded(w, std::make_unique<Later>(I, plan), dst, words);
}

// Whole dwords to lanes that follow each other, exact memory: one piece.
bool store_row(Wave& w, const Lanes& at, u32 bytes, int words, const u32* const* d) {
  u64 step = 0;
  for (int l = 0; l < LANES; ++l) step |= at.addr[l] ^ (at.addr[0] + u64(l) * bytes);
  if (step || ~at.mask || bytes != 4 * u32(words)) return false;
  u32 row[LANES * 4];
  for (int q = 0; q < words; ++q)
    for (int l = 0; l < LANES; ++l) row[l * words + q] = d[q][l];
  write_bytes(w, at.addr[0], row, bytes * LANES);
  return true;
}

void store_lanes(Wave& w, const Inst& I, const Lanes& at, const u64* inside, u32 bytes, int words, int src, bool high) {
  u64 whole = at.mask;
  if (inside) for (int q = 1; q < words; ++q) whole &= inside[q];
  bool peer = check_access(w, I, at.addr, whole, bytes, true, bytes >= 4 ? 4 : int(bytes));
  const u32* d[4];
  u32 tmp[4][LANES];
  for (int q = 0; q < words; ++q) d[q] = word(w, I, src, q, 1, tmp[q]);
  const bool handoff = w.m->count_handoffs && (I.cpol & CPOL_SC1);
  if (!w.m->hostile && !handoff && !(peer && w.m->defer) && whole == at.mask && store_row(w, at, bytes, words, d)) return;
  std::vector<PendingStore> pending;
  const auto emit = [&](u64 addr, u32 n, const u32* data) {
    if (handoff)
      for (u32 q = 0; q < n; q += 8) note_handoff_store(w, addr + q);
    if (!w.m->hostile) return peer && w.m->defer ? peer_store(w, addr, data, n, handoff) : write_bytes(w, addr, data, n);
    PendingStore p{addr, n, I.cpol, {}};
    std::memcpy(p.data, data, n);
    pending.push_back(p);
  };
  for (int l = 0; l < LANES; ++l) {
    if (!(at.mask >> l & 1)) continue;
    u32 data[4];
    for (int q = 0; q < words; ++q) data[q] = d[q][l];
    if (high) data[0] >>= 16;
    if (whole >> l & 1) { emit(at.addr[l], bytes, data); continue; }
    for (int q = 0; q < words; ++q)
      if (inside[q] >> l & 1) {
        u64 one[LANES] = {};
        one[l] = at.addr[l] + 4 * u64(q);
        peer |= check_access(w, I, one, 1ull << l, 4, true, 4);
        emit(one[l], 4, &data[q]);
      }
  }
  if (w.m->hostile) hostile_issue_store(w, std::move(pending));
}

// ---- global and flat
template <Narrow N, int WORDS> void global_load(Wave& w, const Inst& I) {
  Lanes at;
  global_address(w, I, 1, 2, &at);
  load_lanes(w, I, at, nullptr, N, WORDS, 0);
}
template <int BYTES, bool HIGH> void global_store(Wave& w, const Inst& I) {
  Lanes at;
  global_address(w, I, 0, 2, &at);
  store_lanes(w, I, at, nullptr, BYTES, BYTES < 4 ? 1 : BYTES / 4, 1, HIGH);
}
template <Narrow N, int WORDS> void flat_load(Wave& w, const Inst& I) {
  Lanes at;
  flat_address(w, I, 1, &at);
  load_lanes(w, I, at, nullptr, N, WORDS, 0);
}
template <int BYTES, bool HIGH> void flat_store(Wave& w, const Inst& I) {
  Lanes at;
  flat_address(w, I, 0, &at);
  store_lanes(w, I, at, nullptr, BYTES, BYTES < 4 ? 1 : BYTES / 4, 1, HIGH);
}

// ---- buffer; with ``lds`` the loaded dwords go to LDS at M0 + offset + 4 words a lane
void into_lds(Wave& w, const Inst& I, const Lanes& at, int words, int lds_offset) {
  const u32 bytes = 4 * u32(words);
  const bool peer = check_access(w, I, at.addr, at.mask, bytes, false, 4) && w.m->defer;
  const u32 base = w.s[REG_M0] + u32(lds_offset);
  const u64 exec = w.exec();
  for (int l = 0; l < LANES; ++l)
    if ((exec >> l & 1) && u64(base) + bytes * (u64(l) + 1) > w.wg->lds_bytes)
      fail(w, "out-of-bounds: a load into LDS at " + std::to_string(u64(base) + bytes * u64(l)) + " of " + std::to_string(w.wg->lds_bytes));
  const auto perform = [&w, &I, at, exec, base, bytes, peer] {
    for (int l = 0; l < LANES; ++l) {
      if (!(exec >> l & 1)) continue;
      u32 got[4] = {};
      if (at.mask >> l & 1) {
        if (w.m->hostile) hostile_load(w, I, at.addr[l], bytes, got);
        else if (peer) peer_load(w, at.addr[l], bytes, got);
        else std::memcpy(got, reinterpret_cast<void*>(at.addr[l]), bytes);
      }
      const u32 p = base + bytes * u32(l);
      std::memcpy(w.wg->lds + p, got, bytes);
      lds_mark_written(*w.wg, p, bytes);
    }
  };
  if (!w.m->hostile) return perform();
  const bool waits = hostile_load_waits(w, 0, 0);
  if (!waits) perform();
  hostile_loaded(w, waits ? pending_load(perform) : nullptr, 0, 0);
}
template <Narrow N, int WORDS> void buffer_load(Wave& w, const Inst& I) {
  BufferLanes at;
  if (I.lds) {
    if (N != WHOLE) fail(w, "a sub-dword buffer load into LDS is not modelled");
    buffer_address(w, I, 0, 1, 4 * WORDS, &at);
    into_lds(w, I, at, WORDS, I.offset0);
    return;
  }
  buffer_address(w, I, 1, 2, bytes_of(N, WORDS), &at);
  load_lanes(w, I, at, at.inside, N, WORDS, 0);
}
template <int BYTES, bool HIGH> void buffer_store(Wave& w, const Inst& I) {
  BufferLanes at;
  buffer_address(w, I, 1, 2, BYTES, &at);
  store_lanes(w, I, at, at.inside, BYTES, BYTES < 4 ? 1 : BYTES / 4, 0, HIGH);
}
template <int WORDS> void global_load_lds(Wave& w, const Inst& I) {
  Lanes at;
  global_address(w, I, 0, 1, &at);
  into_lds(w, I, at, WORDS, I.offset0);
}

// ---- scratch: private to a lane; the address is base register + vector offset + immediate
u32 scratch_place(Wave& w, u32 off, u32 bytes) {
  const u32 size = u32(w.scratch.size() / LANES);
  if (u64(off) + bytes > size) fail(w, "out-of-bounds: scratch at " + std::to_string(off) + " of " + std::to_string(size) + " bytes a lane");
  return off;
}
void scratch_offsets(Wave& w, const Inst& I, int vaddr, int saddr, u32* off) {
  u32 tmp[LANES];
  const u32* v = I.ops[vaddr].kind == KIND_OFF ? nullptr : source<U32>(w, I, vaddr, 0, tmp);
  const u32 base = I.ops[saddr].kind == KIND_OFF ? 0 : scalar32(w, I, saddr);
  for (int l = 0; l < LANES; ++l) off[l] = base + (v ? v[l] : 0) + u32(I.offset0);
}
template <Narrow N, int WORDS> void scratch_load(Wave& w, const Inst& I) {
  u32 off[LANES], r[WORDS][LANES];
  scratch_offsets(w, I, 1, 2, off);
  const u64 exec = w.exec();
  const u32 size = u32(w.scratch.size() / LANES), bytes = bytes_of(N, WORDS);
  const u32* old = w.lane(I.ops[0].reg);
  for (int l = 0; l < LANES; ++l) {
    if (!(exec >> l & 1)) continue;
    const u32 p = scratch_place(w, off[l], bytes);
    u32 got[4] = {};
    std::memcpy(got, &w.scratch[size_t(l) * size + p], bytes);
    if (N == WHOLE) for (int q = 0; q < WORDS; ++q) r[q][l] = got[q];
    else r[0][l] = widen(N, got[0], old[l]);
  }
  for (int q = 0; q < WORDS; ++q) {
    blend(w.lane(I.ops[0].reg + q), r[q], exec);
    mark_written(w, I.ops[0].reg + q, exec);
  }
}
template <int BYTES> void scratch_store(Wave& w, const Inst& I) {
  constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
  u32 off[LANES], tmp[LANES];
  scratch_offsets(w, I, 0, 2, off);
  const u64 exec = w.exec();
  const u32 size = u32(w.scratch.size() / LANES);
  for (int q = 0; q < WORDS; ++q) {
    const u32* d = word(w, I, 1, q, 1, tmp);
    for (int l = 0; l < LANES; ++l)
      if (exec >> l & 1) std::memcpy(&w.scratch[size_t(l) * size + scratch_place(w, off[l], BYTES) + 4 * q], &d[l], BYTES < 4 ? BYTES : 4);
  }
}

}  // namespace

#define CP "offset sc0 sc1 nt"
#define CPB "offset offen idxen sc0 sc1 nt lds"
#define LOADS(n, w, N, words)                                                                   \
  {"global_load_" n, "dv" w "u,sv0u,o", CP, CLASS_VMEM_LOAD, global_load<N, words>},              \
  {"flat_load_" n, "dv" w "u,sv2u", CP, CLASS_VMEM_LOAD, flat_load<N, words>},                    \
  {"scratch_load_" n, "dv" w "u,o1,o1", CP, CLASS_VMEM_LOAD, scratch_load<N, words>},             \
  {"buffer_load_" n, "dv" w "u,o1,ss4u,ss1u|o1,ss4u,ss1u", CPB, CLASS_VMEM_LOAD, buffer_load<N, words>}
#define D16(n, N)                                                                               \
  {"global_load_" n, "xv1u,sv0u,o", CP, CLASS_VMEM_LOAD, global_load<N, 1>},                      \
  {"flat_load_" n, "xv1u,sv2u", CP, CLASS_VMEM_LOAD, flat_load<N, 1>},                            \
  {"scratch_load_" n, "xv1u,o1,o1", CP, CLASS_VMEM_LOAD, scratch_load<N, 1>},                     \
  {"buffer_load_" n, "xv1u,o1,ss4u,ss1u", CPB, CLASS_VMEM_LOAD, buffer_load<N, 1>}
#define STORES(n, w, bytes)                                                                     \
  {"global_store_" n, "sv0u,sv" w "u,o", CP, CLASS_VMEM_STORE, global_store<bytes, false>},       \
  {"flat_store_" n, "sv2u,sv" w "u", CP, CLASS_VMEM_STORE, flat_store<bytes, false>},             \
  {"scratch_store_" n, "o1,sv" w "u,o1", CP, CLASS_VMEM_STORE, scratch_store<bytes>},             \
  {"buffer_store_" n, "sv" w "u,o1,ss4u,ss1u", CPB, CLASS_VMEM_STORE, buffer_store<bytes, false>}
const OpDef VMEM[] = {
    LOADS("dword", "1", WHOLE, 1), LOADS("dwordx2", "2", WHOLE, 2), LOADS("dwordx3", "3", WHOLE, 3), LOADS("dwordx4", "4", WHOLE, 4),
    LOADS("ubyte", "1", UBYTE, 1), LOADS("sbyte", "1", SBYTE, 1), LOADS("ushort", "1", USHORT, 1), LOADS("sshort", "1", SSHORT, 1),
    D16("short_d16", SHORT_LO), D16("short_d16_hi", SHORT_HI), D16("ubyte_d16", UBYTE_LO), D16("ubyte_d16_hi", UBYTE_HI),
    D16("sbyte_d16", SBYTE_LO), D16("sbyte_d16_hi", SBYTE_HI),
    STORES("dword", "1", 4), STORES("dwordx2", "2", 8), STORES("dwordx3", "3", 12), STORES("dwordx4", "4", 16),
    STORES("byte", "1", 1), STORES("short", "1", 2),
    {"global_store_short_d16_hi", "sv0u,sv1u,o", CP, CLASS_VMEM_STORE, global_store<2, true>},
    {"global_store_byte_d16_hi", "sv0u,sv1u,o", CP, CLASS_VMEM_STORE, global_store<1, true>},
    {"buffer_store_short_d16_hi", "sv1u,o1,ss4u,ss1u", CPB, CLASS_VMEM_STORE, buffer_store<2, true>},
    {"buffer_store_byte_d16_hi", "sv1u,o1,ss4u,ss1u", CPB, CLASS_VMEM_STORE, buffer_store<1, true>},
    {"global_load_lds_dword", "sv0u,o", CP, CLASS_VMEM_LOAD, global_load_lds<1>},
    {"global_load_lds_dwordx3", "sv0u,o", CP, CLASS_VMEM_LOAD, global_load_lds<3>},
    {"global_load_lds_dwordx4", "sv0u,o", CP, CLASS_VMEM_LOAD, global_load_lds<4>},
};
static const OpTable vmem_table(VMEM);

}  // namespace cdna
