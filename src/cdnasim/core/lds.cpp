// SPDX-License-Identifier: Apache-2.0
// Local data share: reads, writes, atomics, lane exchange; race, bounds and never-written checks.
#include <algorithm>

#include "fetch.h"
#include "lds_shadow.h"
#include "machine.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

// The address of one lane's access. Throws when it leaves the workgroup's LDS or is misaligned.
inline u32 place(Wave& w, u32 addr, u32 bytes, u32 align) {
  const u64 size = w.wg->lds_bytes;
  if (u64(addr) + bytes > size)
    fail(w, "out-of-bounds: LDS access at " + std::to_string(addr) + " of " + std::to_string(bytes) + " bytes, the workgroup has " + std::to_string(size));
  if (addr % align && w.m->check[CHECK_MISALIGNED])
    report(w, "misaligned", "LDS access of " + std::to_string(bytes) + " bytes at " + std::to_string(addr));
  return addr;
}

// Where the lanes of one access go: the addresses are inside LDS and aligned, or this threw. A lane that is off has
// the address of one that is on.
struct Places {
  u32 addr[LANES];
  u64 exec;
  bool row;      // every lane next to the one before it
  bool dwords;   // every address is a dword's
};

Places places(Wave& w, const u32* a, u32 offset, u32 bytes, u32 align) {
  Places p;
  p.exec = w.exec();
  u32 low = 0, step = 0, top = 0, same[LANES];
  if (p.exec && ~p.exec) {
    for (int l = 0; l < LANES; ++l) same[l] = a[__builtin_ctzll(p.exec)];
    choose_lanes(same, same, a, p.exec);
    a = same;
  }
  for (int l = 0; l < LANES; ++l) {
    const u32 x = a[l] + offset;
    p.addr[l] = x;
    low |= x;
    top = std::max(top, x);
    step |= x ^ (a[0] + offset + u32(l) * bytes);
  }
  p.row = !step && !~p.exec;
  p.dwords = !(low & 3);
  if (p.exec && (u64(top) + bytes > w.wg->lds_bytes || (low & (align - 1))))
    for (int l = 0; l < LANES; ++l)
      if (p.exec >> l & 1) place(w, p.addr[l], bytes, align);
  return p;
}

// The never-written and race checks of a whole access.
template <int BYTES, bool WRITE>
void check(Wave& w, const Places& p) {
  Workgroup& g = *w.wg;
  if (!g.lds_wtag) return;
  constexpr int WORDS = BYTES < 4 || BYTES == 12 ? 1 : BYTES / 4;
  if (!p.exec) return;
  const u32 mine = lds_tag(w);
  const auto one = [&]<int N>(u32 addr) {
    u32 *const wt = g.lds_wtag + addr / 4, *const rt = g.lds_rtag + addr / 4;
    if constexpr (WRITE) return lds_quick_write<N>(wt, rt, mine);
    else return lds_quick_read<N>(wt, rt, mine);
  };
  if (p.row && p.dwords && BYTES >= 4) {
    constexpr u32 step = 64;
    for (u32 at = p.addr[0]; at < p.addr[0] + LANES * u32(BYTES); at += step)
      if (!one.template operator()<16>(at)) lds_note(w, at, step, WRITE);
    return;
  }
  const bool quick = p.dwords && BYTES >= 4 && BYTES != 12;
  constexpr int STEP = 16 / WORDS;  // lanes at once
  u32 dword[LANES];
  for (int l = 0; l < LANES; ++l) dword[l] = p.addr[l] / 4;
  for (int l0 = 0; l0 < LANES; l0 += STEP) {
    const u64 on = p.exec >> l0 & ((1ull << STEP) - 1);
    if (!on || (quick && lds_quick_lanes<WORDS, WRITE>(g.lds_wtag, g.lds_rtag, dword + l0, mine))) continue;
    for (u64 left = on; left; left &= left - 1) {
      const u32 addr = p.addr[l0 + __builtin_ctzll(left)];
      if (!quick || !one.template operator()<WORDS>(addr)) lds_note(w, addr, BYTES, WRITE);
    }
  }
}

