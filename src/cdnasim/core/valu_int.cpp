// SPDX-License-Identifier: Apache-2.0
// Vector integer and bitwise operations, carries, and comparisons.
#include <algorithm>
#include <bit>

#include "fetch.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;
using i64 = int64_t;
using u16 = uint16_t;
using i16 = int16_t;

constexpr i32 sext24(u32 a) { return i32(a << 8) >> 8; }
constexpr i32 mul_hi24(u32 a, u32 b) { return i32(i64(sext24(a)) * sext24(b) >> 32); }
constexpr u32 mask24(u32 a) { return a & 0xffffff; }

// Carry-in / carry-out: operands are dst, carry-out, a, b[, carry-in].
template <auto F, bool IN>
void carry(Wave& w, const Inst& I) {
  u32 at[LANES], bt[LANES], in[LANES], r[LANES];
  const u32* a = source<U32>(w, I, 2, 0, at);
  const u32* b = source<U32>(w, I, 3, 1, bt);
  spread_bits(IN ? scalar64(w, I, 4) : 0, in);
  uint8_t out[LANES];
  for (int l = 0; l < LANES; ++l) {
    const u64 x = F(u64(a[l]), u64(b[l]), u64(in[l]));
    r[l] = u32(x);
    out[l] = uint8_t(x >> 32 & 1);
  }
  const u64 mask = w.exec();
  put<U32>(w, I, 0, r);
  put_s64(w, I, 1, lane_bits(out) & mask);
}

void cndmask(Wave& w, const Inst& I) {
  u32 at[LANES], bt[LANES], r[LANES];
  // neg / abs flip or clear bit 31 of the chosen source, as for a 32-bit float.
  const float* a = source<F32>(w, I, 1, 0, reinterpret_cast<float*>(at));
  const float* b = source<F32>(w, I, 2, 1, reinterpret_cast<float*>(bt));
  const u64 sel = scalar64(w, I, 3);
  const u32* pa = reinterpret_cast<const u32*>(a);
  const u32* pb = reinterpret_cast<const u32*>(b);
  choose_lanes(r, pa, pb, sel);
  put<U32>(w, I, 0, r);
}

// 64-bit shifts take the amount first.
template <auto F>
void shift64(Wave& w, const Inst& I) { op2<U64, U32, U64, F>(w, I); }

template <bool SIGNED>
void mad_wide(Wave& w, const Inst& I) {
  u32 at[LANES], bt[LANES];
  u64 ct[LANES], r[LANES];
  uint8_t out[LANES];
  const u32* a = source<U32>(w, I, 2, 0, at);
  const u32* b = source<U32>(w, I, 3, 1, bt);
  const u64* c = source<U64>(w, I, 4, 2, ct);
  for (int l = 0; l < LANES; ++l) {
    if constexpr (SIGNED) {
      const __int128 full = __int128(i64(i32(a[l])) * i32(b[l])) + i64(c[l]);
      r[l] = u64(full);
      out[l] = uint8_t(full >> 64 & 1);
    } else {
      r[l] = u64(a[l]) * b[l] + c[l];
      out[l] = r[l] < c[l];
    }
  }
  const u64 mask = w.exec();
  put<U64>(w, I, 0, r);
  put_s64(w, I, 1, lane_bits(out) & mask);
}

// Any function of three bits, as a truth table indexed by (a, b, c) from bit 0 = (0, 0, 0).
template <class D>
void bitop3(Wave& w, const Inst& I) {
  typename D::t at[LANES], bt[LANES], ct[LANES], r[LANES];
  const auto* a = source<D>(w, I, 1, 0, at);
  const auto* b = source<D>(w, I, 2, 1, bt);
  const auto* c = source<D>(w, I, 3, 2, ct);
  for (int l = 0; l < LANES; ++l) {
    u32 x = 0;
    for (int t = 0; t < 8; ++t)
      if (I.imm >> t & 1) x |= (t & 4 ? a[l] : ~a[l]) & (t & 2 ? b[l] : ~b[l]) & (t & 1 ? c[l] : ~c[l]);
    r[l] = typename D::t(x);
  }
  put<D>(w, I, 0, r);
}

