"""Mistakes in the PTX itself: one string of a function, changed.

`nothing` is caught of those that leave a launch as right as before.
"""

from tests.ptx.mistakes.mistake import BOX, EITHER, REGISTER_A, SHARED_A, WRONG, Mistake

REFUSED = "ptx"
NOTHING = "nothing"
TRANSPOSED_LOAD = "matrices load=True store=False"
TRANSPOSED_STORE = "matrices load=False store=True"
PLAIN = "matrices load=False store=False"
BULK = "mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"

MULTICAST = """3d.shared::cluster.global.tile"
                 ".mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, { %4, %5, %6}], [%2], %3;"""
ALONE = """3d.shared::cluster.global.tile"
                 ".mbarrier::complete_tx::bytes [%0], [%1, { %4, %5, %6}], [%2];"""
FOUR = """4d.shared::cluster.global.tile"
                 ".mbarrier::complete_tx::bytes [%0], [%1, { %3, %4, %5, %6}]"""

NUMBERS = [
    Mistake("halves exchanged", "narrow", "cvt.rn.f16x2.f32 %0, %1, %2;", "cvt.rn.f16x2.f32 %0, %2, %1;", WRONG),
    Mistake("bfloat16s exchanged", "narrow", "cvt.rn.bf16x2.f32 %0, %1, %2;", "cvt.rn.bf16x2.f32 %0, %2, %1;", WRONG),
    Mistake(
        "bfloat16 cut off",
        "narrow",
        "cvt.rn.bf16.f32",
        "cvt.rz.bf16.f32",
        REFUSED,
        "cvt.rz.bf16.f32: no instruction that is known",
    ),
    Mistake(
        "tf32 to even",
        "narrow",
        "cvt.rna.tf32.f32",
        "cvt.rn.tf32.f32",
        WRONG,
    ),
    Mistake("tf32 away from zero", "parts", "cvt.rn.tf32.f32", "cvt.rna.tf32.f32", WRONG),
    Mistake(
        "tf32 cut off",
        "parts",
        "cvt.rn.tf32.f32",
        "cvt.rz.tf32.f32",
        REFUSED,
        "cvt.rz.tf32.f32: no instruction that is known",
    ),
    Mistake("mask and bits exchanged", "parts", "%1, %2, %3, 0xea", "%1, %3, %2, 0xea", WRONG),
    Mistake("float16 as bfloat16", "halves", "cvt.rn.f16.f32", "cvt.rn.bf16.f32", WRONG),
    Mistake(
        "input as result",
        "halves",
        "cvt.f32.f16 %0, %1;",
        "cvt.f32.f16 %1, %0;",
        REFUSED,
        r"the operands are h,f; it takes =f,h",
    ),
    Mistake(
        "the other format of eight bits",
        "eight bits",
        "f16x2.e4m3x2",
        "f16x2.e5m2x2",
        REFUSED,
        "cvt.rn.f16x2.e5m2x2: no instr",
    ),
    Mistake("inputs of a pair exchanged", "pairs", "x, { %2, %3}", "x, { %3, %2}", WRONG),
    Mistake("weight of one alone", "pairs", "w, { %4, %4}", "w, { %4, %3}", WRONG),
    Mistake("factor and sum exchanged", "pairs", "sums, x, w, sums;", "sums, x, sums, w;", WRONG),
    Mistake("sums of a pair not written", "pairs", '"mov.b64 { %0, %1}, sums;\\n"\n', "", WRONG),
    Mistake(
        "register not written",
        "pairs",
        '"mov.b64 w, { %4, %4};\\n"\n',
        "",
        REFUSED,
        "reads w, which nothing has written",
    ),
]