// Cycles beyond the first of each pass: lanes that touch one bank in different words.
u32 bank_cycles(const u32* addr, u64 mask, u32 bytes, int banks) {
  // A wave's access is served in passes that move one word a bank: 32 lanes of 4 bytes, 16 of 8, 8 of 16.
  const int lanes_per_pass = std::max(1, banks * 4 / int(std::max(4u, bytes)));
  u32 cycles = 0;
  for (int l0 = 0; l0 < LANES; l0 += lanes_per_pass) {
    int depth[64] = {};
    u32 seen[64][4];
    int worst = 0;
    for (int l = l0; l < std::min(LANES, l0 + lanes_per_pass); ++l) {
      if (!(mask >> l & 1)) continue;
      for (u32 q = addr[l] / 4; q <= (addr[l] + bytes - 1) / 4; ++q) {
        const int b = int(q % u32(banks));
        bool again = false;
        for (int i = 0; i < std::min(depth[b], 4); ++i) again |= seen[b][i] == q;
        if (again) continue;
        if (depth[b] < 4) seen[b][depth[b]] = q;
        worst = std::max(worst, ++depth[b]);
      }
    }
    if (worst > 1) cycles += u32(worst - 1);
  }
  return cycles;
}

// Bank conflicts: 64 banks of 4 bytes on gfx950, 32 on gfx942; lanes that touch one word together do not conflict.
// They depend on the addresses' distances alone, and those of an instruction rarely change.
void count_banks(Wave& w, const Inst& I, const Places& p, u32 bytes, int half) {
  if (!w.m->count_traffic) return;
  Launch& launch = *w.wg->launch;
  ++launch.counters.lds_accesses;
  if (p.row && bytes >= 4) return;
  if (launch.banks.empty()) launch.banks.resize(2 * w.k->code.size());
  BankMemo& memo = launch.banks[2 * size_t(I.index) + size_t(half)];
  const int first = p.exec ? __builtin_ctzll(p.exec) : 0;
  const u32 base = p.addr[first] & ~3u;
  u32 differ = 0, offset[LANES];
  for (int l = 0; l < LANES; ++l) {
    offset[l] = p.addr[l] - base;
    differ |= offset[l] ^ memo.offset[l];
  }
  if (differ || memo.mask != p.exec || !memo.known) {
    memo.cycles = bank_cycles(p.addr, p.exec, bytes, w.k->arch == Arch::gfx950 ? 64 : 32);
    memo.mask = p.exec;
    memo.known = true;
    std::memcpy(memo.offset, offset, sizeof offset);
  }
  launch.counters.lds_conflict_cycles += memo.cycles;
}

template <int BYTES>
constexpr u32 alignment() { return BYTES == 12 ? 4 : BYTES > 8 ? 8 : BYTES; }

// The dwords of one access, lane by lane, into r[word].
template <int BYTES>
void fetch_dwords(const Workgroup& g, const Places& p, u32 (*r)[LANES]) {
  constexpr int WORDS = BYTES / 4;
  if constexpr (WORDS == 1) {
    if (p.row) { std::memcpy(r[0], g.lds + p.addr[0], 4 * LANES); return; }
  }
  if (!p.exec) return;
  if constexpr (WORDS == 4) return load_quads([&](int l) { return g.lds + p.addr[l]; }, r);
  for (u64 left = p.exec; left; left &= left - 1) {
    const int l = __builtin_ctzll(left);
    u32 got[WORDS];
    std::memcpy(got, g.lds + p.addr[l], BYTES);
    for (int q = 0; q < WORDS; ++q) r[q][l] = got[q];
  }
}

// Loads of WORDS dwords (or one narrower element when BYTES < 4) from up to two places a lane.
template <int BYTES, bool SIGNED, int HALF>  // HALF: 0 whole register, 1 d16, 2 d16_hi
void read(Wave& w, const Inst& I) {
  constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
  u32 at[LANES], r[WORDS][LANES];
  const Places p = places(w, source<U32>(w, I, 1, 0, at), u32(I.offset0), BYTES, alignment<BYTES>());
  check<BYTES, false>(w, p);
  if constexpr (BYTES >= 4) fetch_dwords<BYTES>(*w.wg, p, r);
  else {
    const u32* old = w.lane(I.ops[0].reg);
    for (u64 left = p.exec; left; left &= left - 1) {
      const int l = __builtin_ctzll(left);
      u32 x = 0;
      std::memcpy(&x, w.wg->lds + p.addr[l], BYTES);
      if (SIGNED) x = BYTES == 1 ? u32(int32_t(int8_t(x))) : u32(int32_t(int16_t(x)));
      if (HALF == 1) x = (old[l] & 0xffff0000u) | (x & 0xffff);
      if (HALF == 2) x = (old[l] & 0xffffu) | x << 16;
      r[0][l] = x;
    }
  }
  w.wg->launch->counters.lds_read_bytes += u64(BYTES) * u64(__builtin_popcountll(p.exec));
  count_banks(w, I, p, BYTES, 0);
  for (int q = 0; q < WORDS; ++q) {
    blend(w.lane(I.ops[0].reg + q), r[q], p.exec);
    mark_written(w, I.ops[0].reg + q, p.exec);
  }
}