constexpr u32 perm(u32 hi, u32 lo, u32 sel) {
  const u64 data = u64(hi) << 32 | lo;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 s = sel >> (8 * i) & 0xff;
    u32 b;
    if (s >= 13) b = 0xff;
    else if (s == 12) b = 0;
    else if (s >= 8) b = data >> (16 * (s - 8) + 15) & 1 ? 0xff : 0;  // sign of a word, replicated
    else b = u32(data >> (8 * s)) & 0xff;
    r |= b << (8 * i);
  }
  return r;
}
constexpr u32 bfe_u(u32 a, u32 off, u32 width) { return a >> (off & 31) & ((1u << (width & 31)) - 1); }
constexpr i32 bfe_i(i32 a, u32 off, u32 width) {
  width &= 31;
  if (!width) return 0;
  return i32(u32(a >> (off & 31)) << (32 - width)) >> (32 - width);
}
template <class T> constexpr T med3(T a, T b, T c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); }
constexpr u32 sad_u8(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 4; ++i) {
    const i32 x = a >> (8 * i) & 0xff, y = b >> (8 * i) & 0xff;
    c += u32(x > y ? x - y : y - x);
  }
  return c;
}
constexpr u32 rev(u32 a) {
  u32 r = 0;
  for (int i = 0; i < 32; ++i) r |= (a >> i & 1) << (31 - i);
  return r;
}
constexpr i32 dot4(i32 a, i32 b, i32 c) {
  for (int i = 0; i < 4; ++i) c = i32(u32(c) + u32(i32(int8_t(a >> (8 * i))) * int8_t(b >> (8 * i))));
  return c;
}

// clamp on an integer operation saturates to the type's range.
template <class D, auto F>
void sat2(Wave& w, const Inst& I) {
  if constexpr (WORDS_ONLY<D>)
    if (!I.clamp) return op2<D, D, D, [](typename D::t a, typename D::t b) { return typename D::t(F(i64(a), i64(b))); }>(w, I);
  typename D::t at[LANES], bt[LANES], r[LANES];
  const auto* a = source<D>(w, I, 1, 0, at);
  const auto* b = source<D>(w, I, 2, 1, bt);
  for (int l = 0; l < LANES; ++l) {
    i64 x = F(i64(a[l]), i64(b[l]));
    if (I.clamp)
      x = std::clamp(x, i64(std::numeric_limits<typename D::t>::min()), i64(std::numeric_limits<typename D::t>::max()));
    r[l] = typename D::t(x);
  }
  put<D>(w, I, 0, r);
}
template <class D, auto F>
void sat3(Wave& w, const Inst& I) {
  typename D::t at[LANES], bt[LANES], ct[LANES], r[LANES];
  const auto* a = source<D>(w, I, 1, 0, at);
  const auto* b = source<D>(w, I, 2, 1, bt);
  const auto* c = source<D>(w, I, 3, 2, ct);
  for (int l = 0; l < LANES; ++l) {
    i64 x = F(i64(a[l]), i64(b[l]), i64(c[l]));
    if (I.clamp)
      x = std::clamp(x, i64(std::numeric_limits<typename D::t>::min()), i64(std::numeric_limits<typename D::t>::max()));
    r[l] = typename D::t(x);
  }
  put<D>(w, I, 0, r);
}
constexpr auto ADD = [](i64 a, i64 b) { return a + b; };
constexpr auto SUB = [](i64 a, i64 b) { return a - b; };
constexpr auto RSUB = [](i64 a, i64 b) { return b - a; };
constexpr auto MAD = [](i64 a, i64 b, i64 c) { return a * b + c; };

