// SPDX-License-Identifier: Apache-2.0
#include "lds_shadow.h"

#include <algorithm>

namespace cdna {
namespace {

// The bytes of dword ``q`` as of the interval of ``mine``.
LdsBytes& open(Workgroup& g, uint32_t q, uint32_t mine) {
  if (g.lds_mixed.empty()) g.lds_mixed.resize((g.lds_bytes + 3) / 4);
  LdsBytes& s = g.lds_mixed[q];
  const uint32_t w = g.lds_wtag[q], r = g.lds_rtag[q];
  const auto unpack = [mine](uint32_t tag, int8_t* out) {
    const bool fresh = (tag ^ mine) >> 8 == 0;
    if ((tag & 0xff) == LDS_BYTES_MIXED && fresh) return;
    const int8_t who = !fresh ? int8_t(-1) : (tag & 0xff) == LDS_SEVERAL ? int8_t(-2) : int8_t(tag & 0xff);
    std::memset(out, who, 4);
  };
  if ((w & 0xff) != LDS_BYTES_MIXED) s.written = w ? 15 : 0;
  unpack(w, s.writer);
  unpack(r, s.reader);
  return s;
}

void close(Workgroup& g, uint32_t q, uint32_t mine, const LdsBytes& s) {
  const uint32_t epoch = mine & ~0xffu;
  const auto pack = [epoch](const int8_t* who) {
    for (int i = 1; i < 4; ++i)
      if (who[i] != who[0]) return epoch | LDS_BYTES_MIXED;
    return who[0] == -1 ? 1u << 8 : who[0] == -2 ? epoch | LDS_SEVERAL : epoch | uint8_t(who[0]);
  };
  g.lds_wtag[q] = s.written == 0 ? 0 : s.written == 15 ? pack(s.writer) : epoch | LDS_BYTES_MIXED;
  g.lds_rtag[q] = pack(s.reader);
}

}  // namespace

void lds_note(Wave& w, uint32_t addr, uint32_t bytes, bool write) {
  Workgroup& g = *w.wg;
  if (!g.lds_wtag) return;
  const uint32_t mine = lds_tag(w);
  const int8_t me = int8_t(w.wave_in_group);
  const uint32_t end = addr + bytes;
  for (uint32_t q = addr / 4; q <= (end - 1) / 4; ++q) {
    LdsBytes& s = open(g, q, mine);
    int race = -1, unwritten = -1, other = 0;
    for (uint32_t at = std::max(addr, 4 * q); at < std::min(end, 4 * q + 4); ++at) {
      const uint32_t i = at & 3;
      if (!write && !(s.written >> i & 1) && unwritten < 0) unwritten = int(at);
      const bool other_wrote = s.writer[i] != -1 && s.writer[i] != me;
      const bool other_read = s.reader[i] != -1 && s.reader[i] != me;
      if ((other_wrote || (write && other_read)) && race < 0) {
        race = int(at);
        other = other_wrote ? s.writer[i] : s.reader[i] - 1000;
      }
      if (write) {
        s.writer[i] = me;
        s.written = uint8_t(s.written | 1 << i);
      } else s.reader[i] = other_read ? int8_t(-2) : me;
    }
    close(g, q, mine, s);
    if (unwritten >= 0) report(w, "lds-never-written", "LDS byte " + std::to_string(unwritten) + " is read but was never written");
    if (race >= 0) {
      const bool wrote = other > -900;
      const int who = wrote ? other : other + 1000;
      report(w, "lds-race",
             "LDS byte " + std::to_string(race) + (write ? " written" : " read") + " by wave " + std::to_string(me) + " and " +
                 (wrote ? "written by wave " : "read by wave ") + (who < 0 ? "several" : std::to_string(who)) + " without a barrier between them");
    }
  }
}

void lds_mark_written(Workgroup& g, uint32_t addr, uint32_t bytes) {
  if (!g.lds_wtag) return;
  for (uint32_t q = addr / 4; q <= (addr + bytes - 1) / 4; ++q) {
    if ((g.lds_wtag[q] & 0xff) == LDS_BYTES_MIXED) g.lds_mixed[q].written = 15;
    else if (!g.lds_wtag[q]) g.lds_wtag[q] = 1u << 8;
  }
}

}  // namespace cdna
