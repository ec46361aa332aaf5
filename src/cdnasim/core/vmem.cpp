// SPDX-License-Identifier: Apache-2.0
// Vector and scalar memory: global, flat, scratch and buffer accesses, atomics, loads into LDS, waits, barriers.
#include <algorithm>

#include "fetch.h"
#include "lds_shadow.h"
#include "machine.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;
using u16 = uint16_t;

struct Lanes { u64 addr[LANES]; u64 mask; };

// ---- addresses. Operands of a global access from index ``first``: vector address (64-bit, or a 32-bit offset
// with a scalar base) and the scalar base or "off".
void global_address(Wave& w, const Inst& I, int vaddr, int saddr, Lanes* out) {
  out->mask = w.exec();
  if (I.ops[saddr].kind == KIND_OFF) {
    u64 tmp[LANES];
    const u64* a = source<U64>(w, I, vaddr, 0, tmp);
    for (int l = 0; l < LANES; ++l) out->addr[l] = a[l] + u64(int64_t(I.offset0));
  } else {
    u32 tmp[LANES];
    const u64 base = scalar64(w, I, saddr);
    const u32* a = source<U32>(w, I, vaddr, 0, tmp);
    for (int l = 0; l < LANES; ++l) out->addr[l] = base + a[l] + u64(int64_t(I.offset0));
  }
}
void flat_address(Wave& w, const Inst& I, int vaddr, Lanes* out) {
  u64 tmp[LANES];
  out->mask = w.exec();
  const u64* a = source<U64>(w, I, vaddr, 0, tmp);
  for (int l = 0; l < LANES; ++l) out->addr[l] = a[l] + u64(int64_t(I.offset0));
}

// Buffer: operands voffset-or-off, descriptor (4 SGPRs), scalar offset. Lanes outside num_records are taken out
// of the mask for stores; for loads ``dword_mask`` says per dword which lanes are inside.
struct BufferLanes : Lanes { u64 inside[4]; };
void buffer_address(Wave& w, const Inst& I, int vaddr, int desc, u32 bytes, BufferLanes* out) {
  const Operand& d = I.ops[desc];
  if (w.vdef) for (int i = 0; i < 4; ++i) check_sgpr_read(w, I, d.reg + i);
  const u32 w0 = w.s[d.reg], w1 = w.s[d.reg + 1], records = w.s[d.reg + 2], w3 = w.s[d.reg + 3];
  const u64 base = u64(w1 & 0xffff) << 32 | w0;
  const u32 stride = w1 >> 16 & 0x3fff;
  if (stride || w1 >> 31 || (w3 >> 23 & 1)) fail(w, "a buffer descriptor with a stride, a swizzle or an added thread id is not modelled");
  const u32 soffset = scalar32(w, I, desc + 1);
  const u32 imm = u32(I.offset0);
  if (I.idxen) fail(w, "idxen without a stride is not modelled");
  u32 tmp[LANES];
  const u32* v = nullptr;
  if (I.offen) v = source<U32>(w, I, vaddr, 0, tmp);
  const u64 exec = w.exec();
  const int dwords = bytes < 4 ? 1 : int(bytes / 4);
  // Raw buffer: a dword is out of range when its offset is not below num_records less the scalar offset.
  const u64 limit = records > soffset ? records - soffset : 0;
  u32 off[LANES], top = 0, wrap = 0;
  if (!v) v = static_cast<const u32*>(std::memset(tmp, 0, sizeof tmp));
  for (int l = 0; l < LANES; ++l) {
    off[l] = v[l] + imm;
    wrap |= off[l] < v[l];
    top = std::max(top, off[l]);
    out->addr[l] = base + soffset + off[l];
  }
  if (u64(top) + bytes <= limit) {  // the usual case
    for (int q = 0; q < 4; ++q) out->inside[q] = q < dwords ? exec : 0;
  } else {
    uint8_t in[4][LANES];
    const u32 last = bytes < 4 ? bytes : 4;
    for (int q = 0; q < dwords; ++q)
      for (int l = 0; l < LANES; ++l) in[q][l] = u64(off[l]) + 4 * u64(q) + last <= limit;
    for (int q = 0; q < 4; ++q) out->inside[q] = q < dwords ? lane_bits(in[q]) & exec : 0;
  }
  out->mask = out->inside[0];
  if (!wrap) return;
  uint8_t wrapped[LANES];
  for (int l = 0; l < LANES; ++l) wrapped[l] = off[l] < v[l];
  if (const u64 bad = lane_bits(wrapped) & exec) {
    const int l = __builtin_ctzll(bad);
    report(w, "offset-wrap", "lane " + std::to_string(l) + ": voffset " + hex(v[l]) + " + offset " + std::to_string(imm) +
                                 " passes 2^32; computed modulo 2^32, hardware may drop the access");
  }
}

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

