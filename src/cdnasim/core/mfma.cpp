// SPDX-License-Identifier: Apache-2.0
// Matrix instructions. EXEC is ignored. Lane layouts (one block): with G = 64 / M lane groups, lane l holds row
// (A) or column (B) l % M and the K elements of group l / M, contiguous unless noted. Results: 16x16 has row
// 4 (l / 16) + r in register r, column l % 16; 32x32 has row 8 (r / 4) + 4 (l / 32) + r % 4, column l % 32.
//
// Products are exact; the order and the width in which hardware adds them is not documented. Here a sum of
// products is formed in f32 (per block of 32 for the scaled forms), and the accumulator is added to it last.
#include <array>

#include "fetch.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u16 = uint16_t;

typedef float Row16 __attribute__((vector_size(64), aligned(4), may_alias));

#if defined(__AVX512F__)
inline Row16 fused(Row16 a, Row16 b, Row16 c) { return Row16(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c))); }
inline Row16 spread(float x) { return Row16(_mm512_set1_ps(x)); }
#else
inline Row16 spread(float x) { return Row16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Row16 fused(Row16 a, Row16 b, Row16 c) {
  for (int i = 0; i < 16; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}
#endif

// out[m][n] = sum over k, in order, of a[k][m] * b[k][n]. EXACT: the products fit f32, so that a fused multiply-add
// rounds as the product and the sum do.
template <int N, bool EXACT>
void multiply(const float* at, const float* bt, int k_len, float* out) {
  constexpr int V = N / 16, ROWS = 16 / V;
  for (int m = 0; m < N; m += ROWS) {
    Row16 acc[ROWS][V] = {};
    for (int k = 0; k < k_len; ++k) {
      const Row16* b = reinterpret_cast<const Row16*>(bt + k * N);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
        const Row16 x = spread(at[k * N + m + i]);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) acc[i][v] = EXACT ? fused(x, b[v], acc[i][v]) : acc[i][v] + x * b[v];
      }
    }
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < V; ++v) *reinterpret_cast<Row16*>(out + (m + i) * N + 16 * v) = acc[i][v];
  }
}

inline int result_row(int m_dim, int lane, int r) {
  return m_dim == 16 ? 4 * (lane / 16) + r : 8 * (r / 4) + 4 * (lane / 32) + r % 4;
}

const u32* register_lanes(Wave& w, const Inst& I, int k, int part, u32* tmp) {
  const Operand& o = I.ops[k];
  if (o.kind == KIND_VGPR) {
    if (w.vdef) check_vgpr_read(w, I, o.reg + part, ~0ull);
    return w.lane(o.reg + part);
  }
  if (o.kind != KIND_CONST) fail(w, "an MFMA source that is neither a register nor a constant");
  for (int l = 0; l < LANES; ++l) tmp[l] = u32(o.value);
  return tmp;
}

// out is [M][M] row-major; adds the accumulator (operand 3) and writes operand 0.
template <int M>
void accumulate(Wave& w, const Inst& I, const float* out) {
  constexpr int REGS = M * M / LANES;
  u32 r[REGS][LANES], tmp[LANES];
  for (int q = 0; q < REGS; ++q) {
    const u32* c = register_lanes(w, I, 3, q, tmp);
    for (int l0 = 0; l0 < LANES; l0 += 16)  // a row of the result, or half of one
      *reinterpret_cast<Row16*>(r[q] + l0) =
          *reinterpret_cast<const Row16*>(c + l0) + *reinterpret_cast<const Row16*>(out + result_row(M, l0, q) * M + l0 % M);
  }
  for (int q = 0; q < REGS; ++q) {
    std::memcpy(w.lane(I.ops[0].reg + q), r[q], sizeof r[q]);
    mark_written(w, I.ops[0].reg + q, ~0ull);
  }
}

void refuse_broadcast(Wave& w, const Inst& I) {
  if (I.cbsz | I.abid | I.blgp) fail(w, "cbsz / abid / blgp of this MFMA is not modelled");
}