template <int BYTES, int STRIDE>  // two reads at offset0 and offset1, in units of STRIDE bytes
void read2(Wave& w, const Inst& I) {
  constexpr int WORDS = BYTES / 4;
  u32 at[LANES], r[2 * WORDS][LANES];
  const u32* a = source<U32>(w, I, 1, 0, at);
  const u64 exec = w.exec();
  for (int half = 0; half < 2; ++half) {
    const Places p = places(w, a, u32(half ? I.offset1 : I.offset0) * STRIDE, BYTES, BYTES);
    check<BYTES, false>(w, p);
    fetch_dwords<BYTES>(*w.wg, p, r + half * WORDS);
    count_banks(w, I, p, BYTES, half);
  }
  w.wg->launch->counters.lds_read_bytes += 2 * u64(BYTES) * u64(__builtin_popcountll(exec));
  for (int q = 0; q < 2 * WORDS; ++q) {
    blend(w.lane(I.ops[0].reg + q), r[q], exec);
    mark_written(w, I.ops[0].reg + q, exec);
  }
}

// The data operand's WORDS dwords (or its narrow element) to the lanes' places.
template <int BYTES, bool HIGH>
void store_data(Wave& w, const Inst& I, int data, const Places& p) {
  constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
  u32 tmp[WORDS][LANES];
  const u32* d[WORDS];
  for (int q = 0; q < WORDS; ++q) d[q] = word(w, I, data, q, 1, tmp[q]);
  if constexpr (BYTES == 4) {
    if (p.row) { std::memcpy(w.wg->lds + p.addr[0], d[0], 4 * LANES); return; }
  }
  if constexpr (WORDS == 4)
    if (!~p.exec) return store_quads(d, [&](int l) { return w.wg->lds + p.addr[l]; });
  for (u64 left = p.exec; left; left &= left - 1) {
    const int l = __builtin_ctzll(left);
    u32 x[WORDS];
    for (int q = 0; q < WORDS; ++q) x[q] = HIGH ? d[q][l] >> 16 : d[q][l];
    std::memcpy(w.wg->lds + p.addr[l], x, BYTES);
  }
}

template <int BYTES, bool HIGH>
void write(Wave& w, const Inst& I) {
  u32 at[LANES];
  const Places p = places(w, source<U32>(w, I, 0, 0, at), u32(I.offset0), BYTES, alignment<BYTES>());
  check<BYTES, true>(w, p);
  store_data<BYTES, HIGH>(w, I, 1, p);
  w.wg->launch->counters.lds_write_bytes += u64(BYTES) * u64(__builtin_popcountll(p.exec));
  count_banks(w, I, p, BYTES, 0);
}

template <int BYTES, int STRIDE>
void write2(Wave& w, const Inst& I) {
  u32 at[LANES];
  const u32* a = source<U32>(w, I, 0, 0, at);
  for (int half = 0; half < 2; ++half) {
    const Places p = places(w, a, u32(half ? I.offset1 : I.offset0) * STRIDE, BYTES, BYTES);
    check<BYTES, true>(w, p);
    store_data<BYTES, false>(w, I, 1 + half, p);
    count_banks(w, I, p, BYTES, half);
  }
  w.wg->launch->counters.lds_write_bytes += 2 * u64(BYTES) * u64(__builtin_popcountll(w.exec()));
}