// A copy is no use: compilers copy registers of which some path never wrote anything. The copy is as unwritten as
// its source.
void copy(Wave& w, const Inst& I) {
  const Operand& o = I.ops[1];
  if (!w.vdef || o.kind != KIND_VGPR || !I.plain) return op1<U32, U32, [](u32 a) { return a; }>(w, I);
  const u64 exec = w.exec(), known = w.vdef[o.reg];
  const int reg = I.ops[0].reg;
  blend(w.lane(reg), w.lane(o.reg), exec);
  w.vdef[reg] = (w.vdef[reg] & ~exec) | (known & exec);
}

}  // namespace

#define V1(n, ...) {n, "dv1u,sa1u", "dpp sdwa", CLASS_VALU, __VA_ARGS__}
#define V2(n, ...) {n, "dv1u,sa1u,sa1u", "dpp sdwa", CLASS_VALU, __VA_ARGS__}
#define V2C(n, ...) {n, "dv1u,sa1u,sa1u", "dpp sdwa clamp", CLASS_VALU, __VA_ARGS__}
#define V2H(n, ...) {n, "dv1h,sa1h,sa1h", "dpp sdwa clamp op_sel", CLASS_VALU, __VA_ARGS__}
#define V3(n, ...) {n, "dv1u,sa1u,sa1u,sa1u", "", CLASS_VALU, __VA_ARGS__}
#define V3C(n, ...) {n, "dv1u,sa1u,sa1u,sa1u", "clamp", CLASS_VALU, __VA_ARGS__}
#define V3H(n, ...) {n, "dv1h,sa1h,sa1h,sa1h", "clamp op_sel", CLASS_VALU, __VA_ARGS__}
#define VC(n, ...) {n, "dv1u,ds2u,sa1u,sa1u", "dpp sdwa", CLASS_VALU, __VA_ARGS__}
#define VCI(n, ...) {n, "dv1u,ds2u,sa1u,sa1u,ss2u", "dpp sdwa", CLASS_VALU, __VA_ARGS__}
const OpDef VALU_INT[] = {
    V1("v_mov_b32", copy),
    {"v_mov_b64", "dv2u,sa2u", "", CLASS_VALU, op1<U64, U64, [](u64 a) { return a; }>},
    {"v_accvgpr_read_b32", "dv1u,sv1u", "", CLASS_VALU, copy},
    {"v_accvgpr_write_b32", "dv1u,sa1u", "", CLASS_VALU, copy},
    {"v_accvgpr_mov_b32", "dv1u,sv1u", "", CLASS_VALU, copy},
    V1("v_not_b32", (op1<U32, U32, [](u32 a) { return ~a; }>)),
    V1("v_bfrev_b32", (op1<U32, U32, rev>)),
    V1("v_ffbh_u32", (op1<U32, U32, [](u32 a) { return a ? u32(std::countl_zero(a)) : ~0u; }>)),
    V1("v_ffbl_b32", (op1<U32, U32, [](u32 a) { return a ? u32(std::countr_zero(a)) : ~0u; }>)),
    V1("v_ffbh_i32", (op1<U32, U32, [](u32 a) { const u32 x = i32(a) < 0 ? ~a : a; return x ? u32(std::countl_zero(x)) : ~0u; }>)),
    V2C("v_add_u32", (sat2<U32, ADD>)),
    V2C("v_sub_u32", (sat2<U32, SUB>)),
    V2C("v_subrev_u32", (sat2<U32, RSUB>)),
    {"v_add_i32", "dv1u,sa1u,sa1u", "clamp", CLASS_VALU, sat2<I32, ADD>},
    {"v_sub_i32", "dv1u,sa1u,sa1u", "clamp", CLASS_VALU, sat2<I32, SUB>},
    VC("v_add_co_u32", (carry<[](u64 a, u64 b, u64) { return a + b; }, false>)),
    VC("v_sub_co_u32", (carry<[](u64 a, u64 b, u64) { return a - b; }, false>)),
    VC("v_subrev_co_u32", (carry<[](u64 a, u64 b, u64) { return b - a; }, false>)),
    VCI("v_addc_co_u32", (carry<[](u64 a, u64 b, u64 c) { return a + b + c; }, true>)),
    VCI("v_subb_co_u32", (carry<[](u64 a, u64 b, u64 c) { return a - b - c; }, true>)),
    VCI("v_subbrev_co_u32", (carry<[](u64 a, u64 b, u64 c) { return b - a - c; }, true>)),
    {"v_cndmask_b32", "dv1f,sa1f,sa1f,ss2u", "dpp sdwa neg abs", CLASS_VALU, cndmask},
    V2("v_and_b32", (op2<U32, U32, U32, [](u32 a, u32 b) { return a & b; }>)),
    V2("v_or_b32", (op2<U32, U32, U32, [](u32 a, u32 b) { return a | b; }>)),
    V2("v_xor_b32", (op2<U32, U32, U32, [](u32 a, u32 b) { return a ^ b; }>)),
    V2("v_xnor_b32", (op2<U32, U32, U32, [](u32 a, u32 b) { return ~(a ^ b); }>)),
    V2("v_lshlrev_b32", (op2<U32, U32, U32, [](u32 a, u32 b) { return b << (a & 31); }>)),
    V2("v_lshrrev_b32", (op2<U32, U32, U32, [](u32 a, u32 b) { return (b >> (a & 31)); }>)),
    V2("v_ashrrev_i32", (op2<I32, U32, I32, [](u32 a, i32 b) { return (b >> (a & 31)); }>)),
    {"v_lshlrev_b64", "dv2u,sa1u,sa2u", "", CLASS_VALU, shift64<[](u32 a, u64 b) { return b << (a & 63); }>},
    {"v_lshrrev_b64", "dv2u,sa1u,sa2u", "", CLASS_VALU, shift64<[](u32 a, u64 b) { return ((b >> (a & 63))); }>},
    {"v_ashrrev_i64", "dv2u,sa1u,sa2u", "", CLASS_VALU, shift64<[](u32 a, u64 b) { return ((u64(i64(b) >> (a & 63)))); }>},
    V2("v_min_i32", (op2<I32, I32, I32, [](i32 a, i32 b) { return std::min(a, b); }>)),
    V2("v_max_i32", (op2<I32, I32, I32, [](i32 a, i32 b) { return std::max(a, b); }>)),
    V2("v_min_u32", (op2<U32, U32, U32, [](u32 a, u32 b) { return std::min(a, b); }>)),
    V2("v_max_u32", (op2<U32, U32, U32, [](u32 a, u32 b) { return std::max(a, b); }>)),
    V2C("v_mul_i32_i24", (op2<I32, U32, U32, [](u32 a, u32 b) { return i32(u32(sext24(a)) * u32(sext24(b))); }>)),
    V2("v_mul_hi_i32_i24", (op2<I32, U32, U32, mul_hi24>)),
    V2C("v_mul_u32_u24", (op2<U32, U32, U32, [](u32 a, u32 b) { return mask24(a) * mask24(b); }>)),
    V2("v_mul_hi_u32_u24", (op2<U32, U32, U32, [](u32 a, u32 b) { return (u32(u64(mask24(a)) * mask24(b) >> 32)); }>)),
    {"v_mul_lo_u32", "dv1u,sa1u,sa1u", "", CLASS_VALU, op2<U32, U32, U32, [](u32 a, u32 b) { return a * b; }>},
    {"v_mul_hi_u32", "dv1u,sa1u,sa1u", "", CLASS_VALU, op2<U32, U32, U32, [](u32 a, u32 b) { return (u32(u64(a) * b >> 32)); }>},
    {"v_mul_hi_i32", "dv1u,sa1u,sa1u", "", CLASS_VALU, op2<I32, I32, I32, [](i32 a, i32 b) { return (i32(i64(a) * b >> 32)); }>},
    {"v_bcnt_u32_b32", "dv1u,sa1u,sa1u", "", CLASS_VALU, op2<U32, U32, U32, [](u32 a, u32 b) { return u32(std::popcount(a)) + b; }>},
    {"v_bfm_b32", "dv1u,sa1u,sa1u", "", CLASS_VALU, op2<U32, U32, U32, [](u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); }>},
    V3("v_bfe_u32", (op3<U32, U32, U32, U32, bfe_u>)),
    V3("v_bfe_i32", (op3<I32, I32, U32, U32, bfe_i>)),
    V3("v_bfi_b32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return (a & b) | (~a & c); }>)),
    V3("v_alignbit_b32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return (u32((u64(a) << 32 | b) >> (c & 31))); }>)),
    V3("v_alignbyte_b32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return (u32((u64(a) << 32 | b) >> (8 * (c & 3)))); }>)),
    V3("v_perm_b32", (op3<U32, U32, U32, U32, perm>)),
    V3("v_min3_i32", (op3<I32, I32, I32, I32, [](i32 a, i32 b, i32 c) { return std::min(std::min(a, b), c); }>)),
    V3("v_max3_i32", (op3<I32, I32, I32, I32, [](i32 a, i32 b, i32 c) { return std::max(std::max(a, b), c); }>)),
    V3("v_med3_i32", (op3<I32, I32, I32, I32, med3<i32>>)),
    V3("v_min3_u32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return std::min(std::min(a, b), c); }>)),
    V3("v_max3_u32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return std::max(std::max(a, b), c); }>)),
    V3("v_med3_u32", (op3<U32, U32, U32, U32, med3<u32>>)),
    V3C("v_mad_i32_i24", (op3<I32, U32, U32, I32, [](u32 a, u32 b, i32 c) { return i32(u32(sext24(a)) * u32(sext24(b)) + u32(c)); }>)),
    V3C("v_mad_u32_u24", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return mask24(a) * mask24(b) + c; }>)),
    {"v_mad_u64_u32", "dv2u,ds2u,sa1u,sa1u,sa2u", "", CLASS_VALU, mad_wide<false>},
    {"v_mad_i64_i32", "dv2u,ds2u,sa1u,sa1u,sa2u", "", CLASS_VALU, mad_wide<true>},
    {"v_mad_u32_u16", "dv1u,sa1h,sa1h,sa1u", "op_sel", CLASS_VALU, op3<U32, U16, U16, U32, [](u16 a, u16 b, u32 c) { return u32(a) * b + c; }>},
    {"v_mad_i32_i16", "dv1u,sa1h,sa1h,sa1u", "op_sel", CLASS_VALU, op3<I32, I16, I16, I32, [](i16 a, i16 b, i32 c) { return i32(u32(i32(a) * b) + u32(c)); }>},
    {"v_lshl_add_u64", "dv2u,sa2u,sa1u,sa2u", "", CLASS_VALU, op3<U64, U64, U32, U64, [](u64 a, u32 b, u64 c) { return (a << (b & 7)) + c; }>},
    V3("v_lshl_add_u32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; }>)),
    V3("v_add_lshl_u32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); }>)),
    V3("v_lshl_or_b32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return a << (b & 31) | c; }>)),
    V3("v_and_or_b32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return (a & b) | c; }>)),
    V3("v_or3_b32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return a | b | c; }>)),
    V3("v_add3_u32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return a + b + c; }>)),
    V3("v_xad_u32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return (a ^ b) + c; }>)),
    {"v_bitop3_b32", "dv1u,sa1u,sa1u,sa1u", "bitop3", CLASS_VALU, bitop3<U32>},
    {"v_bitop3_b16", "dv1h,sa1h,sa1h,sa1h", "bitop3 op_sel", CLASS_VALU, bitop3<U16K>},
    V3("v_sad_u8", (op3<U32, U32, U32, U32, sad_u8>)),
    V3("v_sad_u32", (op3<U32, U32, U32, U32, [](u32 a, u32 b, u32 c) { return ((a > b ? a - b : b - a) + c); }>)),
    V3("v_dot4_i32_i8", (op3<I32, I32, I32, I32, dot4>)),
    V2H("v_add_u16", (sat2<U16, ADD>)),
    V2H("v_sub_u16", (sat2<U16, SUB>)),
    V2H("v_subrev_u16", (sat2<U16, RSUB>)),
    V2H("v_mul_lo_u16", (op2<U16, U16, U16, [](u16 a, u16 b) { return u16(u32(a) * b); }>)),
    V2H("v_lshlrev_b16", (op2<U16, U16, U16, [](u16 a, u16 b) { return u16(b << (a & 15)); }>)),
    V2H("v_lshrrev_b16", (op2<U16, U16, U16, [](u16 a, u16 b) { return (u16(b >> (a & 15))); }>)),
    V2H("v_ashrrev_i16", (op2<I16, U16, I16, [](u16 a, i16 b) { return (i16(b >> (a & 15))); }>)),
    V2H("v_max_u16", (op2<U16, U16, U16, [](u16 a, u16 b) { return std::max(a, b); }>)),
    V2H("v_max_i16", (op2<I16, I16, I16, [](i16 a, i16 b) { return std::max(a, b); }>)),
    V2H("v_min_u16", (op2<U16, U16, U16, [](u16 a, u16 b) { return std::min(a, b); }>)),
    V2H("v_min_i16", (op2<I16, I16, I16, [](i16 a, i16 b) { return std::min(a, b); }>)),
    {"v_add_i16", "dv1h,sa1h,sa1h", "clamp op_sel", CLASS_VALU, sat2<I16K, ADD>},
    {"v_sub_i16", "dv1h,sa1h,sa1h", "clamp op_sel", CLASS_VALU, sat2<I16K, SUB>},
    V3H("v_mad_u16", (sat3<U16K, MAD>)),
    V3H("v_mad_i16", (sat3<I16K, MAD>)),
    {"v_mad_legacy_u16", "dv1h,sa1h,sa1h,sa1h", "clamp", CLASS_VALU, sat3<U16, MAD>},
    {"v_mad_legacy_i16", "dv1h,sa1h,sa1h,sa1h", "clamp", CLASS_VALU, sat3<I16, MAD>},
};
static const OpTable valu_int_table(VALU_INT);

#define CMP1(op, cname, suffix, spec, T, expr)                                                                     \
  {"v_cmp_" cname "_" suffix, spec, "sdwa", CLASS_VALU, cmp<T, T, [](T::t a, T::t b) { return (expr); }, false>},     \
  {"v_cmpx_" cname "_" suffix, spec, "sdwa", CLASS_VALU, cmp<T, T, [](T::t a, T::t b) { return (expr); }, true>}
#define CMPS(suffix, spec, T)                          \
  CMP1(EQ, "eq", suffix, spec, T, a == b),             \
  CMP1(NE, "ne", suffix, spec, T, a != b),             \
  CMP1(LT, "lt", suffix, spec, T, a < b),              \
  CMP1(LE, "le", suffix, spec, T, a <= b),             \
  CMP1(GT, "gt", suffix, spec, T, a > b),              \
  CMP1(GE, "ge", suffix, spec, T, a >= b)
const OpDef VALU_CMP[] = {
    CMPS("i32", "ds2u,sa1u,sa1u", I32), CMPS("u32", "ds2u,sa1u,sa1u", U32),
    CMPS("i16", "ds2u,sa1h,sa1h", I16), CMPS("u16", "ds2u,sa1h,sa1h", U16),
    CMPS("i64", "ds2u,sa2u,sa2u", I64), CMPS("u64", "ds2u,sa2u,sa2u", U64),
};
static const OpTable valu_cmp_table(VALU_CMP);

}  // namespace cdna
