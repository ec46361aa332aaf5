// SPDX-License-Identifier: Apache-2.0
// Checks that look at whole instructions from outside: registers used before the wait that their load needs, LDS
// stores that a barrier does not wait for, infinities and NaNs born of finite numbers. Each costs nothing when off.
#include <algorithm>

#include "machine.h"
#include "numeric.h"

namespace cdna {
namespace {

// Of each opcode: its counters and the types of its operands, from the table's text.
struct Shape {
  bool vm = false, lds = false, scalar = false, result = false;
  char type[MAX_OPERANDS] = {};
  int count = 0;
};

Shape shape_of(const OpDef& op) {
  Shape s;
  const std::string name = op.name;
  const auto begins = [&](const char* with) { return name.rfind(with, 0) == 0; };
  s.vm = op.cls == CLASS_VMEM_LOAD || op.cls == CLASS_VMEM_STORE || op.cls == CLASS_VMEM_ATOMIC;
  s.lds = op.cls == CLASS_LDS || begins("flat_");
  s.scalar = op.cls == CLASS_SMEM;
  s.result = op.operands[0] == 'd' || op.operands[0] == 'x';
  const std::string first = std::string(op.operands).substr(0, std::string(op.operands).find('|'));
  for (size_t at = 0; at < first.size() && s.count < MAX_OPERANDS;) {
    const size_t end = std::min(first.find(',', at), first.size());
    s.type[s.count++] = first[end - 1];
    at = end + 1;
  }
  return s;
}

const Shape& shape(int32_t opcode) {
  static const std::vector<Shape> shapes = [] {
    std::vector<Shape> out;
    for (int32_t i = 0; i < num_ops(); ++i) out.push_back(shape_of(op_def(i)));
    return out;
  }();
  return shapes[size_t(opcode)];
}

// ---- waits
constexpr size_t VM_MOST = 63, LGKM_MOST = 15;  // what the counters hold; issue stalls past them

void count(Wave& w, const Unwaited& u, int by) {
  for (int i = 0; i < u.width; ++i) {
    uint8_t& n = (u.vector ? w.waits->vgpr : w.waits->sgpr)[u.reg + i];
    n = uint8_t(n + by);
  }
}
void pop(Wave& w, std::vector<Unwaited>& q, size_t i) {
  count(w, q[i], -1);
  q.erase(q.begin() + long(i));
}

void wait(Wave& w, const Inst& I) {
  Waits& s = *w.waits;
  const size_t vm = size_t(I.imm & 0xffff), lgkm = size_t(I.imm >> 16 & 0xff);
  while (s.vm.size() > vm) pop(w, s.vm, 0);
  if (lgkm == 0xff || s.lgkm.size() <= lgkm) return;
  // LDS answers in order, scalar memory in any: with some of it outstanding, only so many LDS operations are done.
  const size_t scalar = size_t(std::count_if(s.lgkm.begin(), s.lgkm.end(), [](const Unwaited& u) { return !u.lds; }));
  size_t done = lgkm == 0 ? s.lgkm.size() : s.lgkm.size() - lgkm;
  if (lgkm != 0) done = done > scalar ? done - scalar : 0;
  for (size_t i = 0; i < s.lgkm.size() && done;) {
    if (lgkm == 0 || s.lgkm[i].lds) {
      pop(w, s.lgkm, i);
      --done;
    } else ++i;
  }
}

void use(Wave& w, const Inst& I, const Shape& of) {
  const Waits& s = *w.waits;
  for (int k = 0; k < I.num_ops; ++k) {
    const Operand& o = I.ops[k];
    if (o.kind != KIND_VGPR && o.kind != KIND_SGPR) continue;
    const bool vector = o.kind == KIND_VGPR;
    // A later load into the same register comes after the earlier one of its own counter.
    const bool in_order = k == 0 && of.result && (of.vm || of.lds);
    for (int i = 0; i < std::max<int>(1, o.width); ++i) {
      if (!(vector ? s.vgpr : s.sgpr)[o.reg + i]) continue;
      const auto covers = [&](const Unwaited& u) { return u.vector == vector && u.reg <= o.reg + i && o.reg + i < u.reg + u.width; };
      const auto* q = std::any_of(s.vm.begin(), s.vm.end(), covers) ? &s.vm : &s.lgkm;
      if (in_order && (q == &s.vm) == of.vm) continue;
      const Unwaited& u = *std::find_if(q->begin(), q->end(), covers);
      report(w, "register-before-wait", std::string(vector ? "vector" : "scalar") + " register " + std::to_string(o.reg + i) +
                                            " is used, but nothing has waited for the load of line " + std::to_string(u.line) + " into it");
      return;
    }
  }
}

void issue(Wave& w, const Inst& I, const Shape& of) {
  Waits& s = *w.waits;
  Unwaited u;
  u.line = I.line;
  u.lds = of.lds || of.vm;
  u.store = I.cls == CLASS_LDS && !of.result;
  const bool returns = of.result && !I.lds && (I.cls != CLASS_VMEM_ATOMIC || (I.cpol & CPOL_SC0));
  if (returns && I.num_ops) {
    u.vector = I.ops[0].kind == KIND_VGPR;
    u.reg = I.ops[0].reg;
    u.width = int16_t(std::max<int>(1, I.ops[0].width));
  }
  if (of.vm) {
    count(w, u, 1);
    s.vm.push_back(u);
    if (s.vm.size() > VM_MOST) pop(w, s.vm, 0);
  }
  if (of.lds || of.scalar) {
    count(w, u, 1);
    s.lgkm.push_back(u);
    if (s.lgkm.size() > LGKM_MOST) pop(w, s.lgkm, 0);
  }
}

// ---- infinities and NaNs
bool finite(char type, uint32_t low, uint32_t high) {
  switch (type) {
    case 'f': return (low & 0x7f800000u) != 0x7f800000u;
    case 'h': return (low & 0x7c00u) != 0x7c00u;
    case 'd': return (high & 0x7ff00000u) != 0x7ff00000u;
    default: return true;
  }
}

// Lanes of an operand that hold an infinity or a NaN. ``k`` names the operand; packed words count as f32 pairs.
uint64_t unbounded(Wave& w, const Inst& I, int k, char type) {
  const Operand& o = I.ops[k];
  if (type != 'f' && type != 'h' && type != 'd') return 0;
  const int step = type == 'd' ? 2 : 1;
  uint64_t out = 0;
  for (int part = 0; part + step <= std::max<int>(step, o.width); part += step)
    for (int l = 0; l < LANES; ++l) {
      uint32_t low = 0, high = 0;
      if (o.kind == KIND_VGPR) {
        low = w.lane(o.reg + part)[l];
        if (step == 2) high = w.lane(o.reg + part + 1)[l];
      } else if (o.kind == KIND_SGPR) {
        low = w.s[o.reg + part];
        if (step == 2) high = w.s[o.reg + part + 1];
      } else if (o.kind == KIND_CONST) {
        low = uint32_t(o.value);
        high = uint32_t(o.value >> 32);
      }
      if (!finite(type, low, high)) out |= 1ull << l;
    }
  return out;
}

// Lanes of a matrix source that hold one, by the element type that the opcode's name ends with.
uint64_t unbounded_source(Wave& w, const Inst& I, int k, const std::string& name) {
  const Operand& o = I.ops[k];
  if (o.kind != KIND_VGPR) return 0;
  uint64_t out = 0;
  for (int part = 0; part < o.width; ++part)
    for (int l = 0; l < LANES; ++l) {
      const uint32_t x = w.lane(o.reg + part)[l];
      bool bad = false;
      if (name.find("bf16") != std::string::npos) bad = (x & 0x7f80u) == 0x7f80u || (x & 0x7f800000u) == 0x7f800000u;
      else if (name.find("f16") != std::string::npos) bad = !finite('h', x, 0) || !finite('h', x >> 16, 0);
      else if (name.find("x4_f32") != std::string::npos || name.find("x2_f32") != std::string::npos) bad = !finite('f', x, 0);
      else if (name.find("f8") != std::string::npos || name.find("fp8") != std::string::npos)
        for (int b = 0; b < 32; b += 8) bad |= (x >> b & 0x7f) >= 0x7c;  // any code that is special in e5m2 or e4m3
      if (bad) out |= 1ull << l;
    }
  return out;
}

}  // namespace

// Before an instruction runs.
void check_waits(Wave& w, const Inst& I) {
  if (!w.waits) w.waits = std::make_unique<Waits>();
  const Shape& of = shape(I.opcode);
  if (I.cls == CLASS_WAIT) return wait(w, I);
  if (!w.waits->vm.empty() || !w.waits->lgkm.empty()) use(w, I, of);
  if (I.cls == CLASS_BARRIER)
    for (const Unwaited& u : w.waits->lgkm)
      if (u.store)
        report(w, "register-before-wait", "a barrier is reached, but nothing has waited for the LDS store of line " + std::to_string(u.line));
  if (of.vm || of.lds || of.scalar) issue(w, I, of);
}

// Around a floating-point instruction: lanes whose inputs are finite before it, and whose result is not after it.
uint64_t bounded_lanes(Wave& w, const Inst& I) {
  if (I.cls != CLASS_VALU && I.cls != CLASS_MFMA) return 0;
  const Shape& of = shape(I.opcode);
  if (!of.result || (of.type[0] != 'f' && of.type[0] != 'h' && of.type[0] != 'd')) return 0;
  uint64_t bad = 0;
  for (int k = op_def(I.opcode).operands[0] == 'x' ? 0 : 1; k < I.num_ops && k < of.count; ++k) bad |= unbounded(w, I, k, of.type[k]);
  if (I.cls == CLASS_VALU) return w.exec() & ~bad;
  const std::string name = op_def(I.opcode).name;
  bad |= unbounded_source(w, I, 1, name) | unbounded_source(w, I, 2, name);
  return bad ? 0 : ~0ull;  // every lane's elements meet every other's
}
void check_born(Wave& w, const Inst& I, uint64_t bounded) {
  if (!bounded) return;
  const uint64_t born = unbounded(w, I, 0, shape(I.opcode).type[0]) & bounded;
  if (!born) return;
  const int lane = __builtin_ctzll(born);
  report(w, "not-finite", "lane " + std::to_string(lane) + " got " + hex(w.lane(I.ops[0].reg)[lane]) +
                              ", an infinity or a NaN, of finite sources (vector register " + std::to_string(I.ops[0].reg) + ")");
}

}  // namespace cdna