// ---- atomics: lanes in order; F(memory, data, data2) is the new value. Not part of the race check: an atomic
// is a synchronisation of its own.
template <class T, bool RETURN, int DATA, auto F>
void atomic(Wave& w, const Inst& I) {
  constexpr int WORDS = sizeof(T) / 4, FIRST = RETURN ? 1 : 0;
  u32 at[LANES], r[WORDS][LANES], lo[LANES], hi[LANES];
  T data[2][LANES] = {};
  const u32* a = source<U32>(w, I, FIRST, 0, at);
  for (int d = 0; d < DATA; ++d) {
    const u32* p = word(w, I, FIRST + 1 + d, 0, 1, lo);
    const u32* q = WORDS == 2 ? word(w, I, FIRST + 1 + d, 1, 1, hi) : p;
    for (int l = 0; l < LANES; ++l) {
      const u64 both = u64(q[l]) << 32 | p[l];
      if constexpr (WORDS == 2) data[d][l] = bits<T>(both);
      else data[d][l] = bits<T>(p[l]);
    }
  }
  const u64 exec = w.exec();
  for (int l = 0; l < LANES; ++l) {
    if (!(exec >> l & 1)) continue;
    const u32 p = place(w, a[l] + u32(I.offset0), sizeof(T), sizeof(T));
    lds_mark_written(*w.wg, p, sizeof(T));
    T old;
    std::memcpy(&old, w.wg->lds + p, sizeof(T));
    const T now = F(old, data[0][l], data[1][l]);
    std::memcpy(w.wg->lds + p, &now, sizeof(T));
    if constexpr (WORDS == 2) {
      r[0][l] = u32(bits<u64>(old));
      r[WORDS - 1][l] = u32(bits<u64>(old) >> 32);
    } else r[0][l] = bits<u32>(old);
  }
  if (RETURN)
    for (int q = 0; q < WORDS; ++q) {
      blend(w.lane(I.ops[0].reg + q), r[q], exec);
      mark_written(w, I.ops[0].reg + q, exec);
    }
}

// ---- lane exchange (no memory)
void bpermute(Wave& w, const Inst& I) {
  u32 at[LANES], dt[LANES], r[LANES];
  const u32* a = source<U32>(w, I, 1, 0, at);
  const u32* d = word(w, I, 2, 0, 1, dt);
  const u64 exec = w.exec();
  for (int l = 0; l < LANES; ++l) {
    const int from = int((a[l] + u32(I.offset0)) / 4 % LANES);
    r[l] = exec >> from & 1 ? d[from] : 0;
  }
  put<U32>(w, I, 0, r);
}
void permute(Wave& w, const Inst& I) {
  u32 at[LANES], dt[LANES], r[LANES] = {};
  const u32* a = source<U32>(w, I, 1, 0, at);
  const u32* d = word(w, I, 2, 0, 1, dt);
  const u64 exec = w.exec();
  for (int l = 0; l < LANES; ++l)
    if (exec >> l & 1) r[(a[l] + u32(I.offset0)) / 4 % LANES] = d[l];
  put<U32>(w, I, 0, r);
}
// offset bit 15: quad permute; else within 32 lanes, new = ((lane & and) | or) ^ xor.
void swizzle(Wave& w, const Inst& I) {
  u32 tmp[LANES], r[LANES];
  const u32* d = word(w, I, 1, 0, 0, tmp);
  const u64 exec = w.exec();
  const int off = I.offset0;
  for (int l = 0; l < LANES; ++l) {
    int from;
    if (off >= 0xe000) fail(w, "FFT and rotate modes of ds_swizzle_b32 are not modelled");
    if (off & 0x8000) from = (l & ~3) | (off >> (2 * (l & 3)) & 3);
    else from = (l & 32) | ((((l & 31) & (off & 31)) | (off >> 5 & 31)) ^ (off >> 10 & 31));
    r[l] = exec >> from & 1 ? d[from] : 0;
  }
  put<U32>(w, I, 0, r);
}

