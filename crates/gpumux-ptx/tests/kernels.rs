//! Whole kernels: what they leave in memory, how they fail, and text that is no PTX.

use std::sync::Arc;

use gpumux_ptx::{FaultKind, Launch, Module, Run};

mod memory;
use memory::Bytes;

const HEAD: &str = ".version 8.0\n.target sm_90\n.address_size 64\n";

/// Runs a kernel of one parameter, the address of `words` words, to its end.
fn run(body: &str, grid: u32, block: u32, words: usize) -> Result<Bytes, FaultKind> {
    run_text(&text(body), grid, block, words)
}

fn text(body: &str) -> String {
    format!(
        "{HEAD}.visible .entry k(.param .u64 p)\n{{\n.reg .pred %p<4>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\nld.param.u64 %rd1, [p];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd3, %rd1, %rd2;\n{body}\nret;\n}}\n"
    )
}

fn run_text(text: &str, grid: u32, block: u32, words: usize) -> Result<Bytes, FaultKind> {
    let launch = Launch {
        module: Arc::new(Module::parse(text).unwrap()),
        kernel: 0,
        grid: [grid, 1, 1],
        block: [block, 1, 1],
        dynamic_shared: 0,
        parameters: 0x1000_u64.to_le_bytes().to_vec(),
        globals: Vec::new(),
        resident: 8,
        sms: 4,
        workspace: 0,
    };
    let mut memory = Bytes(vec![0; 4 * words]);
    let mut run = Run::new(launch).map_err(|fault| fault.kind)?;
    // Interrupted all the time: that must not matter.
    for _ in 0..100_000 {
        if run.step(&mut memory, 10).map_err(|fault| fault.kind)? {
            return Ok(memory);
        }
    }
    panic!("it does not end");
}

#[test]
fn threads_count_and_reduce() {
    let body = "\
        .shared .align 4 .b32 sums[64];\n\
        mov.u32 %r2, sums;\n shl.b32 %r3, %r1, 2;\n add.u32 %r4, %r2, %r3;\n st.shared.u32 [%r4], %r1;\n\
        mov.u32 %r5, 32;\n\
        L1:\n bar.sync 0;\n setp.ge.u32 %p1, %r1, %r5;\n @%p1 bra L2;\n\
        shl.b32 %r6, %r5, 2;\n add.u32 %r7, %r4, %r6;\n ld.shared.u32 %r8, [%r7];\n ld.shared.u32 %r9, [%r4];\n add.u32 %r9, %r9, %r8;\n st.shared.u32 [%r4], %r9;\n\
        L2:\n shr.u32 %r5, %r5, 1;\n setp.ne.u32 %p2, %r5, 0;\n @%p2 bra L1;\n\
        bar.sync 0;\n setp.ne.u32 %p3, %r1, 0;\n @%p3 bra L3;\n ld.shared.u32 %r10, [sums];\n red.global.add.u32 [%rd1], %r10;\n L3:\n";
    assert_eq!(run(body, 3, 64, 1).unwrap().words(), [3 * 2016]);
}

#[test]
fn warps_shuffle_and_vote() {
    let body = "\
        shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, -1;\n\
        and.b32 %r3, %r1, 1;\n setp.eq.u32 %p2, %r3, 1;\n vote.sync.ballot.b32 %r4, %p2, -1;\n popc.b32 %r5, %r4;\n\
        mad.lo.u32 %r6, %r5, 100, %r2;\n st.global.u32 [%rd3], %r6;\n";
    let words = run(body, 1, 32, 32).unwrap().words();
    let expected: Vec<u32> = (0..32).map(|lane| 1600 + (lane ^ 1)).collect();
    assert_eq!(words, expected);
}

#[test]
fn shared_memory_of_a_later_function_is_apart() {
    let body = "\
        .shared .align 4 .b32 own[2];\n st.shared.u32 [own+4], 7;\n call.uni later, ();\n\
        ld.shared.u32 %r3, [own+4];\n st.global.u32 [%rd3], %r3;\n";
    let kernel = text(body).replace(".visible .entry", ".func later();\n.visible .entry");
    let later =
        ".func later() { .shared .align 4 .b32 its[2];\n st.shared.u32 [its+4], 9;\n ret; }\n";
    let found = run_text(&format!("{kernel}{later}"), 1, 1, 1).unwrap();
    assert_eq!(found.words(), [7]);
}

#[test]
fn constant_predicate_votes_as_one_lane() {
    let body = "\
        and.b32 %r2, %r1, 1;\n setp.eq.u32 %p1, %r2, 1;\n mov.pred %p2, -1;\n\
        @%p1 bra ODD;\n vote.sync.ballot.b32 %r3, %p2, 0x55555555;\n bra E;\n\
        ODD:\n vote.sync.ballot.b32 %r3, %p2, 0xaaaaaaaa;\n E:\n st.global.u32 [%rd3], %r3;\n";
    let words = run(body, 1, 32, 32).unwrap().words();
    assert_eq!(words, [0x5555_5555, 0xaaaa_aaaa].repeat(16));
}

