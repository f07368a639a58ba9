//! PTX as other compilers write it: LLVM (Triton, Numba), nvcc's header files, several units linked together.

use std::sync::Arc;

use gpumux_ptx::{FaultKind, Launch, Module, Run};

mod memory;
use memory::Bytes;

const HEAD: &str = ".version 8.0\n.target sm_90\n.address_size 64\n";

fn launch(module: Module, parameters: Vec<u8>) -> Result<Vec<u32>, FaultKind> {
    let launch = Launch {
        globals: (0..module.globals.len() as u64)
            .map(|i| 0x1080 + 16 * i)
            .collect(),
        module: Arc::new(module),
        kernel: 0,
        grid: [1; 3],
        block: [1; 3],
        dynamic_shared: 0,
        parameters,
        resident: 1,
        sms: 1,
        workspace: 0,
    };
    let mut memory = Bytes(vec![0; 256]);
    let mut run = Run::new(launch).map_err(|fault| fault.kind)?;
    for _ in 0..1000 {
        if run.step(&mut memory, 1000).map_err(|fault| fault.kind)? {
            return Ok(memory.words());
        }
    }
    panic!("it does not end");
}

/// Runs a body whose `%rd1` is the address of 32 words; the words.
fn run(body: &str) -> Result<Vec<u32>, FaultKind> {
    let text = format!(
        "{HEAD}.visible .entry k(.param .u64 p)\n{{\n.reg .pred %p<4>;\n.reg .b16 %h<4>;\n.reg .b32 %r<16>;\n.reg .f64 %d<8>;\n.reg .b64 %rd<8>;\nld.param.u64 %rd1, [p];\n{body}\nret;\n}}\n"
    );
    launch(
        Module::parse(&text).unwrap(),
        0x1000_u64.to_le_bytes().to_vec(),
    )
}

#[test]
fn pointer_parameter_alignment_is_the_pointees() {
    let text = format!(
        "{HEAD}.entry k(.param .u32 a, .param .u64 .ptr .global .align 1 b) {{ .reg .b32 %r<2>; .reg .b64 %rd<2>; ld.param.u32 %r1, [a]; ld.param.u64 %rd1, [b]; st.global.u32 [%rd1], %r1; ret; }}"
    );
    let module = Module::parse(&text).unwrap();
    let offsets: Vec<usize> = module.kernels[0]
        .parameters
        .iter()
        .map(|it| it.offset)
        .collect();
    assert_eq!(offsets, [0, 8]);
    let parameters = [7_u64.to_le_bytes(), 0x1000_u64.to_le_bytes()].concat();
    assert_eq!(launch(module, parameters).unwrap()[0], 7);
}

#[test]
fn shared_address_below_its_base_wraps_in_32_bits() {
    let body = ".shared .align 4 .b8 t[256];\nmov.u32 %r1, t;\nadd.u32 %r2, %r1, 4;\nst.shared.u32 [%r2], 9;\nadd.u32 %r3, %r1, -64;\nld.shared.u32 %r4, [%r3+68];\nst.global.u32 [%rd1], %r4;";
    assert_eq!(run(body).unwrap()[0], 9);
    // A 64-bit register that holds no address of shared memory stays wrong.
    let body =
        ".shared .align 4 .b8 t[256];\nmov.u64 %rd2, 0x100000000;\nld.shared.u32 %r4, [%rd2];";
    assert_eq!(run(body), Err(FaultKind::IllegalAddress(0x1_0000_0000)));
}

#[test]
fn vector_of_one_register_is_a_register() {
    let body = "mov.b32 %r1, 5;\nst.global.b32 [%rd1], { %r1 };\nld.global.b32 { %r2 }, [%rd1];\nst.global.b32 [%rd1+4], %r2;";
    assert_eq!(run(body).unwrap()[..2], [5, 5]);
}

#[test]
fn directives_without_space_are_told_apart() {
    // As the header of half precision has it.
    let body = "{.reg.b32 f, g;\nmov.b32 f, 3;\n mul.lo.u32 g, f, 2;\nst.global.b32 [%rd1], g;}";
    assert_eq!(run(body).unwrap()[0], 6);
}

#[test]
fn address_with_coordinates_refuses_its_own_kernel_only() {
    let text = format!(
        "{HEAD}.global .texref t;\n.entry k() {{ ret; }}\n.entry bad() {{ .reg .f32 %f<6>; tex.2d.v4.f32.f32 {{%f1, %f2, %f3, %f4}}, [t, {{%f5, %f5}}]; ret; }}"
    );
    let module = Module::parse(&text).unwrap();
    assert_eq!(module.kernels[0].usable(), Ok(()));
    let why = module.kernels[1].usable().unwrap_err();
    assert!(why.contains("tex.2d.v4.f32.f32"), "{why}");
}

