// SPDX-License-Identifier: Apache-2.0
// Reading and writing operands: the one place that knows about neg / abs, op_sel, DPP, SDWA, clamp and omod.
//
// A handler is made by op1 / op2 / op3 / cmp from the types of its operands and a small function of one lane.
// Every lane is computed into a temporary, then written under the execution mask, so that a destination may
// overlap a source.
#pragma once

#include "numeric.h"
#include "state.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace cdna {

// ---- operand types: the C++ type of a lane's value, and which modifiers touch which bit
struct U32 { using t = uint32_t; static constexpr int bits = 32; static constexpr bool fp = false; };
struct I32 { using t = int32_t; static constexpr int bits = 32; static constexpr bool fp = false; };
struct F32 { using t = float; static constexpr int bits = 32; static constexpr bool fp = true; };
struct U16 { using t = uint16_t; static constexpr int bits = 16; static constexpr bool fp = false; };
struct I16 { using t = int16_t; static constexpr int bits = 16; static constexpr bool fp = false; };
struct F16 { using t = uint16_t; static constexpr int bits = 16; static constexpr bool fp = true; };
struct U64 { using t = uint64_t; static constexpr int bits = 64; static constexpr bool fp = false; };
struct I64 { using t = int64_t; static constexpr int bits = 64; static constexpr bool fp = false; };
struct F64 { using t = double; static constexpr int bits = 64; static constexpr bool fp = true; };
// A 16-bit result that leaves the destination's upper half as it was.
struct U16K : U16 {};
struct I16K : I16 {};
struct F16K : F16 {};

void vgpr_never_written(Wave& w, int reg);
void sgpr_never_written(Wave& w, int reg);
bool dpp_source(const Wave& w, const Inst& I, int lane, int* source);
uint64_t dpp_write_mask(const Wave& w, const Inst& I);
uint32_t sdwa_select(uint32_t value, int sel, bool sext);

inline uint64_t write_mask(const Wave& w, const Inst& I) {
  return I.dpp_ctrl < 0 ? w.exec() : dpp_write_mask(w, I);
}

// A register that is read must have been written, in one active lane at least.
inline void check_vgpr_read(Wave& w, const Inst&, int reg, uint64_t mask) {
  if (__builtin_expect(mask && !(w.vdef[reg] & mask), 0)) vgpr_never_written(w, reg);
}
inline void check_sgpr_read(Wave& w, const Inst&, int reg) {
  if (__builtin_expect(reg < REG_M0 && !(w.sdef[reg >> 5] >> (reg & 31) & 1), 0)) sgpr_never_written(w, reg);
}

// ---- scalar operands
inline uint32_t scalar32(Wave& w, const Inst& I, int k) {
  const Operand& o = I.ops[k];
  switch (o.kind) {
    case KIND_SGPR:
      if (w.vdef) check_sgpr_read(w, I, o.reg);
      return w.s[o.reg];
    case KIND_CONST: return uint32_t(o.value);
    case KIND_SCC: return w.scc;
    case KIND_VCCZ: return w.vcc() == 0;
    case KIND_EXECZ: return w.exec() == 0;
    default: fail(w, "operand " + std::to_string(k) + " is not a scalar");
  }
}
inline uint64_t scalar64(Wave& w, const Inst& I, int k) {
  const Operand& o = I.ops[k];
  if (o.kind == KIND_SGPR) {
    if (w.vdef) { check_sgpr_read(w, I, o.reg); check_sgpr_read(w, I, o.reg + 1); }
    return w.s64(o.reg);
  }
  if (o.kind == KIND_CONST) return o.value;
  if (o.kind == KIND_SCC) return w.scc;
  fail(w, "operand " + std::to_string(k) + " is not a 64-bit scalar");
}
inline void put_s32(Wave& w, const Inst& I, int k, uint32_t value) {
  const int reg = I.ops[k].reg;
  w.s[reg] = value;
  w.sdef[reg >> 5] |= 1u << (reg & 31);
}
inline void put_s64(Wave& w, const Inst& I, int k, uint64_t value) {
  const int reg = I.ops[k].reg;
  std::memcpy(&w.s[reg], &value, 8);
  w.sdef[reg >> 5] |= 3u << (reg & 31);
}