MATRICES = [
    Mistake(
        "load not transposed",
        TRANSPOSED_LOAD,
        "ldmatrix.sync.aligned.m8n8.x4.trans",
        "ldmatrix.sync.aligned.m8n8.x4",
        WRONG,
    ),
    Mistake(
        "load transposed",
        PLAIN,
        "ldmatrix.sync.aligned.m8n8.x4.shared",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared",
        WRONG,
    ),
    Mistake(
        "store not transposed",
        TRANSPOSED_STORE,
        "stmatrix.sync.aligned.m8n8.x4.trans",
        "stmatrix.sync.aligned.m8n8.x4",
        WRONG,
    ),
    Mistake(
        "loaded matrices exchanged", PLAIN, "x4.shared.b16 { %0, %1, %2, %3}", "x4.shared.b16 { %0, %2, %1, %3}", WRONG
    ),
    Mistake(
        "stored matrices exchanged", PLAIN, "x4.shared.b16 [%0], { %1, %2,", "x4.shared.b16 [%0], { %2, %1,", WRONG
    ),
    Mistake(
        "two matrices",
        PLAIN,
        "ldmatrix.sync.aligned.m8n8.x4.shared",
        "ldmatrix.sync.aligned.m8n8.x2.shared",
        REFUSED,
        "m8n8.x2",
    ),
    Mistake("A's rows exchanged", "mma bf16", "{ %4, %5, %6, %7}", "{ %5, %4, %7, %6}", WRONG),
    Mistake("B's halves exchanged", "mma tf32", "{ %8, %9}", "{ %9, %8}", WRONG),
    Mistake("sums exchanged", "mma f16", "{ %8, %9}, { %0, %1, %2, %3};", "{ %8, %9}, { %0, %1, %3, %2};", WRONG),
    Mistake(
        "A's registers for the sums", "mma f16", "{ %8, %9}, { %0, %1, %2, %3};", "{ %8, %9}, { %4, %5, %6, %7};", WRONG
    ),
    Mistake("operands of another type", "mma bf16", "f32.bf16.bf16.f32", "f32.f16.f16.f32", WRONG),
    Mistake("operands of another eight bits", "mma e4m3", "f32.e4m3.e4m3.f32", "f32.e5m2.e5m2.f32", WRONG),
    Mistake(
        "operands of two types",
        "mma e4m3",
        "f32.e4m3.e4m3.f32",
        "f32.e4m3.e5m2.f32",
        REFUSED,
        "e4m3.e5m2.f32: no instruction",
    ),
    Mistake(
        "half of the depth",
        "mma f16",
        "mma.sync.aligned.m16n8k16",
        "mma.sync.aligned.m16n8k8",
        REFUSED,
        "m16n8k8.row.col.f32.f16",
    ),
    Mistake(
        "columns of A", "mma f16", ".row.col.", ".col.col.", REFUSED, "m16n8k16.col.col.f32.f16.f16.f32: no instruction"
    ),
]