#[test]
fn multiplication_of_24_bits_ignores_the_upper_ones() {
    let body = "mov.u32 %r1, 0x01000003;\nmul24.lo.u32 %r2, %r1, 5;\nst.global.u32 [%rd1], %r2;\n\
        mov.u32 %r1, 0x00ffffff;\nmul24.lo.s32 %r2, %r1, 5;\nst.global.u32 [%rd1+4], %r2;\n\
        mov.u32 %r1, 0x00ffffff;\nmul24.hi.u32 %r2, %r1, %r1;\nst.global.u32 [%rd1+8], %r2;\n\
        mad24.lo.u32 %r2, %r1, 2, 3;\nst.global.u32 [%rd1+12], %r2;";
    let high = ((0xff_ffff_u64 * 0xff_ffff) >> 16) as u32;
    assert_eq!(
        run(body).unwrap()[..4],
        [15, (-5_i32) as u32, high, 0x1ff_ffff + 2]
    );
}

#[test]
fn doubles_round_in_the_direction_asked_for() {
    let double = |words: &[u32]| f64::from_bits(u64::from(words[0]) | u64::from(words[1]) << 32);
    let of = |instruction: &str| {
        let body = format!(
            "mov.f64 %d1, 0d3FF0000000000000;\nmov.f64 %d2, 0d4024000000000000;\nmov.f64 %d3, 0d3C00000000000000;\n{instruction};\nst.global.f64 [%rd1], %d4;"
        );
        double(&run(&body).unwrap())
    };
    let one = 1.0_f64;
    for (instruction, expected) in [
        ("add.rp.f64 %d4, %d1, %d3", one.next_up()),
        ("add.rm.f64 %d4, %d1, %d3", one),
        ("sub.rm.f64 %d4, %d1, %d3", one.next_down()),
        ("sub.rz.f64 %d4, %d1, %d3", one.next_down()),
        ("add.rn.f64 %d4, %d1, %d3", one),
        // 0.1 is above the exact tenth.
        ("div.rm.f64 %d4, %d1, %d2", 0.1_f64.next_down()),
        ("div.rp.f64 %d4, %d1, %d2", 0.1),
        ("rcp.rm.f64 %d4, %d2", 0.1_f64.next_down()),
        ("fma.rp.f64 %d4, %d1, %d1, %d3", one.next_up()),
        ("fma.rz.f64 %d4, %d1, %d1, %d3", one),
    ] {
        assert_eq!(
            of(instruction).to_bits(),
            expected.to_bits(),
            "{instruction}"
        );
    }
    // The root of ten lies between two neighbours.
    let (down, up) = (of("sqrt.rm.f64 %d4, %d2"), of("sqrt.rp.f64 %d4, %d2"));
    assert_eq!(down.next_up(), up);
    let (down, up) = (
        of("mul.rm.f64 %d4, 0d3FB999999999999A, 0d3FB999999999999A"),
        of("mul.rp.f64 %d4, 0d3FB999999999999A, 0d3FB999999999999A"),
    );
    assert_eq!(down.next_up(), up);
}

#[test]
fn names_of_linked_units_are_their_own_unless_visible() {
    let first = format!(
        "{HEAD}.extern .func (.param .b32 r) other();\n.global .align 4 .u32 text = 1;\n.visible .global .align 4 .u32 common = 5;\n\
        .func (.param .b32 r) own() {{ .reg .b32 %r<2>; mov.b32 %r1, 10; st.param.b32 [r], %r1; ret; }}\n\
        .visible .entry k(.param .u64 p) {{ .reg .b32 %r<6>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [p];\n\
        {{ .param .b32 v; call.uni (v), own, (); ld.param.b32 %r1, [v]; }}\n\
        {{ .param .b32 v; call.uni (v), other, (); ld.param.b32 %r2, [v]; }}\n\
        ld.global.u32 %r3, [text]; st.global.u32 [%rd1], %r1; st.global.u32 [%rd1+4], %r2; st.global.u32 [%rd1+8], %r3; ret; }}"
    );
    let second = format!(
        "{HEAD}.extern .global .align 4 .u32 common;\n.global .align 4 .u32 text = 2;\n\
        .func (.param .b32 r) own() {{ .reg .b32 %r<2>; mov.b32 %r1, 20; st.param.b32 [r], %r1; ret; }}\n\
        .visible .func (.param .b32 r) other() {{ .reg .b32 %r<4>; {{ .param .b32 v; call.uni (v), own, (); ld.param.b32 %r1, [v]; }}\n\
        ld.global.u32 %r2, [text]; add.u32 %r1, %r1, %r2; ld.global.u32 %r3, [common]; add.u32 %r1, %r1, %r3; st.param.b32 [r], %r1; ret; }}"
    );
    let module = Module::link(&[&first, &second]).unwrap();
    assert_eq!(module.globals.len(), 3);
    // Variables are the test's to place: their values are 0.
    assert_eq!(
        launch(module, 0x1000_u64.to_le_bytes().to_vec()).unwrap()[..3],
        [10, 20, 0]
    );
    let module = Module::link(&[&first, &second]).unwrap();
    let values: Vec<(&str, u8)> = module
        .globals
        .iter()
        .map(|it| (it.name.as_str(), it.initial[0]))
        .collect();
    assert_eq!(values, [("text", 1), ("common", 5), ("text", 2)]);
    let twice = Module::link(&[&second, &second]).unwrap_err();
    assert!(twice.what.contains("`other`"), "{twice}");
}

