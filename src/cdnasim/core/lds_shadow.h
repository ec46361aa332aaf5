// SPDX-License-Identifier: Apache-2.0
// Which bytes of LDS were written, and by whom in this barrier interval: races and reads of nothing.
//
// A dword has two tags, epoch << 8 | who: of its last writer and of its last readers. ``who`` is a wave, SEVERAL,
// or BYTES: then ``Workgroup::lds_mixed`` says it byte by byte. A writer tag of 0 is a dword never written.
// Epochs count barriers and start at 2, so that 1 is the past.
#pragma once

#include "machine.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace cdna {

constexpr uint32_t LDS_SEVERAL = 0xfe, LDS_BYTES_MIXED = 0xff;

inline uint32_t lds_tag(const Wave& w) { return (uint32_t(w.barrier_count) + 2) << 8 | uint32_t(w.wave_in_group); }

// N dwords at once read or written by the wave of ``mine``, when nobody else touched them in this interval and (for
// a read) all were written: the usual case. False, and nothing noted, where the whole story is needed.
template <int N>
struct LdsTags { typedef uint32_t v __attribute__((vector_size(4 * N), aligned(4), may_alias)); };
template <int N>
inline bool lds_any(const typename LdsTags<N>::v& x) {
  uint32_t any = 0;
  for (int i = 0; i < N; ++i) any |= x[i];
  return any;
}
#if defined(__AVX512F__)
template <> inline bool lds_any<16>(const LdsTags<16>::v& x) { return _mm512_test_epi32_mask(__m512i(x), __m512i(x)); }
template <> inline bool lds_any<4>(const LdsTags<4>::v& x) { return !_mm_testz_si128(__m128i(x), __m128i(x)); }
#endif
template <int N>
inline bool lds_quick_read(const uint32_t* wtag, uint32_t* rtag, uint32_t mine) {
  using V = typename LdsTags<N>::v;
  const V w = *reinterpret_cast<const V*>(wtag), r = *reinterpret_cast<const V*>(rtag), me = V{} + mine;
  const V w_now = V((w ^ me) >> 8 == 0), r_now = V((r ^ me) >> 8 == 0), r_other = r_now & V(r != me);
  const V bad = V(w == 0) | V((w & 0xff) == LDS_BYTES_MIXED) | (w_now & V(w != me)) | (r_other & V((r & 0xff) == LDS_BYTES_MIXED));
  if (lds_any<N>(bad)) return false;
  *reinterpret_cast<V*>(rtag) = (~r_other & me) | (r_other & ((me & ~0xffu) | LDS_SEVERAL));
  return true;
}
template <int N>
inline bool lds_quick_write(uint32_t* wtag, const uint32_t* rtag, uint32_t mine) {
  using V = typename LdsTags<N>::v;
  const V w = *reinterpret_cast<const V*>(wtag), r = *reinterpret_cast<const V*>(rtag), me = V{} + mine;
  const V bad = (V((w ^ me) >> 8 == 0) & V(w != me)) | (V((r ^ me) >> 8 == 0) & V(r != me));
  if (lds_any<N>(bad)) return false;
  *reinterpret_cast<V*>(wtag) = me;
  return true;
}
template <>
inline bool lds_quick_read<1>(const uint32_t* wtag, uint32_t* rtag, uint32_t mine) {
  const uint32_t w = *wtag, r = *rtag;
  if (w == 0 || (w & 0xff) == LDS_BYTES_MIXED || ((w ^ mine) >> 8 == 0 && w != mine)) return false;
  if ((r ^ mine) >> 8) *rtag = mine;
  else if (r != mine) {
    if ((r & 0xff) == LDS_BYTES_MIXED) return false;
    *rtag = (mine & ~0xffu) | LDS_SEVERAL;
  }
  return true;
}
template <>
inline bool lds_quick_write<1>(uint32_t* wtag, const uint32_t* rtag, uint32_t mine) {
  if (((*wtag ^ mine) >> 8 == 0 && *wtag != mine) || ((*rtag ^ mine) >> 8 == 0 && *rtag != mine)) return false;
  *wtag = mine;
  return true;
}

// Every byte of an access; reports what is wrong.
void lds_note(Wave& w, uint32_t addr, uint32_t bytes, bool write);
// Written by something that is a synchronisation of its own: no part of the race check.
void lds_mark_written(Workgroup& g, uint32_t addr, uint32_t bytes);

}  // namespace cdna
