// SPDX-License-Identifier: Apache-2.0
// Scalar ALU, branches and the scalar unit's odds and ends.
#include <bit>

#include "fetch.h"
#include "machine.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;
using i64 = int64_t;

struct R32 { u32 value; u32 scc; };
struct R64 { u64 value; u32 scc; };

// Handlers by shape: sources are scalar operands; F gives the value, or the value and SCC.
template <auto F> void mov32(Wave& w, const Inst& I) { put_s32(w, I, 0, F(scalar32(w, I, 1))); }
template <auto F> void mov64(Wave& w, const Inst& I) { put_s64(w, I, 0, F(scalar64(w, I, 1))); }
template <auto F> void un32(Wave& w, const Inst& I) {
  const R32 r = F(scalar32(w, I, 1));
  put_s32(w, I, 0, r.value);
  w.scc = r.scc;
}
template <auto F> void un64(Wave& w, const Inst& I) {
  const R64 r = F(scalar64(w, I, 1));
  put_s64(w, I, 0, r.value);
  w.scc = r.scc;
}
template <auto F> void un64to32(Wave& w, const Inst& I) {
  const R32 r = F(scalar64(w, I, 1));
  put_s32(w, I, 0, r.value);
  w.scc = r.scc;
}
template <auto F> void find64(Wave& w, const Inst& I) { put_s32(w, I, 0, F(scalar64(w, I, 1))); }
template <auto F> void bin32(Wave& w, const Inst& I) {
  const R32 r = F(scalar32(w, I, 1), scalar32(w, I, 2));
  put_s32(w, I, 0, r.value);
  w.scc = r.scc;
}
template <auto F> void plain32(Wave& w, const Inst& I) { put_s32(w, I, 0, F(scalar32(w, I, 1), scalar32(w, I, 2))); }
template <auto F> void carry32(Wave& w, const Inst& I) {
  const R32 r = F(scalar32(w, I, 1), scalar32(w, I, 2), w.scc);
  put_s32(w, I, 0, r.value);
  w.scc = r.scc;
}
// 64-bit bitwise operations merge lane masks, whose bits for lanes that are off may never have been written.
inline u64 mask_source(Wave& w, const Inst& I, int k) {
  return I.ops[k].kind == KIND_SGPR ? w.s64(I.ops[k].reg) : scalar64(w, I, k);
}
template <auto F> void bin64(Wave& w, const Inst& I) {
  const R64 r = F(mask_source(w, I, 1), mask_source(w, I, 2));
  put_s64(w, I, 0, r.value);
  w.scc = r.scc;
}
template <auto F> void shift64(Wave& w, const Inst& I) {
  const R64 r = F(scalar64(w, I, 1), scalar32(w, I, 2));
  put_s64(w, I, 0, r.value);
  w.scc = r.scc;
}
template <auto F> void cmp32(Wave& w, const Inst& I) { w.scc = F(scalar32(w, I, 0), scalar32(w, I, 1)); }
template <auto F> void cmp64(Wave& w, const Inst& I) { w.scc = F(scalar64(w, I, 0), scalar64(w, I, 1)); }
template <auto F> void bit64(Wave& w, const Inst& I) { w.scc = F(scalar64(w, I, 0), scalar32(w, I, 1)); }
// SOPK: the second operand is a sign-extended 16-bit immediate, decoded by the parser.
template <auto F> void addk(Wave& w, const Inst& I) {
  const R32 r = F(scalar32(w, I, 0), u32(I.ops[1].value));
  put_s32(w, I, 0, r.value);
  w.scc = r.scc;
}
template <auto F> void cmpk(Wave& w, const Inst& I) { w.scc = F(scalar32(w, I, 0), u32(I.ops[1].value)); }
void movk(Wave& w, const Inst& I) { put_s32(w, I, 0, u32(I.ops[1].value)); }
void mulk(Wave& w, const Inst& I) { put_s32(w, I, 0, scalar32(w, I, 0) * u32(I.ops[1].value)); }
void cmovk(Wave& w, const Inst& I) { if (w.scc) put_s32(w, I, 0, u32(I.ops[1].value)); }
// F(source, exec) is the new EXEC; the old one goes to the destination.
template <auto F> void saveexec(Wave& w, const Inst& I) {
  const u64 s = scalar64(w, I, 1), old = w.exec(), now = F(s, old);
  w.set_exec(now);
  put_s64(w, I, 0, old);
  w.scc = now != 0;
}
template <auto F> void wrexec(Wave& w, const Inst& I) {
  const u64 now = F(scalar64(w, I, 1), w.exec());
  w.set_exec(now);
  put_s64(w, I, 0, now);
  w.scc = now != 0;
}