#[test]
fn grid_handle_is_known_without_its_barrier() {
    let text = format!(
        "{HEAD}.extern .func (.param .b64 r) cudaCGGetIntrinsicHandle(.param .b32 scope);\n\
         .entry k() {{ .reg .b64 %rd<2>;\n {{ .param .b32 a;\n .param .b64 b;\n st.param.b32 [a], 1;\n\
         call.uni (b), cudaCGGetIntrinsicHandle, (a);\n ld.param.b64 %rd1, [b];\n }} ret; }}"
    );
    let module = Module::parse(&text).unwrap();
    assert_eq!(module.kernels[0].usable(), Ok(()));
}

#[test]
fn variable_that_is_only_declared_refuses_the_kernel() {
    let text = format!(
        "{HEAD}.extern .global .align 4 .u32 elsewhere;\n.entry k() {{ .reg .b32 %r<2>; ld.global.u32 %r1, [elsewhere]; ret; }}"
    );
    let module = Module::parse(&text).unwrap();
    assert_eq!(module.globals.len(), 0);
    let why = module.kernels[0].usable().unwrap_err();
    assert!(why.contains("`elsewhere`"), "{why}");
}

#[test]
fn barrier_in_shared_memory_opens_when_all_have_arrived() {
    let text = format!(
        "{HEAD}.entry k(.param .u64 p) {{ .reg .pred %p<3>; .reg .b32 %r<8>; .reg .b64 %rd<6>; .shared .align 8 .b64 bar; .shared .align 4 .b32 sum;\n\
        ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra A; mbarrier.init.shared.b64 [bar], 32;\n\
        A: bar.sync 0; atom.shared.add.u32 %r2, [sum], %r1; mbarrier.arrive.shared.b64 %rd2, [bar];\n\
        W: mbarrier.test_wait.shared.b64 %p2, [bar], %rd2; @!%p2 bra W;\n\
        ld.shared.u32 %r3, [sum]; mul.wide.u32 %rd3, %r1, 4; add.u64 %rd4, %rd1, %rd3; st.global.u32 [%rd4], %r3;\n\
        mbarrier.pending_count.b64 %r4, %rd2; ret; }}"
    );
    let module = Arc::new(Module::parse(&text).unwrap());
    let mut run = Run::new(Launch {
        module,
        kernel: 0,
        grid: [1; 3],
        block: [32, 1, 1],
        dynamic_shared: 0,
        parameters: 0x1000_u64.to_le_bytes().to_vec(),
        globals: Vec::new(),
        resident: 1,
        sms: 1,
        workspace: 0,
    })
    .unwrap();
    let mut memory = Bytes(vec![0; 128]);
    assert_eq!(run.step(&mut memory, 10_000_000), Ok(true));
    assert_eq!(memory.words(), [496; 32]);
}

#[test]
fn unknown_modifier_refuses_the_kernel() {
    for instruction in [
        "min.xorsign.abs.f32 %f1, %f2, %f3",
        "cvt.rn.satfinite.f16.f32 %h1, %f2",
        "redux.sync.max.abs.f32 %f1, %f2, -1",
        "mbarrier.arrive.expect_tx.shared.b64 _, [b], 8",
    ] {
        let text = format!(
            "{HEAD}.entry k() {{ .reg .f32 %f<4>; .reg .b16 %h<2>; .shared .b64 b; {instruction}; ret; }}"
        );
        let module = Module::parse(&text).unwrap();
        let why = module.kernels[0].usable().unwrap_err();
        assert!(
            why.contains(instruction.split(' ').next().unwrap()),
            "{why}"
        );
    }
}

#[test]
fn flushed_denormals_are_zeros_on_the_way_in_too() {
    let of = |instruction: &str| {
        let body = format!(
            ".reg .f32 %f<4>;\nmov.b32 %f1, 0f00400000;\nmov.b32 %f2, 0f7F000000;\n{instruction};\nst.global.f32 [%rd1], %f3;"
        );
        run(&body).unwrap()[0]
    };
    assert_eq!(of("mul.rn.f32 %f3, %f1, %f2"), 0x3f80_0000);
    assert_eq!(of("mul.rn.ftz.f32 %f3, %f1, %f2"), 0);
    assert_eq!(
        of("cvt.rz.f16.f32 %h1, 0f3F7FFFFF;\ncvt.f32.f16 %f3, %h1"),
        0x3f7f_e000
    );
    assert_eq!(
        of("cvt.rn.f16.f32 %h1, 0f3F7FFFFF;\ncvt.f32.f16 %f3, %h1"),
        0x3f80_0000
    );
}