#[test]
fn active_lanes_are_those_of_the_same_branch() {
    let body = "\
        and.b32 %r2, %r1, 1;\n setp.eq.u32 %p1, %r2, 1;\n @%p1 bra ODD;\n activemask.b32 %r3;\n bra E;\n\
        ODD:\n activemask.b32 %r3;\n E:\n st.global.u32 [%rd3], %r3;\n";
    let words = run(body, 1, 32, 32).unwrap().words();
    assert_eq!(words, [0x5555_5555, 0xaaaa_aaaa].repeat(16));
}

#[test]
fn blocks_that_wait_for_later_ones_get_them() {
    // Block 0 waits for block 1's store.
    let body = "\
        mov.u32 %r2, %ctaid.x;\n setp.ne.u32 %p1, %r2, 0;\n @%p1 st.global.u32 [%rd1], 7;\n @%p1 ret;\n\
        W:\n ld.volatile.global.u32 %r3, [%rd1];\n setp.eq.u32 %p2, %r3, 0;\n @%p2 bra W;\n st.global.u32 [%rd1+4], %r3;\n";
    // Only the first one in turns of 10 instructions; the block's own turn is longer than a step.
    assert_eq!(run(body, 2, 1, 2).unwrap().words(), [7, 7]);
}

#[test]
fn faults_are_told_apart() {
    let fault = |body| run(body, 1, 32, 32).err().unwrap();
    assert_eq!(
        fault("st.global.u32 [%rd3+4], 1;"),
        FaultKind::IllegalAddress(0x1080)
    );
    assert_eq!(
        fault("st.global.u32 [%rd3+2], 1;"),
        FaultKind::Misaligned(0x1002)
    );
    assert_eq!(fault("trap;"), FaultKind::Trap);
    assert_eq!(
        fault("setp.eq.u32 %p1, %r1, 0;\n @%p1 bar.sync 1, 64;\n"),
        FaultKind::Stuck
    );
}

#[test]
fn unknown_instructions_spoil_their_own_kernel_only() {
    let text = format!(
        "{HEAD}.entry bad() {{ .reg .b32 %r<4>;\n wgmma.something.f32 %r1, %r2;\n ret; }}\n.entry good() {{ ret; }}"
    );
    let module = Module::parse(&text).unwrap();
    assert_eq!(
        module.kernels[0].usable(),
        Err("line 5: `wgmma.something.f32` is not known")
    );
    assert_eq!(module.kernels[1].usable(), Ok(()));
}

#[test]
fn variables_have_their_values_and_addresses() {
    let text = format!(
        "{HEAD}.global .align 4 .u32 a[3] = {{1, -2, 3}};\n.const .align 8 .f64 b = 0d3FF0000000000000;\n.global .align 8 .u64 c[2] = {{generic(a), a+4}};\n.global .align 1 .b8 d[8];"
    );
    let module = Module::parse(&text).unwrap();
    let [a, b, c, d] = &module.globals[..] else {
        panic!("four")
    };
    assert_eq!(
        (a.size, &a.initial[4..8]),
        (12, &[0xfe, 0xff, 0xff, 0xff][..])
    );
    assert!(b.constant && b.initial == 1.0_f64.to_le_bytes());
    assert_eq!(c.addresses, [(0, 0, 0), (8, 0, 4)]);
    assert_eq!((d.size, d.initial.len()), (8, 0));
}

#[test]
fn other_text_is_refused() {
    for text in [
        "",
        "hello",
        ".entry x() {}",
        ".version 7.0 .entry (",
        ".version 8 .entry x(.param .u64",
        "\u{7f}",
    ] {
        assert!(Module::parse(text).is_err(), "{text}");
    }
}