constexpr R32 nz(u32 v) { return {v, v != 0}; }
constexpr R64 nz64(u64 v) { return {v, v != 0}; }
constexpr R32 bfe_u(u32 a, u32 b) {
  const u32 off = b & 31, width = b >> 16 & 0x7f;
  const u64 mask = width >= 32 ? 0xffffffffull : (1ull << width) - 1;
  return nz(u32(a >> off & mask));
}
constexpr R32 bfe_i(u32 a, u32 b) {
  const u32 off = b & 31, width = b >> 16 & 0x7f;
  if (!width) return {0, 0};
  const u32 v = u32(i32(a) >> off);
  if (width >= 32) return nz(v);
  return nz(u32(i32(v << (32 - width)) >> (32 - width)));
}
constexpr R64 bfe_u64(u64 a, u32 b) {
  const u32 off = b & 63, width = b >> 16 & 0x7f;
  return nz64(width >= 64 ? a >> off : a >> off & ((1ull << width) - 1));
}
constexpr R64 bfe_i64(u64 a, u32 b) {
  const u32 off = b & 63, width = b >> 16 & 0x7f;
  if (!width) return {0, 0};
  const u64 v = u64(i64(a) >> off);
  if (width >= 64) return nz64(v);
  return nz64(u64(i64(v << (64 - width)) >> (64 - width)));
}
constexpr u32 reverse32(u32 a) {
  u32 r = 0;
  for (int i = 0; i < 32; ++i) r |= (a >> i & 1) << (31 - i);
  return r;
}
constexpr R32 addi(u32 a, u32 b) {
  const u32 r = a + b;
  return {r, (~(a ^ b) & (a ^ r)) >> 31};
}
constexpr R32 subi(u32 a, u32 b) {
  const u32 r = a - b;
  return {r, ((a ^ b) & (a ^ r)) >> 31};
}
template <int N> constexpr R32 lshl_add(u32 a, u32 b) {
  const u64 r = (u64(a) << N) + b;
  return {u32(r), r >> 32 != 0};
}
constexpr R32 sub_borrow(u32 a, u32 b, u32 c) { return {a - b - c, u64(b) + c > a}; }
constexpr u32 flbit(u32 a) { return a ? u32(std::countl_zero(a)) : ~0u; }

void cselect32(Wave& w, const Inst& I) { put_s32(w, I, 0, w.scc ? scalar32(w, I, 1) : scalar32(w, I, 2)); }
void cselect64(Wave& w, const Inst& I) { put_s64(w, I, 0, w.scc ? scalar64(w, I, 1) : scalar64(w, I, 2)); }
void cmov32(Wave& w, const Inst& I) { if (w.scc) put_s32(w, I, 0, scalar32(w, I, 1)); }
void cmov64(Wave& w, const Inst& I) { if (w.scc) put_s64(w, I, 0, scalar64(w, I, 1)); }
void bitset0(Wave& w, const Inst& I) { put_s32(w, I, 0, w.s[I.ops[0].reg] & ~(1u << (scalar32(w, I, 1) & 31))); }
void bitset1(Wave& w, const Inst& I) { put_s32(w, I, 0, w.s[I.ops[0].reg] | 1u << (scalar32(w, I, 1) & 31)); }

template <auto C> void branch(Wave& w, const Inst& I) { if (C(w)) w.pc = I.target; }
void nop(Wave&, const Inst&) {}
void memtime(Wave& w, const Inst& I) { put_s64(w, I, 0, machine_clock(w)); }
void memrealtime(Wave& w, const Inst& I) { put_s64(w, I, 0, machine_clock(w)); }

// s_getreg_b32 / s_setreg: the immediate is the encoded hwreg(id, offset, size).
void getreg(Wave& w, const Inst& I) {
  const u32 id = I.imm & 63, off = I.imm >> 6 & 31, size = (I.imm >> 11 & 31) + 1;
  u32 value;
  if (id == 20) value = u32(w.wg->xcd);                    // HW_REG_XCC_ID
  else if (id == 4) value = u32(w.wave_in_group & 15) | u32(w.wg->cu & 15) << 8;  // HW_REG_HW_ID: wave and CU fields
  else fail(w, "s_getreg_b32 of hardware register " + std::to_string(id) + " is not modelled");
  put_s32(w, I, 0, value >> off & u32((1ull << size) - 1));
}

