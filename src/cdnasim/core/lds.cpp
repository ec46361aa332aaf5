// SPDX-License-Identifier: Apache-2.0
// Local data share: reads, writes, atomics, lane exchange; race, bounds and never-written checks.
#include <algorithm>

#include "fetch.h"
#include "machine.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

// The address of one lane's access. Throws when it leaves the workgroup's LDS or is misaligned.
inline u32 place(Wave& w, u32 addr, u32 bytes, u32 align) {
  const u64 size = w.wg->lds.size();
  if (u64(addr) + bytes > size)
    fail(w, "out-of-bounds: LDS access at " + std::to_string(addr) + " of " + std::to_string(bytes) + " bytes, the workgroup has " + std::to_string(size));
  if (addr % align && w.m->check[CHECK_MISALIGNED])
    report(w, "misaligned", "LDS access of " + std::to_string(bytes) + " bytes at " + std::to_string(addr));
  return addr;
}

// A dword-aligned access when nobody else touched its dwords in this interval: the usual case, without bytes.
bool note_quietly(Workgroup& g, uint32_t epoch, int8_t me, u32 addr, u32 bytes, bool write) {
  const u32 mine = uint8_t(me) * 0x01010101u, nobody = ~0u;
  for (u32 q = addr / 4; q < (addr + bytes) / 4; ++q) {
    const LdsShadow& s = g.lds_shadow[q];
    u32 writers, readers;
    std::memcpy(&writers, s.writer, 4);
    std::memcpy(&readers, s.reader, 4);
    if (s.epoch_w == epoch && writers != nobody && writers != mine) return false;
    if (s.epoch_r == epoch && readers != nobody && readers != mine) return false;
  }
  for (u32 q = addr / 4; q < (addr + bytes) / 4; ++q) {
    LdsShadow& s = g.lds_shadow[q];
    if (write) { s.epoch_w = epoch; std::memcpy(s.writer, &mine, 4); }
    else { s.epoch_r = epoch; std::memcpy(s.reader, &mine, 4); }
  }
  return true;
}

void note(Wave& w, u32 addr, u32 bytes, bool write) {
  Workgroup& g = *w.wg;
  if (!g.lds_written.empty()) {
    u32 all = 0;
    if (write) std::memset(&g.lds_written[addr], 1, bytes);
    else if (bytes >= 4) {
      all = 0x01010101;
      for (u32 i = 0; i < bytes; i += 4) { u32 x; std::memcpy(&x, &g.lds_written[addr + i], 4); all &= x; }
    }
    if (!write && all != 0x01010101)
      for (u32 i = 0; i < bytes; ++i)
        if (!g.lds_written[addr + i]) {
          report(w, "lds-never-written", "LDS byte " + std::to_string(addr + i) + " is read but was never written");
          break;
        }
  }
  if (g.lds_shadow.empty()) return;
  const u32 epoch = u32(w.barrier_count) + 1;
  const int8_t me = int8_t(w.wave_in_group);
  if (!((addr | bytes) & 3) && note_quietly(g, epoch, me, addr, bytes, write)) return;
  for (u32 at = addr; at < addr + bytes; ++at) {
    LdsShadow& s = g.lds_shadow[at / 4];
    const u32 i = at & 3;
    if (s.epoch_w != epoch) { std::memset(s.writer, -1, 4); s.epoch_w = epoch; }
    if (s.epoch_r != epoch) { std::memset(s.reader, -1, 4); s.epoch_r = epoch; }
    const bool other_wrote = s.writer[i] != -1 && s.writer[i] != me;
    const bool other_read = s.reader[i] != -1 && s.reader[i] != me;
    if (other_wrote || (write && other_read)) {
      const int other = other_wrote ? s.writer[i] : s.reader[i];
      report(w, "lds-race",
             "LDS byte " + std::to_string(at) + (write ? " written" : " read") + " by wave " + std::to_string(me) + " and " +
                 (other_wrote ? "written by wave " : "read by wave ") + (other < 0 ? "several" : std::to_string(other)) +
                 " without a barrier between them");
    }
    if (write) s.writer[i] = me;
    else s.reader[i] = s.reader[i] != -1 && s.reader[i] != me ? int8_t(-2) : me;
  }
}

// Bank conflicts: 64 banks of 4 bytes on gfx950, 32 on gfx942; lanes that touch one word together do not conflict.
void count_banks(Wave& w, const u32* addr, u64 mask, u32 bytes) {
  if (!w.m->count_traffic) return;
  Counters& c = w.wg->launch->counters;
  ++c.lds_accesses;
  bool simple = mask == ~0ull;  // every lane next to the one before it: no conflict
  for (int l = 1; l < LANES; ++l) simple &= addr[l] - addr[l - 1] == bytes;
  if (simple && bytes >= 4) return;
  const int banks = w.k->arch == Arch::gfx950 ? 64 : 32;
  // A wave's access is served in passes that move one word a bank: 32 lanes of 4 bytes, 16 of 8, 8 of 16.
  const int lanes_per_pass = std::max(1, banks * 4 / int(std::max(4u, bytes)));
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
    if (worst > 1) c.lds_conflict_cycles += u64(worst - 1);
  }
}

