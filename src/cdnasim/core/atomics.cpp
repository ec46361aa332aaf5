// SPDX-License-Identifier: Apache-2.0
// Atomics on memory: global, flat and buffer.
#include "addresses.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;
using u16 = uint16_t;

// Lanes in order, at the device's point of coherence. sc0 returns the old value.
template <class T> u64 to_bits(T x) { if constexpr (sizeof(T) == 8) return bits<u64>(x); else return bits<u32>(x); }
bool shared(Wave& w, const Lanes& at) {
  const Allocation* a = at.mask ? w.m->find(at.addr[__builtin_ctzll(at.mask)]) : nullptr;
  return a && a->peer;
}
template <class T, int DATA, auto F>
void atomic_lanes(Wave& w, const Inst& I, const Lanes& at, int data_op, int dst) {
  constexpr int WORDS = sizeof(T) / 4;
  if (w.m->defer && shared(w, at)) {  // memory of peers: when the round ends and all see the same (core/rounds.cpp)
    w.state = WAVE_ROUND;
    w.yield = w.again = w.atomic = true;
    return;
  }
  check_access(w, I, at.addr, at.mask, sizeof(T), false, int(sizeof(T)));
  check_access(w, I, at.addr, at.mask, sizeof(T), true, int(sizeof(T)));
  const u32* d[2 * WORDS];
  u32 tmp[2 * WORDS][LANES], r[WORDS][LANES] = {};
  for (int q = 0; q < DATA * WORDS; ++q) d[q] = word(w, I, data_op, q, 1, tmp[q]);
  for (int l = 0; l < LANES; ++l) {
    if (!(at.mask >> l & 1)) continue;
    T v[2] = {};
    for (int i = 0; i < DATA; ++i) {
      if constexpr (WORDS == 2) v[i] = bits<T>(u64(d[2 * i + 1][l]) << 32 | d[2 * i][l]);
      else v[i] = bits<T>(d[i][l]);
    }
    if (w.m->hostile) hostile_atomic(w, at.addr[l], sizeof(T));
    T old;
    std::memcpy(&old, reinterpret_cast<void*>(at.addr[l]), sizeof(T));
    const T now = F(old, v[0], v[1]);
    write_bytes(w, at.addr[l], &now, sizeof(T));
    r[0][l] = u32(to_bits(old));
    if (WORDS == 2) r[WORDS - 1][l] = u32(to_bits(old) >> 32);
  }
  if (dst < 0) return;
  if (at.mask) {
    const int first = __builtin_ctzll(at.mask);
    w.last_load_addr = at.addr[first];
    w.last_load_value = r[0][first];
    w.last_load_line = I.line;
  }
  for (int q = 0; q < WORDS; ++q) {
    blend(w.lane(I.ops[dst].reg + q), r[q], w.exec());
    mark_written(w, I.ops[dst].reg + q, w.exec());
  }
}
// Operands: [dst,] address, data, base.
template <class T, int DATA, auto F> void global_atomic(Wave& w, const Inst& I) {
  const int first = I.num_ops - 3;
  if ((first == 1) != bool(I.cpol & CPOL_SC0)) fail(w, "an atomic with a destination needs sc0, one without must not have it");
  Lanes at;
  global_address(w, I, first, first + 2, &at);
  atomic_lanes<T, DATA, F>(w, I, at, first + 1, first ? 0 : -1);
}
template <class T, int DATA, auto F> void flat_atomic(Wave& w, const Inst& I) {
  const int first = I.num_ops - 2;
  Lanes at;
  flat_address(w, I, first, &at);
  atomic_lanes<T, DATA, F>(w, I, at, first + 1, first ? 0 : -1);
}
// The data register is also the destination.
template <class T, int DATA, auto F> void buffer_atomic(Wave& w, const Inst& I) {
  BufferLanes at;
  buffer_address(w, I, 1, 2, sizeof(T), &at);
  atomic_lanes<T, DATA, F>(w, I, at, 0, I.cpol & CPOL_SC0 ? 0 : -1);
}
inline u32 pk_bf16(u32 a, u32 b) {
  return u32(f32_to_bf16(bf16_to_f32(u16(a)) + bf16_to_f32(u16(b)))) | u32(f32_to_bf16(bf16_to_f32(u16(a >> 16)) + bf16_to_f32(u16(b >> 16)))) << 16;
}
inline u32 pk_f16(u32 a, u32 b) {
  return u32(f32_to_f16(f16_to_f32(u16(a)) + f16_to_f32(u16(b)))) | u32(f32_to_f16(f16_to_f32(u16(a >> 16)) + f16_to_f32(u16(b >> 16)))) << 16;
}

}  // namespace