// s_setreg_imm32_b32: MODE's FP16_OVFL bit may be changed; its rounding fields may be set to what they are, 0.
void setreg(Wave& w, const Inst& I) {
  const u32 id = I.imm & 63, off = I.imm >> 6 & 31, size = (I.imm >> 11 & 31) + 1;
  if (id == 1 && off + size <= 4 && I.ops[1].value == 0) return;
  if (id != 1 || off != 23 || size != 1) fail(w, "s_setreg of hardware register " + std::to_string(id) + ", bits " + std::to_string(off) + " .. " + std::to_string(off + size - 1) + " is not modelled");
  w.fp16_ovfl = I.ops[1].value & 1;
}

}  // namespace

const OpDef SALU[] = {
#define S1(n, ...) {n, "ds1u,ss1u", "", CLASS_SALU, __VA_ARGS__}
#define S1W(n, ...) {n, "ds2u,ss2u", "", CLASS_SALU, __VA_ARGS__}
#define S2(n, ...) {n, "ds1u,ss1u,ss1u", "", CLASS_SALU, __VA_ARGS__}
#define S2W(n, ...) {n, "ds2u,ss2u,ss2u", "", CLASS_SALU, __VA_ARGS__}
#define SHW(n, ...) {n, "ds2u,ss2u,ss1u", "", CLASS_SALU, __VA_ARGS__}
#define SC(n, ...) {n, "ss1u,ss1u", "", CLASS_SALU, __VA_ARGS__}
#define SCW(n, ...) {n, "ss2u,ss2u", "", CLASS_SALU, __VA_ARGS__}
#define SK(n, ...) {n, "xs1u,k", "", CLASS_SALU, __VA_ARGS__}
#define SKC(n, ...) {n, "ss1u,k", "", CLASS_SALU, __VA_ARGS__}
#define SKU(n, ...) {n, "ss1u,ku", "", CLASS_SALU, __VA_ARGS__}
    S1("s_mov_b32", mov32<[](u32 a) { return a; }>),
    S1W("s_mov_b64", mov64<[](u64 a) { return a; }>),
    S1("s_cmov_b32", cmov32),
    S1W("s_cmov_b64", cmov64),
    S1("s_not_b32", un32<[](u32 a) { return nz(~a); }>),
    S1W("s_not_b64", un64<[](u64 a) { return nz64(~a); }>),
    S1("s_brev_b32", mov32<reverse32>),
    S1W("s_brev_b64", mov64<[](u64 a) { return ((u64(reverse32(u32(a))) << 32 | reverse32(u32(a >> 32)))); }>),
    S1("s_bcnt0_i32_b32", un32<[](u32 a) { return nz(u32(std::popcount(~a))); }>),
    {"s_bcnt0_i32_b64", "ds1u,ss2u", "", CLASS_SALU, un64to32<[](u64 a) { return nz(u32(std::popcount(~a))); }>},
    S1("s_bcnt1_i32_b32", un32<[](u32 a) { return nz(u32(std::popcount(a))); }>),
    {"s_bcnt1_i32_b64", "ds1u,ss2u", "", CLASS_SALU, un64to32<[](u64 a) { return nz(u32(std::popcount(a))); }>},
    S1("s_ff0_i32_b32", mov32<[](u32 a) { return ~a ? u32(std::countr_one(a)) : ~0u; }>),
    {"s_ff0_i32_b64", "ds1u,ss2u", "", CLASS_SALU, find64<[](u64 a) { return ~a ? u32(std::countr_one(a)) : ~0u; }>},
    S1("s_ff1_i32_b32", mov32<[](u32 a) { return a ? u32(std::countr_zero(a)) : ~0u; }>),
    {"s_ff1_i32_b64", "ds1u,ss2u", "", CLASS_SALU, find64<[](u64 a) { return a ? u32(std::countr_zero(a)) : ~0u; }>},
    S1("s_flbit_i32_b32", mov32<flbit>),
    {"s_flbit_i32_b64", "ds1u,ss2u", "", CLASS_SALU, find64<[](u64 a) { return a ? u32(std::countl_zero(a)) : ~0u; }>},
    S1("s_flbit_i32", mov32<[](u32 a) { return flbit(i32(a) < 0 ? ~a : a); }>),
    {"s_flbit_i32_i64", "ds1u,ss2u", "", CLASS_SALU,
     find64<[](u64 a) { a = i64(a) < 0 ? ~a : a; return a ? u32(std::countl_zero(a)) : ~0u; }>},
    S1("s_sext_i32_i8", mov32<[](u32 a) { return u32(i32(int8_t(a))); }>),
    S1("s_sext_i32_i16", mov32<[](u32 a) { return u32(i32(int16_t(a))); }>),
    S1("s_bitset0_b32", bitset0),
    S1("s_bitset1_b32", bitset1),
    S1("s_abs_i32", un32<[](u32 a) { return nz(i32(a) < 0 ? 0 - a : a); }>),
    S1W("s_and_saveexec_b64", saveexec<[](u64 s, u64 e) { return s & e; }>),
    S1W("s_or_saveexec_b64", saveexec<[](u64 s, u64 e) { return s | e; }>),
    S1W("s_xor_saveexec_b64", saveexec<[](u64 s, u64 e) { return s ^ e; }>),
    S1W("s_andn2_saveexec_b64", saveexec<[](u64 s, u64 e) { return s & ~e; }>),
    S1W("s_orn2_saveexec_b64", saveexec<[](u64 s, u64 e) { return s | ~e; }>),
    S1W("s_nand_saveexec_b64", saveexec<[](u64 s, u64 e) { return ~(s & e); }>),
    S1W("s_nor_saveexec_b64", saveexec<[](u64 s, u64 e) { return ~(s | e); }>),
    S1W("s_xnor_saveexec_b64", saveexec<[](u64 s, u64 e) { return ~(s ^ e); }>),
    S1W("s_andn1_saveexec_b64", saveexec<[](u64 s, u64 e) { return ~s & e; }>),
    S1W("s_orn1_saveexec_b64", saveexec<[](u64 s, u64 e) { return ~s | e; }>),
    S1W("s_andn1_wrexec_b64", wrexec<[](u64 s, u64 e) { return ~s & e; }>),
    S1W("s_andn2_wrexec_b64", wrexec<[](u64 s, u64 e) { return s & ~e; }>),

    S2("s_add_u32", bin32<[](u32 a, u32 b) { return R32{a + b, a + b < a}; }>),
    S2("s_sub_u32", bin32<[](u32 a, u32 b) { return sub_borrow(a, b, 0); }>),
    S2("s_add_i32", bin32<addi>),
    S2("s_sub_i32", bin32<subi>),
    S2("s_addc_u32", carry32<[](u32 a, u32 b, u32 c) { const u64 r = u64(a) + b + c; return R32{u32(r), u32(r >> 32)}; }>),
    S2("s_subb_u32", carry32<[](u32 a, u32 b, u32 c) { return sub_borrow(a, b, c); }>),
    S2("s_min_i32", bin32<[](u32 a, u32 b) { return i32(a) < i32(b) ? R32{a, 1} : R32{b, 0}; }>),
    S2("s_min_u32", bin32<[](u32 a, u32 b) { return a < b ? R32{a, 1} : R32{b, 0}; }>),
    S2("s_max_i32", bin32<[](u32 a, u32 b) { return i32(a) >= i32(b) ? R32{a, 1} : R32{b, 0}; }>),
    S2("s_max_u32", bin32<[](u32 a, u32 b) { return a >= b ? R32{a, 1} : R32{b, 0}; }>),
    S2("s_cselect_b32", cselect32),
    S2W("s_cselect_b64", cselect64),
    S2("s_and_b32", bin32<[](u32 a, u32 b) { return nz(a & b); }>),
    S2W("s_and_b64", bin64<[](u64 a, u64 b) { return nz64(a & b); }>),
    S2("s_or_b32", bin32<[](u32 a, u32 b) { return nz(a | b); }>),
    S2W("s_or_b64", bin64<[](u64 a, u64 b) { return nz64(a | b); }>),
    S2("s_xor_b32", bin32<[](u32 a, u32 b) { return nz(a ^ b); }>),
    S2W("s_xor_b64", bin64<[](u64 a, u64 b) { return nz64(a ^ b); }>),
    S2("s_andn2_b32", bin32<[](u32 a, u32 b) { return nz(a & ~b); }>),
    S2W("s_andn2_b64", bin64<[](u64 a, u64 b) { return nz64(a & ~b); }>),
    S2("s_orn2_b32", bin32<[](u32 a, u32 b) { return nz(a | ~b); }>),
    S2W("s_orn2_b64", bin64<[](u64 a, u64 b) { return nz64(a | ~b); }>),
    S2("s_nand_b32", bin32<[](u32 a, u32 b) { return nz(~(a & b)); }>),
    S2W("s_nand_b64", bin64<[](u64 a, u64 b) { return nz64(~(a & b)); }>),
    S2("s_nor_b32", bin32<[](u32 a, u32 b) { return nz(~(a | b)); }>),
    S2W("s_nor_b64", bin64<[](u64 a, u64 b) { return nz64(~(a | b)); }>),
    S2("s_xnor_b32", bin32<[](u32 a, u32 b) { return nz(~(a ^ b)); }>),
    S2W("s_xnor_b64", bin64<[](u64 a, u64 b) { return nz64(~(a ^ b)); }>),
    S2("s_lshl_b32", bin32<[](u32 a, u32 b) { return nz(a << (b & 31)); }>),
    SHW("s_lshl_b64", shift64<[](u64 a, u32 b) { return nz64(a << (b & 63)); }>),
    S2("s_lshr_b32", bin32<[](u32 a, u32 b) { return ((nz(a >> (b & 31)))); }>),
    SHW("s_lshr_b64", shift64<[](u64 a, u32 b) { return ((nz64(a >> (b & 63)))); }>),
    S2("s_ashr_i32", bin32<[](u32 a, u32 b) { return ((nz(u32(i32(a) >> (b & 31))))); }>),
    SHW("s_ashr_i64", shift64<[](u64 a, u32 b) { return ((nz64(u64(i64(a) >> (b & 63))))); }>),
    S2("s_bfm_b32", plain32<[](u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); }>),
    {"s_bfm_b64", "ds2u,ss1u,ss1u", "", CLASS_SALU,
     [](Wave& w, const Inst& I) { put_s64(w, I, 0, ((1ull << (scalar32(w, I, 1) & 63)) - 1) << (scalar32(w, I, 2) & 63)); }},
    S2("s_mul_i32", plain32<[](u32 a, u32 b) { return a * b; }>),
    S2("s_mul_hi_u32", plain32<[](u32 a, u32 b) { return ((u32(u64(a) * b >> 32))); }>),
    S2("s_mul_hi_i32", plain32<[](u32 a, u32 b) { return ((u32(u64(i64(i32(a)) * i32(b)) >> 32))); }>),
    S2("s_bfe_u32", bin32<bfe_u>),
    S2("s_bfe_i32", bin32<bfe_i>),
    SHW("s_bfe_u64", shift64<bfe_u64>),
    SHW("s_bfe_i64", shift64<bfe_i64>),
    S2("s_absdiff_i32", bin32<[](u32 a, u32 b) { const u32 d = a - b; return nz(i32(d) < 0 ? 0 - d : d); }>),
    S2("s_lshl1_add_u32", bin32<lshl_add<1>>),
    S2("s_lshl2_add_u32", bin32<lshl_add<2>>),
    S2("s_lshl3_add_u32", bin32<lshl_add<3>>),
    S2("s_lshl4_add_u32", bin32<lshl_add<4>>),
    S2("s_pack_ll_b32_b16", plain32<[](u32 a, u32 b) { return (a & 0xffff) | b << 16; }>),
    S2("s_pack_lh_b32_b16", plain32<[](u32 a, u32 b) { return (a & 0xffff) | (b & 0xffff0000u); }>),
    S2("s_pack_hh_b32_b16", plain32<[](u32 a, u32 b) { return ((a >> 16 | (b & 0xffff0000u))); }>),

    SC("s_cmp_eq_i32", cmp32<[](u32 a, u32 b) { return a == b; }>),
    SC("s_cmp_lg_i32", cmp32<[](u32 a, u32 b) { return a != b; }>),
    SC("s_cmp_gt_i32", cmp32<[](u32 a, u32 b) { return ((i32(a) > i32(b))); }>),
    SC("s_cmp_ge_i32", cmp32<[](u32 a, u32 b) { return ((i32(a) >= i32(b))); }>),
    SC("s_cmp_lt_i32", cmp32<[](u32 a, u32 b) { return i32(a) < i32(b); }>),
    SC("s_cmp_le_i32", cmp32<[](u32 a, u32 b) { return i32(a) <= i32(b); }>),
    SC("s_cmp_eq_u32", cmp32<[](u32 a, u32 b) { return a == b; }>),
    SC("s_cmp_lg_u32", cmp32<[](u32 a, u32 b) { return a != b; }>),
    SC("s_cmp_gt_u32", cmp32<[](u32 a, u32 b) { return (a > b); }>),
    SC("s_cmp_ge_u32", cmp32<[](u32 a, u32 b) { return (a >= b); }>),
    SC("s_cmp_lt_u32", cmp32<[](u32 a, u32 b) { return a < b; }>),
    SC("s_cmp_le_u32", cmp32<[](u32 a, u32 b) { return a <= b; }>),
    SCW("s_cmp_eq_u64", cmp64<[](u64 a, u64 b) { return a == b; }>),
    SCW("s_cmp_lg_u64", cmp64<[](u64 a, u64 b) { return a != b; }>),
    SC("s_bitcmp0_b32", cmp32<[](u32 a, u32 b) { return ((!(a >> (b & 31) & 1))); }>),
    SC("s_bitcmp1_b32", cmp32<[](u32 a, u32 b) { return (((a >> (b & 31) & 1) != 0)); }>),
    {"s_bitcmp0_b64", "ss2u,ss1u", "", CLASS_SALU, bit64<[](u64 a, u32 b) { return ((!(a >> (b & 63) & 1))); }>},
    {"s_bitcmp1_b64", "ss2u,ss1u", "", CLASS_SALU, bit64<[](u64 a, u32 b) { return (((a >> (b & 63) & 1) != 0)); }>},

    {"s_movk_i32", "ds1u,k", "", CLASS_SALU, movk},
    SK("s_cmovk_i32", cmovk),
    SK("s_addk_i32", addk<addi>),
    SK("s_mulk_i32", mulk),
    SKC("s_cmpk_eq_i32", cmpk<[](u32 a, u32 b) { return a == b; }>),
    SKC("s_cmpk_lg_i32", cmpk<[](u32 a, u32 b) { return a != b; }>),
    SKC("s_cmpk_gt_i32", cmpk<[](u32 a, u32 b) { return ((i32(a) > i32(b))); }>),
    SKC("s_cmpk_ge_i32", cmpk<[](u32 a, u32 b) { return ((i32(a) >= i32(b))); }>),
    SKC("s_cmpk_lt_i32", cmpk<[](u32 a, u32 b) { return i32(a) < i32(b); }>),
    SKC("s_cmpk_le_i32", cmpk<[](u32 a, u32 b) { return i32(a) <= i32(b); }>),
    SKU("s_cmpk_eq_u32", cmpk<[](u32 a, u32 b) { return a == b; }>),
    SKU("s_cmpk_lg_u32", cmpk<[](u32 a, u32 b) { return a != b; }>),
    SKU("s_cmpk_gt_u32", cmpk<[](u32 a, u32 b) { return (a > b); }>),
    SKU("s_cmpk_ge_u32", cmpk<[](u32 a, u32 b) { return (a >= b); }>),
    SKU("s_cmpk_lt_u32", cmpk<[](u32 a, u32 b) { return a < b; }>),
    SKU("s_cmpk_le_u32", cmpk<[](u32 a, u32 b) { return a <= b; }>),
    {"s_getreg_b32", "ds1u,r", "", CLASS_SALU, getreg},
    {"s_setreg_imm32_b32", "r,ss1u", "", CLASS_SALU, setreg},

    {"s_branch", "l", "", CLASS_BRANCH, branch<[](Wave&) { return true; }>},
    {"s_cbranch_scc0", "l", "", CLASS_BRANCH, branch<[](Wave& w) { return !w.scc; }>},
    {"s_cbranch_scc1", "l", "", CLASS_BRANCH, branch<[](Wave& w) { return w.scc != 0; }>},
    {"s_cbranch_vccz", "l", "", CLASS_BRANCH, branch<[](Wave& w) { return w.vcc() == 0; }>},
    {"s_cbranch_vccnz", "l", "", CLASS_BRANCH, branch<[](Wave& w) { return w.vcc() != 0; }>},
    {"s_cbranch_execz", "l", "", CLASS_BRANCH, branch<[](Wave& w) { return w.exec() == 0; }>},
    {"s_cbranch_execnz", "l", "", CLASS_BRANCH, branch<[](Wave& w) { return w.exec() != 0; }>},
    {"s_nop", "i", "", CLASS_OTHER, nop},
    {"s_setprio", "i", "", CLASS_OTHER, nop},
    {"s_icache_inv", "", "", CLASS_OTHER, nop},
    {"s_memtime", "ds2u", "", CLASS_SMEM, memtime},
    {"s_memrealtime", "ds2u", "", CLASS_SMEM, memrealtime},
};
static const OpTable salu_table(SALU);

}  // namespace cdna
