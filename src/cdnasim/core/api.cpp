// SPDX-License-Identifier: Apache-2.0
// The C interface that cdnasim/native.py calls. Functions that can fail return a message, or null.
#include <algorithm>

#include "machine.h"

using namespace cdna;

namespace cdna {
static std::vector<OpDef>& ops() {
  static std::vector<OpDef> table;
  return table;
}
int32_t num_ops() { return int32_t(ops().size()); }
const OpDef& op_def(int32_t index) { return ops()[size_t(index)]; }
void add_ops(const OpDef* table, size_t count) { ops().insert(ops().end(), table, table + count); }
}  // namespace cdna

static thread_local std::string last_error;
template <class F>
static const char* guarded(F f) {
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    last_error = e.what();
    return last_error.c_str();
  }
}

extern "C" {

int32_t cdna_num_ops() { return int32_t(ops().size()); }
const char* cdna_op_name(int32_t i) { return ops()[size_t(i)].name; }
const char* cdna_op_operands(int32_t i) { return ops()[size_t(i)].operands; }
const char* cdna_op_mods(int32_t i) { return ops()[size_t(i)].mods; }
int32_t cdna_op_class(int32_t i) { return ops()[size_t(i)].cls; }
int32_t cdna_sizeof_inst() { return int32_t(sizeof(Inst)); }

Kernel* cdna_kernel(const Inst* code, int32_t count, int32_t arch, int32_t vgprs, int32_t sgprs, int32_t lds, int32_t scratch) {
  auto* k = new Kernel;
  k->code.assign(code, code + count);
  for (Inst& i : k->code) {
    i.fn = ops()[size_t(i.opcode)].fn;
    i.cls = int8_t(ops()[size_t(i.opcode)].cls);
    i.index = int32_t(&i - k->code.data());
    i.plain = i.dpp_ctrl < 0 && !(i.sdwa | i.clamp | i.omod | i.op_sel | i.op_sel_hi | i.neg_lo | i.neg_hi);
    for (const Operand& o : i.ops) i.plain = i.plain && !o.flags;
  }
  k->arch = Arch(arch);
  k->num_vgprs = vgprs;
  k->num_sgprs = sgprs;
  k->lds_bytes = lds;
  k->scratch_bytes = scratch;
  k->executed.assign(size_t(count), 0);
  return k;
}
void cdna_kernel_free(Kernel* k) { delete k; }
void cdna_kernel_executed(Kernel* k, uint64_t* out) { std::copy(k->executed.begin(), k->executed.end(), out); }

Machine* cdna_machine(int32_t arch, int32_t ranks, int32_t xcds, int32_t cus, int32_t lds_per_cu) {
  auto* m = new Machine;
  m->arch = Arch(arch);
  m->ranks = ranks;
  m->rank.resize(size_t(ranks));
  for (int i = 0; i < ranks; ++i) {
    m->rank[size_t(i)].m = m;
    m->rank[size_t(i)].id = i;
  }
  m->num_xcd = xcds;
  m->num_cu = cus;
  m->lds_per_cu = lds_per_cu;
  return m;
}
void cdna_machine_free(Machine* m) {
  hostile_free(*m);
  for (Rank& r : m->rank) pool_free(r);
  delete m;
}
void cdna_configure(Machine* m, uint64_t seed, int32_t schedule, int32_t quantum_min, int32_t quantum_max, int32_t hostile, int32_t unasked,
                    uint64_t stall, int32_t traffic, int32_t threads, const int32_t* checks) {
  m->rng.seed(seed);
  for (Rank& r : m->rank) r.rng.seed(seed * 1000003 + uint64_t(r.id) + 1);
  m->threads = threads;
  m->schedule = schedule;
  m->quantum_min = quantum_min;
  m->quantum_max = quantum_max;
  m->hostile = hostile;
  m->unasked = unasked;
  m->stall_bound = stall;
  m->count_traffic = traffic;
  for (int i = 0; i < NUM_CHECKS; ++i) m->check[i] = checks[i];
  hostile_free(*m);
  if (hostile) hostile_init(*m);
}
const char* cdna_allocate(Machine* m, uint64_t base, uint64_t bytes, int32_t rank, int32_t peer, int32_t read_only, int32_t track, const char* name) {
  return guarded([&] {
    auto a = std::make_unique<Allocation>();
    a->base = base;
    a->bytes = bytes;
    a->rank = rank;
    a->peer = peer;
    a->read_only = read_only;
    a->name = name;
    if (track) a->written.assign((bytes + 63) / 64, 0);
    a->touched.assign((bytes + 4095) / 4096, 0);
    auto it = std::upper_bound(m->allocations.begin(), m->allocations.end(), base,
                               [](uint64_t x, const std::unique_ptr<Allocation>& y) { return x < y->base; });
    if (it != m->allocations.end() && (*it)->base < base + bytes)
      throw SimError("allocation '" + a->name + "' overlaps '" + (*it)->name + "'");
    if (it != m->allocations.begin() && (*std::prev(it))->end() > base)
      throw SimError("allocation '" + a->name + "' overlaps '" + (*std::prev(it))->name + "'");
    a->model_base = m->model_end;
    m->model_end += (bytes + MODEL_PAGE - 1) / MODEL_PAGE * MODEL_PAGE;
    m->in_order.push_back(a.get());
    m->allocations.insert(it, std::move(a));
    for (Rank& r : m->rank) r.last_hit = nullptr;
  });
}
void cdna_release(Machine* m, uint64_t base) {
  for (Rank& r : m->rank) r.last_hit = nullptr;
  for (auto it = m->allocations.begin(); it != m->allocations.end(); ++it)
    if ((*it)->base == base) {
      std::erase(m->in_order, it->get());
      m->allocations.erase(it);
      return;
    }
}
void cdna_mark_written(Machine* m, uint64_t base, uint64_t offset, uint64_t bytes) {
  if (Allocation* a = m->find(base))
    if (!a->written.empty())
      for (uint64_t i = offset; i < offset + bytes; ++i) a->written[i >> 6] |= 1ull << (i & 63);
}
uint64_t cdna_touched_bytes(Machine* m, int32_t rank, const char* name, int32_t clear) {
  uint64_t lines = 0;
  for (auto& a : m->allocations) {
    if (rank >= 0 && a->rank != rank) continue;
    if (name && a->name != name) continue;
    for (uint64_t& x : a->touched) {
      lines += uint64_t(__builtin_popcountll(x));
      if (clear) x = 0;
    }
  }
  return 64 * lines;
}

Launch* cdna_launch(Kernel* k, const int32_t* grid, const int32_t* block, int32_t rank, int32_t lds, int32_t persistent, uint64_t kernarg,
                    uint64_t packet, const int32_t* abi) {
  auto* l = new Launch;
  l->kernel = k;
  std::copy(grid, grid + 3, l->grid);
  std::copy(block, block + 3, l->block);
  l->rank = rank;
  l->lds_bytes = lds;
  l->persistent = persistent;
  l->kernarg = kernarg;
  l->dispatch_packet = packet;
  int32_t* fields[] = {&l->user_sgprs, &l->kernarg_sgpr, &l->dispatch_sgpr, &l->queue_sgpr, &l->dispatch_id_sgpr, &l->private_size_sgpr,
                       &l->preload_first, &l->preload_dwords, &l->preload_offset, &l->id_x, &l->id_y, &l->id_z, &l->workgroup_info,
                       &l->workitem_dims};
  for (size_t i = 0; i < sizeof fields / sizeof *fields; ++i) *fields[i] = abi[i];
  return l;
}
void cdna_launch_free(Launch* l) { delete l; }
void cdna_launch_counters(Launch* l, uint64_t* out) {
  static_assert(sizeof(Counters) % 8 == 0);
  std::memcpy(out, &l->counters, sizeof(Counters));
}
uint64_t cdna_launch_waves(Launch* l, uint64_t* out) {
  if (out) std::memcpy(out, l->waves.data(), l->waves.size() * sizeof(WaveRecord));
  return l->waves.size();
}
int32_t cdna_wave_words() { return int32_t(sizeof(WaveRecord) / 8); }
void cdna_launch_executed(Launch* l, uint64_t* out) { std::copy(l->executed.begin(), l->executed.end(), out); }
void cdna_timeline(Machine* m, int32_t on) { m->timeline = on; }
uint64_t cdna_spans(Machine* m, int32_t rank, void* out) {
  const std::vector<Span>& spans = m->rank[size_t(rank)].spans;
  if (out) std::memcpy(out, spans.data(), spans.size() * sizeof(Span));
  return spans.size();
}
int32_t cdna_counters_words() { return int32_t(sizeof(Counters) / 8); }

const char* cdna_run(Machine* m, Launch** launches, int32_t count) {
  return guarded([&] {
    std::vector<std::vector<Launch*>> queues(static_cast<size_t>(m->ranks));
    for (int i = 0; i < count; ++i) queues[size_t(launches[i]->rank)].push_back(launches[i]);
    run_launches(*m, queues);
  });
}
void cdna_watch(Machine* m, int32_t rank, int32_t workgroup, int32_t wave, int32_t dump_line, uint64_t limit) {
  m->watch = Watch{};
  m->watch.rank = rank;
  m->watch.workgroup = workgroup;
  m->watch.wave = wave;
  m->watch.dump_line = dump_line;
  m->watch.limit = limit;
}
uint64_t cdna_watch_size(Machine* m, int32_t what) {
  const Watch& w = m->watch;
  return what == 0 ? w.lines.size() : what == 1 ? w.vgprs.size() : w.sgprs.size();
}
const void* cdna_watch_data(Machine* m, int32_t what) {
  const Watch& w = m->watch;
  return what == 0 ? static_cast<const void*>(w.lines.data()) : what == 1 ? w.vgprs.data() : w.sgprs.data();
}
void cdna_count_handoffs(Machine* m, int32_t on) { m->count_handoffs = on; }
uint64_t cdna_clock(Machine* m) { return m->clock(); }
int32_t cdna_num_warnings(Machine* m) { return int32_t(m->warnings.size()); }
const char* cdna_warning(Machine* m, int32_t i) { return m->warnings[size_t(i)].c_str(); }
void cdna_clear_warnings(Machine* m) {
  m->warnings.clear();
  m->warning_count.clear();
}

// ---- one wave by hand, for the opcode tests: registers in, one instruction after another, registers out
struct Bench {
  Machine m;
  Launch l;
  Workgroup g;
  std::vector<uint32_t> registers;
  std::vector<uint8_t> lds;
};
Bench* cdna_bench(Kernel* k, int32_t lds) {
  auto* b = new Bench;
  b->m.arch = k->arch;
  b->m.count_traffic = 0;
  b->l.kernel = k;
  b->g.launch = &b->l;
  b->m.rank.resize(1);
  b->m.rank[0].m = &b->m;
  b->lds.assign(size_t(lds), 0);
  b->g.lds = b->lds.data();
  b->g.lds_bytes = uint32_t(lds);
  b->g.waves.resize(1);
  b->registers.assign(size_t(k->num_vgprs) * LANES + 16, 0);
  Wave& w = b->g.waves[0];
  w.v = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(b->registers.data()) + 63) & ~uintptr_t(63));
  w.r = &b->m.rank[0];
  w.wg = &b->g;
  w.m = &b->m;
  w.k = k;
  return b;
}
void cdna_bench_free(Bench* b) { delete b; }
uint32_t* cdna_bench_vgprs(Bench* b) { return b->g.waves[0].v; }
uint32_t* cdna_bench_sgprs(Bench* b) { return b->g.waves[0].s; }
uint8_t* cdna_bench_lds(Bench* b) { return b->lds.data(); }
Machine* cdna_bench_machine(Bench* b) { return &b->m; }
const char* cdna_bench_step(Bench* b, int32_t pc, uint32_t* scc) {
  return guarded([&] {
    Wave& w = b->g.waves[0];
    w.scc = *scc;
    w.pc = pc + 1;
    const Inst& I = w.k->code[size_t(pc)];
    I.fn(w, I);
    *scc = w.scc;
  });
}

}  // extern "C"