// ---- elements of a plain operand: unpack(word array of a lane, element) -> float
struct Bf16 { static constexpr bool exact = true; static constexpr int per_word = 2; static float get(u32 x, int e) { return bf16_to_f32(u16(x >> (16 * e))); } };
struct Half { static constexpr bool exact = true; static constexpr int per_word = 2; static float get(u32 x, int e) { return f16_to_f32(u16(x >> (16 * e))); } };
struct Single { static constexpr bool exact = false; static constexpr int per_word = 1; static float get(u32 x, int) { return as_f32(x); } };

template <int M, int K, class T>
void mfma_f32(Wave& w, const Inst& I) {
  refuse_broadcast(w, I);
  constexpr int GROUPS = LANES / M, PER_LANE = K / GROUPS, WORDS = PER_LANE / T::per_word;
  float at[K * M], bt[K * M], out[M * M];
  u32 tmp[LANES];
  for (int q = 0; q < WORDS; ++q) {
    const u32* pa = register_lanes(w, I, 1, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < T::per_word; ++e) at[((l / M) * PER_LANE + q * T::per_word + e) * M + l % M] = T::get(pa[l], e);
    const u32* pb = register_lanes(w, I, 2, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < T::per_word; ++e) bt[((l / M) * PER_LANE + q * T::per_word + e) * M + l % M] = T::get(pb[l], e);
  }
  multiply<M, T::exact>(at, bt, K, out);
  accumulate<M>(w, I, out);
}

// ---- 8-bit formats, decoded by table
using Table = std::array<float, 256>;
Table make_table(const MiniFormat& f) {
  Table t{};
  const int codes = 1 << (1 + f.exp_bits + f.man_bits);
  for (int i = 0; i < codes; ++i) t[i] = mini_to_f32(f, u32(i));
  return t;
}
const Table T_OCP_E4M3 = make_table(OCP_E4M3), T_OCP_E5M2 = make_table(OCP_E5M2);
const Table T_FNUZ_E4M3 = make_table(FNUZ_E4M3), T_FNUZ_E5M2 = make_table(FNUZ_E5M2), T_E2M1 = make_table(E2M1);

template <bool E5> const Table& byte_table(const Wave& w) {
  if (w.k->arch == Arch::gfx942) return E5 ? T_FNUZ_E5M2 : T_FNUZ_E4M3;
  return E5 ? T_OCP_E5M2 : T_OCP_E4M3;
}

template <int M, int K, bool A5, bool B5>
void mfma_fp8(Wave& w, const Inst& I) {
  refuse_broadcast(w, I);
  constexpr int GROUPS = LANES / M, PER_LANE = K / GROUPS;
  const Table &ta = byte_table<A5>(w), &tb = byte_table<B5>(w);
  float at[K * M], bt[K * M], out[M * M];
  u32 tmp[LANES];
  for (int q = 0; q < PER_LANE / 4; ++q) {
    const u32* pa = register_lanes(w, I, 1, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < 4; ++e) at[((l / M) * PER_LANE + q * 4 + e) * M + l % M] = ta[pa[l] >> (8 * e) & 0xff];
    const u32* pb = register_lanes(w, I, 2, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < 4; ++e) bt[((l / M) * PER_LANE + q * 4 + e) * M + l % M] = tb[pb[l] >> (8 * e) & 0xff];
  }
  multiply<M, true>(at, bt, K, out);
  accumulate<M>(w, I, out);
}

