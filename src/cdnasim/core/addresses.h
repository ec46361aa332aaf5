// SPDX-License-Identifier: Apache-2.0
// The addresses of a vector memory instruction's lanes: global, flat and buffer.
#pragma once

#include <algorithm>

#include "fetch.h"
#include "machine.h"

namespace cdna {

struct Lanes { uint64_t addr[LANES]; uint64_t mask; };

// ---- addresses. Operands of a global access from index ``first``: vector address (64-bit, or a 32-bit offset
// with a scalar base) and the scalar base or "off".
inline void global_address(Wave& w, const Inst& I, int vaddr, int saddr, Lanes* out) {
  out->mask = w.exec();
  if (I.ops[saddr].kind == KIND_OFF) {
    uint64_t tmp[LANES];
    const uint64_t* a = source<U64>(w, I, vaddr, 0, tmp);
    for (int l = 0; l < LANES; ++l) out->addr[l] = a[l] + uint64_t(int64_t(I.offset0));
  } else {
    uint32_t tmp[LANES];
    const uint64_t base = scalar64(w, I, saddr);
    const uint32_t* a = source<U32>(w, I, vaddr, 0, tmp);
    for (int l = 0; l < LANES; ++l) out->addr[l] = base + a[l] + uint64_t(int64_t(I.offset0));
  }
}
inline void flat_address(Wave& w, const Inst& I, int vaddr, Lanes* out) {
  uint64_t tmp[LANES];
  out->mask = w.exec();
  const uint64_t* a = source<U64>(w, I, vaddr, 0, tmp);
  for (int l = 0; l < LANES; ++l) out->addr[l] = a[l] + uint64_t(int64_t(I.offset0));
}

// Buffer: operands voffset-or-off, descriptor (4 SGPRs), scalar offset. Lanes outside num_records are taken out
// of the mask for stores; for loads ``dword_mask`` says per dword which lanes are inside.
struct BufferLanes : Lanes { uint64_t inside[4]; };
inline void buffer_address(Wave& w, const Inst& I, int vaddr, int desc, uint32_t bytes, BufferLanes* out) {
  const Operand& d = I.ops[desc];
  if (w.vdef) for (int i = 0; i < 4; ++i) check_sgpr_read(w, I, d.reg + i);
  const uint32_t w0 = w.s[d.reg], w1 = w.s[d.reg + 1], records = w.s[d.reg + 2], w3 = w.s[d.reg + 3];
  const uint64_t base = uint64_t(w1 & 0xffff) << 32 | w0;
  const uint32_t stride = w1 >> 16 & 0x3fff;
  if (stride || w1 >> 31 || (w3 >> 23 & 1)) fail(w, "a buffer descriptor with a stride, a swizzle or an added thread id is not modelled");
  const uint32_t soffset = scalar32(w, I, desc + 1);
  const uint32_t imm = uint32_t(I.offset0);
  if (I.idxen) fail(w, "idxen without a stride is not modelled");
  uint32_t tmp[LANES];
  const uint32_t* v = nullptr;
  if (I.offen) v = source<U32>(w, I, vaddr, 0, tmp);
  const uint64_t exec = w.exec();
  const int dwords = bytes < 4 ? 1 : int(bytes / 4);
  // Raw buffer: a dword is out of range when its offset is not below num_records less the scalar offset.
  const uint64_t limit = records > soffset ? records - soffset : 0;
  uint32_t off[LANES], top = 0, wrap = 0;
  if (!v) v = static_cast<const uint32_t*>(std::memset(tmp, 0, sizeof tmp));
  for (int l = 0; l < LANES; ++l) {
    off[l] = v[l] + imm;
    wrap |= off[l] < v[l];
    top = std::max(top, off[l]);
    out->addr[l] = base + soffset + off[l];
  }
  if (uint64_t(top) + bytes <= limit) {  // the usual case
    for (int q = 0; q < 4; ++q) out->inside[q] = q < dwords ? exec : 0;
  } else {
    uint8_t in[4][LANES];
    const uint32_t last = bytes < 4 ? bytes : 4;
    for (int q = 0; q < dwords; ++q)
      for (int l = 0; l < LANES; ++l) in[q][l] = uint64_t(off[l]) + 4 * uint64_t(q) + last <= limit;
    for (int q = 0; q < 4; ++q) out->inside[q] = q < dwords ? lane_bits(in[q]) & exec : 0;
  }
  out->mask = out->inside[0];
  if (!wrap) return;
  uint8_t wrapped[LANES];
  for (int l = 0; l < LANES; ++l) wrapped[l] = off[l] < v[l];
  if (const uint64_t bad = lane_bits(wrapped) & exec) {
    const int l = __builtin_ctzll(bad);
    report(w, "offset-wrap", "lane " + std::to_string(l) + ": voffset " + hex(v[l]) + " + offset " + std::to_string(imm) +
                                 " passes 2^32; computed modulo 2^32, hardware may drop the access");
  }
}

}  // namespace cdna
