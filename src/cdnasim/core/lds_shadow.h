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
// On values: the tags before and after. False where the whole story is needed.
template <int N>
inline bool lds_read_tags(const typename LdsTags<N>::v& w, const typename LdsTags<N>::v& r, uint32_t mine, typename LdsTags<N>::v* now) {
  using V = typename LdsTags<N>::v;
  const V me = V{} + mine;
  const V w_now = V((w ^ me) >> 8 == 0), r_now = V((r ^ me) >> 8 == 0), r_other = r_now & V(r != me);
  const V bad = V(w == 0) | V((w & 0xff) == LDS_BYTES_MIXED) | (w_now & V(w != me)) | (r_other & V((r & 0xff) == LDS_BYTES_MIXED));
  *now = (~r_other & me) | (r_other & ((me & ~0xffu) | LDS_SEVERAL));
  return !lds_any<N>(bad);
}
template <int N>
inline bool lds_write_tags(const typename LdsTags<N>::v& w, const typename LdsTags<N>::v& r, uint32_t mine) {
  using V = typename LdsTags<N>::v;
  const V me = V{} + mine;
  const V bad = (V((w ^ me) >> 8 == 0) & V(w != me)) | (V((r ^ me) >> 8 == 0) & V(r != me));
  return !lds_any<N>(bad);
}
// In place.
template <int N>
inline bool lds_quick_read(const uint32_t* wtag, uint32_t* rtag, uint32_t mine) {
  using V = typename LdsTags<N>::v;
  V now;
  if (!lds_read_tags<N>(*reinterpret_cast<const V*>(wtag), *reinterpret_cast<const V*>(rtag), mine, &now)) return false;
  *reinterpret_cast<V*>(rtag) = now;
  return true;
}
template <int N>
inline bool lds_quick_write(uint32_t* wtag, const uint32_t* rtag, uint32_t mine) {
  using V = typename LdsTags<N>::v;
  if (!lds_write_tags<N>(*reinterpret_cast<const V*>(wtag), *reinterpret_cast<const V*>(rtag), mine)) return false;
  *reinterpret_cast<V*>(wtag) = V{} + mine;
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

// The 16 dwords that 16 / WORDS lanes access together (WORDS each, from ``dword[lane]`` on): moved to and from a row.
#if defined(__AVX512F__)
template <int WORDS>
inline LdsTags<16>::v lds_gather(const uint32_t* tags, const uint32_t* dword) {
  if constexpr (WORDS == 4) {
    const auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(tags + dword[i])); };
    __m512i x = _mm512_castsi128_si512(row(0));
    x = _mm512_inserti32x4(x, row(1), 1);
    x = _mm512_inserti32x4(x, row(2), 2);
    return LdsTags<16>::v(_mm512_inserti32x4(x, row(3), 3));
  } else if constexpr (WORDS == 2) {
    return LdsTags<16>::v(_mm512_i32gather_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(dword)), tags, 4));
  } else return LdsTags<16>::v(_mm512_i32gather_epi32(_mm512_loadu_si512(dword), tags, 4));
}
template <int WORDS>
inline void lds_scatter(uint32_t* tags, const uint32_t* dword, const LdsTags<16>::v& x) {
  if constexpr (WORDS == 4) {
    const auto put = [&](int i, __m128i row) { _mm_storeu_si128(reinterpret_cast<__m128i*>(tags + dword[i]), row); };
    put(0, _mm512_castsi512_si128(__m512i(x)));
    put(1, _mm512_extracti32x4_epi32(__m512i(x), 1));
    put(2, _mm512_extracti32x4_epi32(__m512i(x), 2));
    put(3, _mm512_extracti32x4_epi32(__m512i(x), 3));
  } else if constexpr (WORDS == 2) {
    _mm512_i32scatter_epi64(tags, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(dword)), __m512i(x), 4);
  } else _mm512_i32scatter_epi32(tags, _mm512_loadu_si512(dword), __m512i(x), 4);
}
#else
template <int WORDS>
inline LdsTags<16>::v lds_gather(const uint32_t* tags, const uint32_t* dword) {
  LdsTags<16>::v x;
  for (int i = 0; i < 16; ++i) x[i] = tags[dword[i / WORDS] + uint32_t(i % WORDS)];
  return x;
}
template <int WORDS>
inline void lds_scatter(uint32_t* tags, const uint32_t* dword, const LdsTags<16>::v& x) {
  for (int i = 0; i < 16; ++i) tags[dword[i / WORDS] + uint32_t(i % WORDS)] = x[i];
}
#endif

// 16 / WORDS lanes' accesses. Lanes that share a dword write one tag.
template <int WORDS, bool WRITE>
inline bool lds_quick_lanes(uint32_t* wtag, uint32_t* rtag, const uint32_t* dword, uint32_t mine) {
  using V = LdsTags<16>::v;
  const V w = lds_gather<WORDS>(wtag, dword), r = lds_gather<WORDS>(rtag, dword);
  V now = V{} + mine;
  if constexpr (WRITE) {
    if (!lds_write_tags<16>(w, r, mine)) return false;
    if (lds_any<16>(now ^ w)) lds_scatter<WORDS>(wtag, dword, now);
  } else {
    if (!lds_read_tags<16>(w, r, mine, &now)) return false;
    if (lds_any<16>(now ^ r)) lds_scatter<WORDS>(rtag, dword, now);
  }
  return true;
}

// Every byte of an access; reports what is wrong.
void lds_note(Wave& w, uint32_t addr, uint32_t bytes, bool write);
// Written by something that is a synchronisation of its own: no part of the race check.
void lds_mark_written(Workgroup& g, uint32_t addr, uint32_t bytes);

}  // namespace cdna