// ---- vector operands
inline void mark_written(Wave& w, int reg, uint64_t mask) {
  if (w.vdef) w.vdef[reg] |= mask;
}

inline void blend(uint32_t* d, const uint32_t* r, uint64_t mask) {
#if defined(__AVX512F__)
  for (int q = 0; q < 4; ++q)
    _mm512_mask_storeu_epi32(d + 16 * q, __mmask16(mask >> (16 * q)), _mm512_loadu_si512(r + 16 * q));
#else
  for (int l = 0; l < LANES; ++l)
    if (mask >> l & 1) d[l] = r[l];
#endif
}

// Lane by lane, b where the bit of ``sel`` is set, else a. ``r`` may be one of them.
inline void choose_lanes(uint32_t* r, const uint32_t* a, const uint32_t* b, uint64_t sel) {
#if defined(__AVX512F__)
  for (int q = 0; q < 4; ++q)
    _mm512_storeu_si512(r + 16 * q, _mm512_mask_loadu_epi32(_mm512_loadu_si512(a + 16 * q), __mmask16(sel >> (16 * q)), b + 16 * q));
#else
  for (int l = 0; l < LANES; ++l) r[l] = sel >> l & 1 ? b[l] : a[l];
#endif
}

// 1 in the lanes whose bit is set, 0 in the others.
inline void spread_bits(uint64_t bits, uint32_t* out) {
#if defined(__AVX512F__)
  for (int q = 0; q < 4; ++q) _mm512_storeu_si512(out + 16 * q, _mm512_maskz_set1_epi32(__mmask16(bits >> (16 * q)), 1));
#else
  for (int l = 0; l < LANES; ++l) out[l] = bits >> l & 1;
#endif
}

// Four dwords a lane, at ``at(lane)``, to and from four registers.
#if defined(__AVX512F__)
// Sixteen lanes: lane 4 s + j is the part s of row j, and becomes the dword 4 s + j of each register (or back).
inline void transpose_quads(__m512i* x) {
  const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
  x[0] = _mm512_unpacklo_epi64(a, c);
  x[1] = _mm512_unpackhi_epi64(a, c);
  x[2] = _mm512_unpacklo_epi64(b, d);
  x[3] = _mm512_unpackhi_epi64(b, d);
}
#endif
template <class At>
inline void load_quads(At at, uint32_t (*r)[LANES]) {
#if defined(__AVX512F__)
  for (int l = 0; l < LANES; l += 16) {
    const auto quad = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(l + i))); };
    __m512i x[4];
    for (int j = 0; j < 4; ++j) {
      x[j] = _mm512_castsi128_si512(quad(j));
      x[j] = _mm512_inserti32x4(x[j], quad(4 + j), 1);
      x[j] = _mm512_inserti32x4(x[j], quad(8 + j), 2);
      x[j] = _mm512_inserti32x4(x[j], quad(12 + j), 3);
    }
    transpose_quads(x);
    for (int q = 0; q < 4; ++q) _mm512_storeu_si512(r[q] + l, x[q]);
  }
#else
  for (int l = 0; l < LANES; ++l) {
    uint32_t got[4];
    std::memcpy(got, at(l), 16);
    for (int q = 0; q < 4; ++q) r[q][l] = got[q];
  }
#endif
}
template <class At>
inline void store_quads(const uint32_t* const* d, At at) {
#if defined(__AVX512F__)
  for (int l = 0; l < LANES; l += 16) {
    __m512i x[4];
    for (int q = 0; q < 4; ++q) x[q] = _mm512_loadu_si512(d[q] + l);
    transpose_quads(x);
    const auto put = [&](int i, __m128i quad) { _mm_storeu_si128(reinterpret_cast<__m128i*>(at(l + i)), quad); };
    // In the order of the lanes: two may have one place.
    for (int j = 0; j < 4; ++j) put(j, _mm512_castsi512_si128(x[j]));
    for (int j = 0; j < 4; ++j) put(4 + j, _mm512_extracti32x4_epi32(x[j], 1));
    for (int j = 0; j < 4; ++j) put(8 + j, _mm512_extracti32x4_epi32(x[j], 2));
    for (int j = 0; j < 4; ++j) put(12 + j, _mm512_extracti32x4_epi32(x[j], 3));
  }
#else
  for (int l = 0; l < LANES; ++l) {
    const uint32_t x[4] = {d[0][l], d[1][l], d[2][l], d[3][l]};
    std::memcpy(at(l), x, 16);
  }
#endif
}