PRODUCTS = [
    Mistake(
        "descriptors exchanged", SHARED_A, "%26, %25, adds", "%25, %26, adds", rf"descriptor|out-of-bounds|{WRONG}"
    ),
    Mistake(
        "transpositions exchanged", SHARED_A, "1, 1, %27, %28;", "1, 1, %28, %27;", rf"descriptor|out-of-bounds|{WRONG}"
    ),
    Mistake("never adds", SHARED_A, "setp.ne.b32 adds, %24, 0;", "setp.ne.b32 adds, 0, 0;", WRONG),
    Mistake("adds from the first step on", SHARED_A, "setp.ne.b32 adds, %24, 0;", "setp.ne.b32 adds, %24, 2;", NOTHING),
    Mistake("adds where it must not", "batched", "setp.ne.b32 adds, %24, 0;", "setp.ne.b32 adds, %24, 2;", WRONG),
    Mistake(
        "opposite predicate", SHARED_A, "setp.ne.b32 adds", "setp.eq.b32 adds", REFUSED, "setp.eq.b32: no instruction"
    ),
    Mistake(
        "predicate not set",
        SHARED_A,
        '"setp.ne.b32 adds, %24, 0;\\n"\n',
        "",
        REFUSED,
        "reads adds, which nothing has written",
    ),
    Mistake(
        "sums in another order",
        SHARED_A,
        "{%0, %1, %2,",
        "{%1, %0, %2,",
        "wgmma",
        "sums: operand 1 lies not behind operand 0",
    ),
    Mistake(
        "A in another order",
        REGISTER_A,
        "{%14, %15, %16, %17}",
        "{%15, %14, %16, %17}",
        "wgmma",
        "A: operand 1 lies not behind",
    ),
    Mistake("fewer columns", SHARED_A, "m64n48k16", "m64n40k16", REFUSED, r"24 times =f.*|it takes \{20 times =f\}"),
    Mistake("columns for another type", SHARED_A, "f32.bf16.bf16", "f32.f16.f16", WRONG),
    Mistake("A subtracted", SHARED_A, "adds, 1, 1", "adds, -1, 1", WRONG),
    Mistake(
        "A doubled", SHARED_A, "adds, 1, 1", "adds, 2, 1", "wgmma", "A times 2 and B times 1; accepted are 1 and -1"
    ),
    Mistake(
        "registers not fenced",
        SHARED_A,
        "wgmma.fence.sync.aligned;",
        "",
        "wgmma",
        "no wgmma_fence since the start",
        orders=EITHER,
    ),
    Mistake(
        "group not committed",
        SHARED_A,
        "wgmma.commit_group.sync.aligned;",
        "",
        "async",
        "exits while wgmma may still be",
    ),
    Mistake(
        "products not waited for",
        SHARED_A,
        "wgmma.wait_group.sync.aligned %0;",
        "",
        "async",
        "exits while wgmma may still be",
    ),
    Mistake(
        "one group too many under way",
        SHARED_A,
        "wait_group.sync.aligned %0;",
        "wait_group.sync.aligned 1;",
        "async",
        "exits while",
    ),
    Mistake(
        "statement not volatile",
        SHARED_A,
        'asm volatile(\n        "{\\n"\n        ".reg .pred adds',
        'asm(\n        "{\\n"\n        ".reg .pred adds',
        REFUSED,
        "not volatile",
    ),
    Mistake(
        "more registers handed back",
        "batched",
        "setmaxnreg.dec.sync.aligned.u32 %0;",
        "setmaxnreg.inc.sync.aligned.u32 %0;",
        "registers",
    ),
    Mistake(
        "registers not taken",
        "batched",
        "setmaxnreg.inc.sync.aligned.u32 %0;",
        "setmaxnreg.inc.sync.aligned.u32 36;",
        "registers",
    ),
]

COPIES = [
    Mistake("never zeros", "copies", "[%0], [%1], 16, %2;", "[%0], [%1], 16, 16;", WRONG),
    Mistake("half of the bytes", "copies", "[%0], [%1], 8, %2;", "[%0], [%1], 8, 4;", WRONG),
    Mistake("16 bytes through both caches", "copies", "cp.async.cg", "cp.async.ca", NOTHING),
    Mistake(
        "8 bytes through one cache",
        "copies",
        "cp.async.ca.shared.global [%0], [%1], 8",
        "cp.async.cg.shared.global [%0], [%1], 8",
        "async",
        "cp.async.cg of 8 bytes",
    ),
    Mistake(
        "places exchanged",
        "copies",
        "[%0], [%1], 4, %2;",
        "[%1], [%0], 4, %2;",
        REFUSED,
        r"the operands are \[l\],\[r\],n,r",
    ),
    Mistake(
        "size of another copy", "copies", "[%0], [%1], 8, %2;", "[%0], [%1], 4, %2;", "async", "copy_async_4 of 8 bytes"
    ),
    Mistake("groups not committed", "copies", "cp.async.commit_group;", "", WRONG),
    Mistake("wait for nothing", "copies", "cp.async.wait_group %0;", "cp.async.wait_group 2;", WRONG),
    Mistake("wait for all", "copies", "cp.async.wait_group %0;", "cp.async.wait_group 0;", NOTHING),
    Mistake("words exchanged", "copies", "{ %1, %2, %3, %4}", "{ %2, %1, %3, %4}", WRONG),
    Mistake("words of a pair exchanged", "copies", "v2.u32 [%0], { %1, %2}", "v2.u32 [%0], { %2, %1}", WRONG),
    Mistake(
        "arrival that is counted besides",
        "arrivals",
        "arrive.noinc.shared",
        "arrive.shared",
        "deadlock",
        "mbarrier_wait",
    ),
    Mistake(
        "arrival at another barrier",
        "arrivals",
        'b64 [%0];" ::"r"(barrier)',
        'b64 [%0];" ::"r"(barrier + 8)',
        "mbarrier|out-of-bounds",
    ),
]