// Each line once; false, and noted, when they are too many to wait on.
bool distinct_poll_lines(Wave& w) {
  std::vector<u64>& lines = w.poll_lines;
  std::sort(lines.begin(), lines.end());
  lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
  w.poll_overflow |= lines.size() > MOST_POLL_LINES;
  return !w.poll_overflow;
}

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
};

void perform_load(Wave& w, const Inst& I, const LoadPlan& p) {
  const u32 bytes = bytes_of(p.narrow, p.words);
  u32 r[4][LANES] = {};
  const u32* old = w.lane(I.ops[p.dst].reg);
  for (int l = 0; l < LANES; ++l) {
    u32 got[4] = {};
    void* from = reinterpret_cast<void*>(p.at.addr[l]);
    if (!(p.at.mask >> l & 1)) {
    } else if (p.whole >> l & 1) {
      if (p.model) hostile_load(w, I, p.at.addr[l], bytes, got);
      else if (p.peer) peer_load(w, p.at.addr[l], bytes, got);
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
void load_now(Wave& w, const Inst& I, const Lanes& at, int dst) {
  const u64 exec = w.exec();
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

// Whether all lanes read one allocation that no launch may write: no cache can hold anything else.
bool constant(const Wave& w, const Lanes& at, u32 bytes) {
  const Allocation* a = w.r->last_hit;
  if (!a || !a->read_only) return false;
  u64 outside = 0;
  for (int l = 0; l < LANES; ++l) outside |= u64(at.addr[l] < a->base || at.addr[l] + bytes > a->end()) << l;
  return !(outside & at.mask);
}

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
  if (!w.m->hostile && !peer && whole == at.mask && n == WHOLE && whole) {
    if (words == 4) return load_now<4>(w, I, at, dst);
    if (words == 2) return load_now<2>(w, I, at, dst);
    if (words == 1) return load_now<1>(w, I, at, dst);
    return load_now<3>(w, I, at, dst);
  }
  LoadPlan plan{at, whole, w.exec(), {}, n, words, dst, peer, w.m->hostile && !constant(w, at, bytes)};
  if (inside) std::memcpy(plan.inside, inside, sizeof plan.inside);
  if (w.m->hostile) hostile_issue_load(w, [&w, &I, plan] { perform_load(w, I, plan); }, dst, words);
  else perform_load(w, I, plan);
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
  if (w.m->hostile) hostile_issue_load(w, perform);
  else perform();
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

// ---- atomics: lanes in order, at the device's point of coherence. sc0 returns the old value.
template <class T> u64 to_bits(T x) { if constexpr (sizeof(T) == 8) return bits<u64>(x); else return bits<u32>(x); }
bool shared(Wave& w, const Lanes& at) {
  const Allocation* a = at.mask ? w.m->find(at.addr[__builtin_ctzll(at.mask)]) : nullptr;
  return a && a->peer;
}
template <class T, int DATA, auto F>
void atomic_lanes(Wave& w, const Inst& I, const Lanes& at, int data_op, int dst) {
  constexpr int WORDS = sizeof(T) / 4;
  if (w.m->defer && shared(w, at)) {  // memory of peers: when the round ends and all see the same (core/rounds.cpp)
    w.state = WAVE_ROUND;
    w.yield = w.again = w.atomic = true;
    return;
  }
  check_access(w, I, at.addr, at.mask, sizeof(T), false, int(sizeof(T)));
  check_access(w, I, at.addr, at.mask, sizeof(T), true, int(sizeof(T)));
  const u32* d[2 * WORDS];
  u32 tmp[2 * WORDS][LANES], r[WORDS][LANES] = {};
  for (int q = 0; q < DATA * WORDS; ++q) d[q] = word(w, I, data_op, q, 1, tmp[q]);
  for (int l = 0; l < LANES; ++l) {
    if (!(at.mask >> l & 1)) continue;
    T v[2] = {};
    for (int i = 0; i < DATA; ++i) {
      if constexpr (WORDS == 2) v[i] = bits<T>(u64(d[2 * i + 1][l]) << 32 | d[2 * i][l]);
      else v[i] = bits<T>(d[i][l]);
    }
    if (w.m->hostile) hostile_atomic(w, at.addr[l], sizeof(T));
    T old;
    std::memcpy(&old, reinterpret_cast<void*>(at.addr[l]), sizeof(T));
    const T now = F(old, v[0], v[1]);
    write_bytes(w, at.addr[l], &now, sizeof(T));
    r[0][l] = u32(to_bits(old));
    if (WORDS == 2) r[WORDS - 1][l] = u32(to_bits(old) >> 32);
  }
  if (dst < 0) return;
  if (at.mask) {
    const int first = __builtin_ctzll(at.mask);
    w.last_load_addr = at.addr[first];
    w.last_load_value = r[0][first];
    w.last_load_line = I.line;
  }
  for (int q = 0; q < WORDS; ++q) {
    blend(w.lane(I.ops[dst].reg + q), r[q], w.exec());
    mark_written(w, I.ops[dst].reg + q, w.exec());
  }
}
// Operands: [dst,] address, data, base.
template <class T, int DATA, auto F> void global_atomic(Wave& w, const Inst& I) {
  const int first = I.num_ops - 3;
  if ((first == 1) != bool(I.cpol & CPOL_SC0)) fail(w, "an atomic with a destination needs sc0, one without must not have it");
  Lanes at;
  global_address(w, I, first, first + 2, &at);
  atomic_lanes<T, DATA, F>(w, I, at, first + 1, first ? 0 : -1);
}
template <class T, int DATA, auto F> void flat_atomic(Wave& w, const Inst& I) {
  const int first = I.num_ops - 2;
  Lanes at;
  flat_address(w, I, first, &at);
  atomic_lanes<T, DATA, F>(w, I, at, first + 1, first ? 0 : -1);
}
// The data register is also the destination.
template <class T, int DATA, auto F> void buffer_atomic(Wave& w, const Inst& I) {
  BufferLanes at;
  buffer_address(w, I, 1, 2, sizeof(T), &at);
  atomic_lanes<T, DATA, F>(w, I, at, 0, I.cpol & CPOL_SC0 ? 0 : -1);
}
inline u32 pk_bf16(u32 a, u32 b) {
  return u32(f32_to_bf16(bf16_to_f32(u16(a)) + bf16_to_f32(u16(b)))) | u32(f32_to_bf16(bf16_to_f32(u16(a >> 16)) + bf16_to_f32(u16(b >> 16)))) << 16;
}
inline u32 pk_f16(u32 a, u32 b) {
  return u32(f32_to_f16(f16_to_f32(u16(a)) + f16_to_f32(u16(b)))) | u32(f32_to_f16(f16_to_f32(u16(a >> 16)) + f16_to_f32(u16(b >> 16)))) << 16;
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

// ---- scalar loads: through the scalar cache, treated as plain loads of memory
template <int WORDS> void s_load(Wave& w, const Inst& I) {
  u64 addr = scalar64(w, I, 1) + u64(int64_t(I.offset0));
  if (I.ops[2].kind == KIND_CONST) addr += I.ops[2].value;
  else addr += scalar32(w, I, 2);
  if (addr & 3) report(w, "misaligned", "scalar load at " + hex(addr));
  check_scalar_access(w, addr, 4 * WORDS);
  const int reg = I.ops[0].reg;
  std::memcpy(&w.s[reg], reinterpret_cast<void*>(addr), 4 * WORDS);
  for (int i = 0; i < WORDS; ++i) w.sdef[(reg + i) >> 5] |= 1u << ((reg + i) & 31);
}
template <int WORDS> void s_buffer_load(Wave& w, const Inst& I) {
  const int d = I.ops[1].reg;
  const u64 base = u64(w.s[d + 1] & 0xffff) << 32 | w.s[d];
  const u64 off = (I.ops[2].kind == KIND_CONST ? I.ops[2].value : scalar32(w, I, 2)) + u64(int64_t(I.offset0));
  const int reg = I.ops[0].reg;
  for (int i = 0; i < WORDS; ++i) {
    u32 value = 0;
    if (off + 4 * u64(i) + 4 <= w.s[d + 2]) {
      check_scalar_access(w, base + off + 4 * u64(i), 4);
      std::memcpy(&value, reinterpret_cast<void*>(base + off + 4 * u64(i)), 4);
    }
    w.s[reg + i] = value;
    w.sdef[(reg + i) >> 5] |= 1u << ((reg + i) & 31);
  }
}

// ---- waits and caches. The immediate holds vmcnt in bits 0..15, lgkmcnt in 16..23, expcnt in 24..31 (0xff..: no wait).
void s_waitcnt(Wave& w, const Inst& I) {
  const int vmcnt = I.imm & 0xffff;
  if (vmcnt == 0xffff) return;
  if (w.m->hostile) {
    if (hostile_straggle(w, vmcnt)) w.yield = w.again = true;
    else hostile_wait(w, vmcnt);
  } else if (w.m->defer && w.peer_round == w.m->round) {  // its stores to peers are complete when peers see them
    w.state = WAVE_ROUND;
    w.yield = true;
  }
}
// A wave that polls sleeps until something it looked at past the caches changes, or everybody sleeps; a wave that
// was interrupted since it looked does not (the change may have come in between).
void s_sleep(Wave& w, const Inst&) {
  w.yield = true;
  ++w.polls;
  if (!w.poll_lines.empty() && !w.poll_overflow && !w.preempted && distinct_poll_lines(w)) park(w);
  w.poll_lines.clear();
  w.poll_overflow = w.preempted = false;
}
void buffer_inv(Wave& w, const Inst& I) { if (w.m->hostile) hostile_invalidate(w, I); }
void buffer_wbl2(Wave& w, const Inst& I) { if (w.m->hostile) hostile_write_back(w, I); }
void dcache(Wave&, const Inst&) {}

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
#define ATOM(n, dw, sw, T, DATA, expr)                                                          \
  {"global_atomic_" n, "dv" dw "u,sv0u,sv" sw "u,o|sv0u,sv" sw "u,o", CP, CLASS_VMEM_ATOMIC, global_atomic<T, DATA, [](T m, T d, T e) -> T { (void)m; (void)e; return (expr); }>}, \
  {"flat_atomic_" n, "dv" dw "u,sv2u,sv" sw "u|sv2u,sv" sw "u", CP, CLASS_VMEM_ATOMIC, flat_atomic<T, DATA, [](T m, T d, T e) -> T { (void)m; (void)e; return (expr); }>}, \
  {"buffer_atomic_" n, "xv" sw "u,o1,ss4u,ss1u", CPB, CLASS_VMEM_ATOMIC, buffer_atomic<T, DATA, [](T m, T d, T e) -> T { (void)m; (void)e; return (expr); }>}
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
    ATOM("swap", "1", "1", u32, 1, d), ATOM("add", "1", "1", u32, 1, m + d), ATOM("sub", "1", "1", u32, 1, m - d),
    ATOM("smin", "1", "1", int32_t, 1, d < m ? d : m), ATOM("smax", "1", "1", int32_t, 1, d > m ? d : m),
    ATOM("umin", "1", "1", u32, 1, d < m ? d : m), ATOM("umax", "1", "1", u32, 1, d > m ? d : m),
    ATOM("and", "1", "1", u32, 1, m & d), ATOM("or", "1", "1", u32, 1, m | d), ATOM("xor", "1", "1", u32, 1, m ^ d),
    ATOM("inc", "1", "1", u32, 1, m >= d ? 0u : m + 1), ATOM("dec", "1", "1", u32, 1, (m == 0 || m > d) ? d : m - 1),
    ATOM("add_f32", "1", "1", float, 1, m + d), ATOM("pk_add_bf16", "1", "1", u32, 1, pk_bf16(m, d)), ATOM("pk_add_f16", "1", "1", u32, 1, pk_f16(m, d)),
    ATOM("swap_x2", "2", "2", u64, 1, d), ATOM("add_x2", "2", "2", u64, 1, m + d), ATOM("sub_x2", "2", "2", u64, 1, m - d),
    ATOM("umin_x2", "2", "2", u64, 1, d < m ? d : m), ATOM("umax_x2", "2", "2", u64, 1, d > m ? d : m),
    ATOM("smin_x2", "2", "2", int64_t, 1, d < m ? d : m), ATOM("smax_x2", "2", "2", int64_t, 1, d > m ? d : m),
    ATOM("and_x2", "2", "2", u64, 1, m & d), ATOM("or_x2", "2", "2", u64, 1, m | d), ATOM("xor_x2", "2", "2", u64, 1, m ^ d),
    ATOM("add_f64", "2", "2", double, 1, m + d), ATOM("min_f64", "2", "2", double, 1, d < m ? d : m), ATOM("max_f64", "2", "2", double, 1, d > m ? d : m),
    // Data holds the new value, then the value compared with.
    ATOM("cmpswap", "1", "2", u32, 2, m == e ? d : m), ATOM("cmpswap_x2", "2", "4", u64, 2, m == e ? d : m),
    {"s_load_dword", "ds1u,ss2u,ss1u", "offset", CLASS_SMEM, s_load<1>},
    {"s_load_dwordx2", "ds2u,ss2u,ss1u", "offset", CLASS_SMEM, s_load<2>},
    {"s_load_dwordx4", "ds4u,ss2u,ss1u", "offset", CLASS_SMEM, s_load<4>},
    {"s_load_dwordx8", "ds8u,ss2u,ss1u", "offset", CLASS_SMEM, s_load<8>},
    {"s_load_dwordx16", "ds16u,ss2u,ss1u", "offset", CLASS_SMEM, s_load<16>},
    {"s_buffer_load_dword", "ds1u,ss4u,ss1u", "offset", CLASS_SMEM, s_buffer_load<1>},
    {"s_buffer_load_dwordx2", "ds2u,ss4u,ss1u", "offset", CLASS_SMEM, s_buffer_load<2>},
    {"s_buffer_load_dwordx4", "ds4u,ss4u,ss1u", "offset", CLASS_SMEM, s_buffer_load<4>},
    {"s_buffer_load_dwordx8", "ds8u,ss4u,ss1u", "offset", CLASS_SMEM, s_buffer_load<8>},
    {"s_waitcnt", "w", "", CLASS_WAIT, s_waitcnt},
    {"s_sleep", "i", "", CLASS_SLEEP, s_sleep},
    {"s_barrier", "", "", CLASS_BARRIER, barrier},
    {"s_endpgm", "", "", CLASS_OTHER, end_program},
    {"buffer_inv", "", "sc0 sc1", CLASS_OTHER, buffer_inv},
    {"buffer_wbl2", "", "sc0 sc1", CLASS_OTHER, buffer_wbl2},
    {"s_dcache_inv", "", "", CLASS_OTHER, dcache},
    {"s_dcache_wb", "", "", CLASS_OTHER, dcache},
};
static const OpTable vmem_table(VMEM);

}  // namespace cdna