// A bit a lane of which the flag is set.
inline uint64_t lane_bits(const uint8_t* flag) {
#if defined(__AVX512BW__)
  return _mm512_test_epi8_mask(_mm512_loadu_si512(flag), _mm512_loadu_si512(flag));
#else
  uint64_t out = 0;
  for (int l = 0; l < LANES; ++l) out |= uint64_t(flag[l] != 0) << l;
  return out;
#endif
}

// The 32-bit word of vector operand ``k`` (dword ``part``) for every lane, before any modifier. ``src_no`` is
// the source's number: DPP moves source 0 across lanes.
inline const uint32_t* word(Wave& w, const Inst& I, int k, int part, int src_no, uint32_t* tmp) {
  const Operand& o = I.ops[k];
  if (o.kind == KIND_VGPR) {
    // Only the low word: compilers leave the high half of a 64-bit source undefined when its result is not used.
    if (!part && w.vdef) check_vgpr_read(w, I, o.reg, w.exec());
    const uint32_t* p = w.lane(o.reg + part);
    if (I.dpp_ctrl < 0 || src_no != 0) return p;
    for (int l = 0; l < LANES; ++l) {
      int from;
      tmp[l] = dpp_source(w, I, l, &from) ? p[from] : 0;
    }
    return tmp;
  }
  uint32_t value;
  if (o.kind == KIND_CONST) value = part ? uint32_t(o.value >> 32) : uint32_t(o.value);
  else if (o.kind == KIND_SGPR) {
    if (w.vdef) check_sgpr_read(w, I, o.reg + part);
    value = w.s[o.reg + part];
  } else if (part) value = 0;
  else value = scalar32(w, I, k);
  for (int l = 0; l < LANES; ++l) tmp[l] = value;
  return tmp;
}

template <class T>
inline const typename T::t* source(Wave& w, const Inst& I, int k, int src_no, typename T::t* out) {
  const int flags = I.ops[k].flags;
  if constexpr (T::bits == 64) {
    uint32_t lo_tmp[LANES], hi_tmp[LANES];
    const uint32_t* lo = word(w, I, k, 0, src_no, lo_tmp);
    const uint32_t* hi = word(w, I, k, 1, src_no, hi_tmp);
    for (int l = 0; l < LANES; ++l) {
      uint64_t u = uint64_t(hi[l]) << 32 | lo[l];
      if constexpr (T::fp) {
        if (flags & FLAG_ABS) u &= ~(1ull << 63);
        if (flags & FLAG_NEG) u ^= 1ull << 63;
      }
      out[l] = bits<typename T::t>(u);
    }
    return out;
  } else {
    uint32_t narrow[T::bits == 16 ? LANES : 1];
    uint32_t* tmp = T::bits == 32 ? reinterpret_cast<uint32_t*>(out) : narrow;
    const uint32_t* p = word(w, I, k, 0, src_no, tmp);
    const int sel = src_no == 0 ? I.src0_sel : I.src1_sel;
    const bool select = I.sdwa && src_no < 2 && sel != 6;
    if constexpr (T::bits == 32) {
      if (!flags && !select) return reinterpret_cast<const typename T::t*>(p);
    }
    const bool high = T::bits == 16 && !I.sdwa && (I.op_sel >> src_no & 1);
    constexpr uint32_t sign = T::bits == 16 ? 0x8000u : 0x80000000u;
    for (int l = 0; l < LANES; ++l) {
      uint32_t u = p[l];
      if (select) u = sdwa_select(u, sel, flags & FLAG_SEXT);
      if (high) u >>= 16;
      if constexpr (T::fp) {
        if (flags & FLAG_ABS) u &= ~sign;
        if (flags & FLAG_NEG) u ^= sign;
      }
      if constexpr (T::bits == 16) out[l] = typename T::t(u);
      else out[l] = bits<typename T::t>(u);
    }
    return out;
  }
}

// ---- results
template <class F>
inline F modify_float(const Wave& w, const Inst& I, F x) {
  if (I.omod == 1) x *= 2;
  else if (I.omod == 2) x *= 4;
  else if (I.omod == 3) x /= 2;
  if (I.clamp) {
    if (std::isnan(x)) x = w.k->dx10_clamp ? F(0) : x;
    else x = x < 0 ? F(0) : x > 1 ? F(1) : x;
  }
  return x;
}