// Loads of WORDS dwords (or one narrower element when BYTES < 4) from up to two places a lane.
template <int BYTES, bool SIGNED, int HALF>  // HALF: 0 whole register, 1 d16, 2 d16_hi
void read(Wave& w, const Inst& I) {
  constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
  u32 at[LANES], addr[LANES], r[WORDS][LANES];
  const u32* a = source<U32>(w, I, 1, 0, at);
  const u64 exec = w.exec();
  const u32* old = w.lane(I.ops[0].reg);
  for (int l = 0; l < LANES; ++l) {
    addr[l] = a[l] + u32(I.offset0);
    if (!(exec >> l & 1)) continue;
    const u32 p = place(w, addr[l], BYTES, BYTES == 12 ? 4 : BYTES > 8 ? 8 : BYTES);
    note(w, p, BYTES, false);
    if (BYTES >= 4) {
      for (int q = 0; q < WORDS; ++q) std::memcpy(&r[q][l], &w.wg->lds[p + 4 * q], 4);
    } else {
      u32 x = 0;
      std::memcpy(&x, &w.wg->lds[p], BYTES);
      if (SIGNED) x = BYTES == 1 ? u32(int32_t(int8_t(x))) : u32(int32_t(int16_t(x)));
      if (HALF == 1) x = (old[l] & 0xffff0000u) | (x & 0xffff);
      if (HALF == 2) x = (old[l] & 0xffffu) | x << 16;
      r[0][l] = x;
    }
  }
  w.wg->launch->counters.lds_read_bytes += u64(BYTES) * u64(__builtin_popcountll(exec));
  count_banks(w, addr, exec, BYTES);
  for (int q = 0; q < WORDS; ++q) {
    blend(w.lane(I.ops[0].reg + q), r[q], exec);
    mark_written(w, I.ops[0].reg + q, exec);
  }
}

template <int BYTES, int STRIDE>  // two reads at offset0 and offset1, in units of STRIDE bytes
void read2(Wave& w, const Inst& I) {
  constexpr int WORDS = BYTES / 4;
  u32 at[LANES], addr[LANES], r[2 * WORDS][LANES];
  const u32* a = source<U32>(w, I, 1, 0, at);
  const u64 exec = w.exec();
  for (int half = 0; half < 2; ++half) {
    for (int l = 0; l < LANES; ++l) {
      addr[l] = a[l] + u32(half ? I.offset1 : I.offset0) * STRIDE;
      if (!(exec >> l & 1)) continue;
      const u32 p = place(w, addr[l], BYTES, BYTES);
      note(w, p, BYTES, false);
      for (int q = 0; q < WORDS; ++q) std::memcpy(&r[half * WORDS + q][l], &w.wg->lds[p + 4 * q], 4);
    }
    count_banks(w, addr, exec, BYTES);
  }
  w.wg->launch->counters.lds_read_bytes += 2 * u64(BYTES) * u64(__builtin_popcountll(exec));
  for (int q = 0; q < 2 * WORDS; ++q) {
    blend(w.lane(I.ops[0].reg + q), r[q], exec);
    mark_written(w, I.ops[0].reg + q, exec);
  }
}

template <int BYTES, bool HIGH>
void write(Wave& w, const Inst& I) {
  constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
  u32 at[LANES], addr[LANES], tmp[LANES];
  const u32* a = source<U32>(w, I, 0, 0, at);
  const u64 exec = w.exec();
  for (int l = 0; l < LANES; ++l) {
    addr[l] = a[l] + u32(I.offset0);
    if (!(exec >> l & 1)) continue;
    place(w, addr[l], BYTES, BYTES == 12 ? 4 : BYTES > 8 ? 8 : BYTES);
    note(w, addr[l], BYTES, true);
  }
  for (int q = 0; q < WORDS; ++q) {
    const u32* d = word(w, I, 1, q, 1, tmp);
    for (int l = 0; l < LANES; ++l) {
      if (!(exec >> l & 1)) continue;
      const u32 x = HIGH ? d[l] >> 16 : d[l];
      std::memcpy(&w.wg->lds[addr[l] + 4 * q], &x, BYTES < 4 ? BYTES : 4);
    }
  }
  w.wg->launch->counters.lds_write_bytes += u64(BYTES) * u64(__builtin_popcountll(exec));
  count_banks(w, addr, exec, BYTES);
}

template <int BYTES, int STRIDE>
void write2(Wave& w, const Inst& I) {
  constexpr int WORDS = BYTES / 4;
  u32 at[LANES], addr[LANES], tmp[LANES];
  const u32* a = source<U32>(w, I, 0, 0, at);
  const u64 exec = w.exec();
  for (int half = 0; half < 2; ++half) {
    for (int l = 0; l < LANES; ++l) {
      addr[l] = a[l] + u32(half ? I.offset1 : I.offset0) * STRIDE;
      if (!(exec >> l & 1)) continue;
      place(w, addr[l], BYTES, BYTES);
      note(w, addr[l], BYTES, true);
    }
    for (int q = 0; q < WORDS; ++q) {
      const u32* d = word(w, I, 1 + half, q, 1, tmp);
      for (int l = 0; l < LANES; ++l)
        if (exec >> l & 1) std::memcpy(&w.wg->lds[addr[l] + 4 * q], &d[l], 4);
    }
    count_banks(w, addr, exec, BYTES);
  }
  w.wg->launch->counters.lds_write_bytes += 2 * u64(BYTES) * u64(__builtin_popcountll(exec));
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
    if (!w.wg->lds_written.empty()) std::memset(&w.wg->lds_written[p], 1, sizeof(T));
    T old;
    std::memcpy(&old, &w.wg->lds[p], sizeof(T));
    const T now = F(old, data[0][l], data[1][l]);
    std::memcpy(&w.wg->lds[p], &now, sizeof(T));
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
  u64 row[LANES];
  for (int l = 0; l < LANES; ++l) {
    const u32 p = place(w, a[l] + u32(I.offset0), 8, 8);
    note(w, p, 8, false);
    std::memcpy(&row[l], &w.wg->lds[p], 8);
  }
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