#define CP "offset sc0 sc1 nt"
#define CPB "offset offen idxen sc0 sc1 nt lds"
#define ATOM(n, dw, sw, T, DATA, expr)                                                          \
  {"global_atomic_" n, "dv" dw "u,sv0u,sv" sw "u,o|sv0u,sv" sw "u,o", CP, CLASS_VMEM_ATOMIC, global_atomic<T, DATA, [](T m, T d, T e) -> T { (void)m; (void)e; return (expr); }>}, \
  {"flat_atomic_" n, "dv" dw "u,sv2u,sv" sw "u|sv2u,sv" sw "u", CP, CLASS_VMEM_ATOMIC, flat_atomic<T, DATA, [](T m, T d, T e) -> T { (void)m; (void)e; return (expr); }>}, \
  {"buffer_atomic_" n, "xv" sw "u,o1,ss4u,ss1u", CPB, CLASS_VMEM_ATOMIC, buffer_atomic<T, DATA, [](T m, T d, T e) -> T { (void)m; (void)e; return (expr); }>}
const OpDef ATOMICS[] = {
    ATOM("swap", "1", "1", u32, 1, d), ATOM("add", "1", "1", u32, 1, m + d), ATOM("sub", "1", "1", u32, 1, m - d),
    ATOM("smin", "1", "1", int32_t, 1, d < m ? d : m), ATOM("smax", "1", "1", int32_t, 1, d > m ? d : m),
    ATOM("umin", "1", "1", u32, 1, d < m ? d : m), ATOM("umax", "1", "1", u32, 1, d > m ? d : m),
    ATOM("and", "1", "1", u32, 1, m & d), ATOM("or", "1", "1", u32, 1, m | d), ATOM("xor", "1", "1", u32, 1, m ^ d),
    ATOM("inc", "1", "1", u32, 1, m >= d ? 0u : m + 1), ATOM("dec", "1", "1", u32, 1, (m == 0 || m > d) ? d : m - 1),
    ATOM("add_f32", "1", "1", float, 1, m + d), ATOM("pk_add_bf16", "1", "1", u32, 1, pk_bf16(m, d)), ATOM("pk_add_f16", "1", "1", u32, 1, pk_f16(m, d)),
    ATOM("swap_x2", "2", "2", u64, 1, d), ATOM("add_x2", "2", "2", u64, 1, m + d), ATOM("sub_x2", "2", "2", u64, 1, m - d),
    ATOM("umin_x2", "2", "2", u64, 1, d < m ? d : m), ATOM("umax_x2", "2", "2", u64, 1, d > m ? d : m),
    ATOM("smin_x2", "2", "2", int64_t, 1, d < m ? d : m), ATOM("smax_x2", "2", "2", int64_t, 1, d > m ? d : m),
    ATOM("and_x2", "2", "2", u64, 1, m & d), ATOM("or_x2", "2", "2", u64, 1, m | d), ATOM("xor_x2", "2", "2", u64, 1, m ^ d),
    ATOM("add_f64", "2", "2", double, 1, m + d), ATOM("min_f64", "2", "2", double, 1, d < m ? d : m), ATOM("max_f64", "2", "2", double, 1, d > m ? d : m),
    // Data holds the new value, then the value compared with.
    ATOM("cmpswap", "1", "2", u32, 2, m == e ? d : m), ATOM("cmpswap_x2", "2", "4", u64, 2, m == e ? d : m),
};
static const OpTable atomics_table(ATOMICS);

}  // namespace cdna