// Transposed reads, per 16 lanes: lane r's element k is element r % E of the 64 bits at the address of lane
// (16 / E) k + r / E, where E = 64 / BITS.
template <int BITS>
void read_tr(Wave& w, const Inst& I) {
  constexpr int E = 64 / BITS;
  u32 at[LANES], r[2][LANES];
  const u32* a = source<U32>(w, I, 1, 0, at);
  const u64 exec = w.exec();
  if (~exec) fail(w, "a transposed LDS read with lanes off is not modelled");
  const Places p = places(w, a, u32(I.offset0), 8, 8);
  check<8, false>(w, p);
  u64 row[LANES];
  for (int l = 0; l < LANES; ++l) std::memcpy(&row[l], w.wg->lds + p.addr[l], 8);
  for (int l = 0; l < LANES; ++l) {
    const int base = l & ~15, in = l & 15;
    u64 x = 0;
    for (int k = 0; k < E; ++k) {
      const u64 element = row[base + (16 / E) * k + in / E] >> (BITS * (in % E)) & ((1ull << BITS) - 1);
      x |= element << (BITS * k);
    }
    r[0][l] = u32(x);
    r[1][l] = u32(x >> 32);
  }
  w.wg->launch->counters.lds_read_bytes += 8 * LANES;
  for (int q = 0; q < 2; ++q) {
    blend(w.lane(I.ops[0].reg + q), r[q], exec);
    mark_written(w, I.ops[0].reg + q, exec);
  }
}

inline u32 pk_bf16(u32 a, u32 b) {
  return u32(f32_to_bf16(bf16_to_f32(uint16_t(a)) + bf16_to_f32(uint16_t(b)))) |
         u32(f32_to_bf16(bf16_to_f32(uint16_t(a >> 16)) + bf16_to_f32(uint16_t(b >> 16)))) << 16;
}
inline u32 pk_f16(u32 a, u32 b) {
  return u32(f32_to_f16(f16_to_f32(uint16_t(a)) + f16_to_f32(uint16_t(b)))) |
         u32(f32_to_f16(f16_to_f32(uint16_t(a >> 16)) + f16_to_f32(uint16_t(b >> 16)))) << 16;
}

}  // namespace

#define RD(n, w, f) {n, "dv" w "u,sv1u", "offset", CLASS_LDS, f}
#define RDX(n, ...) {n, "xv1u,sv1u", "offset", CLASS_LDS, __VA_ARGS__}
#define RD2(n, w, f) {n, "dv" w "u,sv1u", "offset0 offset1", CLASS_LDS, f}
#define WR(n, w, f) {n, "sv1u,sv" w "u", "offset", CLASS_LDS, f}
#define WR2(n, w, f) {n, "sv1u,sv" w "u,sv" w "u", "offset0 offset1", CLASS_LDS, f}
#define AT(n, rn, T, w, expr)                                                                                        \
  {n, "sv1u,sv" w "u", "offset", CLASS_LDS, atomic<T, false, 1, [](T m, T d, T) -> T { return (expr); }>},              \
  {rn, "dv" w "u,sv1u,sv" w "u", "offset", CLASS_LDS, atomic<T, true, 1, [](T m, T d, T) -> T { return (expr); }>}
#define CAS(n, rn, T, w)                                                                                             \
  {n, "sv1u,sv" w "u,sv" w "u", "offset", CLASS_LDS, atomic<T, false, 2, [](T m, T c, T d) -> T { return m == c ? d : m; }>}, \
  {rn, "dv" w "u,sv1u,sv" w "u,sv" w "u", "offset", CLASS_LDS, atomic<T, true, 2, [](T m, T c, T d) -> T { return m == c ? d : m; }>}