void refuse_f16_overflow(const Wave& w, const uint16_t* r, uint64_t mask);
void put_sdwa(Wave& w, const Inst& I, int reg, const uint32_t* r, uint64_t mask);

template <class T>
inline void put(Wave& w, const Inst& I, int k, typename T::t* r) {
  const int reg = I.ops[k].reg;
  const uint64_t mask = write_mask(w, I);
  if constexpr (T::fp) {
    if (I.omod | I.clamp) {
      for (int l = 0; l < LANES; ++l) {
        if constexpr (T::bits == 16) r[l] = f32_to_f16(modify_float(w, I, f16_to_f32(r[l])));
        else r[l] = modify_float(w, I, r[l]);
      }
    }
  }
  uint32_t out[LANES];
  if constexpr (T::bits == 64) {
    uint32_t high[LANES];
    for (int l = 0; l < LANES; ++l) {
      const uint64_t u = bits<uint64_t>(r[l]);
      out[l] = uint32_t(u);
      high[l] = uint32_t(u >> 32);
    }
    blend(w.lane(reg), out, mask);
    blend(w.lane(reg + 1), high, mask);
    mark_written(w, reg, mask);
    mark_written(w, reg + 1, mask);
    return;
  } else if constexpr (T::bits == 32) {
    const uint32_t* p = reinterpret_cast<const uint32_t*>(r);
    if (I.sdwa) { put_sdwa(w, I, reg, p, mask); return; }
    blend(w.lane(reg), p, mask);
  } else {
    constexpr bool keep = std::is_same_v<T, U16K> || std::is_same_v<T, I16K> || std::is_same_v<T, F16K>;
    if constexpr (T::fp)
      if (w.fp16_ovfl) refuse_f16_overflow(w, r, mask);
    const uint32_t* d = w.lane(reg);
    const bool high = I.op_sel >> 3 & 1;
    for (int l = 0; l < LANES; ++l) {
      const uint32_t u = uint16_t(r[l]);
      out[l] = high ? (d[l] & 0xffffu) | u << 16 : keep ? (d[l] & 0xffff0000u) | u : u;
    }
    if (I.sdwa) { put_sdwa(w, I, reg, out, mask); return; }
    blend(w.lane(reg), out, mask);
  }
  mark_written(w, reg, mask);
}

// ---- the usual case: whole 32-bit operands without a modifier, and every lane on. The result may then lie over a
// source: a lane is read before it is written.
template <class... T>
constexpr bool WORDS_ONLY = ((T::bits == 32) && ...);

template <class T>
inline const typename T::t* quick(Wave& w, const Inst& I, int k, typename T::t* tmp) {
  const Operand& o = I.ops[k];
  if (o.kind == KIND_VGPR) {
    if (w.vdef) check_vgpr_read(w, I, o.reg, ~0ull);
    return reinterpret_cast<const typename T::t*>(w.lane(o.reg));
  }
  const typename T::t value = bits<typename T::t>(scalar32(w, I, k));
  for (int l = 0; l < LANES; ++l) tmp[l] = value;
  return tmp;
}
template <class D>
inline typename D::t* quick_result(Wave& w, const Inst& I) {
  const int reg = I.ops[0].reg;
  if (w.vdef) w.vdef[reg] = ~0ull;
  return reinterpret_cast<typename D::t*>(w.lane(reg));
}
inline bool usual(const Wave& w, const Inst& I) { return I.plain && !~w.exec(); }

// ---- handlers from lane functions. FIRST is the number of destinations before the sources.
template <class D, class A, auto F, int FIRST = 1>
void op1(Wave& w, const Inst& I) {
  typename A::t at[LANES];
  if constexpr (WORDS_ONLY<D, A>) {
    if (usual(w, I)) {
      const auto* a = quick<A>(w, I, FIRST, at);
      auto* d = quick_result<D>(w, I);
#pragma GCC ivdep
      for (int l = 0; l < LANES; ++l) d[l] = F(a[l]);
      return;
    }
  }
  typename D::t r[LANES];
  const auto* a = source<A>(w, I, FIRST, 0, at);
  for (int l = 0; l < LANES; ++l) r[l] = F(a[l]);
  put<D>(w, I, 0, r);
}