BULK_COPIES = [
    Mistake(
        "bytes not expected",
        "ring",
        "arrive.expect_tx.shared::cta.b64 _, [%0], %1;",
        "arrive.shared::cta.b64 _, [%0];",
        "async",
        "copy_bulk was under",
    ),
    Mistake(
        "other bytes expected",
        "ring",
        "expect_tx.shared::cta.b64 _, [%0], %1;",
        "expect_tx.shared::cta.b64 _, [%0], 64;",
        "deadlock",
        "-64 bytes",
    ),
    Mistake(
        "fewer bytes copied", "ring", BULK, BULK.replace("%2", "64"), "deadlock|async", "bytes are missing|under way"
    ),
    Mistake(
        "place and barrier exchanged",
        "ring",
        BULK,
        BULK.replace("%0", "%8").replace("%3", "%0").replace("%8", "%3"),
        "mbarrier|out-of-bounds",
    ),
    Mistake(
        "coordinates of a load exchanged",
        BOX,
        "[%1, { %3, %4, %5, %6}]",
        "[%1, { %4, %3, %5, %6}]",
        "misaligned",
        "_box at element 2 of a row",
    ),
    Mistake(
        "coordinates of a store exchanged",
        BOX,
        "[%0, { %2, %3, %4, %5}]",
        "[%0, { %3, %2, %4, %5}]",
        "misaligned",
        "_box at element 2 of a row",
    ),
    Mistake(
        "box without its last coordinate",
        BOX,
        "4d.global.shared::cta",
        "3d.global.shared::cta",
        REFUSED,
        r"it takes \[l,\{r,r,r\}\],\[r\]",
    ),
    Mistake(
        "three of four coordinates",
        BOX,
        FOUR,
        FOUR.replace("4d", "3d").replace(", %6", ""),
        "tensor-map",
        "3 coordinates for a map of 4",
    ),
    Mistake(
        "stores not committed", BOX, "cp.async.bulk.commit_group;", "", "async", "exits while store_box may still read"
    ),
    Mistake(
        "stores not waited for",
        BOX,
        "cp.async.bulk.wait_group.read %0;",
        "",
        "async",
        "exits while store_box may still read",
    ),
    Mistake(
        "stores waited for until they are written",
        BOX,
        "cp.async.bulk.wait_group.read %0;",
        "cp.async.bulk.wait_group %0;",
        NOTHING,
    ),
    Mistake("prefetch left out", BOX, "prefetch.tensormap [%0];", "", NOTHING),
    Mistake(
        "prefetch of what is no map",
        BOX,
        '[%0];" ::"l"(&map) : "memory"); }',
        '[%0];" ::"l"(&map.words[1]) : "memory"); }',
        "tensor-map",
        "not one that the host encoded",
    ),
    Mistake(
        "writes not shown to the engine", BOX, "fence.proxy.async.shared::cta;", "", "proxy", "store_box", orders=EITHER
    ),
]