// ---- scaled f8f6f4: cbsz and blgp name the formats (0 e4m3, 1 e5m2, 4 e2m1).
// An 8-bit operand's 32 bytes are two halves of 16: k = 16 g and K / 2 + 16 g. An e2m1 operand's 16 bytes are
// k = 32 g, low nibble first.
// ``out`` is [K][M].
#if defined(__AVX512F__)
// Sixteen lanes' values of byte or nibble ``e`` of a word each.
inline __m512 decode16(__m512i words, int e, int format, __m512 table) {
  if (format == 4) return _mm512_permutexvar_ps(_mm512_srli_epi32(words, unsigned(4 * e)), table);
  const __m512i x = _mm512_srli_epi32(words, unsigned(8 * e));
  const __m512i mag = _mm512_and_si512(x, _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x80)), 24);
  const bool e5 = format == 1;
  // The exponent moves from the small format's bias to f32's; denormals (the first codes) come from the table.
  __m512i value = _mm512_add_epi32(_mm512_slli_epi32(mag, e5 ? 21 : 20), _mm512_set1_epi32((127 - (e5 ? 15 : 7)) << 23));
  const __mmask16 tiny = _mm512_cmplt_epi32_mask(mag, _mm512_set1_epi32(e5 ? 4 : 8));
  value = _mm512_mask_mov_epi32(value, tiny, __m512i(_mm512_permutexvar_ps(mag, table)));
  if (e5) {
    value = _mm512_mask_mov_epi32(value, _mm512_cmpeq_epi32_mask(mag, _mm512_set1_epi32(0x7c)), _mm512_set1_epi32(0x7f800000));
    value = _mm512_mask_mov_epi32(value, _mm512_cmpgt_epi32_mask(mag, _mm512_set1_epi32(0x7c)), _mm512_set1_epi32(0x7fc00000));
  } else value = _mm512_mask_mov_epi32(value, _mm512_cmpeq_epi32_mask(mag, _mm512_set1_epi32(0x7f)), _mm512_set1_epi32(0x7fc00000));
  return __m512(_mm512_or_si512(value, sign));
}
#endif
template <int M>
inline void decode_row(const u32* lanes, int e, int format, const float* t, float* out) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_loadu_ps(t);
  for (int i = 0; i < M; i += 16) _mm512_storeu_ps(out + i, decode16(_mm512_loadu_si512(lanes + i), e, format, table));
#else
  const int bits = format == 4 ? 4 : 8;
  for (int i = 0; i < M; ++i) out[i] = t[lanes[i] >> (bits * e) & ((1u << bits) - 1)];
#endif
}
template <int M, int K>
void decode_f8f6f4(Wave& w, const Inst& I, int op, int format, float* out) {
  u32 tmp[LANES];
  const int words = format == 4 ? 4 : 8;
  if (format != 0 && format != 1 && format != 4) fail(w, "f8f6f4 operand format " + std::to_string(format) + " (6-bit) is not modelled");
  if (I.ops[op].width != words) fail(w, "f8f6f4 operand of " + std::to_string(I.ops[op].width) + " registers for format " + std::to_string(format));
  const float* t = (format == 4 ? T_E2M1 : format == 1 ? T_OCP_E5M2 : T_OCP_E4M3).data();
  for (int q = 0; q < words; ++q) {
    const u32* p = register_lanes(w, I, op, q, tmp);
    for (int g = 0; g < LANES / M; ++g) {
      const int k0 = format == 4 ? 32 * g + 8 * q : (q < 4 ? 0 : K / 2) + 16 * g + 4 * (q & 3);
      for (int e = 0; e < (format == 4 ? 8 : 4); ++e) decode_row<M>(p + g * M, e, format, t, out + (k0 + e) * M);
    }
  }
}

template <int M>
void add_scaled(const float* part, const u32 (*codes)[M], float* sum) {
  float col[M];
  for (int j = 0; j < M; ++j) col[j] = as_f32(codes[1][j] << 23);
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < M; v += 16) {
      const Row16 scale = spread(as_f32(codes[0][i] << 23)) * *reinterpret_cast<const Row16*>(col + v);
      *reinterpret_cast<Row16*>(sum + i * M + v) += *reinterpret_cast<const Row16*>(part + i * M + v) * scale;
    }
}