proptest::proptest! {
    /// PTX with pieces missing or doubled is refused or understood, but never breaks anything.
    #[test]
    fn damaged_text_does_not_panic(cuts in proptest::collection::vec((0..1500_usize, 0..60_usize, proptest::bool::ANY), 0..6)) {
        let mut text = format!("{HEAD}.global .u32 g[4] = {{1, 2}};\n.func (.param .b32 r) f(.param .b64 a) {{ .reg .b64 %x<3>; ld.param.u64 %x1, [a]; st.param.b32 [r], %x1; ret; }}\n.visible .entry k(.param .u64 p, .param .align 8 .b8 q[16])\n.maxntid 128, 1, 1\n{{ .reg .pred %p<4>; .reg .b32 %r<16>; .reg .f32 %f<4>; .reg .b64 %rd<8>;\n ld.param.u64 %rd1, [p]; ld.param.v2.u32 {{%r1, %r2}}, [q+8]; mov.u32 %r3, %tid.x;\n setp.lt.and.u32 %p1|%p2, %r3, 5, !%p3; @!%p1 bra X; selp.b32 %r4, %r1, -7, %p1;\n {{ .param .b64 param0; st.param.b64 [param0], %rd1; .param .b32 retval0; call.uni (retval0), f, (param0); ld.param.b32 %r5, [retval0]; }}\n fma.rn.f32 %f1, %f2, 0f3F800000, %f3; atom.global.add.u32 %r6, [g+4], 1; bar.sync 0;\n X: st.global.v2.u32 [%rd1], {{%r4, %r5}}; ret; }}\n");
        for (at, length, double) in cuts {
            let floor = |at: usize, text: &str| (0..=at.min(text.len())).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
            let from = floor(at, &text);
            let to = floor(from + length, &text);
            let piece = text[from..to].to_owned();
            text.replace_range(from..to, if double { piece.repeat(2) } else { String::new() }.as_str());
        }
        if let Ok(module) = Module::parse(&text) {
            let module = Arc::new(module);
            for kernel in 0..module.kernels.len() {
                let launch = Launch {
                    globals: vec![0x1000; module.globals.len()],
                    module: Arc::clone(&module),
                    kernel,
                    grid: [2, 1, 1],
                    block: [3, 1, 1],
                    dynamic_shared: 0,
                    parameters: vec![0; 64],
                    resident: 1,
                    sms: 1,
                    workspace: 0,
                };
                if let Ok(mut run) = Run::new(launch) {
                    let _ = run.step(&mut Bytes(vec![0; 64]), 10_000);
                }
            }
        }
    }
}

/// Several threads may each have a block, in whatever order they give them back.
#[test]
fn blocks_taken_by_several_end_in_any_order() {
    let body = "mov.u32 %r2, %ctaid.x;\n red.global.add.u32 [%rd1], 1;\n setp.ne.u32 %p1, %r2, 0;\n @%p1 ret;\n\
        W:\n ld.volatile.global.u32 %r3, [%rd1];\n setp.ne.u32 %p2, %r3, 5;\n @%p2 bra W;\n";
    let text = format!(
        "{HEAD}.visible .entry k(.param .u64 p)\n{{\n.reg .pred %p<4>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\nld.param.u64 %rd1, [p];\n{body}\nret;\n}}\n"
    );
    let mut run = Run::new(Launch {
        module: Arc::new(Module::parse(&text).unwrap()),
        kernel: 0,
        grid: [5, 1, 1],
        block: [1; 3],
        dynamic_shared: 0,
        parameters: 0x1000_u64.to_le_bytes().to_vec(),
        globals: Vec::new(),
        resident: 2,
        sms: 4,
        workspace: 0,
    })
    .unwrap();
    let mut memory = Bytes(vec![0; 4]);
    let mut done = false;
    for _ in 0..20 {
        let mut taken: Vec<_> = std::iter::from_fn(|| run.take()).collect();
        assert!(taken.len() <= 2, "no more than are resident");
        for turn in &mut taken {
            turn.run(&mut memory, 100);
        }
        for turn in taken.into_iter().rev() {
            assert!(!done);
            done = run.give(turn).unwrap();
        }
    }
    assert!(done && run.take().is_none());
    assert_eq!((memory.words(), run.stats().blocks), (vec![5], 5));
}

/// A block that waits for another one does not use up its turn by looking.
#[test]
fn waiting_block_gives_its_turn_away() {
    let text = format!(
        "{HEAD}.visible .entry k(.param .u64 p)\n{{\n.reg .pred %p<4>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\nld.param.u64 %rd1, [p];\nW:\n ld.volatile.global.u32 %r3, [%rd1];\n setp.eq.u32 %p2, %r3, 0;\n @%p2 bra W;\n ret;\n}}\n"
    );
    let mut run = Run::new(Launch {
        module: Arc::new(Module::parse(&text).unwrap()),
        kernel: 0,
        grid: [1; 3],
        block: [1; 3],
        dynamic_shared: 0,
        parameters: 0x1000_u64.to_le_bytes().to_vec(),
        globals: Vec::new(),
        resident: 1,
        sms: 1,
        workspace: 0,
    })
    .unwrap();
    let mut memory = Bytes(vec![0; 4]);
    let mut turn = run.take().unwrap();
    turn.run(&mut memory, 1 << 20);
    assert_eq!(run.give(turn), Ok(false));
    assert!(run.stats().instructions < 1 << 13);
    memory.0[0] = 1;
    assert_eq!(run.step(&mut memory, 100), Ok(true));
}