BARRIERS = [
    Mistake(
        "barrier not shown to the engine",
        "ring",
        "fence.mbarrier_init.release.cluster;",
        "",
        "mbarrier",
        "no fence_mbarrier_init",
    ),
    Mistake(
        "one arrival at each barrier",
        "ring",
        "mbarrier.init.shared::cta.b64 [%0], %1;",
        "mbarrier.init.shared::cta.b64 [%0], 1;",
        "mbarrier|race|deadlock",
    ),
    Mistake("parity of one kind", "ring", "[%0], %1, 0x989680;", "[%0], 0, 0x989680;", f"mbarrier|deadlock|{WRONG}"),
    Mistake("a try in place of a wait", "ring", '"@!complete bra WAIT;\\n"\n', "", f"mbarrier|{WRONG}"),
    Mistake("another time for a try", "ring", "%1, 0x989680;", "%1, 0;", NOTHING),
    Mistake("no such label", "ring", "bra WAIT;", "bra AGAIN;", REFUSED, "bra AGAIN: the statement has no such label"),
    Mistake(
        "accesses may pass a wait",
        "ring",
        '"}" ::"r"(barrier), "r"(parity) : "memory");',
        '"}" ::"r"(barrier), "r"(parity));',
        REFUSED,
        'does not list "memory"',
    ),
    Mistake("arrival left out", "ring", "mbarrier.arrive.shared::cta.b64 _, [%0];", "", "deadlock"),
    Mistake(
        "barrier and threads exchanged",
        "named barriers",
        "bar.sync %0, %1;",
        "bar.sync %1, %0;",
        "barrier",
        "barrier_sync: barrier 64",
    ),
    Mistake("arrival that waits", "named barriers", "bar.arrive %0, %1;", "bar.sync %0, %1;", NOTHING),
    Mistake(
        "wait that only arrives", "named barriers", "bar.sync %0, %1;", "bar.arrive %0, %1;", WRONG, orders=("reverse",)
    ),
]

CLUSTERS = [
    Mistake(
        "to one block alone",
        "cluster",
        "bytes.multicast::cluster [%0], [%1], %2, [%3], %4;",
        "bytes [%0], [%1], %2, [%3];",
        "deadlock|async",
    ),
    Mistake("box to one block alone", "panels", MULTICAST, ALONE, "deadlock|async"),
    Mistake(
        "box to blocks that nobody names",
        "panels",
        MULTICAST,
        MULTICAST.replace(".multicast::cluster", ""),
        REFUSED,
        r"the operands are \[r\],\[l,\{r,r,r\}\],\[r\],h",
    ),
    Mistake(
        "address and rank exchanged",
        "cluster",
        "mapa.shared::cluster.u32 %0, %1, %2;",
        "mapa.shared::cluster.u32 %0, %2, %1;",
        "cluster|out-of-bounds",
    ),
    Mistake(
        "arrival at another block by its own instruction",
        "cluster",
        "arrive.shared::cluster.b64",
        "arrive.shared::cta.b64",
        "cluster",
        "by an address",
    ),
    Mistake(
        "number of the cluster",
        "cluster",
        "%%cluster_ctarank",
        "%%clusterid.x",
        REFUSED,
        "mov.u32 %0, %%clusterid.x: the operands",
    ),
    Mistake(
        "blocks do not wait",
        "cluster",
        "\\nbarrier.cluster.wait.acquire.aligned;",
        "",
        "mbarrier|cluster",
        "initialised|exits after",
    ),
    Mistake(
        "blocks do not arrive",
        "cluster",
        "barrier.cluster.arrive.relaxed.aligned;\\n",
        "",
        "cluster",
        "wait with no barrier.cluster.arrive",
    ),
    Mistake(
        "a cluster's barrier that orders all memory", "cluster", "arrive.relaxed.aligned", "arrive.aligned", NOTHING
    ),
    Mistake("grid before not waited for", "grids", "griddepcontrol.wait;", "", "grid", "before wait_for_previous_grid"),
    Mistake("next grid not let in", "grids", "griddepcontrol.launch_dependents;", "", NOTHING),
]

STRINGS = [*NUMBERS, *MATRICES, *PRODUCTS, *COPIES, *BULK_COPIES, *BARRIERS, *CLUSTERS]