template <int M, int K, bool SCALED>
void mfma_f8f6f4(Wave& w, const Inst& I) {
  constexpr int BLOCKS = K / 32;
  float at[K * M], bt[K * M], part[M * M], sum[M * M] = {};
  decode_f8f6f4<M, K>(w, I, 1, I.cbsz, at);
  decode_f8f6f4<M, K>(w, I, 2, I.blgp, bt);
  u32 ta[LANES], tb[LANES];
  const u32 *sa = nullptr, *sb = nullptr;
  int byte_a = 0, byte_b = 0;
  if (SCALED) {
    sa = word(w, I, 4, 0, 0, ta);
    sb = word(w, I, 5, 0, 1, tb);
    byte_a = (I.op_sel & 1) | (I.op_sel_hi & 1) << 1;
    byte_b = (I.op_sel >> 1 & 1) | (I.op_sel_hi >> 1 & 1) << 1;
  }
  for (int b = 0; b < BLOCKS; ++b) {
    multiply<M, true>(at + 32 * b * M, bt + 32 * b * M, 32, part);
    // The product of two moderate scales stays a normal float: no rounding on the way.
    const auto code = [&](const u32* s, int byte, int i) { return s ? s[b * M + i] >> (8 * byte) & 0xff : 127u; };
    u32 codes[2][M], out_of_range = 0;
    for (int i = 0; i < M; ++i) {
      codes[0][i] = code(sa, byte_a, i);
      codes[1][i] = code(sb, byte_b, i);
      out_of_range |= u32(codes[0][i] - 90 > 74) | u32(codes[1][i] - 90 > 74);
    }
    if (!out_of_range) add_scaled<M>(part, codes, sum);
    else
      for (int i = 0; i < M; ++i)
        for (int j = 0; j < M; ++j)
          sum[i * M + j] += float(double(part[i * M + j]) * e8m0_to_f32(codes[0][i]) * e8m0_to_f32(codes[1][j]));
  }
  accumulate<M>(w, I, sum);
}

// ---- integers: exact, wrapping in 32 bits
template <int M, int K>
void mfma_i8(Wave& w, const Inst& I) {
  refuse_broadcast(w, I);
  constexpr int GROUPS = LANES / M, PER_LANE = K / GROUPS, REGS = M * M / LANES;
  int8_t a[M][K], b[M][K];
  u32 tmp[LANES];
  for (int q = 0; q < PER_LANE / 4; ++q) {
    const u32* pa = register_lanes(w, I, 1, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < 4; ++e) a[l % M][(l / M) * PER_LANE + q * 4 + e] = int8_t(pa[l] >> (8 * e));
    const u32* pb = register_lanes(w, I, 2, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < 4; ++e) b[l % M][(l / M) * PER_LANE + q * 4 + e] = int8_t(pb[l] >> (8 * e));
  }
  u32 r[REGS][LANES];
  for (int q = 0; q < REGS; ++q) {
    const u32* c = register_lanes(w, I, 3, q, tmp);
    for (int l = 0; l < LANES; ++l) {
      u32 s = c[l];
      for (int k = 0; k < K; ++k) s += u32(int32_t(a[result_row(M, l, q)][k]) * b[l % M][k]);
      r[q][l] = s;
    }
  }
  for (int q = 0; q < REGS; ++q) {
    std::memcpy(w.lane(I.ops[0].reg + q), r[q], sizeof r[q]);
    mark_written(w, I.ops[0].reg + q, ~0ull);
  }
}

}  // namespace

