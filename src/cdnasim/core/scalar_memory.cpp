// SPDX-License-Identifier: Apache-2.0
// Scalar loads, waits and sleeps, write-backs and invalidations of the caches.
#include "fetch.h"
#include "machine.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

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

const OpDef SCALAR_MEMORY[] = {
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
static const OpTable scalar_memory_table(SCALAR_MEMORY);

}  // namespace cdna