const OpDef LDS[] = {
    RD("ds_read_b32", "1", (read<4, false, 0>)), RD("ds_read_b64", "2", (read<8, false, 0>)),
    RD("ds_read_b96", "3", (read<12, false, 0>)), RD("ds_read_b128", "4", (read<16, false, 0>)),
    RD("ds_read_u8", "1", (read<1, false, 0>)), RD("ds_read_i8", "1", (read<1, true, 0>)),
    RD("ds_read_u16", "1", (read<2, false, 0>)), RD("ds_read_i16", "1", (read<2, true, 0>)),
    RDX("ds_read_u16_d16", (read<2, false, 1>)), RDX("ds_read_u16_d16_hi", (read<2, false, 2>)),
    RDX("ds_read_u8_d16", (read<1, false, 1>)), RDX("ds_read_u8_d16_hi", (read<1, false, 2>)),
    RDX("ds_read_i8_d16", (read<1, true, 1>)), RDX("ds_read_i8_d16_hi", (read<1, true, 2>)),
    RD2("ds_read2_b32", "2", (read2<4, 4>)), RD2("ds_read2st64_b32", "2", (read2<4, 256>)),
    RD2("ds_read2_b64", "4", (read2<8, 8>)), RD2("ds_read2st64_b64", "4", (read2<8, 512>)),
    WR("ds_write_b8", "1", (write<1, false>)), WR("ds_write_b16", "1", (write<2, false>)),
    WR("ds_write_b8_d16_hi", "1", (write<1, true>)), WR("ds_write_b16_d16_hi", "1", (write<2, true>)),
    WR("ds_write_b32", "1", (write<4, false>)), WR("ds_write_b64", "2", (write<8, false>)),
    WR("ds_write_b96", "3", (write<12, false>)), WR("ds_write_b128", "4", (write<16, false>)),
    WR2("ds_write2_b32", "1", (write2<4, 4>)), WR2("ds_write2st64_b32", "1", (write2<4, 256>)),
    WR2("ds_write2_b64", "2", (write2<8, 8>)), WR2("ds_write2st64_b64", "2", (write2<8, 512>)),
    AT("ds_add_u32", "ds_add_rtn_u32", u32, "1", m + d), AT("ds_sub_u32", "ds_sub_rtn_u32", u32, "1", m - d),
    AT("ds_min_u32", "ds_min_rtn_u32", u32, "1", d < m ? d : m), AT("ds_max_u32", "ds_max_rtn_u32", u32, "1", d > m ? d : m),
    AT("ds_min_i32", "ds_min_rtn_i32", int32_t, "1", d < m ? d : m), AT("ds_max_i32", "ds_max_rtn_i32", int32_t, "1", d > m ? d : m),
    AT("ds_and_b32", "ds_and_rtn_b32", u32, "1", m & d), AT("ds_or_b32", "ds_or_rtn_b32", u32, "1", m | d),
    AT("ds_xor_b32", "ds_xor_rtn_b32", u32, "1", m ^ d), AT("ds_add_f32", "ds_add_rtn_f32", float, "1", m + d),
    AT("ds_inc_u32", "ds_inc_rtn_u32", u32, "1", m >= d ? 0u : m + 1), AT("ds_dec_u32", "ds_dec_rtn_u32", u32, "1", (m == 0 || m > d) ? d : m - 1),
    AT("ds_pk_add_bf16", "ds_pk_add_rtn_bf16", u32, "1", pk_bf16(m, d)), AT("ds_pk_add_f16", "ds_pk_add_rtn_f16", u32, "1", pk_f16(m, d)),
    AT("ds_add_u64", "ds_add_rtn_u64", u64, "2", m + d), AT("ds_or_b64", "ds_or_rtn_b64", u64, "2", m | d),
    AT("ds_and_b64", "ds_and_rtn_b64", u64, "2", m & d), AT("ds_xor_b64", "ds_xor_rtn_b64", u64, "2", m ^ d),
    AT("ds_add_f64", "ds_add_rtn_f64", double, "2", m + d),
    {"ds_wrxchg_rtn_b32", "dv1u,sv1u,sv1u", "offset", CLASS_LDS, atomic<u32, true, 1, [](u32, u32 d, u32) { return d; }>},
    {"ds_wrxchg_rtn_b64", "dv2u,sv1u,sv2u", "offset", CLASS_LDS, atomic<u64, true, 1, [](u64, u64 d, u64) { return d; }>},
    CAS("ds_cmpst_b32", "ds_cmpst_rtn_b32", u32, "1"), CAS("ds_cmpst_b64", "ds_cmpst_rtn_b64", u64, "2"),
    {"ds_bpermute_b32", "dv1u,sv1u,sv1u", "offset", CLASS_LDS, bpermute},
    {"ds_permute_b32", "dv1u,sv1u,sv1u", "offset", CLASS_LDS, permute},
    {"ds_swizzle_b32", "dv1u,sv1u", "swizzle", CLASS_LDS, swizzle},
    {"ds_read_b64_tr_b16", "dv2u,sv1u", "offset", CLASS_LDS, read_tr<16>},
    {"ds_read_b64_tr_b8", "dv2u,sv1u", "offset", CLASS_LDS, read_tr<8>},
    {"ds_read_b64_tr_b4", "dv2u,sv1u", "offset", CLASS_LDS, read_tr<4>},
};
static const OpTable lds_table(LDS);

}  // namespace cdna