#define MM "cbsz abid blgp"
#define MF(n, d, a, f) {n, "dv" d "f,sv" a "u,sv" a "u,sa" d "f", MM, CLASS_MFMA, f}
const OpDef MFMA[] = {
    MF("v_mfma_f32_16x16x16_bf16", "4", "2", (mfma_f32<16, 16, Bf16>)),
    MF("v_mfma_f32_16x16x16_bf16_1k", "4", "2", (mfma_f32<16, 16, Bf16>)),
    MF("v_mfma_f32_16x16x16bf16_1k", "4", "2", (mfma_f32<16, 16, Bf16>)),
    MF("v_mfma_f32_32x32x8_bf16", "16", "2", (mfma_f32<32, 8, Bf16>)),
    MF("v_mfma_f32_32x32x8_bf16_1k", "16", "2", (mfma_f32<32, 8, Bf16>)),
    MF("v_mfma_f32_32x32x8bf16_1k", "16", "2", (mfma_f32<32, 8, Bf16>)),
    MF("v_mfma_f32_16x16x32_bf16", "4", "4", (mfma_f32<16, 32, Bf16>)),
    MF("v_mfma_f32_32x32x16_bf16", "16", "4", (mfma_f32<32, 16, Bf16>)),
    MF("v_mfma_f32_16x16x16_f16", "4", "2", (mfma_f32<16, 16, Half>)),
    MF("v_mfma_f32_32x32x8_f16", "16", "2", (mfma_f32<32, 8, Half>)),
    MF("v_mfma_f32_16x16x32_f16", "4", "4", (mfma_f32<16, 32, Half>)),
    MF("v_mfma_f32_32x32x16_f16", "16", "4", (mfma_f32<32, 16, Half>)),
    MF("v_mfma_f32_16x16x4_f32", "4", "1", (mfma_f32<16, 4, Single>)),
    MF("v_mfma_f32_32x32x2_f32", "16", "1", (mfma_f32<32, 2, Single>)),
    MF("v_mfma_f32_16x16x32_fp8_fp8", "4", "2", (mfma_fp8<16, 32, false, false>)),
    MF("v_mfma_f32_16x16x32_fp8_bf8", "4", "2", (mfma_fp8<16, 32, false, true>)),
    MF("v_mfma_f32_16x16x32_bf8_fp8", "4", "2", (mfma_fp8<16, 32, true, false>)),
    MF("v_mfma_f32_16x16x32_bf8_bf8", "4", "2", (mfma_fp8<16, 32, true, true>)),
    MF("v_mfma_f32_32x32x16_fp8_fp8", "16", "2", (mfma_fp8<32, 16, false, false>)),
    MF("v_mfma_f32_32x32x16_fp8_bf8", "16", "2", (mfma_fp8<32, 16, false, true>)),
    MF("v_mfma_f32_32x32x16_bf8_fp8", "16", "2", (mfma_fp8<32, 16, true, false>)),
    MF("v_mfma_f32_32x32x16_bf8_bf8", "16", "2", (mfma_fp8<32, 16, true, true>)),
    {"v_mfma_i32_16x16x32_i8", "dv4u,sv2u,sv2u,sa4u", MM, CLASS_MFMA, mfma_i8<16, 32>},
    {"v_mfma_i32_32x32x16_i8", "dv16u,sv2u,sv2u,sa16u", MM, CLASS_MFMA, mfma_i8<32, 16>},
    {"v_mfma_i32_16x16x64_i8", "dv4u,sv4u,sv4u,sa4u", MM, CLASS_MFMA, mfma_i8<16, 64>},
    {"v_mfma_i32_32x32x32_i8", "dv16u,sv4u,sv4u,sa16u", MM, CLASS_MFMA, mfma_i8<32, 32>},
    // Operand widths of the f8f6f4 forms depend on the format: 0 means checked by the handler.
    {"v_mfma_f32_16x16x128_f8f6f4", "dv4f,sv0u,sv0u,sa4f", MM, CLASS_MFMA, mfma_f8f6f4<16, 128, false>},
    {"v_mfma_f32_32x32x64_f8f6f4", "dv16f,sv0u,sv0u,sa16f", MM, CLASS_MFMA, mfma_f8f6f4<32, 64, false>},
    {"v_mfma_scale_f32_16x16x128_f8f6f4", "dv4f,sv0u,sv0u,sa4f,sa1u,sa1u", MM " op_sel op_sel_hi", CLASS_MFMA, mfma_f8f6f4<16, 128, true>},
    {"v_mfma_scale_f32_32x32x64_f8f6f4", "dv16f,sv0u,sv0u,sa16f,sa1u,sa1u", MM " op_sel op_sel_hi", CLASS_MFMA, mfma_f8f6f4<32, 64, true>},
};
static const OpTable mfma_table(MFMA);

}  // namespace cdna
