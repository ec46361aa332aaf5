// SPDX-License-Identifier: Apache-2.0
// The out-of-line parts of operand access: lane movement by DPP, sub-dword selection by SDWA, checks, errors.
#include <cstdio>

#include "fetch.h"
#include "machine.h"

namespace cdna {

std::string hex(uint64_t v) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(v));
  return text;
}

void fail(const Wave& w, const std::string& what) {
  (void)w;
  throw SimError(what);
}

void vgpr_never_written(Wave& w, int reg) {
  report(w, "register-never-written", "vector register " + std::to_string(reg) + " is read, but no active lane of it was ever written");
}

void sgpr_never_written(Wave& w, int reg) {
  report(w, "register-never-written", "scalar register " + std::to_string(reg) + " is read, but was never written");
}

// The lane that lane ``lane`` reads under this DPP control; false where there is none (outside the row or wave,
// or the source lane is off).
bool dpp_source(const Wave& w, const Inst& I, int lane, int* source) {
  const int c = I.dpp_ctrl, row = lane & ~15, in = lane & 15;
  int from = -1;
  if (c <= 0xff) from = (lane & ~3) | (c >> (2 * (lane & 3)) & 3);                // quad_perm
  else if (c > 0x100 && c <= 0x10f) from = in + (c & 15) < 16 ? lane + (c & 15) : -1;   // row_shl
  else if (c > 0x110 && c <= 0x11f) from = in - (c & 15) >= 0 ? lane - (c & 15) : -1;   // row_shr
  else if (c > 0x120 && c <= 0x12f) from = row | ((in - (c & 15)) & 15);           // row_ror
  else if (c == 0x130) from = lane + 1 < LANES ? lane + 1 : -1;                    // wave_shl
  else if (c == 0x134) from = (lane + 1) & 63;                                     // wave_rol
  else if (c == 0x138) from = lane - 1;                                            // wave_shr
  else if (c == 0x13c) from = (lane - 1) & 63;                                     // wave_ror
  else if (c == 0x140) from = row | (15 - in);                                     // row_mirror
  else if (c == 0x141) from = (lane & ~7) | (7 - (lane & 7));                      // row_half_mirror
  else if (c == 0x142) from = row ? row - 1 : -1;                                  // row_bcast:15
  else if (c == 0x143) from = lane >= 32 ? 31 : -1;                                // row_bcast:31
  else if (c >= 0x150 && c <= 0x15f) from = row | (c & 15);                        // row_newbcast
  else fail(w, "DPP control " + hex(c) + " is not known");
  if (from < 0 || !(w.exec() >> from & 1)) return false;
  *source = from;
  return true;
}

uint64_t dpp_write_mask(const Wave& w, const Inst& I) {
  uint64_t mask = 0;
  for (int l = 0; l < LANES; ++l) {
    if (!(I.row_mask >> (l >> 4) & 1) || !(I.bank_mask >> ((l >> 2) & 3) & 1)) continue;
    int from;
    if (!I.bound_ctrl && !dpp_source(w, I, l, &from)) continue;
    mask |= 1ull << l;
  }
  return mask & w.exec();
}

// SDWA selectors: 0..3 byte, 4..5 word, 6 dword.
uint32_t sdwa_select(uint32_t value, int sel, bool sext) {
  if (sel <= 3) {
    const uint32_t b = value >> (8 * sel) & 0xff;
    return sext ? uint32_t(int32_t(int8_t(b))) : b;
  }
  if (sel <= 5) {
    const uint32_t h = value >> (16 * (sel - 4)) & 0xffff;
    return sext ? uint32_t(int32_t(int16_t(h))) : h;
  }
  return value;
}

// With FP16_OVFL set an f16 overflow gives the largest finite value; that is not modelled.
void refuse_f16_overflow(const Wave& w, const uint16_t* r, uint64_t mask) {
  for (int l = 0; l < LANES; ++l)
    if ((mask >> l & 1) && (r[l] & 0x7fff) == 0x7c00) fail(w, "an infinite f16 result while FP16_OVFL is set is not modelled");
}

// dst_unused: 0 pad with zero, 1 sign-extend, 2 preserve.
void put_sdwa(Wave& w, const Inst& I, int reg, const uint32_t* r, uint64_t mask) {
  uint32_t* d = w.lane(reg);
  for (int l = 0; l < LANES; ++l) {
    if (!(mask >> l & 1)) continue;
    if (I.dst_sel == 6) { d[l] = r[l]; continue; }
    const int width = I.dst_sel <= 3 ? 8 : 16, shift = I.dst_sel <= 3 ? 8 * I.dst_sel : 16 * (I.dst_sel - 4);
    const uint32_t field = (width == 8 ? 0xffu : 0xffffu) << shift;
    const uint32_t value = r[l] << shift & field;
    if (I.dst_unused == 2) d[l] = (d[l] & ~field) | value;
    else if (I.dst_unused == 1) {
      const int32_t ext = width == 8 ? int32_t(int8_t(r[l])) : int32_t(int16_t(r[l]));
      d[l] = uint32_t(ext) << shift;
    } else d[l] = value;
  }
  mark_written(w, reg, mask);
}

}  // namespace cdna