// As op1 for functions too slow to run on lanes that are off.
template <class D, class A, auto F>
void op1_active(Wave& w, const Inst& I) {
  typename A::t at[LANES];
  typename D::t r[LANES];
  const auto* a = source<A>(w, I, 1, 0, at);
  const uint64_t mask = write_mask(w, I);
  for (int l = 0; l < LANES; ++l) r[l] = mask >> l & 1 ? F(a[l]) : typename D::t(0);
  put<D>(w, I, 0, r);
}

template <class D, class A, class B, auto F, int FIRST = 1>
void op2(Wave& w, const Inst& I) {
  typename A::t at[LANES];
  typename B::t bt[LANES];
  if constexpr (WORDS_ONLY<D, A, B>) {
    if (usual(w, I)) {
      const auto* a = quick<A>(w, I, FIRST, at);
      const auto* b = quick<B>(w, I, FIRST + 1, bt);
      auto* d = quick_result<D>(w, I);
#pragma GCC ivdep
      for (int l = 0; l < LANES; ++l) d[l] = F(a[l], b[l]);
      return;
    }
  }
  typename D::t r[LANES];
  const auto* a = source<A>(w, I, FIRST, 0, at);
  const auto* b = source<B>(w, I, FIRST + 1, 1, bt);
  for (int l = 0; l < LANES; ++l) r[l] = F(a[l], b[l]);
  put<D>(w, I, 0, r);
}

template <class D, class A, class B, class C, auto F, int FIRST = 1>
void op3(Wave& w, const Inst& I) {
  typename A::t at[LANES];
  typename B::t bt[LANES];
  typename C::t ct[LANES];
  if constexpr (WORDS_ONLY<D, A, B, C>) {
    if (usual(w, I)) {
      const auto* a = quick<A>(w, I, FIRST, at);
      const auto* b = quick<B>(w, I, FIRST + 1, bt);
      const auto* c = quick<C>(w, I, FIRST + 2, ct);
      auto* d = quick_result<D>(w, I);
#pragma GCC ivdep
      for (int l = 0; l < LANES; ++l) d[l] = F(a[l], b[l], c[l]);
      return;
    }
  }
  typename D::t r[LANES];
  const auto* a = source<A>(w, I, FIRST, 0, at);
  const auto* b = source<B>(w, I, FIRST + 1, 1, bt);
  const auto* c = source<C>(w, I, FIRST + 2, 2, ct);
  for (int l = 0; l < LANES; ++l) r[l] = F(a[l], b[l], c[l]);
  put<D>(w, I, 0, r);
}

// Destination is also the third source (v_fmac, v_mac).
template <class D, auto F>
void op_acc(Wave& w, const Inst& I) {
  typename D::t at[LANES], bt[LANES], ct[LANES], r[LANES];
  if constexpr (WORDS_ONLY<D>) {
    if (usual(w, I)) {
      const auto* a = quick<D>(w, I, 1, at);
      const auto* b = quick<D>(w, I, 2, bt);
      const auto* c = quick<D>(w, I, 0, ct);
      auto* d = quick_result<D>(w, I);
#pragma GCC ivdep
      for (int l = 0; l < LANES; ++l) d[l] = F(a[l], b[l], c[l]);
      return;
    }
  }
  const auto* a = source<D>(w, I, 1, 0, at);
  const auto* b = source<D>(w, I, 2, 1, bt);
  const auto* c = source<D>(w, I, 0, 2, ct);
  for (int l = 0; l < LANES; ++l) r[l] = F(a[l], b[l], c[l]);
  put<D>(w, I, 0, r);
}

template <class A, class B, auto F, bool EXEC>
void cmp(Wave& w, const Inst& I) {
  typename A::t at[LANES];
  typename B::t bt[LANES];
  const auto* a = source<A>(w, I, 1, 0, at);
  const auto* b = source<B>(w, I, 2, 1, bt);
  uint8_t hit[LANES];
  for (int l = 0; l < LANES; ++l) hit[l] = F(a[l], b[l]);
  const uint64_t result = lane_bits(hit) & w.exec();
  put_s64(w, I, 0, result);
  if (EXEC) w.set_exec(result);
}

}  // namespace cdna
